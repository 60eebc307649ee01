"""Time that a rank loses to another one that is late, and to a host that issues too late."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from statistics import median

from shardwise.reporting.findings.finding import USUAL_ON_CPU, WORTH, Finding
from shardwise.reporting.words import PARTS, name_unit, show_share, show_time
from shardwise.timeline import Breakdown, Segment, Span, Timeline

# A late rank


def slow_rank(timeline: Timeline) -> list[Finding]:
    """A rank that the others wait for: it waits least itself, and they wait for long."""
    if len(timeline.ranks) < 2:
        return []
    parts = {rank: timeline.breakdown(rank) for rank in timeline.ranks}
    waits = {rank: part.waiting_for_peers for rank, part in parts.items()}
    slow = min(waits, key=lambda rank: (waits[rank], -parts[rank].compute))
    others = [rank for rank in timeline.ranks if rank != slow]
    lost = int(median(waits[rank] for rank in others)) - waits[slow]
    if lost < WORTH * timeline.step:
        return []
    waiting = max(others, key=lambda rank: waits[rank])
    where = _first_wait(timeline, waiting, lost)
    cause, change = _why_late(timeline, slow, others, parts)
    units = (where.unit,) if where is not None else ()
    shows = f" It starts to show at {_at(where)}." if where is not None else ""
    what = (
        f"Rank {slow} is late: the other {'rank waits' if timeline.world == 2 else 'ranks wait'} "
        f"{show_time(lost)} of each step for it ({show_share(lost / timeline.step)}).{shows}{cause}"
    )
    return [Finding("slow_rank", what, change, lost, units, slow)]


def _first_wait(timeline: Timeline, rank: int, lost: int) -> Span | None:
    """The first wait of `rank` that is a fair part of what it loses."""
    held: dict[tuple[str, str, str], int] = {}
    for segment in timeline.segments(rank):
        if segment.kind == "waiting_for_peers" and segment.span is not None:
            span = segment.span
            key = span.name, span.unit, span.phase
            held[key] = held.get(key, 0) + segment.end - segment.start
            if held[key] >= 0.1 * lost:
                return span
    return None


def _why_late(
    timeline: Timeline, slow: int, others: list[int], parts: Mapping[int, Breakdown]
) -> tuple[str, str]:
    """What the late rank spends more on than the others, and what to look at."""
    more = {
        kind: getattr(parts[slow], kind) - int(median(getattr(parts[r], kind) for r in others))
        for kind in ("compute", "contention", "copies", "host_idle")
    }
    kind = max(more, key=lambda k: more[k])
    if more[kind] <= 0:
        return "", f"Look at what rank {slow} does beside training, and at its share of the data."
    cause = f" It spends {show_time(more[kind])} more on {PARTS[kind]} than the others."
    match kind:
        case "host_idle":
            gap = _largest_gap(timeline, slow)
            after = f", mostly {_place(gap[0], gap[1])}" if gap else ""
            return f"{cause[:-1]}{after}.", (
                f"Look at the host of rank {slow}: its data loader, other processes, what Python "
                "does there."
            )
        case "compute" | "contention":
            return cause, (
                f"Give rank {slow} the same work as the others (sequence lengths, padding), and "
                "check its clock, its temperature and what else runs on it."
            )
    return cause, f"Look at what else runs on the machine of rank {slow}."


# The host


def host_bound(timeline: Timeline, late: Sequence[Finding] = ()) -> list[Finding]:
    """The compute stream has nothing to do because the host issues too late. A rank that is `late`
    for this reason has been named already.
    """
    named = {finding.rank for finding in late if PARTS["host_idle"] in finding.what}
    ranks = [rank for rank in timeline.ranks if rank not in named]
    rank = max(ranks, key=lambda r: timeline.breakdown(r).host_idle)
    idle = timeline.breakdown(rank).host_idle
    found = _largest_gap(timeline, rank)
    if found is None or idle < 2 * WORTH * timeline.step:
        return []
    before, after, longest, total = found
    on_cpu = timeline.labels.get("device", "").startswith("cpu")
    where = _place(before, after)
    what = (
        f"The compute of rank {rank} stands still for {show_time(idle)} "
        f"({show_share(idle / timeline.step)} of the step) with nothing issued to it; "
        f"the largest gap, {show_time(longest)}, is {where}."
    )
    units = (before.unit,) if before is not None and before.unit else ()
    if longest > max(0.3 * idle, WORTH * timeline.step) or longest > 0.1 * timeline.step:
        change = (
            f"Find what the host does {where}: reading data, logging, `.item()` or another wait "
            "for the device; do it less often or on another thread."
        )
        return [Finding("host_bound", what, change, total, units, rank)]
    if on_cpu and idle < USUAL_ON_CPU * timeline.step:
        return []
    if on_cpu:
        change = (
            "On a CPU this is Python between the kernels: larger micro-batches make it matter "
            "less, `torch.compile` removes some."
        )
    else:
        change = (
            "The gaps are small and many: give kernels more work (larger micro-batches) or issue "
            "fewer of them (`torch.compile`, fused optimizer with `sw.local`)."
        )
    return [Finding("host_bound", what, change, idle, units, rank)]


def _largest_gap(timeline: Timeline, rank: int) -> tuple[Span | None, Span | None, int, int] | None:
    """What computed before and after the longest idle stretch, its length, and what all idle
    stretches after the same unit and phase take together.
    """
    idle = _idle_stretches(timeline, rank)
    if not idle:
        return None
    busy = sorted(
        (s for s in timeline.spans if s.rank == rank and s.role == "compute"),
        key=lambda span: span.end,
    )

    ends = [span.end for span in busy]

    # Work of no unit says little about the place: the unit before or after it says more.
    def before(stretch: Segment) -> Span | None:
        ended = bisect_right(ends, stretch.start)
        phase = busy[ended - 1].phase if ended else ""
        for span in reversed(busy[max(0, ended - 100) : ended]):
            if span.unit and span.phase == phase:
                return span
        return busy[ended - 1] if ended else None

    longest = max(idle, key=lambda stretch: stretch.end - stretch.start)
    last = before(longest)
    following = [span for span in busy if span.start >= longest.end]
    following = [span for span in following if span.unit] or following
    after = min(following, key=lambda span: span.start) if following else None
    floor = (longest.end - longest.start) // 10
    key = last and (last.unit, last.phase)
    total = 0
    for stretch in idle:
        if stretch.end - stretch.start > floor:
            span = before(stretch)
            if (span and (span.unit, span.phase)) == key:
                total += stretch.end - stretch.start
    return last, after, longest.end - longest.start, total


def _idle_stretches(timeline: Timeline, rank: int) -> list[Segment]:
    joined: list[Segment] = []
    for segment in timeline.segments(rank):
        if segment.kind == "host_idle":
            if joined and joined[-1].end == segment.start:
                joined[-1] = Segment(joined[-1].start, segment.end, "host_idle", None)
            else:
                joined.append(segment)
    return joined


def _place(before: Span | None, after: Span | None) -> str:
    if before is None:
        return f"before {_at(after)}" if after else "in the whole step"
    if after is None:
        return f"after {_at(before)}, at the step's end"
    if (before.unit, before.phase) == (after.unit, after.phase):
        return f"within {_at(before)}"
    if before.phase == after.phase and before.unit and after.unit:
        return f"between {name_unit(before.unit)} and {name_unit(after.unit)} in {before.phase}"
    return f"after {_at(before)}"


def _at(span: Span) -> str:
    if span.unit:
        return f"{name_unit(span.unit)} in {span.phase}"
    return (
        "the optimizer's step" if span.phase == "optimizer" else f"work of no unit in {span.phase}"
    )
