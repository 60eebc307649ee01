"""Running one rank of an emulated cluster: the step's time, what of it is exposed communication,
and the rank's peak of memory.

Exposed communication is taken twice, in two ways that know nothing of each other:

- measured: how long the compute stream (on a CPU: the host) stood still in its waits, less what it
  does so over a free network, where it still waits for casts, for packing, and for copies of what
  arrives;
- counterfactual: the step's time less that of the same step over a free network, in one run.

Kernels that occupy the device (`--occupancy`) also take something from the compute they run beside,
which no wait shows. Then the counterfactual is parted: `waiting` is what the step gains when nobody
waits but the kernels go on, `contention` what it gains when they are gone too.

On a GPU both are taken with the host a whole step ahead, as in a training loop that never
synchronises: the device is kept waiting until the step has been issued. Where the host is slower
than the device, the plain step says so, and there the network costs less than it exposes.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.description.tracing import torch_private
from shardwise.description.tracing.real_run import free_bytes
from shardwise.description.workload import row_of
from shardwise.emulation.collectives import Emulation, emulate
from shardwise.emulation.device import Mode
from shardwise.emulation.engines import Rows, Subject, build
from shardwise.emulation.exposure import Exposure, Message
from shardwise.emulation.networks import NetworkModel
from shardwise.emulation.peers import Peers
from shardwise.errors import UserError
from shardwise.planning.memory import count_kept
from shardwise.planning.plan import Plan
from shardwise.profiling import footprint, timing
from shardwise.profiling.results import Row
from shardwise.profiling.timing import Sample, Side, Step

MODES: tuple[Mode, ...] = ("network", "unwaited", "free")
WARMUP = 3
BLOCKS = 2  # how often each engine is built and timed when two are compared

Say = Callable[[str], None]


@dataclass(frozen=True)
class Job:
    """What is run, and on what."""

    subject: Subject
    plan: Plan
    rank: int
    device: torch.device
    network: NetworkModel
    network_name: str
    steps: int
    occupancy: int = 0

    @property
    def role(self) -> int:
        """Which row of its subject's micro-batches the rank has."""
        return row_of(self.rank, self.plan.mesh, len(self.subject.rows))


def join_fake_group(rank: int, world: int) -> None:
    """This process as one rank of a group in which nothing is sent."""
    store = torch_private.fake_store()
    dist.init_process_group("fake", store=store, rank=rank, world_size=world)


@contextmanager
def fake_group(rank: int, world: int) -> Iterator[None]:
    """Such a group while it is open."""
    join_fake_group(rank, world)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def joined(rank: int, world: int) -> Iterator[None]:
    """This process as `rank` of `world`, as it is emulated."""
    if dist.is_initialized():
        raise UserError("a process group is open already; emulate in a process of its own")
    # Fabricated gradients may get very small; denormal numbers would cost time of their own.
    torch.set_flush_denormal(True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # of a host's cores, a rank has one
    try:
        with fake_group(rank, world):
            yield
    finally:
        torch.set_num_threads(threads)
        torch.set_flush_denormal(False)


def check_memory(plan: Plan, subject: Subject, device: torch.device) -> None:
    """Error if not even parameters, gradients, optimizer state and buffers fit."""
    kept = count_kept(plan.resolve(subject.build()))
    needed = kept.at_once if device.type == "cuda" else kept.host_at_once
    free = free_bytes(device)
    if needed > free:
        raise UserError(
            f"one rank of {subject.name} under {plan.title} on mesh {plan.replicate}x{plan.shard} "
            f"keeps {needed / 1e9:.1f} GB without activations, and {device} has {free / 1e9:.1f} "
            f"GB free: {', or '.join([*ways_to_keep_less(plan), 'use a smaller --model'])}"
        )


def ways_to_keep_less(plan: Plan) -> list[str]:
    """What makes a rank of this Plan hold less of the model; nothing that it does already."""
    if plan.strategy.state == "replicate":
        return [f"use --plan zero3 --mesh 1x{max(2, plan.world)}"]
    ways = ["shard over more ranks (--mesh)"]
    return ways if plan.strategy.parameters == "shard" else [*ways, "use --plan zero3"]


@dataclass
class Taken:
    """What was measured of one engine, in all its builds."""

    # By the emulation's mode; `ahead_ms` and `exposures` are of steps with the host ahead.
    samples: dict[str, list[Sample]] = field(default_factory=lambda: defaultdict(list))
    ahead_ms: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    exposures: dict[str, list[Exposure]] = field(default_factory=lambda: defaultdict(list))
    peaks: list[tuple[int, int]] = field(default_factory=list)  # allocated, reserved
    # Of the last build's step.
    calls: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def waitless(self) -> str:
        """The mode in which nobody waits for the network."""
        return "unwaited" if "unwaited" in self.ahead_ms else "free"

    def difference(self, first: str, second: str) -> list[float]:
        """Of steps that ran one right after the other: the device's clock rate drifts."""
        pairs = zip(self.ahead_ms[first], self.ahead_ms[second], strict=True)
        return [a - b for a, b in pairs]

    def waited_ms(self, mode: str) -> list[float]:
        """All waits of the compute stream."""
        return [exposure.waited_s * 1e3 for exposure in self.exposures[mode]]

    @property
    def exposed_ms(self) -> list[float]:
        """All waits less those of a step that does not wait for a network."""
        pairs = zip(self.waited_ms("network"), self.waited_ms(self.waitless), strict=True)
        return [a - b for a, b in pairs]


def run(job: Job, engines: tuple[str, ...], say: Say) -> list[Row]:
    """A row for each engine; two take turns, BLOCKS times each. The process group is open."""
    inputs = job.subject.draw_rows(job.device)
    blocks = BLOCKS if len(engines) > 1 else 1
    rounds = max(2, -(-job.steps // blocks))
    taken = {engine: Taken() for engine in engines}
    with emulate(job.network, job.occupancy) as emulation:
        for i in range(blocks):
            for engine in engines:
                say(f"{engine}: {job.subject.name}, {job.network_name}, round {i + 1} of {blocks}")
                try:
                    _run_block(job, engine, inputs, emulation, rounds, taken[engine])
                except torch.OutOfMemoryError as error:
                    largest = max(map(max, job.subject.rows))
                    smaller = "--batch or --seq" if largest > 1 else "--seq"
                    ways = [f"use a smaller {smaller}", *ways_to_keep_less(job.plan)]
                    raise UserError(
                        f"{engine} ran out of memory on {job.device} with {job.subject.tokens}: "
                        f"{', or '.join(ways)} "
                        f"({str(error).splitlines()[0]})"
                    ) from error
    return [_sum_up(engine, taken[engine]) for engine in engines]


def _run_block(
    job: Job, engine: str, inputs: Rows, emulation: Emulation, rounds: int, taken: Taken
) -> None:
    """Build the engine and add what its steps take, in each mode in turn."""
    cuda = job.device.type == "cuda"
    left, held = (footprint.free_device(), torch.cuda.memory_reserved()) if cuda else (0, 0)
    built = build(engine, job.subject, job.plan, job.device, inputs)
    step = _beside_peers(job, built.steps, emulation)
    time_step(step, emulation, job.device, rounds, taken)
    emulation.calls.clear()
    emulation.sent.clear()
    if cuda:
        allocated, reserved = footprint.peaks_on_cuda(step)
        taken.peaks.append((allocated - left, reserved - held))
    else:
        step()
    taken.calls, taken.sent = dict(emulation.calls), dict(emulation.sent)
    taken.settings = built.settings
    if not taken.calls and job.plan.world > 1:
        raise RuntimeError(f"no collective of {engine} went over the emulated network")
    del built, step
    if not cuda:
        peak = footprint.peak_on_cpu(
            lambda: build(engine, job.subject, job.plan, job.device, inputs).steps[job.role]
        )
        taken.peaks.append((peak, 0))


def time_step(
    step: Step, emulation: Emulation, device: torch.device, rounds: int, taken: Taken
) -> None:
    """Add what steps take, in each mode in turn: with the host in them, then with it ahead."""
    # Only kernels that occupy the device can go on without being waited for.
    modes = MODES if device.type == "cuda" and emulation.occupancy else ("network", "free")
    steps = {mode: _in_mode(emulation, mode, step) for mode in modes}
    plain = {mode: steps[mode] for mode in ("network", "free")}
    samples = timing.alternate(plain, rounds, WARMUP, timing.timer_on(device.type))
    for mode in plain:
        taken.samples[mode] += samples[mode]
    for i in range(rounds):
        for mode in modes if i % 2 else modes[::-1]:
            took, exposure = step_ahead(device, emulation, steps[mode], samples["network"])
            taken.ahead_ms[mode].append(took)
            taken.exposures[mode].append(exposure)


def _beside_peers(job: Job, steps: Sequence[Step], emulation: Emulation) -> Step:
    """The rank's own step, in which others with other micro-batches come when they would."""
    if len(steps) == 1:
        return steps[0]
    for step in steps:
        step()  # kernels are built and memory is taken before anything is timed
    peers = Peers(emulation, job.device, job.plan, steps)
    peers.settle(rounds=len(job.subject.rows[0]) + 1)
    return partial(peers.run, job.role)


def profile(job: Job, engine: str, directory: Path, cluster: str, steps: int = 3) -> None:
    """Write the profile of a few steps of one engine. The process group is open."""
    from shardwise.profiling.collect import profile as start_profile

    if job.device.type == "cuda":
        footprint.free_device()  # what an engine before it left would be memory of this one
    inputs = job.subject.draw_rows(job.device)
    title = f"{engine}, {job.plan.title}, network emulated: {job.network_name}"
    with emulate(job.network, job.occupancy) as emulation:
        built = build(engine, job.subject, job.plan, job.device, inputs)
        step = _beside_peers(job, built.steps, emulation)
        for _ in range(WARMUP):
            step()
        with start_profile(built.model, steps, title=title) as measured:
            for _ in range(steps):
                step()
    measured.write(directory, cluster)


def _in_mode(emulation: Emulation, mode: Mode, step: Step) -> Step:
    def in_mode() -> None:
        emulation.mode = mode
        try:
            step()
        finally:
            emulation.mode = "network"

    return in_mode


def step_ahead(
    device: torch.device, emulation: Emulation, step: Step, samples: list[Sample]
) -> tuple[float, Exposure]:
    """One step with its waits measured, and its milliseconds; on a GPU with the host ahead."""
    if device.type != "cuda":
        with emulation.measure(device) as exposure:
            began = time.perf_counter()
            step()
            ended = time.perf_counter()
        return (ended - began) * 1e3, exposure
    hold = emulation.links_of(device).delay
    return timing.time_ahead(step, hold, samples, emulation.measure(device))


def _sum_up(engine: str, taken: Taken) -> Row:
    """One engine's figures. Milliseconds, medians; spreads are interquartile."""

    difference, waited, exposed = taken.difference, taken.waited_ms, taken.exposed_ms
    waitless, counterfactual = taken.waitless, difference("network", "free")
    # Only the first block makes the libraries' workspaces; the others find them there.
    peak, reserved = (min(values) for values in zip(*taken.peaks, strict=True))
    by_exposed = sorted(taken.exposures["network"], key=lambda exposure: exposure.exposed_s)
    side = Side.of(
        taken.samples["network"],
        peak,
        sum(taken.calls.values()),
        taken.ahead_ms["network"],
        reserved or None,
    )
    free = [sample.step_ms for sample in taken.samples["free"]]
    return {
        "engine": engine,
        # The same step over a free network.
        "free_step_ms": statistics.median(free),
        # Measured: all waits less those of a step that does not wait for a network.
        "exposed_ms": statistics.median(exposed),
        "exposed_spread_ms": timing.spread(exposed),
        # The step less the same over a free network.
        "counterfactual_ms": statistics.median(counterfactual),
        "counterfactual_spread_ms": timing.spread(counterfactual),
        # Of that: less one that waits for nothing while the kernels go on; and the rest, what the
        # kernels cost the compute they run beside.
        "waiting_ms": statistics.median(difference("network", waitless)),
        "contention_ms": statistics.median(difference(waitless, "free")),
        # All waits of the compute stream, and those over a free network.
        "waited_ms": statistics.median(waited("network")),
        "free_waited_ms": statistics.median(waited("free")),
        "calls": taken.calls,
        "bytes_by_collective": taken.sent,
        "settings": taken.settings,
        "messages": _sum_up_messages(by_exposed[len(by_exposed) // 2]),
        **asdict(side),
    }


def _sum_up_messages(exposure: Exposure) -> list[Row]:
    """The messages of a step by collective, ranks and size."""
    alike: dict[tuple[str, int, int], list[Message]] = defaultdict(list)
    for message in exposure.messages:
        alike[message.collective, message.ranks, message.nbytes].append(message)
    return [
        {
            "collective": collective,
            "ranks": ranks,
            "bytes": nbytes,
            "count": len(messages),
            "modelled_ms": sum(message.modelled_s for message in messages) * 1e3,
            "taken_ms": sum(message.seconds for message in messages) * 1e3,
            "exposed_ms": sum(message.exposed_s for message in messages) * 1e3,
            "least_ms": min(message.seconds for message in messages) * 1e3,
            "most_ms": max(message.seconds for message in messages) * 1e3,
        }
        for (collective, ranks, nbytes), messages in alike.items()
    ]
