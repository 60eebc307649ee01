"""One step on a rank whose host computes: its thread is the compute stream.

Stretches in operations are compute, or copies inside a gather or a pack; a blocking wait leaves the
stream empty; everything else is the host's own work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.engine.marks import CallMark, Marks, WaitMark
from shardwise.profiling.merge import RankTransfer, number_transfers
from shardwise.profiling.pieces import HostPieces, Piece, join_spans
from shardwise.profiling.trace import HostEvent, TorchTrace
from shardwise.profiling.traced_to_timed import WAIT_NS, StepMap
from shardwise.timeline import COMPUTE, HOST, Busy, Span
from shardwise.timeline.busy import union

# Python between two operations of a module counts as their dispatch up to this long.
DISPATCH_NS = 200_000
COPYING_NS = 20_000  # the same inside the engine's own copies

Window = tuple[int, int]


def host_step(
    trace: TorchTrace | None,
    marks: Marks,
    window: Window,
    rank: int,
    step_map: StepMap | None = None,
    waits_marked: bool = True,
) -> tuple[list[Span], list[RankTransfer]]:
    """One step of the host. Its trace is of this step, or of the one that `step_map` leads from, or
    there is none, and everything outside of the engine's marks counts as compute.
    """
    ran: list[Window] = [window]  # when the host was in operations
    unmarked: list[HostEvent] = []  # transfers
    if trace is not None:
        ran = [(op.start, op.end) for op in trace.operations if op.thread == trace.host]
        unmarked = _note_ends(trace, marks, step_map.traced if step_map is not None else window)
    copied = union(ran, COPYING_NS)
    dispatched = union(copied, DISPATCH_NS)
    if step_map is not None:
        step_map.bring_calls()
        copied, dispatched = step_map.windows(copied), step_map.windows(dispatched)
        unmarked = [
            replace(e, start=step_map.time(e.start), end=step_map.time(e.end)) for e in unmarked
        ]
    pieces = HostPieces(marks, *window)
    transfers = _transfers(marks, window, rank, unmarked, pieces)
    # Somebody else waits for these, of whom no mark tells.
    waits = [(event.start, event.end) for event in unmarked]
    if not waits_marked:
        waits += [(each.span.start, each.span.end) for each in transfers]
    return _spans(pieces, Busy(copied), Busy(dispatched), Busy(waits), rank), transfers


def _spans(
    pieces: HostPieces, copied: Busy[int], dispatched: Busy[int], waits: Busy[int], rank: int
) -> list[Span]:
    """What the host did as its compute stream."""
    spans: list[Span] = []
    for piece in map(_awake, pieces.pieces):
        ran = dispatched if piece.mark is None else copied
        for inside in ran.inside(piece.start, piece.end):
            spans.append(piece.span(piece.role, rank, COMPUTE, *inside))
        for outside in ran.outside(piece.start, piece.end):
            for idle in waits.outside(*outside):
                spans.append(piece.span(HOST, rank, COMPUTE, *idle))
    return join_spans(spans)


def _note_ends(trace: TorchTrace, marks: Marks, window: Window) -> list[HostEvent]:
    """Give each collective issued in the window the beginning and the end that gloo's own thread
    has. Gives those that no mark tells of: DistributedDataParallel's, the user's own.
    """
    start, end = window
    events = [event for event in trace.transfers if event.end > start and event.start < end]
    taken: set[int] = set()
    for call in marks.calls:
        if start <= call.start < end:
            event = _find_event(call, events, taken)
            if event is not None:
                taken.add(id(event))
                call.begun, call.end = event.start, event.end
    return [event for event in events if id(event) not in taken and event.start >= start]


def _transfers(
    marks: Marks, window: Window, rank: int, unmarked: Sequence[HostEvent], pieces: HostPieces
) -> list[RankTransfer]:
    """The collectives issued in the window, then those that no mark tells of."""
    start, end = window
    found: list[tuple[CallMark, int, int]] = []
    for call in marks.calls:
        if start <= call.start < end:
            begin = call.begun or call.issued
            stop = min(max(begin, call.end or begin), end)
            found.append((call, min(begin, stop), stop))
    for event in unmarked:
        piece = pieces.at(event.start)
        call = CallMark(event.name, piece.unit, piece.phase, "unmarked", 0, (), event.start)
        found.append((call, event.start, min(event.end, end)))
    return number_transfers(rank, found)


def _awake(piece: Piece) -> Piece:
    """The piece without the time that the host stood still. A wait for what is there already is
    work like any other, and so is waking up.
    """
    mark = piece.mark
    if not isinstance(mark, WaitMark) or mark.end - mark.start <= WAIT_NS:
        return piece
    ended = mark.call.end if mark.call.end is not None else piece.end
    return replace(piece, start=min(max(piece.start, ended), piece.end))


def _find_event(call: CallMark, events: list[HostEvent], taken: set[int]) -> HostEvent | None:
    for event in events:
        if id(event) not in taken and event.start >= call.start and _is_kind(event.name, call.name):
            # A collective that was waited for ended before the wait did: a later event is another.
            return event if call.end is None or event.start <= call.end else None
    return None


# What gloo's events have in their names. A scatter is a sum that it reduces whole, or parts that
# ranks add themselves.
_EVENTS = {
    "all_gather": ("gather",),
    "all_reduce": ("reduce",),
    "all_to_all": ("all_to_all",),
    "reduce_scatter": ("reduce", "all_to_all"),
}


def _is_kind(name: str, collective: str) -> bool:
    return any(word in name for word in _EVENTS.get(collective, ("reduce",)))
