"""Predicted against measured on one device: one rank of an emulated group, with modelled
collectives. Each case is predicted from its kernels, which are replayed without the engine, and
from copies and a host that were timed alone; then it is run.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription, Pass
from shardwise.emulation.collectives import Network, emulate
from shardwise.engine.api import shard
from shardwise.engine.local_step import local
from shardwise.engine.microbatches import microbatches
from shardwise.lab.accuracy.calibrate import Calibration, emulated_level
from shardwise.lab.accuracy.cases import AccuracyCase, build_model
from shardwise.lab.accuracy.kernels import Sizes
from shardwise.lab.accuracy.replay import PAUSE_S, Beside, Replayed, replay
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe
from shardwise.predict.simulate import simulate
from shardwise.predict.step import StepOptions
from shardwise.profiling import footprint
from shardwise.profiling.timing import Sample, Step, time_on_cuda
from shardwise.timeline import Timeline
from shardwise.trainer.model import OPTIMIZER, compute_loss

WARMUP = 3
STEPS = 5
# And at least so long on a GPU: until its clock is steady, and while it swings about its mean.
WARM_S, TIMED_S = 1.0, 1.0


def _kind(device: str) -> str:
    return torch.device(device).type


@dataclass(frozen=True)
class Prediction:
    step_ms: float
    peak_bytes: int
    timeline: Timeline


def describe_case(case: AccuracyCase, device: str) -> tuple[Plan, ModelDescription]:
    """Trace the case's model on the meta device."""
    model = build_model(case, "meta")
    plan = case.plan().resolve(model)
    tokens = torch.empty((case.batch, case.length), dtype=torch.int64, device="meta")
    described = describe(
        model,
        (tokens, tokens.clone()),
        plan,
        loss=compute_loss,
        device=_kind(device),
        checkpoint=case.checkpoint,
    )
    return plan, described


def sizes_of(case: AccuracyCase) -> Sizes:
    return Sizes(case.batch * case.length, case.shape.d_model, case.shape.vocab)


def predict(
    case: AccuracyCase,
    traced: tuple[Plan, ModelDescription],
    calibration: Calibration,
    base: Cluster,
    device: str,
    passes: Iterable[tuple[Pass, float]] = (),
    slowdown: float = 1.0,
    held: int = 0,
) -> Prediction:
    """Simulate the case with measured seconds for its `passes` (the base cluster's rates where
    there are none), above the `held` bytes that are on the device before it.
    """
    plan, described = traced
    network = _slow_down(case.network, slowdown)
    cluster = calibration.apply(base, network, whole=plan.shard == 1)
    streams = _kind(device) == "cuda"
    costs = Costs(cluster, streams=streams, emulated=True, copy_rates=calibration.copy_rates)
    costs.set_passes(passes)
    timeline = simulate(
        plan,
        described,
        cluster,
        case.workload,
        costs=costs,
        options=StepOptions(loss_inside=False),
        base_bytes=held,
    )
    return Prediction(timeline.step_ms, timeline.peak().total, timeline)


def predict_shipped(case: AccuracyCase, base: Cluster) -> Prediction:
    """As `shardwise plan` predicts the case: device, copies and host are the cluster file's, and
    nothing of the run that it is compared with. Only the link is that run's emulated one.
    """
    plan, described = describe_case(case, "cuda")
    cluster = dataclasses.replace(base, levels=(emulated_level(case.network),))
    costs = Costs(cluster, emulated=True)
    options = StepOptions(loss_inside=False)
    timeline = simulate(plan, described, cluster, case.workload, costs=costs, options=options)
    return Prediction(timeline.step_ms, timeline.peak().total, timeline)


def _slow_down(network: Network, slowdown: float) -> Network:
    """As the emulated network is if it waits for a number of cycles, and the clock is lower."""
    return Network(network.bandwidth / slowdown, network.latency * slowdown)


def replay_case(
    case: AccuracyCase,
    traced: tuple[Plan, ModelDescription],
    calibration: Calibration,
    base: Cluster,
    device: str,
) -> Replayed:
    """Time the case's kernels, amid the copies and pauses of a first prediction."""
    draft = predict(case, traced, calibration, base, device).timeline
    parts = draft.breakdown()
    updates = sum(s.duration for s in draft.spans if s.name == "update" and s.rank == 0)
    waits = parts.exposed_transfer + parts.waiting_for_peers + parts.host_idle
    each = 1e9 * case.micro_batches
    small = torch.zeros(1, device=device)
    beside = Beside(
        copies=(parts.contention + parts.copies + updates) / each,
        copy_bytes_per_s=calibration.stream_bytes_per_s,
        pauses=waits / each,
        pause=lambda: dist.all_reduce(small),
    )
    # A CPU's clock is its own affair.
    limits = {} if _kind(device) == "cuda" else {"settle_s": 0.0, "timed_s": 0.0}
    with emulate(Network(latency=PAUSE_S)):
        return replay(traced[1], sizes_of(case), device, beside, **limits)


@dataclass(frozen=True)
class Measurement:
    step_ms: float
    spread_ms: float
    cpu_ms: float
    peak_bytes: int
    samples_ms: list[float]


def measure(case: AccuracyCase, device: str, steps: int = STEPS) -> Measurement:
    """Build the case, warm it up, time it and take its peak; then give everything back."""
    cuda = _kind(device) == "cuda"
    step, tokens = _step_of(case, device)
    try:
        with emulate(case.network) as emulation:
            # Whom the garbage collector strikes is chance; and a GPU that waits for it clocks up.
            gc.collect()
            gc.disable()
            _repeat(step, cuda, WARMUP, WARM_S)
            called = sum(emulation.calls.values())
            samples = _repeat(step, cuda, steps, TIMED_S)
            if not sum(emulation.calls.values()) > called:
                raise RuntimeError(f"{case.name}: no collective went over the emulated network")
            peak = footprint.peak_on_cuda(step) if cuda else 0
    finally:
        gc.enable()
        del step, tokens
        gc.collect()
        if cuda:
            footprint.free_device()
    times = [sample.step_ms for sample in samples]
    return Measurement(
        statistics.fmean(times),
        max(times) - min(times),
        statistics.median(sample.cpu_ms for sample in samples),
        peak,
        times,
    )


def _repeat(step: Step, cuda: bool, least: int, seconds: float) -> list[Sample]:
    """Time the step `least` times, and on a GPU for `seconds`."""
    samples: list[Sample] = []
    began = time.perf_counter()
    while len(samples) < least or (cuda and time.perf_counter() - began < seconds):
        samples.append(time_on_cuda(step) if cuda else _time_on_cpu(step))
    return samples


def _time_on_cpu(step: Step) -> Sample:
    began = time.perf_counter()
    step()
    took = (time.perf_counter() - began) * 1e3
    return Sample(took, took)


def _step_of(case: AccuracyCase, device: str) -> tuple[Step, torch.Tensor]:
    """One whole training step: zero_grad, the micro-batches, the fused optimizer."""
    draw = torch.Generator().manual_seed(1)
    shape = (2, case.batch, case.length)
    both = torch.randint(0, case.shape.vocab, shape, generator=draw).to(device)
    tokens, targets = both[0], both[1]
    model = build_model(case, device)
    shard(model, case.plan())
    optimizer = local(torch.optim.AdamW(model.parameters(), **OPTIMIZER))
    divisor = dist.get_world_size() * case.micro_batches
    batches = [(tokens, targets)] * case.micro_batches

    def step() -> None:
        optimizer.zero_grad()
        if case.micro_batches == 1:
            (compute_loss(model, tokens, targets) / divisor).backward()
        else:
            for inputs, goals in microbatches(model, batches):
                (compute_loss(model, inputs, goals) / divisor).backward()
        optimizer.step()

    return step, both


Say = Callable[[str], None]


def run_case(
    case: AccuracyCase,
    calibration: Calibration,
    base: Cluster,
    device: str,
    say: Say,
    steps: int = STEPS,
) -> dict[str, Any]:
    """One row: prediction first, then the measurement."""
    traced = describe_case(case, device)
    found = replay_case(case, traced, calibration, base, device)
    held = footprint.free_device() if _kind(device) == "cuda" else 0
    predicted = predict(case, traced, calibration, base, device, found.passes, found.slowdown, held)
    say(
        f"{case.name} {case.describe()}: kernels {found.first_s * 1e3:.1f} ms at first, "
        f"{found.settled_s * 1e3:.1f} ms settled; predicted {predicted.step_ms:.1f} ms"
    )
    measured = measure(case, device, steps)
    row: dict[str, Any] = {
        "case": case.name,
        "mode": case.describe(),
        "set": case.group,
        "network": str(case.network),
        "predicted_ms": predicted.step_ms,
        "measured_ms": measured.step_ms,
        "measured_spread_ms": measured.spread_ms,
        "measured_cpu_ms": measured.cpu_ms,
        "measured_samples_ms": [round(sample, 2) for sample in measured.samples_ms],
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes or None,
        "breakdown_ms": {k: v / 1e6 for k, v in predicted.timeline.breakdown().parts().items()},
        "replayed": {
            "first_ms": found.first_s * 1e3,
            "settled_ms": found.settled_s * 1e3,
            "pause_slowdown": found.slowdown,
        },
        "held_before_bytes": held,
        "predicted_roles": dict(predicted.timeline.peak().by_role),
    }
    say(
        f"{case.name}: measured {measured.step_ms:.1f} ms "
        f"({predicted.step_ms / measured.step_ms - 1:+.1%}), peak "
        f"{predicted.peak_bytes / 1e9:.2f} against {measured.peak_bytes / 1e9:.2f} GB"
    )
    return row
