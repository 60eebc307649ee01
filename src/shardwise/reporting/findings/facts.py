"""Memory, prediction against measurement, and facts that fill the page when little stands out."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.units import place_of
from shardwise.reporting.words import (
    PARTS,
    join,
    name_unit,
    name_units,
    show_bytes,
    show_share,
    show_time,
)
from shardwise.timeline import Timeline

NEAR = 0.9  # of the limit: memory worth a warning
APART = 0.1  # of the prediction: a difference worth a sentence

_LESS = {
    "activations": "Recompute activations (checkpointing) or use smaller micro-batches.",
    "full": "Lower forward_prefetch and backward_prefetch, or cut units smaller.",
    "parameters": "Shard over more ranks, or shard parameters too (zero3).",
    "gradients": "Shard gradients (zero2 or zero3) over more ranks.",
    "state": "Shard the optimizer's state (zero1 and up) over more ranks.",
    "slots": "Lower reduce_depth to 1 or cut units smaller.",
    "temporary": "Find the largest temporaries in the list below; fused kernels avoid them.",
    "other": "Memory that no role explains: see the largest allocations below.",
}


def memory_limit(timeline: Timeline, memory: Mapping[str, Any]) -> list[Finding]:
    """The rank that is nearest to its limit, if any is near; or one whose allocator holds much
    more than is used.
    """
    found = []
    for entry in memory.get("ranks", ()):
        limit, peak = entry.get("limit_bytes"), entry.get("peak_allocated")
        held = max([peak or 0, *(entry.get("reserved") or ())])
        if limit and held > NEAR * limit:
            found.append((held / limit, entry["rank"], peak, held, limit))
    if not found:
        return []
    share, rank, peak, held, limit = max(found)
    role, made_of = _largest_role(timeline, rank)
    if held > 1.25 * peak:
        what = (
            f"Rank {rank} reserves {show_bytes(held)} of {show_bytes(limit)} "
            f"({show_share(share)}) but uses {show_bytes(peak)} at most: the rest is fragmented."
        )
        change = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    else:
        what = (
            f"Rank {rank} comes to {show_share(share)} of its {show_bytes(limit)}"
            f"{f' ({made_of})' if made_of else ''}."
        )
        change = _LESS.get(role, "")
    return [Finding("memory", what, change, 0, (), rank, urgent=True)]


def _largest_role(timeline: Timeline, rank: int) -> tuple[str, str]:
    curve = next((curve for curve in timeline.memory if curve.rank == rank), None)
    if curve is None or not curve.times:
        return "", ""
    peak = curve.peak()
    role = max(peak.by_role, key=lambda r: peak.by_role[r])
    return role, _describe_peak(peak.by_role, peak.total)


def deviation(timeline: Timeline, predicted: Timeline | None) -> list[Finding]:
    """The measured step is longer than the predicted one; which part and which units."""
    if predicted is None or not predicted.spans:
        return []
    more = timeline.step - predicted.step
    if more < APART * predicted.step:
        return []
    mine, other = timeline.breakdown(), predicted.breakdown()
    apart = {name: value - other.parts()[name] for name, value in mine.parts().items()}
    part = max(apart, key=lambda name: apart[name])
    units = _units_apart(timeline, predicted, part)
    words = {"optimizer": "the optimizer's step", "outside units": "what is outside units"}
    where = f", most in {name_units([words.get(u, u) for u in units])}" if units else ""
    what = (
        f"The step takes {show_time(timeline.step)} where {show_time(predicted.step)} were "
        f"predicted; {show_time(apart[part])} of the difference is {PARTS[part]}{where}."
    )
    change = (
        "Calibrate the cluster's description on this machine (`shardwise calibrate`), then what "
        "still differs is the run's own."
        if part in ("compute", "copies")
        else f"The plan does not expect this much {PARTS[part]}: the other findings say where."
    )
    return [Finding("deviation", what, change, 0, units)]


def _units_apart(timeline: Timeline, predicted: Timeline, part: str) -> tuple[str, ...]:
    if part not in ("compute", "exposed_transfer"):
        return ()

    def by_unit(side: Timeline) -> dict[str, int]:
        found: dict[str, int] = {}
        if part == "compute":
            slowest = side.slowest
            for span in side.spans:
                if span.rank == slowest and span.role == "compute":
                    place = place_of(span.unit, span.phase)
                    found[place] = found.get(place, 0) + span.duration
        else:
            for (unit, phase), value in side.exposed().items():
                place = place_of(unit, phase)
                found[place] = found.get(place, 0) + value
        return found

    mine, other = by_unit(timeline), by_unit(predicted)
    apart = {unit: value - other.get(unit, 0) for unit, value in mine.items()}
    most = max(apart.values(), default=0)
    return tuple(unit for unit, value in apart.items() if value > max(0, 0.5 * most))


# Facts


def good(timeline: Timeline) -> Finding:
    """What to say when nothing stands out."""
    parts = timeline.breakdown()
    what = (
        f"Nothing stands out: compute is {show_share(parts.compute / parts.step)} of the step of "
        f"{show_time(parts.step)}, and no other part costs enough to name."
    )
    return Finding("good", what, "Faster kernels or less work are what is left.")


def facts(
    timeline: Timeline, predicted: Timeline | None, memory: Mapping[str, Any]
) -> list[Finding]:
    """Always at least three."""
    found = [_hidden(timeline), *_memory(timeline, memory), *_agreement(timeline, predicted)]
    return [*found, *_evenness(timeline), _largest_part(timeline)]


def _hidden(timeline: Timeline) -> Finding:
    overlaps = timeline.overlaps()
    total = sum(overlap.span.duration for overlap in overlaps)
    if not total:
        return Finding("fact", "This step has no communication.")
    exposed = sum(overlap.exposed for overlap in overlaps)
    hidden = sum(overlap.is_hidden for overlap in overlaps)
    return Finding(
        "fact",
        f"{show_share(max(0.0, 1 - exposed / total))} of {show_time(total)} of communication is "
        f"hidden: compute never waits for {hidden} of {len(overlaps)} collectives.",
    )


def _memory(timeline: Timeline, memory: Mapping[str, Any]) -> list[Finding]:
    if not timeline.memory:
        return []
    peak = timeline.peak()
    if not peak.total:
        return []
    role = max(peak.by_role, key=lambda r: peak.by_role[r])
    limits = [e["limit_bytes"] for e in memory.get("ranks", ()) if e.get("limit_bytes")]
    room = f", {show_share(peak.total / min(limits))} of the limit" if limits else ""
    return [
        Finding(
            "memory",
            f"Memory peaks at {_describe_peak(peak.by_role, peak.total)}{room} "
            f"(rank {peak.rank}, {show_time(peak.time - timeline.start)} into the step).",
            f"To use less: {_LESS[role][0].lower()}{_LESS[role][1:]}",
            rank=peak.rank,
        )
    ]


def _agreement(timeline: Timeline, predicted: Timeline | None) -> list[Finding]:
    if predicted is None:
        return []
    apart = timeline.step / predicted.step - 1
    if apart >= APART:
        return []
    how = (
        f"within {show_share(abs(apart))} of the"
        if abs(apart) < APART
        else f"{show_share(-apart)} below the"
    )
    return [
        Finding(
            "fact",
            f"The measured step of {show_time(timeline.step)} is {how} predicted "
            f"{show_time(predicted.step)}.",
        )
    ]


def _evenness(timeline: Timeline) -> list[Finding]:
    if len(timeline.ranks) < 2:
        return []
    compute = {rank: timeline.breakdown(rank).compute for rank in timeline.ranks}
    most = max(compute, key=lambda rank: compute[rank])
    middle = median(compute.values()) or 1
    return [
        Finding(
            "fact",
            f"Ranks compute {show_time(min(compute.values()))} to {show_time(compute[most])} of "
            f"the step; rank {most} the longest, {show_share(compute[most] / middle - 1)} above "
            "the median.",
            rank=most,
        )
    ]


def _largest_part(timeline: Timeline) -> Finding:
    spent: dict[str, int] = {}
    slowest = timeline.slowest
    for span in timeline.spans:
        if span.rank == slowest and span.role == "compute":
            spent[span.unit] = spent.get(span.unit, 0) + span.duration
    if not spent:
        return Finding("fact", f"The step takes {show_time(timeline.step)}.")
    unit = max(spent, key=lambda name: spent[name])
    return Finding(
        "fact",
        f"The unit with the most compute is {name_unit(unit)}: {show_time(spent[unit])}, "
        f"{show_share(spent[unit] / timeline.step)} of the step.",
        units=(unit,),
    )


def _describe_peak(by_role: Mapping[str, int], total: int) -> str:
    """The two roles that fill the peak most."""
    order = sorted(by_role, key=lambda role: -by_role[role])
    named = [f"{role} {show_bytes(by_role[role])}" for role in order[:2] if by_role[role]]
    return f"{show_bytes(total)}: {join(named)}" if named else show_bytes(total)
