"""Time that a rank loses to another one that is late, and to a host that issues too late."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from shardwise.reporting.findings.finding import USUAL_ON_CPU, WORTH, Finding
from shardwise.reporting.formats import name_part, name_unit, show_share, show_time
from shardwise.reporting.queries import rank_with_most, spans_of, standstills
from shardwise.timeline import Breakdown, Segment, Span, Timeline

# A late rank


def slow_rank(timeline: Timeline) -> Finding | None:
    """A rank that the others wait for: it waits least itself, and they wait for long."""
    if len(timeline.ranks) < 2:
        return None
    parts = {rank: timeline.breakdown(rank) for rank in timeline.ranks}
    waits = {rank: part.waiting_for_peers for rank, part in parts.items()}
    slow = min(waits, key=lambda rank: (waits[rank], -parts[rank].compute))
    others = [rank for rank in timeline.ranks if rank != slow]
    lost = int(median(waits[rank] for rank in others)) - waits[slow]
    if lost < WORTH * timeline.step:
        return None
    first = _first_wait(timeline, max(others, key=lambda rank: waits[rank]), lost)
    cause, change = _why_late(timeline, slow, others, parts)
    units = (first.unit,) if first is not None else ()
    shows = f" It starts to show at {_name_work(first)}." if first is not None else ""
    what = (
        f"Rank {slow} is late: the other {'rank waits' if timeline.world == 2 else 'ranks wait'} "
        f"{show_time(lost)} of each step for it ({show_share(lost / timeline.step)}).{shows}{cause}"
    )
    return Finding("slow_rank", what, change, lost, units, slow)


def _first_wait(timeline: Timeline, rank: int, lost: int) -> Span | None:
    """The first wait of `rank` that is a fair part of what it loses."""
    waited: Counter[tuple[str, str, str]] = Counter()
    for segment in timeline.segments(rank):
        if segment.kind == "waiting_for_peers" and segment.span is not None:
            span = segment.span
            key = span.name, span.unit, span.phase
            waited[key] += segment.duration
            if waited[key] >= 0.1 * lost:
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
    cause = f" It spends {show_time(more[kind])} more on {name_part(kind)} than the others"
    if kind == "host_idle":
        gap = _largest_gap(timeline, slow)
        return f"{cause}{f', mostly {gap.where}' if gap else ''}.", (
            f"Look at the host of rank {slow}: its data loader, other processes, what Python "
            "does there."
        )
    if kind == "copies":
        return f"{cause}.", f"Look at what else runs on the machine of rank {slow}."
    return f"{cause}.", (
        f"Give rank {slow} the same work as the others (sequence lengths, padding), and "
        "check its clock, its temperature and what else runs on it."
    )


# The host


def host_bound(timeline: Timeline, late: Finding | None = None) -> Finding | None:
    """The compute stream has nothing to do because the host issues too late. A rank that is `late`
    for this reason has been named already.
    """
    named = late.rank if late and name_part("host_idle") in late.what else None
    rank = rank_with_most(timeline, "host_idle", [r for r in timeline.ranks if r != named])
    idle = timeline.breakdown(rank).host_idle
    gap = _largest_gap(timeline, rank)
    if gap is None or idle < 2 * WORTH * timeline.step:
        return None
    what = (
        f"The compute of rank {rank} stands still for {show_time(idle)} "
        f"({show_share(idle / timeline.step)} of the step) with nothing issued to it; "
        f"the largest gap, {show_time(gap.length)}, is {gap.where}."
    )
    cost = idle
    on_cpu = timeline.labels.get("device", "").startswith("cpu")
    if gap.length > min(max(0.3 * idle, WORTH * timeline.step), 0.1 * timeline.step):
        cost = gap.alike
        change = (
            f"Find what the host does {gap.where}: reading data, logging, `.item()` or another "
            "wait for the device; do it less often or on another thread."
        )
    elif on_cpu and idle < USUAL_ON_CPU * timeline.step:
        return None
    elif on_cpu:
        change = (
            "On a CPU this is Python between the kernels: larger micro-batches make it matter "
            "less, `torch.compile` removes some."
        )
    else:
        change = (
            "The gaps are small and many: give kernels more work (larger micro-batches) or issue "
            "fewer of them (`torch.compile`, fused optimizer with `sw.local`)."
        )
    units = (gap.before.unit,) if gap.before is not None and gap.before.unit else ()
    return Finding("host_bound", what, change, cost, units, rank)


class _Gap(NamedTuple):
    """The longest stretch in which the host had issued nothing."""

    before: Span | None  # what computed before it
    after: Span | None
    length: int
    alike: int  # nanoseconds of all such stretches after the same unit and phase

    @property
    def where(self) -> str:
        before, after = self.before, self.after
        if before is None:
            return f"before {_name_work(after)}" if after else "in the whole step"
        if after is None:
            return f"after {_name_work(before)}, at the step's end"
        if _unit_and_phase(before) == _unit_and_phase(after):
            return f"within {_name_work(before)}"
        if before.phase == after.phase and before.unit and after.unit:
            return f"between {name_unit(before.unit)} and {name_unit(after.unit)} in {before.phase}"
        return f"after {_name_work(before)}"


def _largest_gap(timeline: Timeline, rank: int) -> _Gap | None:
    idle = [gap for gap in standstills(timeline, rank) if gap.kind == "host_idle"]
    if not idle:
        return None
    computed = sorted(spans_of(timeline, rank, "compute"), key=lambda span: span.end)
    ends = [span.end for span in computed]

    # Work of no unit says little about the place: the unit before or after it says more.
    def last_before(gap: Segment) -> Span | None:
        ended = bisect_right(ends, gap.start)
        if not ended:
            return None
        last = computed[ended - 1]
        near = (computed[i] for i in range(ended - 1, max(-1, ended - 101), -1))
        return next((s for s in near if s.unit and s.phase == last.phase), last)

    longest = max(idle, key=lambda gap: gap.duration)
    before = last_before(longest)
    following = [span for span in computed if span.start >= longest.end]
    following = [span for span in following if span.unit] or following
    alike = (
        gap.duration
        for gap in idle
        if gap.duration > longest.duration // 10
        and _unit_and_phase(last_before(gap)) == _unit_and_phase(before)
    )
    after = min(following, key=lambda span: span.start, default=None)
    return _Gap(before, after, longest.duration, sum(alike))


def _unit_and_phase(span: Span | None) -> tuple[str, str] | None:
    return (span.unit, span.phase) if span else None


def _name_work(span: Span) -> str:
    if span.unit:
        return f"{name_unit(span.unit)} in {span.phase}"
    if span.phase == "optimizer":
        return "the optimizer's step"
    return f"work of no unit in {span.phase}"
