"""What a step's timelines say in plain sentences, with what to change; the costliest first.

Pure functions from Timelines: each looks for one kind of loss, on the rank where it is largest, and
gives nothing when it is too small to matter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import Any

from shardwise.reporting.findings.communication import exposed
from shardwise.reporting.findings.finding import USUAL_ON_CPU, WORTH, Finding
from shardwise.reporting.findings.late import host_bound, slow_rank
from shardwise.reporting.findings.memory import memory_limit, memory_peak
from shardwise.reporting.findings.prediction import agreement, deviation
from shardwise.reporting.formats import join, name_unit, name_units, show_share, show_time
from shardwise.reporting.queries import rank_with_most, spans_of
from shardwise.timeline import Timeline


def find(
    measured: Timeline,
    predicted: Timeline | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    memory: Mapping[str, Any] | None = None,
    messages: Mapping[str, Any] | None = None,
    told: Finding | None = None,
) -> list[Finding]:
    """All that stands out in a measured step, the costliest first; then facts worth knowing, at
    least three together. `told` compares step and prediction already, over many steps.
    """
    plan, memory = plan or {}, memory or {}
    late = slow_rank(measured)
    found = [
        late,
        *exposed(measured, predicted, plan, messages or {}),
        host_bound(measured, late),
        copies(measured, plan),
        contention(measured, predicted),
        memory_limit(measured, memory),
    ]
    losses = [finding for finding in found if finding] or [_good(measured)]
    losses.sort(key=lambda finding: (finding.urgent, finding.cost_ns), reverse=True)
    facts = [
        # What is beyond the prediction is what the losses cost: it comes after them.
        told or deviation(measured, predicted),
        _hidden(measured),
        memory_peak(measured, memory),
        None if told else agreement(measured, predicted),
        _evenness(measured),
        _largest_unit(measured),
    ]
    return losses + [finding for finding in facts if finding]


def copies(timeline: Timeline, plan: Mapping[str, Any]) -> Finding | None:
    """Packing, casting and copying out take time of their own."""
    rank = rank_with_most(timeline, "copies")
    spent = timeline.breakdown(rank).copies
    on_cpu = timeline.labels.get("device", "").startswith("cpu")
    if spent < (USUAL_ON_CPU / 2 if on_cpu else 2 * WORTH) * timeline.step:
        return None
    by_name: Counter[str] = Counter()
    by_unit: Counter[str] = Counter()
    for segment in timeline.segments(rank):
        if segment.kind == "copies" and segment.span is not None:
            by_name[segment.span.name] += segment.duration
            by_unit[segment.span.unit] += segment.duration
    most = by_name.most_common(2)
    gathers = any(word in name for name, _ in most for word in ("gather", "out"))
    if all(name.endswith(" call") for name, _ in most):
        change = "The backend copies inside its calls: fewer, larger messages need fewer of them."
    elif gathers and plan.get("gather") in ("auto", "packed"):
        change = (
            'Try gather="grouped" or "each" in the plan, which write parameters in place without '
            "a copy-out."
        )
    elif plan.get("reduce_dtype") not in (None, plan.get("compute_dtype")):
        change = "With reduce_dtype equal to the gradients' own dtype they need no cast."
    else:
        change = "Fewer, larger units have fewer copies to start; accumulation packs less often."
    what = (
        f"Copies take {show_time(spent)} of the step of rank {rank} "
        f"({show_share(spent / timeline.step)}): "
        f"{join([f'{name} {show_time(took)}' for name, took in most])}."
    )
    units = tuple(unit for unit, _ in by_unit.most_common(4))
    return Finding("copies", what, change, spent, units, rank)


def contention(timeline: Timeline, predicted: Timeline | None) -> Finding | None:
    """Kernels run slower because communication uses the device beside them."""
    rank = rank_with_most(timeline, "contention")
    lost = timeline.breakdown(rank).contention
    if lost < WORTH * timeline.step:
        return None
    by_unit: Counter[str] = Counter()
    for span in spans_of(timeline, rank, "compute"):
        if span.contention:
            by_unit[span.unit] += span.contention
    units = tuple(unit for unit, _ in by_unit.most_common(4))
    expected = ""
    if predicted is not None and rank in predicted.ranks:
        expected = f"; {show_time(predicted.breakdown(rank).contention)} were predicted"
    what = (
        f"Kernels of rank {rank} lose {show_time(lost)} ({show_share(lost / timeline.step)}) to "
        f"communication beside them, most in {name_units(units)}{expected}."
    )
    change = (
        "Give communication fewer multiprocessors (NCCL_MAX_CTAS, copy engines), or move it to "
        "where kernels are bound by memory less."
    )
    return Finding("contention", what, change, lost, units, rank)


def _good(timeline: Timeline) -> Finding:
    """What to say when nothing stands out."""
    parts = timeline.breakdown()
    what = (
        f"Nothing stands out: compute is {show_share(parts.compute / parts.step)} of the step of "
        f"{show_time(parts.step)}, and no other part costs enough to name."
    )
    return Finding("good", what, "Faster kernels or less work are what is left.")


def _hidden(timeline: Timeline) -> Finding:
    overlaps = timeline.overlaps()
    total = sum(overlap.span.duration for overlap in overlaps)
    if not total:
        return Finding("fact", "This step has no communication.")
    waited = sum(overlap.exposed for overlap in overlaps)
    hidden = sum(overlap.is_hidden for overlap in overlaps)
    return Finding(
        "fact",
        f"{show_share(max(0.0, 1 - waited / total))} of {show_time(total)} of communication is "
        f"hidden: compute never waits for {hidden} of {len(overlaps)} collectives.",
    )


def _evenness(timeline: Timeline) -> Finding | None:
    if len(timeline.ranks) < 2:
        return None
    compute = {rank: timeline.breakdown(rank).compute for rank in timeline.ranks}
    most = max(compute, key=lambda rank: compute[rank])
    middle = median(compute.values()) or 1
    return Finding(
        "fact",
        f"Ranks compute {show_time(min(compute.values()))} to {show_time(compute[most])} of the "
        f"step; rank {most} the longest, {show_share(compute[most] / middle - 1)} above the "
        "median.",
        rank=most,
    )


def _largest_unit(timeline: Timeline) -> Finding:
    by_unit: Counter[str] = Counter()
    for span in spans_of(timeline, timeline.slowest, "compute"):
        by_unit[span.unit] += span.duration
    if not by_unit:
        return Finding("fact", f"The step takes {show_time(timeline.step)}.")
    ((unit, spent),) = by_unit.most_common(1)
    return Finding(
        "fact",
        f"The unit with the most compute is {name_unit(unit)}: {show_time(spent)}, "
        f"{show_share(spent / timeline.step)} of the step.",
        units=(unit,),
    )
