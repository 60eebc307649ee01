"""A side of the page: one step as it is drawn, columns of numbers by rank, small enough for a
phone.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.reporting.messages import measured_bytes, planned_bytes
from shardwise.reporting.queries import (
    compute_by_unit,
    curve_of,
    exposed_by_unit,
    rank_with_most,
    spans_of,
    standstills,
    unit_or_rest,
)
from shardwise.reporting.run import Run
from shardwise.timeline import COMPUTE, HOST, MEMORY_ROLES, MemoryCurve, Span, Timeline
from shardwise.timeline.kernel_groups import PHASES, computing, merge_phases, sum_by_group

MOST_SPANS = 40_000  # of all ranks together; beyond it only some ranks are drawn
MOST_MOMENTS = 1_200  # of a memory curve
MOST_KERNELS = 15  # of a phase


class _Texts(dict[str, int]):
    """Texts that spans share, by the number that stands for each of them."""

    def __missing__(self, text: str) -> int:
        self[text] = len(self)
        return self[text]


def draw_side(run: Run, timeline: Timeline, label: str) -> dict[str, Any]:
    """Give all that the page shows of a run's measured or predicted step."""
    texts = _Texts()
    ranks = {str(rank): _draw_rank(run, timeline, rank, texts) for rank in choose_ranks(timeline)}
    return {
        "label": label,
        "source": "predicted" if timeline is run.predicted else source_of(timeline),
        "labels": dict(timeline.labels),
        "step": timeline.step,
        "slowest": timeline.slowest,
        "listed": len(timeline.ranks),
        "ranks": ranks,
        "texts": list(texts),
    }


def draw_kernels(run: Run) -> dict[str, Any]:
    """Which kernels took the time of the whole step and of each phase, by rank."""
    shown = choose_ranks(run.timeline) if run.timeline is not None else []
    phases = {"step": PHASES, **{phase: (phase,) for phase in PHASES}}
    return {
        "label": run.name,
        "ranks": {
            str(told["rank"]): {
                name: _draw_phase(merge_phases(told["rows"], inside))
                for name, inside in phases.items()
            }
            for told in run.kernels.get("ranks", ())
            if told["rank"] in shown
        },
    }


def _draw_phase(rows: list[dict[str, Any]]) -> dict[str, Any]:
    computed = computing(rows)
    return {
        "compute": sum(row["ns"] for row in computed),
        "groups": sum_by_group(computed),
        "longest": computed[:MOST_KERNELS],
    }


def source_of(timeline: Timeline) -> str:
    return timeline.labels.get("source", "measured")


def choose_ranks(timeline: Timeline) -> list[int]:
    """All ranks, or as many as fit: the slowest, the one that waits most, then by number."""
    waits_most = rank_with_most(timeline, "waiting_for_peers")
    counts = Counter(span.rank for span in timeline.spans)
    chosen: list[int] = []
    left = MOST_SPANS
    for rank in dict.fromkeys((timeline.slowest, waits_most, *timeline.ranks)):
        if not chosen or counts[rank] <= left:
            chosen.append(rank)
            left -= counts[rank]
    return sorted(chosen)


def _draw_rank(run: Run, timeline: Timeline, rank: int, texts: _Texts) -> dict[str, Any]:
    # Long ones first where two start together, so that what they hold is drawn on top.
    spans = sorted(spans_of(timeline, rank), key=lambda span: (span.start, -span.end))
    if timeline is run.predicted:
        sizes = planned_bytes(spans, run.plan, run.micro_batches)
        allocator: Mapping[str, Any] = {}
    else:
        sizes = measured_bytes(spans, run.messages)
        allocator = run.memory_of(rank)
    # Compute on top, the host below, lanes between them as they came.
    streams = sorted(timeline.streams(rank), key=lambda name: (name == HOST) - (name == COMPUTE))
    zero = timeline.start
    gaps = standstills(timeline, rank)
    parts = timeline.breakdown(rank)
    return {
        "stands_for": timeline.stands_for.get(rank, 1),
        "step": parts.step,
        "parts": parts.parts(),
        "streams": streams,
        "start": [span.start - zero for span in spans],
        "duration": [span.duration for span in spans],
        "name": [texts[span.name] for span in spans],
        "unit": [texts[span.unit] for span in spans],
        "phase": [texts[span.phase] for span in spans],
        "role": [texts[span.role] for span in spans],
        "stream": [streams.index(span.stream) for span in spans],
        "bytes": sizes,
        "units": _sum_by_unit(timeline, rank, spans, sizes),
        "gaps": {
            "start": [gap.start - zero for gap in gaps],
            "duration": [gap.duration for gap in gaps],
            "kind": [texts[gap.kind] for gap in gaps],
            "name": [texts[gap.span.name if gap.span else ""] for gap in gaps],
            "unit": [texts[gap.span.unit if gap.span else ""] for gap in gaps],
        },
        "memory": _draw_memory(curve_of(timeline, rank), zero, allocator),
    }


def _sum_by_unit(
    timeline: Timeline, rank: int, spans: Sequence[Span], sizes: Sequence[int | None]
) -> dict[str, dict[str, int | None]]:
    """Nanoseconds of compute and of exposed transfer, and bytes of its collectives, by unit in the
    order in which they first run; what has no unit has rows of its own, so that the rows add up.
    `sizes` are the bytes of `spans`; those of a unit are unknown if one of them is.
    """
    compute, exposed = compute_by_unit(spans), exposed_by_unit(timeline, rank)
    moved: dict[str, int | None] = {}
    order: dict[str, None] = {}
    for span, size in zip(spans, sizes, strict=True):
        unit = unit_or_rest(span.unit, span.phase)
        if span.role in ("compute", "transfer"):
            order[unit] = None
        if span.role == "transfer":
            before = moved.get(unit, 0)
            moved[unit] = None if size is None or before is None else before + size
    return {
        unit: {"compute": compute[unit], "exposed": exposed[unit], "bytes": moved.get(unit)}
        for unit in dict.fromkeys((*order, *exposed))
    }


def _draw_memory(
    curve: MemoryCurve | None, zero: int, allocator: Mapping[str, Any]
) -> dict[str, Any] | None:
    if curve is None:
        return None
    moments = thin(curve)
    peak = curve.peak()
    roles = [role for role in MEMORY_ROLES if any(curve.roles.get(role, ()))]
    found: dict[str, Any] = {
        "times": [curve.times[i] - zero for i in moments],
        "roles": {role: [curve.roles[role][i] for i in moments] for role in roles},
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
        reserved = zip(allocator["times"], allocator["reserved"], strict=True)
        found["reserved"] = _thin_line([(time - zero, value) for time, value in reserved])
        found["reserved_peak"] = max(allocator["reserved"])
    return found


def thin(curve: MemoryCurve) -> list[int]:
    """Indices of at most MOST_MOMENTS moments: of each stretch the highest, and both ends."""
    count = len(curve.times)
    if count <= MOST_MOMENTS:
        return list(range(count))
    cuts = [count * i // (MOST_MOMENTS - 2) for i in range(MOST_MOMENTS - 1)]
    highest = {max(range(a, b), key=curve.totals.__getitem__) for a, b in itertools.pairwise(cuts)}
    return sorted(highest | {0, count - 1})


def _thin_line(moments: list[tuple[int, int]]) -> dict[str, list[int]]:
    """Only where the value changes, and the end."""
    changes = [m for i, m in enumerate(moments) if not i or m[1] != moments[i - 1][1]]
    if moments[-1] is not changes[-1]:
        changes.append(moments[-1])
    changes = changes[:: 1 + len(changes) // MOST_MOMENTS]
    return {"times": [time for time, _ in changes], "bytes": [value for _, value in changes]}
