"""A Timeline as the page draws it: columns of numbers by rank, small enough for a phone."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from shardwise.reporting.units import per_unit
from shardwise.timeline import COMPUTE, HOST, MEMORY_ROLES, MemoryCurve, Segment, Span, Timeline

MOST_SPANS = 40_000  # of all ranks together; beyond it only some ranks are drawn
MOST_MOMENTS = 1_200  # of a memory curve

Sizes = Callable[[Sequence[Span]], list[int | None]]  # bytes of each of a rank's spans


def view(
    timeline: Timeline, sizes_of: Sizes, allocator: Callable[[int], Mapping[str, Any]]
) -> dict[str, Any]:
    """Give all that the page shows of a timeline. `allocator` gives what memory.json has of a
    rank.
    """
    ranks = choose_ranks(timeline)
    words: dict[str, int] = {}
    return {
        "title": timeline.labels.get("title", ""),
        "labels": dict(timeline.labels),
        "step": timeline.step,
        "world": timeline.world,
        "slowest": timeline.slowest,
        "listed": len(timeline.ranks),
        "ranks": {
            str(rank): _view_rank(timeline, rank, sizes_of, allocator(rank), words)
            for rank in ranks
        },
        "words": list(words),
    }


def choose_ranks(timeline: Timeline) -> list[int]:
    """All ranks, or as many as fit: the slowest, the one that waits most, then by number."""
    waiting = {rank: timeline.breakdown(rank).waiting_for_peers for rank in timeline.ranks}
    order = [timeline.slowest, max(waiting, key=lambda rank: waiting[rank]), *timeline.ranks]
    counts = _count(span.rank for span in timeline.spans)
    chosen: list[int] = []
    left = MOST_SPANS
    for rank in dict.fromkeys(order):
        if not chosen or counts[rank] <= left:
            chosen.append(rank)
            left -= counts[rank]
    return sorted(chosen)


def _count(values: Iterable[int]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        counts[value] = counts.get(value, 0) + 1
    return counts


def _view_rank(
    timeline: Timeline,
    rank: int,
    sizes_of: Sizes,
    allocator: Mapping[str, Any],
    words: dict[str, int],
) -> dict[str, Any]:
    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    # Long ones first where two start together, so that what they hold is drawn on top.
    own = [span for span in timeline.spans if span.rank == rank]
    own.sort(key=lambda span: (span.start, -span.end))
    sizes = sizes_of(own)
    streams = order_streams(timeline.streams(rank))
    zero = timeline.start
    gaps = join_gaps(timeline.segments(rank))
    parts = timeline.breakdown(rank)
    return {
        "stands_for": timeline.stands_for.get(rank, 1),
        "step": parts.step,
        "parts": parts.parts(),
        "streams": streams,
        "start": [span.start - zero for span in own],
        "duration": [span.duration for span in own],
        "name": [word(span.name) for span in own],
        "unit": [word(span.unit) for span in own],
        "phase": [word(span.phase) for span in own],
        "role": [word(span.role) for span in own],
        "stream": [streams.index(span.stream) for span in own],
        "bytes": sizes,
        "units": per_unit(timeline, rank, own, sizes),
        "gaps": {
            "start": [gap.start - zero for gap in gaps],
            "duration": [gap.end - gap.start for gap in gaps],
            "kind": [word(gap.kind) for gap in gaps],
            "name": [word(gap.span.name if gap.span else "") for gap in gaps],
            "unit": [word(gap.span.unit if gap.span else "") for gap in gaps],
        },
        "memory": _view_memory(timeline, rank, zero, allocator),
    }


def order_streams(streams: Sequence[str]) -> list[str]:
    """Compute on top, the host below, lanes between them as they came."""
    lanes = [name for name in streams if name not in (COMPUTE, HOST)]
    return [
        *([COMPUTE] if COMPUTE in streams else []),
        *lanes,
        *([HOST] if HOST in streams else []),
    ]


def join_gaps(segments: Sequence[Segment]) -> list[Segment]:
    """The stretches without compute; neighbours laid to the same span are one."""
    joined: list[Segment] = []
    for segment in segments:
        if segment.kind == "compute":
            continue
        last = joined[-1] if joined else None
        if (
            last is not None
            and last.end == segment.start
            and (last.kind, last.span) == (segment.kind, segment.span)
        ):
            joined[-1] = Segment(last.start, segment.end, last.kind, last.span)
        else:
            joined.append(segment)
    return joined


def _view_memory(
    timeline: Timeline, rank: int, zero: int, allocator: Mapping[str, Any]
) -> dict[str, Any] | None:
    curve = next((curve for curve in timeline.memory if curve.rank == rank), None)
    if curve is None or not curve.times:
        return None
    kept = thin(curve)
    peak = curve.peak()
    roles = [role for role in MEMORY_ROLES if any(curve.roles.get(role, ()))]
    found: dict[str, Any] = {
        "times": [curve.times[i] - zero for i in kept],
        "roles": {role: [curve.roles[role][i] for i in kept] for role in roles},
        "peak": {
            "time": peak.time - zero,
            "total": peak.total,
            "by_role": {role: peak.by_role[role] for role in roles},
        },
        "limit": allocator.get("limit_bytes"),
        "allocated_peak": allocator.get("peak_allocated"),
        "largest": list(allocator.get("largest") or ())[:8],
        "reserved": None,
    }
    if allocator.get("reserved"):
        moments = zip(allocator["times"], allocator["reserved"], strict=True)
        found["reserved"] = _thin_line([(time - zero, value) for time, value in moments])
        found["reserved_peak"] = max(allocator["reserved"])
    return found


def thin(curve: MemoryCurve) -> list[int]:
    """Indices of at most MOST_MOMENTS moments: of each stretch the highest, and both ends."""
    count = len(curve.times)
    if count <= MOST_MOMENTS:
        return list(range(count))
    cuts = [count * i // (MOST_MOMENTS - 2) for i in range(MOST_MOMENTS - 1)]
    stretches = [range(a, b) for a, b in itertools.pairwise(cuts)]
    kept = {max(stretch, key=curve.totals.__getitem__) for stretch in stretches}
    return sorted(kept | {0, count - 1})


def _thin_line(moments: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Only where the value changes, and the end."""
    changes = [m for i, m in enumerate(moments) if not i or m[1] != moments[i - 1][1]]
    if moments[-1] is not changes[-1]:
        changes.append(moments[-1])
    changes = changes[:: 1 + len(changes) // MOST_MOMENTS]
    return {"times": [time for time, _ in changes], "bytes": [value for _, value in changes]}
