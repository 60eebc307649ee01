"""Predicted against measured on one device: one rank of an emulated group, with modelled
collectives. Each case is predicted from its kernels, which are replayed without the engine, and
from copies and a host that were timed alone; then it is run.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Iterable

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.description.cluster import Cluster
from shardwise.description.language_model import draw_tokens, make_model
from shardwise.description.model import PassFacts
from shardwise.emulation.collectives import Network, emulate
from shardwise.lab.accuracy.calibrate import Calibration, emulated_level
from shardwise.lab.accuracy.cases import AccuracyCase, Traced, describe_model
from shardwise.lab.accuracy.kernels import Widths
from shardwise.lab.accuracy.page import tell_prediction
from shardwise.lab.accuracy.replay import PAUSE_S, Beside, Replayed, replay
from shardwise.lab.rows import say
from shardwise.lab.steps.engines import wrap_plan
from shardwise.predict.cost import Costs
from shardwise.predict.step import StepOptions
from shardwise.profiling import footprint
from shardwise.profiling.results import Row
from shardwise.profiling.timing import Step, no_garbage_collection, repeat, timer_on
from shardwise.timeline import Timeline

WARMUP = 3
STEPS = 5
# And at least so long on a GPU: until its clock is steady, and while it swings about its mean.
WARM_S, TIMED_S = 1.0, 1.0


def _on_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


def describe_case(case: AccuracyCase, device: str) -> Traced:
    """Trace the case's model on the meta device."""
    return describe_model(case.size, case.batch, case.length, case.plan(), device, case.checkpoint)


def widths_of(case: AccuracyCase) -> Widths:
    return Widths.of(case.size, case.batch, case.length)


def predict(
    case: AccuracyCase,
    traced: Traced,
    calibration: Calibration,
    base: Cluster,
    device: str,
    passes: Iterable[tuple[PassFacts, float]] = (),
    slowdown: float = 1.0,
    held: int = 0,
) -> Timeline:
    """Simulate the case with measured seconds for its `passes` (the base cluster's rates where
    there are none), above the `held` bytes that are on the device before it. The emulated network
    waits for a number of cycles, so it is slower where the clock is lower by `slowdown`.
    """
    network = Network(case.network.bandwidth / slowdown, case.network.latency * slowdown)
    cluster = calibration.apply(base, network, whole=traced[0].shard == 1)
    rates = calibration.copy_rates
    costs = Costs(cluster, streams=_on_cuda(device), emulated=True, copy_rates=rates)
    costs.set_passes(passes)
    return _simulate(case, traced, costs, held)


def predict_shipped(case: AccuracyCase, base: Cluster) -> Timeline:
    """As `shardwise plan` predicts the case: device, copies and host are the cluster file's, and
    nothing of the run that it is compared with. Only the link is that run's emulated one.
    """
    cluster = dataclasses.replace(base, levels=(emulated_level(case.network),))
    return _simulate(case, describe_case(case, "cuda"), Costs(cluster, emulated=True), 0)


def _simulate(case: AccuracyCase, traced: Traced, costs: Costs, held: int) -> Timeline:
    options = StepOptions(loss_inside=False)
    return sw.simulate(
        *traced, costs.cluster, case.workload, costs=costs, options=options, base_bytes=held
    )


def replay_case(
    case: AccuracyCase,
    traced: Traced,
    calibration: Calibration,
    base: Cluster,
    device: str,
) -> Replayed:
    """Time the case's kernels, amid the copies and pauses of a first prediction."""
    draft = predict(case, traced, calibration, base, device)
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
    limits = {} if _on_cuda(device) else {"settle_s": 0.0, "timed_s": 0.0}
    with emulate(Network(latency=PAUSE_S)):
        return replay(traced[1], widths_of(case), device, beside, **limits)


def measure(case: AccuracyCase, device: str, steps: int = STEPS) -> Row:
    """Build the case, warm it up, time it and take its peak; then give everything back."""
    step = _step_of(case, device)
    try:
        # A GPU that waits for the garbage collector clocks up.
        with emulate(case.network) as emulation, no_garbage_collection():
            timer, cuda = timer_on(device), _on_cuda(device)
            repeat(step, timer, WARMUP, WARM_S if cuda else 0.0)
            called = sum(emulation.calls.values())
            samples = repeat(step, timer, steps, TIMED_S if cuda else 0.0)
            if not sum(emulation.calls.values()) > called:
                raise RuntimeError(f"{case.name}: no collective went over the emulated network")
            peak = footprint.peaks_on_cuda(step)[0] if _on_cuda(device) else None
    finally:
        del step
        gc.collect()
        if _on_cuda(device):
            footprint.free_device()
    times = [sample.step_ms for sample in samples]
    return {
        "measured_ms": statistics.fmean(times),
        "measured_spread_ms": max(times) - min(times),
        "measured_cpu_ms": statistics.median(sample.cpu_ms for sample in samples),
        "measured_samples_ms": [round(sample, 2) for sample in times],
        "measured_bytes": peak,
    }


def _step_of(case: AccuracyCase, device: str) -> Step:
    """One whole training step: zero_grad, the micro-batches, the fused optimizer."""
    model = make_model(case.size, device, case.length, case.checkpoint)
    tokens = draw_tokens(case.size, case.batch, case.length, device)
    return wrap_plan(model, case.plan()).step_on(*tokens, case.micro_batches)


def run_case(case: AccuracyCase, calibration: Calibration, base: Cluster, device: str) -> Row:
    """One row: prediction first, then the measurement."""
    traced = describe_case(case, device)
    found = replay_case(case, traced, calibration, base, device)
    held = footprint.free_device() if _on_cuda(device) else 0
    predicted = predict(case, traced, calibration, base, device, found.passes, found.slowdown, held)
    step_ms, peak = predicted.step_ms, predicted.peak()
    say(
        f"{case.name} {case.describe()}: kernels {found.first_s * 1e3:.1f} ms at first, "
        f"{found.settled_s * 1e3:.1f} ms settled; predicted {step_ms:.1f} ms"
    )
    measured = measure(case, device, STEPS)
    took = measured["measured_ms"]
    say(
        f"{case.name}: measured {took:.1f} ms ({step_ms / took - 1:+.1%}), peak "
        f"{peak.total / 1e9:.2f} against {(measured['measured_bytes'] or 0) / 1e9:.2f} GB"
    )
    return {
        "case": case.name,
        "mode": case.describe(),
        "set": case.group,
        "network": str(case.network),
        **tell_prediction(predicted),
        "predicted_bytes": peak.total,
        **measured,
        "replayed": {
            "first_ms": found.first_s * 1e3,
            "settled_ms": found.settled_s * 1e3,
            "pause_slowdown": found.slowdown,
        },
        "held_before_bytes": held,
        "predicted_roles": dict(peak.by_role),
    }
