"""What findings and the page both ask of a timeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from shardwise.timeline import MemoryCurve, Segment, Span, Timeline


def spans_of(timeline: Timeline, rank: int, role: str | None = None) -> list[Span]:
    """The spans of one rank, as they are listed; of one role, where it is given."""
    return [s for s in timeline.spans if s.rank == rank and role in (None, s.role)]


def rank_with_most(timeline: Timeline, part: str, ranks: Iterable[int] | None = None) -> int:
    """The rank (of these, or of all) whose step has most of a part of the breakdown."""
    return max(ranks or timeline.ranks, key=lambda r: getattr(timeline.breakdown(r), part))


def standstills(timeline: Timeline, rank: int) -> list[Segment]:
    """The stretches without compute; neighbours of one kind that wait for the same span are one."""
    joined: list[Segment] = []
    for segment in timeline.segments(rank):
        if segment.kind == "compute":
            continue
        last = joined[-1] if joined else None
        if last and (last.end, last.kind, last.span) == (segment.start, segment.kind, segment.span):
            joined[-1] = Segment(last.start, segment.end, last.kind, last.span)
        else:
            joined.append(segment)
    return joined


def curve_of(timeline: Timeline, rank: int) -> MemoryCurve | None:
    """The memory of a rank, if any was recorded."""
    return next((curve for curve in timeline.memory if curve.rank == rank and curve.times), None)


def unit_or_rest(unit: str, phase: str) -> str:
    """The unit; work of no unit is the optimizer's, or lies outside units."""
    return unit or ("optimizer" if phase == "optimizer" else "outside units")


def compute_by_unit(spans: Iterable[Span]) -> Counter[str]:
    """Nanoseconds of compute, in the order in which units first run."""
    found: Counter[str] = Counter()
    for span in spans:
        if span.role == "compute":
            found[unit_or_rest(span.unit, span.phase)] += span.duration
    return found


def exposed_by_unit(timeline: Timeline, rank: int) -> Counter[str]:
    """Nanoseconds that compute waits for a unit's collectives."""
    found: Counter[str] = Counter()
    for (unit, phase), nanoseconds in timeline.exposed(rank).items():
        found[unit_or_rest(unit, phase)] += nanoseconds
    return found
