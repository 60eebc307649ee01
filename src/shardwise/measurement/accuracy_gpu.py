"""Predicted against measured on one device: one rank of an emulated group, with modelled
collectives. Each case is predicted from kernels, copies and a host that were timed alone, and then
run.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.comms.emulated import emulate
from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.measurement import memory
from shardwise.measurement.accuracy_calibrate import Calibration
from shardwise.measurement.accuracy_cases import AccuracyCase, build_model
from shardwise.measurement.accuracy_kernels import KernelTable, Sizes
from shardwise.measurement.benchmark import Sample, Step, time_on_cuda
from shardwise.measurement.engines import OPTIMIZER
from shardwise.measurement.models import compute_loss
from shardwise.planning.cost import Costs
from shardwise.planning.describe import describe
from shardwise.planning.plan import Plan
from shardwise.planning.schedule_step import StepOptions
from shardwise.planning.simulate import simulate
from shardwise.runtime.api import shard
from shardwise.runtime.local import local
from shardwise.runtime.microbatches import microbatches
from shardwise.timeline import Timeline

WARMUP = 3
STEPS = 8


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
    table: KernelTable,
    base: Cluster,
    held: int = 0,
) -> Prediction:
    """Simulate the case with the kernels' measured times, above the `held` bytes that are on the
    device before it.
    """
    plan, described = traced
    streams = _kind(table.device) == "cuda"
    cluster = calibration.apply(base, case.network, whole=plan.shard == 1)
    costs = Costs(cluster, streams=streams, emulated=True, copy_rates=calibration.copy_rates)
    launch = 0.0 if streams else max(0.0, calibration.op_s - calibration.kernel_s)
    costs.set_passes(table.passes(described, sizes_of(case), launch))
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


@dataclass(frozen=True)
class Measurement:
    step_ms: float
    spread_ms: float
    cpu_ms: float
    peak_bytes: int


def measure(case: AccuracyCase, device: str, steps: int = STEPS) -> Measurement:
    """Build the case, warm it up, time it and take its peak; then give everything back."""
    cuda = _kind(device) == "cuda"
    step, tokens = _step_of(case, device)
    try:
        with emulate(case.network) as emulation:
            for _ in range(WARMUP):
                step()
            called = sum(emulation.calls.values())
            # Whom the garbage collector strikes is chance.
            gc.collect()
            gc.disable()
            samples = [time_on_cuda(step) if cuda else _time_on_cpu(step) for _ in range(steps)]
            if not sum(emulation.calls.values()) > called:
                raise RuntimeError(f"{case.name}: no collective went over the emulated network")
            peak = memory.peak_on_cuda(step) if cuda else 0
    finally:
        gc.enable()
        del step, tokens
        gc.collect()
        if cuda:
            memory.free_device()
    times = [sample.step_ms for sample in samples]
    return Measurement(
        statistics.median(times),
        max(times) - min(times),
        statistics.median(sample.cpu_ms for sample in samples),
        peak,
    )


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
    table: KernelTable,
    base: Cluster,
    say: Say,
    steps: int = STEPS,
) -> dict[str, Any]:
    """One row: prediction first, then the measurement."""
    traced = describe_case(case, table.device)
    new = table.measure(traced[1], sizes_of(case))
    held = memory.free_device() if _kind(table.device) == "cuda" else 0
    predicted = predict(case, traced, calibration, table, base, held)
    say(f"{case.name} {case.describe()}: {new} kernels timed; predicted {predicted.step_ms:.1f} ms")
    measured = measure(case, table.device, steps)
    row: dict[str, Any] = {
        "case": case.name,
        "mode": case.describe(),
        "set": case.group,
        "network": str(case.network),
        "predicted_ms": predicted.step_ms,
        "measured_ms": measured.step_ms,
        "measured_spread_ms": measured.spread_ms,
        "measured_cpu_ms": measured.cpu_ms,
        "predicted_bytes": predicted.peak_bytes,
        "measured_bytes": measured.peak_bytes or None,
        "breakdown_ms": {k: v / 1e6 for k, v in predicted.timeline.breakdown().parts().items()},
        "held_before_bytes": held,
        "predicted_roles": dict(predicted.timeline.peak().by_role),
    }
    say(
        f"{case.name}: measured {measured.step_ms:.1f} ms "
        f"({predicted.step_ms / measured.step_ms - 1:+.1%}), peak "
        f"{predicted.peak_bytes / 1e9:.2f} against {measured.peak_bytes / 1e9:.2f} GB"
    )
    return row
