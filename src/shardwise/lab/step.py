"""The step benchmark: one training step of shardwise against torch's engines.

Every family of cases runs in processes of its own, one per real rank, so that a process group, a
thread count or a CUDA context of one never meets another.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.children import spawn_ranks
from shardwise.emulation.collectives import Emulation, Network, emulate
from shardwise.lab import engines
from shardwise.lab.engines import Precision, Wrap, Wrapped
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Row, Sample, Side, Step, Timer
from shardwise.trainer.model import OPTIMIZER, make_model
from shardwise.trainer.sizes import BENCH as LARGE
from shardwise.trainer.sizes import Size, bench_size

OWN = Precision()  # every dtype the parameters' own
TOLERANCE = 1e-5
PARITY_STEPS = 3
BLOCKS = 5  # on a GPU: how often each candidate is built and timed
LEFT_OVER = 2**28  # bytes that may stay on the device between them without a word


class BenchmarkError(Exception):
    """A comparison that would not be worth its figures."""


@dataclass(frozen=True)
class Case:
    """One comparison: what runs, and on what."""

    name: str
    shape: Size
    batch: int
    length: int
    strategies: tuple[str, ...]
    steps: int  # timed, of each candidate
    warmup: int
    precision: Precision = OWN
    network: Network | None = None  # emulated, if any
    through: str = "plan"  # how shardwise is used (engines.OURS)

    def quick(self) -> Case:
        """The same path in seconds; its figures mean nothing."""
        shape = dataclasses.replace(self.shape, layers=2)
        return dataclasses.replace(self, shape=shape, steps=4, warmup=1)


@dataclass(frozen=True)
class Family:
    """Cases that share a process group."""

    cases: tuple[Case, ...]
    backend: str
    world: int
    processes: int  # real ones; fewer than `world` with the fake backend
    device: str
    about: str


SMALL = bench_size(layers=16, d_model=64, d_ff=256, heads=4, vocab=256)
MEDIUM = bench_size(layers=6, d_model=256, d_ff=1024, heads=4, vocab=256)
NETWORKS = {
    "free": Network(),
    "300GBs": Network(bandwidth=300e9, latency=20e-6),
    "100GBs": Network(bandwidth=100e9, latency=20e-6),
}

FAMILIES: dict[str, Family] = {
    "fake8": Family(
        (Case("fake8", SMALL, 1, 16, ("zero3", "zero2"), steps=40, warmup=5),),
        backend="fake", world=8, processes=1, device="cpu",
        about="many small parameters, one rank of 8, nothing is sent: the engines' own Python",
    ),
    "gloo2": Family(
        (Case("gloo2", MEDIUM, 4, 64, ("zero3", "ddp"), steps=30, warmup=3),),
        backend="gloo", world=2, processes=2, device="cpu",
        about="two real ranks on this machine; parity is checked before anything is timed",
    ),
    "h200": Family(
        tuple(
            Case(
                f"h200-{batch}x2048-{label}", LARGE, batch, 2048, ("zero3",), steps=18, warmup=3,
                precision=Precision("bfloat16", "float32"), network=network,
            )
            for batch in (4, 1) for label, network in NETWORKS.items()
        ),
        backend="fake", world=8, processes=1, device="cuda",
        about="0.95 B parameters in bf16 on one GPU, one rank of an emulated 8-rank group",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What the command line may change of the cases."""

    strategies: tuple[str, ...] | None = None
    steps: int | None = None
    quick: bool = False
    through: str = "plan"

    def apply(self, family: Family) -> Family:
        """The family's cases as asked for; those without a strategy left are left out."""
        changed = []
        for case in family.cases:
            if self.quick:
                case = case.quick()
            if self.steps is not None:
                case = dataclasses.replace(case, steps=self.steps)
            if self.through != "plan":
                # torch's surface has no data parallel without shards.
                kept = tuple(name for name in case.strategies if name != "ddp")
                case = dataclasses.replace(case, through=self.through, strategies=kept)
            if self.strategies is not None:
                kept = tuple(name for name in case.strategies if name in self.strategies)
                case = dataclasses.replace(case, strategies=kept)
            if case.strategies:
                changed.append(case)
        return dataclasses.replace(family, cases=tuple(changed))


def run_family(family: Family, quick: bool) -> list[dict[str, Any]]:
    """The rows of all cases of a family, measured in fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(_measure_on_rank, (family, quick, folder), family.processes)
        answer = json.loads((Path(folder) / "answer.json").read_text())
    if "error" in answer:
        raise BenchmarkError(answer["error"])
    return answer["rows"]


def _measure_on_rank(rank: int, family: Family, quick: bool, folder: str) -> None:
    """The body of one process: join the group, measure, let rank 0 answer in `folder`."""
    # torch's profiler, which counts allocations, otherwise announces itself on every start.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    # The fake backend leaves garbage in what it gathers; denormal numbers there would cost time.
    torch.set_flush_denormal(True)
    _join(rank, family, folder)
    answer: dict[str, Any] = {}
    try:
        answer["rows"] = [
            dataclasses.asdict(_compare(family, case, strategy, quick))
            for case in family.cases
            for strategy in case.strategies
        ]
    except BenchmarkError as error:
        answer["error"] = str(error)
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    dist.destroy_process_group()


def _join(rank: int, family: Family, folder: str) -> None:
    if family.backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=family.world)
    else:
        store = dist.FileStore(str(Path(folder) / "store"), family.world)
        dist.init_process_group(family.backend, store=store, rank=rank, world_size=family.world)


def _compare(family: Family, case: Case, strategy: str, quick: bool) -> Row:
    """One row."""
    say(f"{case.name} {strategy}: {case.steps} steps each, in turn")
    with _network(case) as emulation:
        measure = _measure_on_gpu if family.device == "cuda" else _measure_on_cpu
        sides, parity, settings = measure(family, case, strategy, emulation)
    row = Row.of(
        sides["ours"],
        sides["theirs"],
        case=case.name,
        strategy=strategy,
        peer=engines.PEERS[strategy],
        parity=parity,
        settings=_describe(family, case, quick) | settings,
    )
    alone = "" if row.device_ratio is None else f", on the device alone {row.device_ratio:.2f}"
    say(
        f"{case.name} {strategy}: {row.ours.step_ms:.1f} ms against {row.theirs.step_ms:.1f}, "
        f"ratio {row.step_ratio:.2f}{alone}"
    )
    return row


Measured = tuple[dict[str, Side], float | None, dict[str, Any]]


def _measure_on_cpu(
    family: Family, case: Case, strategy: str, emulation: Emulation | None
) -> Measured:
    """Both candidates live side by side and step in turn; memory is taken from a second pair.

    The memory step has a batch of one token, so that its peak is what the parameters cost
    (gathered, reduced, optimized) and next to nothing of activations.
    """
    candidates = {name: _build(family, case, strategy, wrap) for name, wrap in _wraps(case).items()}
    tokens = _make_tokens(case, family.device, case.batch, case.length)
    steps = {name: candidate.step_on(*tokens) for name, candidate in candidates.items()}
    parity = _check_parity(candidates, steps, case.name, strategy) if _real(family) else None
    ready = dist.barrier if _real(family) else _nothing
    samples = timing.alternate(
        steps, case.steps, case.warmup, _slowest_rank(family, timing.time_on_host(ready))
    )
    settings = {name: candidate.settings for name, candidate in candidates.items()}
    del candidates, steps
    one_token = _make_tokens(case, family.device, 1, 1)
    sides = {}
    for name, wrap in _wraps(case).items():
        build = _step_builder(family, case, strategy, wrap, one_token)
        sides[name] = Side.of(samples[name], footprint.peak_on_cpu(build))
    counted = "all CPU allocations of a step on one token (so: parameters, not activations)"
    return sides, parity, settings | {"peak_bytes": counted}


def _measure_on_gpu(
    family: Family, case: Case, strategy: str, emulation: Emulation | None
) -> Measured:
    """The candidates take turns on the device: build, warm up, time, free, BLOCKS times each. In
    every block steps are timed with the host in them, then as many with the host ahead.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in _wraps(case)}
    alone: dict[str, list[float]] = {name: [] for name in _wraps(case)}
    peaks: dict[str, list[tuple[int, int]]] = {name: [] for name in _wraps(case)}
    settings: dict[str, Any] = {
        "peak_bytes": "torch.cuda.max_memory_allocated over a step, less what was there before",
        "reserved_bytes": "torch.cuda.max_memory_reserved over a step, less what was there before",
        "device_ms": "by the device's clock, with the host a step ahead",
        "blocks": BLOCKS,
    }
    collectives: dict[str, int] = {}
    tokens = _make_tokens(case, family.device, case.batch, case.length)
    for _ in range(BLOCKS):
        for name, wrap in _wraps(case).items():
            left = footprint.free_device()
            held = torch.cuda.memory_reserved()
            if left > LEFT_OVER:
                say(
                    f"warning: {left / 2**20:.0f} MiB stayed on the device after the last candidate"
                )
            candidate = _build(family, case, strategy, wrap)
            step = candidate.step_on(*tokens)
            rounds = math.ceil(case.steps / BLOCKS)
            taken = timing.alternate({name: step}, rounds, case.warmup, timing.time_on_cuda)
            samples[name] += taken[name]
            if emulation is not None:
                hold = emulation.links_of(torch.device("cuda", 0)).delay
                for _ in range(rounds):
                    took, _ = timing.time_ahead(step, hold, taken[name], nullcontext())
                    alone[name].append(took)
            called = sum(emulation.calls.values()) if emulation else 0
            allocated, reserved = footprint.peaks_on_cuda(step)
            peaks[name].append((allocated - left, reserved - held))
            if emulation is not None:
                collectives[name] = sum(emulation.calls.values()) - called
            settings[name] = candidate.settings
            del candidate, step
    footprint.free_device()
    _check_emulated(case, emulation, collectives)
    # Only the first block makes the libraries' workspaces; the others find them there.
    sides = {}
    for name in samples:
        allocated, reserved = (min(values) for values in zip(*peaks[name], strict=True))
        sides[name] = Side.of(
            samples[name], allocated, collectives.get(name), alone[name], reserved
        )
    return sides, None, settings


def _wraps(case: Case) -> dict[str, Wrap]:
    return {"ours": engines.OURS[case.through], "theirs": engines.wrap_theirs}


def _build(family: Family, case: Case, strategy: str, wrap: Wrap) -> Wrapped:
    return wrap(make_model(case.shape, family.device), strategy, case.precision)


def _step_builder(
    family: Family,
    case: Case,
    strategy: str,
    wrap: Wrap,
    tokens: tuple[torch.Tensor, torch.Tensor],
) -> Callable[[], Step]:
    return lambda: _build(family, case, strategy, wrap).step_on(*tokens)


def _make_tokens(
    case: Case, device: str, batch: int, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets, the same for all candidates."""
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    both = torch.randint(0, case.shape.vocab, (2, batch, length), generator=draw).to(device)
    return both[0], both[1]


def _check_parity(
    candidates: dict[str, Wrapped], steps: dict[str, Step], case: str, strategy: str
) -> float:
    """Train both for a few steps; an error on every rank if their parameters part."""
    for step in steps.values():
        for _ in range(PARITY_STEPS):
            step()
    worst, where = engines.largest_difference(candidates["ours"].model, candidates["theirs"].model)
    if worst > TOLERANCE:
        raise BenchmarkError(
            f"{case} {strategy}: after {PARITY_STEPS} steps from the same weights and inputs, "
            f"{where} differs from {engines.PEERS[strategy]}'s by {worst:.1e} of its largest "
            f"value (allowed {TOLERANCE:.0e}); nothing was timed"
        )
    return worst


def _check_emulated(case: Case, emulation: Emulation | None, collectives: dict[str, int]) -> None:
    missed = [name for name, count in collectives.items() if count == 0]
    if emulation is not None and missed:
        raise BenchmarkError(
            f"{case.name}: no collective of {missed} went over the emulated network"
        )


def _slowest_rank(family: Family, timer: Timer) -> Timer:
    """A step is over when its slowest rank is."""
    if not _real(family):
        return timer

    def slowest(step: Step) -> Sample:
        sample = timer(step)
        times = torch.tensor([sample.step_ms, sample.cpu_ms], dtype=torch.float64)
        dist.all_reduce(times, op=dist.ReduceOp.MAX)
        return Sample(*times.tolist())

    return slowest


def _describe(family: Family, case: Case, quick: bool) -> dict[str, Any]:
    return {
        "model": case.shape.describe(),
        "batch": f"{case.batch} x {case.length} tokens per rank",
        "ranks": family.world,
        "backend": family.backend,
        "device": family.device,
        "threads": torch.get_num_threads(),
        "optimizer": f"AdamW {OPTIMIZER}",
        "compute_dtype": case.precision.compute or "float32",
        "reduce_dtype": case.precision.reduce or "float32",
        "network": _describe_network(family, case),
        "through": case.through,
        "steps": case.steps,
        "warmup": case.warmup,
        "quick": quick,
    }


def _describe_network(family: Family, case: Case) -> str:
    if case.network is None:
        return "none: nothing is sent" if family.backend == "fake" else family.backend
    if math.isinf(case.network.bandwidth):
        return "emulated: free (data arrives, nobody waits)"
    gigabytes, micros = case.network.bandwidth / 1e9, case.network.latency * 1e6
    return f"emulated: {gigabytes:.0f} GB/s per rank, {micros:.0f} us per collective"


@contextmanager
def _network(case: Case) -> Iterator[Emulation | None]:
    if case.network is None:
        yield None
        return
    with emulate(case.network) as emulation:
        yield emulation


def _real(family: Family) -> bool:
    return family.backend != "fake"


def _nothing() -> None:
    return None


def say(message: str) -> None:
    """Progress, beside the output proper."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def select(names: Sequence[str], options: Options) -> dict[str, Family]:
    """The families asked for that this machine can run; says which it cannot."""
    chosen = {}
    for name in names:
        family = options.apply(FAMILIES[name])
        if family.device == "cuda" and not torch.cuda.is_available():
            say(f"{name}: skipped, no CUDA device here")
        elif family.cases:
            chosen[name] = family
    return chosen
