"""Exposed communication: which collectives compute waits for, why, and which setting hides them.

A gather that was issued only when compute already stood still is late, whatever the wire does; one
that ran beside compute and still was not done in time met a wire (or a queue) that is too slow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.reporting.findings.finding import WORTH, Finding
from shardwise.reporting.formats import (
    name_collective,
    name_unit,
    name_units,
    show_share,
    show_time,
)
from shardwise.reporting.queries import rank_with_most, spans_of
from shardwise.timeline import Busy, Span, Timeline

LATE = "late"  # issued when compute stood still already
WIRE = "wire"  # it, or what it queued behind, ran beside compute and did not end in time
FIRST = "first"  # nothing came before it that could hide it
TURN = "turn"  # forward ended with this unit, backward begins with it
LAST = "last"  # nothing comes after it that could hide it

GATHER = "all-gather"


@dataclass(frozen=True)
class Exposed:
    """One collective of one unit that compute waited for."""

    span: Span
    nanoseconds: int
    why: str


@dataclass(frozen=True)
class _Group:
    """All waits for one collective in one phase that have the same reason."""

    collective: str
    phase: str
    why: str
    waits: list[Exposed]

    @property
    def cost(self) -> int:
        return sum(wait.nanoseconds for wait in self.waits)

    @property
    def units(self) -> tuple[str, ...]:
        """Those that lose a fair share; a few microseconds elsewhere are not worth a name."""
        least = 0.1 * self.cost / len(self.waits)
        return tuple(dict.fromkeys(w.span.unit for w in self.waits if w.nanoseconds >= least))

    @property
    def is_unprefetched(self) -> bool:
        return self.why == LATE and self.collective == GATHER


def exposed(
    timeline: Timeline,
    predicted: Timeline | None,
    plan: Mapping[str, Any],
    messages: Mapping[str, Any],
) -> list[Finding]:
    """One finding for each collective, phase and reason; neighbouring units are named together."""
    rank = rank_with_most(timeline, "exposed_transfer")
    groups: dict[tuple[str, str, str], _Group] = {}
    for wait in explain(timeline, rank):
        key = name_collective(wait.span.name), wait.span.phase, wait.why
        groups.setdefault(key, _Group(*key, [])).waits.append(wait)
    found: list[Finding] = []
    small: list[Exposed] = []
    for group in groups.values():
        # A gather that the plan wants ahead and that comes late is worth a word also when short.
        unplanned = group.is_unprefetched and plan.get(f"{group.phase}_prefetch")
        if group.cost < (WORTH / 2 if unplanned else WORTH) * timeline.step:
            small += group.waits
            continue
        kind = "unprefetched" if group.is_unprefetched else "exposed"
        what = _say(timeline, group, rank) + _say_prediction(predicted, group)
        change = _change(timeline, group, rank, plan, messages)
        found.append(Finding(kind, what, change, group.cost, group.units, rank))
    return found + _in_pieces(timeline, small, rank)


def _in_pieces(timeline: Timeline, waits: list[Exposed], rank: int) -> list[Finding]:
    """Exposed time that no collective, phase and reason has enough of by itself."""
    cost = sum(wait.nanoseconds for wait in waits)
    if cost < WORTH * timeline.step:
        return []
    largest = max(waits, key=lambda wait: wait.nanoseconds)
    of = f" of {name_unit(largest.span.unit)}" if largest.span.unit else ""
    what = (
        f"Exposed transfers sum to {show_time(cost)} ({show_share(cost / timeline.step)} of the "
        f"step) in {len(waits)} small pieces on rank {rank}; the largest is the "
        f"{name_collective(largest.span.name)}{of} in {largest.span.phase}, "
        f"{show_time(largest.nanoseconds)}."
    )
    change = "Larger micro-batches give each of them more compute to hide under."
    units = tuple(dict.fromkeys(wait.span.unit for wait in waits))
    return [Finding("exposed", what, change, cost, units, rank)]


# Why


def explain(timeline: Timeline, rank: int) -> list[Exposed]:
    """Every transfer that compute waited for, with the reason."""
    own = sorted(spans_of(timeline, rank), key=lambda span: span.end)
    compute = [span for span in own if span.role == "compute"]
    computed = _busy(compute)
    training = _busy([span for span in compute if span.phase != "optimizer"] or compute)
    backward = _busy(span for span in compute if span.phase == "backward")
    lanes: dict[str, list[Span]] = {}
    for span in own:
        if span.role in ("transfer", "waiting", "copy"):
            lanes.setdefault(span.stream, []).append(span)
    start, end = timeline.start, timeline.end(rank)
    waits = []
    for overlap in timeline.overlaps(rank=rank):
        if overlap.is_hidden:
            continue
        span = overlap.span
        little = max(0.1 * span.duration, 0.002 * timeline.step)
        issued = _issued(span, lanes[span.stream])
        stood_still = computed.between(issued, span.end) < 0.1 * span.duration
        in_backward = span.phase == "backward"
        reduces = name_collective(span.name) != GATHER
        if computed.between(start, span.end) < little:
            why = FIRST
        elif in_backward and reduces and training.between(span.start, end) < little:
            why = LAST
        elif in_backward and stood_still and backward.between(start, span.end) < little:
            why = TURN
        else:
            why = LATE if stood_still else WIRE
        waits.append(Exposed(span, overlap.exposed, why))
    return waits


def _busy(spans: Iterable[Span]) -> Busy:
    return Busy((span.start, span.end) for span in spans)


def _issued(span: Span, lane: list[Span]) -> int:
    """The latest moment at which a collective was surely issued: its lane was busy from then on,
    with its own wait for peers or with others before it in the queue. `lane` is sorted by end.
    """
    issued = span.start
    slack = max(1, span.duration // 50)
    for i in range(bisect_right(lane, issued + slack, key=lambda s: s.end) - 1, -1, -1):
        if lane[i].end < issued - slack:
            break
        issued = min(issued, lane[i].start)
    return issued


# What is said

_WHY = {
    LATE: "issued only when compute already stood still, not ahead of it",
    FIRST: "nothing runs before to hide it",
    TURN: "forward ends with this unit and backward begins with it, so nothing runs between",
    LAST: "no compute is left to hide it",
}


def _say(timeline: Timeline, group: _Group, rank: int) -> str:
    many = len(group.units) > 1
    order = f"{group.why} " if group.why in (FIRST, LAST) else ""
    who = f"{order}{group.collective}{'s' if many else ''} of {name_units(group.units)}"
    on = f" on rank {rank}" if len(timeline.ranks) > 1 else ""
    if group.collective != GATHER and group.why in (LATE, WIRE):
        why = "backward waits for it instead of going on"
    elif group.why == WIRE:
        why = (
            "started beside compute, they take longer than it"
            if many
            else "it starts beside compute but outlasts it"
        )
    else:
        why = _WHY[group.why]
    return (
        f"The {who} {'are' if many else 'is'} exposed {show_time(group.cost)} "
        f"({show_share(group.cost / timeline.step)} of the step) in {group.phase}{on}: {why}."
    )


def _say_prediction(predicted: Timeline | None, group: _Group) -> str:
    """How much was predicted, if that is less than half."""
    if predicted is None:
        return ""
    expected = sum(
        overlap.exposed
        for overlap in predicted.overlaps(phase=group.phase)
        if overlap.span.unit in group.units
        and name_collective(overlap.span.name) == group.collective
    )
    if expected >= 0.5 * group.cost:
        return ""
    return f" {show_time(expected) if expected else 'None of it'} was predicted."


# What to change


def _change(
    timeline: Timeline,
    group: _Group,
    rank: int,
    plan: Mapping[str, Any],
    messages: Mapping[str, Any],
) -> str:
    small = _too_small(group, messages)
    if group.collective == GATHER:
        if small and group.why == WIRE:
            return small
        gathered = {
            span.unit
            for span in spans_of(timeline, rank, "transfer")
            if span.phase == group.phase and name_collective(span.name) == GATHER
        }
        return _change_gather(group, plan, len(gathered))
    if plan.get("name") == "ddp" and plan.get("reduce") in ("naive", "flat"):
        return f'Plan(reduce="{plan["reduce"]}") starts only after backward: use "bucketed".'
    if group.why == LAST:
        return (
            "Cut the units that backward reaches last (the embedding) smaller, or reduce less "
            'often: accumulate micro-batches with sync="last".'
        )
    if small:
        return small
    if group.phase == "backward" and not plan:
        return "A plan with reduce_depth=2 lets backward go on while a reduce is under way."
    is_shallow = plan.get("reduce_depth", 1) == 1 and plan.get("name") != "ddp"
    if group.phase == "backward" and is_shallow:
        return "Set reduce_depth to 2, so that backward goes on while a reduce is under way."
    return (
        'Send less: reduce_dtype="bfloat16", more micro-batches before a reduce (sync="last"), '
        "or hsdp with the shard group inside a node."
    )


def _change_gather(group: _Group, plan: Mapping[str, Any], total: int) -> str:
    """Of `total` units that are gathered in this phase, those of the group come too late."""
    phase, units = group.phase, len(group.units)
    setting = "forward_prefetch" if phase == "forward" else "backward_prefetch"
    depth = plan.get(setting)
    if group.why == FIRST:
        return "A smaller first unit is gathered sooner: cut the embedding into a unit of its own."
    if group.why == TURN:
        return (
            "keep_after_forward=True does not gather it again, if memory allows that for all "
            "units; a smaller last unit costs less."
        )
    if group.why == LATE:
        if depth is None:
            return (
                f"Gather ahead: set {setting} to 1 (with `fully_shard`, "
                f"set_modules_to_{phase}_prefetch)."
            )
        if depth == 0:
            return f"Raise {setting} from 0 to 1."
        if units <= max(1, total // 3):
            which = "This unit is" if units == 1 else "These units are"
            return (
                f"{which} not gathered ahead although {setting} is {depth}: called in another "
                "order than in the step before, or from outside the model's forward? Run units "
                "in one order in every step."
            )
        return f"Raise {setting} to {depth + 1}."
    if units >= 0.6 * total and total > 2:
        keep, low = "", 'gather in 16 bits (compute_dtype="bfloat16"), '
        if phase == "backward" and plan.get("keep_after_forward") is not True:
            keep = "keep_after_forward=True saves backward's gathers if memory allows; "
        if plan.get("compute_dtype") in ("bfloat16", "float16"):
            low = ""
        return (
            f"The wire is slower than compute here: {keep}{low}give each gather more compute "
            "(larger micro-batches), or shard within a node only (hsdp)."
        )
    raised = f"Raise {setting} to {depth + 1}" if depth is not None else f"Raise {setting}"
    return f"{raised}, so that the gather starts a unit earlier."


def _too_small(group: _Group, messages: Mapping[str, Any]) -> str:
    """Advice for messages so small that latency, not bandwidth, is their time."""
    units = {wait.span.unit for wait in group.waits}
    own, curve = (
        [
            entry
            for entry in messages.get(name, ())
            if name_collective(entry["collective"]) == group.collective and entry["seconds"]
        ]
        for name in ("messages", "curve")
    )
    own = [message for message in own if message["unit"] in units]
    if not own or not curve:
        return ""
    best = max(c["bytes"] / c["seconds"] for c in curve)
    nearest = [min(curve, key=lambda c: abs(c["bytes"] - m["bytes"])) for m in own]
    reached = max(c["bytes"] / c["seconds"] for c in nearest)
    if reached > 0.5 * best:
        return ""
    return (
        f"Messages of this size reach {show_share(reached / best)} of the bandwidth of large ones: "
        "make units larger (units= or bucket_bytes= of the plan)."
    )
