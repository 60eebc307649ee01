"""Exposed communication: which collectives compute waits for, why, and which setting hides them.

A gather that was issued only when compute already stood still is late, whatever the wire does; one
that ran beside compute and still was not done in time met a wire (or a queue) that is too slow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardwise.reporting.findings.finding import WORTH, Finding
from shardwise.reporting.words import name_collective, name_unit, name_units, show_share, show_time
from shardwise.timeline import Busy, Span, Timeline

LATE = "late"  # issued when compute stood still already
WIRE = "wire"  # it, or what it queued behind, ran beside compute and did not end in time
FIRST = "first"  # nothing came before it that could hide it
TURN = "turn"  # forward ended with this unit, backward begins with it
LAST = "last"  # nothing comes after it that could hide it


@dataclass(frozen=True)
class Exposed:
    """One collective of one unit that compute waited for."""

    span: Span
    nanoseconds: int
    why: str


def exposed(
    timeline: Timeline,
    predicted: Timeline | None,
    plan: Mapping[str, Any],
    messages: Mapping[str, Any],
) -> list[Finding]:
    """One finding for each collective, phase and reason; neighbouring units are named together."""
    rank = max(timeline.ranks, key=lambda r: timeline.breakdown(r).exposed_transfer)
    waits = explain(timeline, rank)
    groups: dict[tuple[str, str, str], list[Exposed]] = {}
    for wait in waits:
        key = name_collective(wait.span.name), wait.span.phase, wait.why
        groups.setdefault(key, []).append(wait)
    found: list[Finding] = []
    small: list[Exposed] = []
    for (collective, phase, why), group in groups.items():
        cost = sum(wait.nanoseconds for wait in group)
        # A gather that the plan wants ahead and that comes late is worth a word also when short.
        unplanned = why == LATE and collective == "all-gather" and plan.get(f"{phase}_prefetch")
        if cost < (WORTH / 2 if unplanned else WORTH) * timeline.step:
            small += group
            continue
        # Units that lose a fair share; a few microseconds elsewhere are not worth a name.
        named = [w for w in group if w.nanoseconds >= 0.1 * cost / len(group)]
        units = tuple(dict.fromkeys(wait.span.unit for wait in named))
        what = _say(timeline, collective, phase, why, units, cost, rank)
        expected = _expected(predicted, collective, phase, units)
        if expected is not None and expected < 0.5 * cost:
            what += f" {show_time(expected) if expected else 'None of it'} was predicted."
        total = len(
            {s.unit for s in timeline.spans if s.role == "transfer" and s.phase == phase
             and s.rank == rank and name_collective(s.name) == collective}
        )  # fmt: skip
        change = _change(collective, phase, why, plan, len(units), total, messages, group)
        kind = "unprefetched" if why == LATE and collective == "all-gather" else "exposed"
        found.append(Finding(kind, what, change, cost, units, rank))
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


def explain(timeline: Timeline, rank: int) -> list[Exposed]:
    """Every transfer that compute waited for, with the reason."""
    own = sorted((s for s in timeline.spans if s.rank == rank), key=lambda span: span.end)
    compute = [span for span in own if span.role == "compute"]
    computed = _busy(compute)
    training = _busy([span for span in compute if span.phase != "optimizer"] or compute)
    backward = _busy([span for span in compute if span.phase == "backward"])
    lanes: dict[str, list[Span]] = {}
    for span in own:
        if span.role in ("transfer", "waiting", "copy"):
            lanes.setdefault(span.stream, []).append(span)
    start, end, step = timeline.start, timeline.end(rank), timeline.step
    waits = []
    for overlap in timeline.overlaps(rank=rank):
        if overlap.is_hidden:
            continue
        span = overlap.span
        little = max(0.1 * span.duration, 0.002 * step)
        issued = _issued(span, lanes[span.stream])
        stood_still = computed.between(issued, span.end) < 0.1 * span.duration
        in_backward = span.phase == "backward"
        gathers = name_collective(span.name) == "all-gather"
        if computed.between(start, span.end) < little:
            why = FIRST
        elif in_backward and not gathers and training.between(span.start, end) < little:
            why = LAST
        elif in_backward and stood_still and backward.between(start, span.end) < little:
            why = TURN
        else:
            why = LATE if stood_still else WIRE
        waits.append(Exposed(span, overlap.exposed, why))
    return waits


def _busy(spans: list[Span]) -> Busy:
    return Busy((span.start, span.end) for span in spans)


def _issued(span: Span, lane: list[Span]) -> int:
    """The latest moment at which a collective was surely issued: its lane was busy from then on,
    with its own wait for peers or with others before it in the queue. `lane` is sorted by end.
    """
    issued = span.start
    slack = max(1, span.duration // 50)
    for i in range(bisect_right(lane, issued + slack, key=lambda s: s.end) - 1, -1, -1):
        other = lane[i]
        if other.end < issued - slack:
            break
        if other.start < issued:
            issued = other.start
    return issued


def _say(
    timeline: Timeline,
    collective: str,
    phase: str,
    why: str,
    units: tuple[str, ...],
    cost: int,
    rank: int,
) -> str:
    many = len(units) > 1
    who = f"{collective}{'s' if many else ''} of {name_units(units)}"
    share = f"{show_time(cost)} ({show_share(cost / timeline.step)} of the step) in {phase}"
    on = f" on rank {rank}" if len(timeline.ranks) > 1 else ""
    are = "are" if many else "is"
    if collective != "all-gather" and why in (LATE, WIRE):
        return f"The {who} {are} exposed {share}{on}: backward waits for it instead of going on."
    match why:
        case "late":
            return (
                f"The {who} {are} exposed {share}{on}: issued only when compute already stood "
                "still, not ahead of it."
            )
        case "first":
            return f"The first {who} {are} exposed {share}{on}: nothing runs before to hide it."
        case "turn":
            return (
                f"The {who} {are} exposed {share}{on}: forward ends with this unit and backward "
                "begins with it, so nothing runs between."
            )
        case "last":
            return f"The last {who} {are} exposed {share}{on}: no compute is left to hide it."
    return (
        f"The {who} {are} exposed {share}{on}: started beside compute, they take longer than it."
        if many
        else f"The {who} is exposed {share}{on}: it starts beside compute but outlasts it."
    )


def _expected(
    predicted: Timeline | None, collective: str, phase: str, units: tuple[str, ...]
) -> int | None:
    if predicted is None:
        return None
    rank = predicted.slowest
    return sum(
        overlap.exposed
        for overlap in predicted.overlaps(phase=phase, rank=rank)
        if overlap.span.unit in units and name_collective(overlap.span.name) == collective
    )


def _change(
    collective: str,
    phase: str,
    why: str,
    plan: Mapping[str, Any],
    units: int,
    total: int,
    messages: Mapping[str, Any],
    group: list[Exposed],
) -> str:
    small = _too_small(collective, messages, group)
    if collective == "all-gather":
        if small and why == WIRE:
            return small
        return _change_gather(phase, why, plan, units, total)
    if plan.get("name") == "ddp" and plan.get("reduce") in ("naive", "flat"):
        return f'Plan(reduce="{plan["reduce"]}") starts only after backward: use "bucketed".'
    if why == LAST:
        return (
            "Cut the units that backward reaches last (the embedding) smaller, or reduce less "
            'often: accumulate micro-batches with sync="last".'
        )
    if small:
        return small
    depth = plan.get("reduce_depth", 1)
    if phase == "backward" and not plan:
        return "A plan with reduce_depth=2 lets backward go on while a reduce is under way."
    if phase == "backward" and depth == 1 and plan.get("name") != "ddp":
        return "Set reduce_depth to 2, so that backward goes on while a reduce is under way."
    return (
        'Send less: reduce_dtype="bfloat16", more micro-batches before a reduce (sync="last"), '
        "or hsdp with the shard group inside a node."
    )


def _change_gather(phase: str, why: str, plan: Mapping[str, Any], units: int, total: int) -> str:
    setting = "forward_prefetch" if phase == "forward" else "backward_prefetch"
    depth = plan.get(setting)
    if why == FIRST:
        return "A smaller first unit is gathered sooner: cut the embedding into a unit of its own."
    if why == TURN:
        return (
            "keep_after_forward=True does not gather it again, if memory allows that for all "
            "units; a smaller last unit costs less."
        )
    if why == LATE:
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
        keep = (
            "keep_after_forward=True saves backward's gathers if memory allows; "
            if phase == "backward" and plan.get("keep_after_forward") is not True
            else ""
        )
        low = (
            ""
            if plan.get("compute_dtype") in ("bfloat16", "float16")
            else 'gather in 16 bits (compute_dtype="bfloat16"), '
        )
        return (
            f"The wire is slower than compute here: {keep}{low}give each gather more compute "
            "(larger micro-batches), or shard within a node only (hsdp)."
        )
    raised = f"Raise {setting} to {depth + 1}" if depth is not None else f"Raise {setting}"
    return f"{raised}, so that the gather starts a unit earlier."


def _too_small(collective: str, messages: Mapping[str, Any], group: list[Exposed]) -> str:
    """Advice for messages so small that latency, not bandwidth, is their time."""
    units = {wait.span.unit for wait in group}
    own = [
        m for m in messages.get("messages", ())
        if m["unit"] in units and name_collective(m["collective"]) == collective and m["seconds"]
    ]  # fmt: skip
    curve = [
        c for c in messages.get("curve", ())
        if name_collective(c["collective"]) == collective and c["seconds"]
    ]  # fmt: skip
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
