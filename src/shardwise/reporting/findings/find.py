"""What a step's timelines say in plain sentences, with what to change; the costliest first.

Pure functions from Timelines: each looks for one kind of loss, on the rank where it is largest, and
gives nothing when it is too small to matter. `choose` picks the three that a report opens with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.reporting.findings import facts, host, wire
from shardwise.reporting.findings.finding import SHOWN, USUAL_ON_CPU, WORTH, Finding
from shardwise.reporting.words import join, name_units, show_share, show_time
from shardwise.timeline import Timeline


def find(
    measured: Timeline,
    predicted: Timeline | None = None,
    plan: Mapping[str, Any] | None = None,
    *,
    memory: Mapping[str, Any] | None = None,
    messages: Mapping[str, Any] | None = None,
) -> list[Finding]:
    """All that stands out in a measured step, the costliest first; then facts worth knowing."""
    plan = plan or {}
    found: list[Finding] = []
    late = host.slow_rank(measured)
    found += late
    found += wire.exposed(measured, predicted, plan, messages or {})
    found += host.host_bound(measured, late)
    found += copies(measured, plan)
    found += contention(measured, predicted)
    found += facts.memory_limit(measured, memory or {})
    # What is beyond the prediction is what the others cost: it comes after them.
    known = facts.deviation(measured, predicted)
    known += facts.facts(measured, predicted, memory or {})
    if not found:
        found.append(facts.good(measured))
    found.sort(key=lambda finding: (finding.urgent, finding.cost_ns), reverse=True)
    return found + known


def choose(findings: Iterable[Finding], count: int = SHOWN) -> tuple[list[Finding], list[Finding]]:
    """The ones to open with, and the rest: losses before facts, and a second one of a kind only
    where there is room.
    """
    ordered = list(findings)
    losses = [finding for finding in ordered if finding.cost_ns or finding.urgent]
    of_kind = {finding.kind: finding for finding in reversed(losses)}
    fresh = sorted(of_kind.values(), key=ordered.index)
    queue = dict.fromkeys([*fresh, *losses, *ordered])
    first = list(queue)[:count]
    first.sort(key=ordered.index)
    return first, [finding for finding in ordered if finding not in first]


def copies(timeline: Timeline, plan: Mapping[str, Any]) -> list[Finding]:
    """Packing, casting and copying out take time of their own."""
    rank = max(timeline.ranks, key=lambda r: timeline.breakdown(r).copies)
    spent = timeline.breakdown(rank).copies
    on_cpu = timeline.labels.get("device", "").startswith("cpu")
    if spent < (USUAL_ON_CPU / 2 if on_cpu else 2 * WORTH) * timeline.step:
        return []
    by_name: dict[str, int] = {}
    by_unit: dict[str, int] = {}
    for segment in timeline.segments(rank):
        if segment.kind == "copies" and segment.span is not None:
            took = segment.end - segment.start
            by_name[segment.span.name] = by_name.get(segment.span.name, 0) + took
            by_unit[segment.span.unit] = by_unit.get(segment.span.unit, 0) + took
    names = sorted(by_name, key=lambda name: -by_name[name])[:2]
    mostly = join([f"{name} {show_time(by_name[name])}" for name in names])
    gathers = any(word in name for name in names for word in ("gather", "out"))
    if all(name.endswith(" call") for name in names):
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
        f"({show_share(spent / timeline.step)}): {mostly}."
    )
    units = tuple(sorted(by_unit, key=lambda unit: -by_unit[unit])[:4])
    return [Finding("copies", what, change, spent, units, rank)]


def contention(timeline: Timeline, predicted: Timeline | None) -> list[Finding]:
    """Kernels run slower because communication uses the device beside them."""
    rank = max(timeline.ranks, key=lambda r: timeline.breakdown(r).contention)
    parts = timeline.breakdown(rank)
    if parts.contention < WORTH * timeline.step:
        return []
    held: dict[str, int] = {}
    for span in timeline.spans:
        if span.rank == rank and span.role == "compute" and span.contention:
            held[span.unit] = held.get(span.unit, 0) + span.contention
    units = tuple(sorted(held, key=lambda unit: -held[unit])[:4])
    expected = ""
    if predicted is not None and rank in predicted.ranks:
        expected = f"; {show_time(predicted.breakdown(rank).contention)} were predicted"
    what = (
        f"Kernels of rank {rank} lose {show_time(parts.contention)} "
        f"({show_share(parts.contention / timeline.step)}) to communication beside them, most in "
        f"{name_units(units)}{expected}."
    )
    change = (
        "Give communication fewer multiprocessors (NCCL_MAX_CTAS, copy engines), or move it to "
        "where kernels are bound by memory less."
    )
    return [Finding("contention", what, change, parts.contention, units, rank)]
