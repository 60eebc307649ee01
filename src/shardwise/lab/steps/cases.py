"""What `shardwise bench step` and `bench profile` run: cases, in families that share a group."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.description.language_model import OPTIMIZER
from shardwise.description.preset import BENCH, Size, bench_size
from shardwise.emulation.collectives import Emulation, Network, emulate
from shardwise.hosts import two_hosts
from shardwise.lab.on_hosts import ask_hosts
from shardwise.lab.processes import ask_ranks
from shardwise.lab.rows import say
from shardwise.lab.steps.engines import PEERS, Precision
from shardwise.lab.steps.models import GPT2_MEDIUM, MOE

BLOCKS = 5
OWN = Precision()  # every dtype the parameters' own
MIXED = Precision("bfloat16", "float32")


@dataclass(frozen=True)
class StepCase:
    """One comparison: what runs, and on what."""

    name: str
    size: Size
    batch: int
    length: int
    strategies: tuple[str, ...]
    steps: int  # timed, of each candidate
    warmup: int
    precision: Precision = OWN
    network: Network | None = None  # emulated, if any
    through: str = "plan"  # how shardwise is used (engines.OURS)
    blocks: int = BLOCKS  # on a GPU: how often each candidate is built and timed
    compiled: bool = False  # the model's blocks go through torch.compile

    def quick(self) -> StepCase:
        """The same path in seconds; its figures mean nothing."""
        small = dataclasses.replace(self.size, layers=2)
        return dataclasses.replace(self, size=small, steps=4, warmup=1)

    @property
    def candidates(self) -> str:
        """Which of engines.OURS and the like run."""
        return "capture compiled" if self.captures and self.compiled else self.through

    @property
    def captures(self) -> bool:
        return self.through == "capture"

    def open_network(self) -> AbstractContextManager[Emulation | None]:
        return nullcontext() if self.network is None else emulate(self.network)


@dataclass(frozen=True)
class Family:
    """Cases that share a process group."""

    cases: tuple[StepCase, ...]
    backend: str
    world: int
    processes: int  # real ones; fewer than `world` with the fake backend
    device: str
    rate: str = ""  # of the cable between two hosts, on which the ranks are; else they are on one

    @property
    def real(self) -> bool:
        return self.backend != "fake"

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` answers on rank 0 of fresh processes that share the group."""
        if self.rate:
            with two_hosts(self.rate) as hosts:
                return ask_hosts(hosts, self.processes // 2, function, *arguments)
        return ask_ranks(
            function, *arguments, world=self.world, processes=self.processes, backend=self.backend
        )


SMALL = bench_size(layers=16, d_model=64, d_ff=256, heads=4, vocab=256)
MEDIUM = bench_size(layers=6, d_model=256, d_ff=1024, heads=4, vocab=256)
NETWORKS = {
    "free": Network(),
    "300GBs": Network(bandwidth=300e9, latency=20e-6),
    "100GBs": Network(bandwidth=100e9, latency=20e-6),
}

FAMILIES: dict[str, Family] = {
    "fake8": Family(
        (StepCase("fake8", SMALL, 1, 16, ("zero3", "zero2"), steps=40, warmup=5),),
        backend="fake", world=8, processes=1, device="cpu",
    ),
    "gloo2": Family(
        (StepCase("gloo2", MEDIUM, 4, 64, ("zero3", "zero1", "ddp"), steps=30, warmup=3),),
        backend="gloo", world=2, processes=2, device="cpu",
    ),
    "h200": Family(
        tuple(
            StepCase(
                f"h200-{batch}x2048-{label}", BENCH, batch, 2048, ("zero3",), steps=18, warmup=3,
                precision=MIXED, network=network,
            )
            for batch in (4, 1) for label, network in NETWORKS.items()
        ),
        backend="fake", world=8, processes=1, device="cuda",
    ),
    # Compiling takes longer than timing: each candidate is built twice.
    "graph": Family(
        tuple(
            StepCase(
                f"{name}-{batch}x{length}-{label}", size, batch, length, ("zero3",), steps=16,
                warmup=3, precision=MIXED, network=NETWORKS[label], through="compile", blocks=2,
            )
            for name, size, batch, length, label in (
                ("graph", BENCH, 4, 2048, "300GBs"),
                ("graph", BENCH, 1, 2048, "free"),
                ("graph", BENCH, 4, 2048, "free"),
                ("graph-gpt2", GPT2_MEDIUM, 8, 1024, "300GBs"),
                ("graph-gpt2", GPT2_MEDIUM, 1, 1024, "free"),
            )
        ),
        backend="fake", world=8, processes=1, device="cuda",
    ),
    # The first call of a captured step, two more and the recording are its warm-up; an arena, with
    # which the third step begins, puts that off by two.
    "static": Family(
        tuple(
            StepCase(
                f"static-{name}{batch}x{length}-{label}{'-compiled' * compiled}", size, batch,
                length, ("zero3",), steps=16, warmup=7, precision=MIXED, network=NETWORKS[label],
                through="capture", blocks=1 if compiled else 2, compiled=compiled,
            )
            for name, size, batch, length, label, compiled in (
                ("", BENCH, 1, 2048, "free", False),
                ("gpt2-", GPT2_MEDIUM, 8, 1024, "free", False),
                ("moe-", MOE, 8, 1024, "free", False),
                ("", BENCH, 4, 2048, "free", False),
                ("", BENCH, 4, 2048, "300GBs", False),
                ("", BENCH, 1, 2048, "free", True),
                ("", BENCH, 4, 2048, "free", True),
            )
        ),
        backend="fake", world=8, processes=1, device="cuda",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class StepChoice:
    """What the command line may change of the cases."""

    strategies: tuple[str, ...] | None = None
    steps: int | None = None
    quick: bool = False
    through: str = "plan"
    only: str | None = None  # cases with this in their names

    def apply(self, family: Family) -> Family:
        """The family's cases as asked for; those without a strategy left are left out."""
        changed = []
        for case in family.cases:
            if self.quick:
                case = case.quick()
            if self.steps is not None:
                case = dataclasses.replace(case, steps=self.steps)
            if self.through != "plan" and case.through not in ("compile", "capture"):
                # torch's surface has no data parallel without shards.
                sharding = tuple(s for s in case.strategies if PEERS[s] == "fully_shard")
                case = dataclasses.replace(case, through=self.through, strategies=sharding)
            if self.strategies is not None:
                chosen = tuple(name for name in case.strategies if name in self.strategies)
                case = dataclasses.replace(case, strategies=chosen)
            if case.strategies and (self.only is None or self.only in case.name):
                changed.append(case)
        return dataclasses.replace(family, cases=tuple(changed))


def select(names: Sequence[str], choice: StepChoice) -> dict[str, Family]:
    """The families asked for that this machine can run; says which it cannot."""
    chosen = {}
    for name in names:
        family = choice.apply(FAMILIES[name])
        if family.device == "cuda" and not torch.cuda.is_available():
            say(f"{name}: skipped, no CUDA device here")
        elif family.cases:
            chosen[name] = family
    return chosen


def describe_case(family: Family, case: StepCase, quick: bool) -> dict[str, Any]:
    return {
        "model": case.size.describe(),
        "batch": f"{case.batch} x {case.length} tokens per rank",
        "ranks": family.world,
        "backend": family.backend,
        "device": family.device,
        "threads": torch.get_num_threads(),
        "optimizer": f"AdamW {OPTIMIZER}",
        "compute_dtype": case.precision.compute or "float32",
        "reduce_dtype": case.precision.reduce or "float32",
        "network": _tell_network(family, case),
        "through": case.through,
        "steps": case.steps,
        "warmup": case.warmup,
        "quick": quick,
    }


def _tell_network(family: Family, case: StepCase) -> str:
    if family.rate:
        return f"gloo, two hosts and a cable of {family.rate} between them"
    if case.network is None:
        return "none: nothing is sent" if not family.real else family.backend
    if math.isinf(case.network.bandwidth):
        return "emulated: free (data arrives, nobody waits)"
    gigabytes, micros = case.network.bandwidth / 1e9, case.network.latency * 1e6
    return f"emulated: {gigabytes:.0f} GB/s per rank, {micros:.0f} us per collective"
