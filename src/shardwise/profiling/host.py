"""One step on a rank whose host computes: its thread is the compute stream.

Stretches in operations are compute, or copies inside a gather or a pack; a blocking wait leaves the
stream empty; everything else is the host's own work.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from shardwise.engine.marks import Call, Marks, Wait
from shardwise.profiling.carry import Carry
from shardwise.profiling.spans import (
    WAIT_NS,
    HostPieces,
    Piece,
    Transfer,
    cut_host,
    join_spans,
    make_span,
    number_transfers,
    transfer_span,
)
from shardwise.profiling.trace import Event, Trace
from shardwise.timeline import COMPUTE, HOST, Span
from shardwise.timeline.busy import union

# Python between two operations of a module counts as their dispatch up to this long.
DISPATCH_NS = 200_000
COPYING_NS = 20_000  # the same inside the engine's own copies

Interval = tuple[int, int]


@dataclass(frozen=True)
class Ran:
    """When the host was in operations, with the Python between them: few of it count as part of the
    engine's own copies, more as the dispatch of a module's.
    """

    copied: list[Interval]
    dispatched: list[Interval]

    @classmethod
    def of(cls, trace: Trace) -> Ran:
        ran = [(op.start, op.end) for op in trace.operations if op.thread == trace.host]
        copied = _close_gaps(union(ran), COPYING_NS)
        return cls(copied, _close_gaps(copied, DISPATCH_NS))

    def carried(self, carry: Carry) -> Ran:
        return Ran(carry.windows(self.copied), carry.windows(self.dispatched))


def host_step(
    trace: Trace | None,
    marks: Marks,
    window: Interval,
    rank: int,
    carry: Carry | None = None,
    waits_marked: bool = True,
) -> tuple[list[Span], list[Transfer]]:
    """One step of the host. Its trace is of this step, or of the one that `carry` brings here, or
    there is none, and everything outside of the engine's marks counts as compute.
    """
    start, end = window
    ran, others = Ran([window], [window]), []
    if trace is not None:
        ran, others = Ran.of(trace), note_ends(trace, marks, *(carry.source if carry else window))
    if carry is not None:
        carry.calls()
        ran = ran.carried(carry)
        others = [replace(e, start=carry.time(e.start), end=carry.time(e.end)) for e in others]
    transfers = host_transfers(marks, start, end, rank, others)
    unmarked = [(event.start, event.end) for event in others]
    if not waits_marked:
        unmarked += [(each.span.start, each.span.end) for each in transfers]
    return host_spans(ran, marks, start, end, rank, unmarked), transfers


def host_spans(
    ran: Ran, marks: Marks, start: int, end: int, rank: int, unmarked: Sequence[Interval]
) -> list[Span]:
    """What the host did as its compute stream; `unmarked` are transfers that somebody else waits
    for, of whom no mark tells.
    """
    waits = union(unmarked)
    spans: list[Span] = []
    for piece in cut_host(marks, start, end):
        piece = _awake(piece)
        if piece.end <= piece.start:
            continue
        inside = list(
            clip(ran.dispatched if piece.mark is None else ran.copied, piece.start, piece.end)
        )
        for begin, stop in inside:
            spans.append(make_span(piece, piece.role, rank, COMPUTE, begin, stop))
        for begin, stop in outside(inside, piece.start, piece.end):
            for idle in outside(list(clip(waits, begin, stop)), begin, stop):
                spans.append(make_span(piece, HOST, rank, COMPUTE, *idle))
    return join_spans(spans)


def note_ends(trace: Trace, marks: Marks, start: int, end: int) -> list[Event]:
    """Give each collective issued in between the beginning and the end that gloo's own thread has;
    those that no mark tells of (DistributedDataParallel's, the user's own) are returned.
    """
    events = [event for event in trace.transfers if event.end > start and event.start < end]
    taken: set[int] = set()
    for call in marks.calls:
        if start <= call.start < end:
            event = _find_event(call, events, taken)
            if event is not None:
                taken.add(id(event))
                call.begun, call.end = event.start, event.end
    return [event for event in events if id(event) not in taken and event.start >= start]


def host_transfers(
    marks: Marks, start: int, end: int, rank: int, others: Sequence[Event]
) -> list[Transfer]:
    """The collectives issued in between, and `others` that no mark tells of."""
    spans: list[tuple[Call, Span]] = []
    for call in marks.calls:
        if not start <= call.start < end:
            continue
        begin = call.begun or call.issued
        stop = min(max(begin, call.end or begin), end)
        begin = min(begin, stop)
        spans.append((call, transfer_span(call, rank, begin, stop)))
    pieces = HostPieces(cut_host(marks, start, end))
    for event in others:
        piece, stop = pieces.at(event.start), min(event.end, end)
        call = Call(event.name, piece.unit, piece.phase, "unmarked", 0, 0, (), event.start)
        spans.append((call, transfer_span(call, rank, event.start, stop)))
    return number_transfers(spans)


def _awake(piece: Piece) -> Piece:
    """The piece without the time that the host stood still. A wait for what is there already is
    work like any other, and so is waking up.
    """
    mark = piece.mark
    if not isinstance(mark, Wait) or mark.end - mark.start <= WAIT_NS:
        return piece
    ended = mark.call.end if mark.call.end is not None else piece.end
    return replace(piece, start=min(max(piece.start, ended), piece.end))


def _find_event(call: Call, events: list[Event], taken: set[int]) -> Event | None:
    for event in events:
        if id(event) not in taken and event.start >= call.start and _is_kind(event.name, call.name):
            # What is waited for has ended by then.
            return event if call.end is None or event.start <= call.end else None
    return None


def _is_kind(name: str, collective: str) -> bool:
    if collective == "all_gather":
        return "gather" in name
    # Some versions of gloo scatter a sum that they reduce whole.
    return "reduce" in name


def _close_gaps(intervals: list[Interval], most: int) -> list[Interval]:
    closed: list[Interval] = []
    for start, end in intervals:
        if closed and start - closed[-1][1] <= most:
            closed[-1] = closed[-1][0], end
        else:
            closed.append((start, end))
    return closed


def clip(intervals: list[Interval], start: int, end: int) -> Iterable[Interval]:
    """What of sorted, disjoint intervals lies between."""
    i = max(0, bisect_right(intervals, (start, start)) - 1)
    while i < len(intervals) and intervals[i][0] < end:
        begin, stop = max(intervals[i][0], start), min(intervals[i][1], end)
        if stop > begin:
            yield begin, stop
        i += 1


def outside(inside: list[Interval], start: int, end: int) -> list[Interval]:
    """The rest of start to end."""
    rest, at = [], start
    for begin, stop in inside:
        if begin > at:
            rest.append((at, begin))
        at = stop
    if end > at:
        rest.append((at, end))
    return rest
