"""From marks to the spans of one step on one rank: what the readings of a host's and of a device's
trace share.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardwise.engine.marks import Call, Marks, Range
from shardwise.timeline import COMPUTE, Span

WAIT_NS = 50_000  # a wait that takes longer has blocked


@dataclass(frozen=True)
class Piece:
    """A stretch of the host's time under one mark; without one, in the context of a unit."""

    start: int
    end: int
    unit: str
    phase: str
    mark: Range | Call | None

    @property
    def name(self) -> str:
        if isinstance(self.mark, Call):
            return f"{self.mark.name} call"
        if self.mark is not None:
            return self.mark.name
        return "update" if self.phase == "optimizer" else self.phase

    @property
    def role(self) -> str:
        return COMPUTE if self.mark is None else "copy"


@dataclass(frozen=True)
class Transfer:
    """A collective as one rank saw it; `key` and `number` find it on the other ranks."""

    span: Span
    key: tuple[str, tuple[int, ...]]
    number: int
    nbytes: int
    ranks: int


def cut_host(marks: Marks, start: int, end: int) -> list[Piece]:
    """The host's time from `start` to `end` in pieces, the innermost mark first."""
    calls = [call for call in marks.calls if call.issued]
    ranges: list[Range | Call] = [*marks.ranges, *calls]
    changes: list[tuple[int, int, int]] = [
        (time, 1, i) for i, (time, _, _) in enumerate(marks.contexts)
    ]
    for i, made in enumerate(ranges):
        changes.append((made.start, 2, i))
        changes.append((_end(made), 0, i))
    changes.sort()
    unit, phase, at = "", "forward", start
    active: list[int] = []
    pieces: list[Piece] = []

    def close(until: int) -> None:
        nonlocal at
        if until > at:
            mark = ranges[active[-1]] if active else None
            found = (mark.unit, mark.phase) if mark is not None else (unit, phase)
            pieces.append(Piece(at, until, *found, mark))
            at = until

    for time, kind, i in changes:
        close(min(time, end))
        if kind == 1:
            _, unit, phase = marks.contexts[i]
        elif kind == 2:
            active.append(i)
        elif i in active:
            active.remove(i)
    close(end)
    return pieces


def _end(mark: Range | Call) -> int:
    return mark.issued if isinstance(mark, Call) else mark.end


class HostPieces:
    """The host's time in pieces, to be asked for a moment."""

    def __init__(self, pieces: list[Piece]) -> None:
        self.pieces = pieces
        self._starts = [piece.start for piece in pieces]

    def at(self, moment: int) -> Piece:
        return self.pieces[max(0, bisect_right(self._starts, moment) - 1)]


def number_transfers(found: list[tuple[Call, Span]]) -> list[Transfer]:
    """Number the calls of each group of ranks, in the order in which the host issued them."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    made = []
    for call, span in found:
        key = (call.axis, call.members)
        made.append(Transfer(span, key, counts[key], call.nbytes, call.ranks))
        counts[key] += 1
    return made


def part_waiting(ranks: Sequence[Sequence[Transfer]]) -> list[Span]:
    """Every transfer's span; where another rank took less time for the same collective, the rest
    was spent waiting for a late peer.
    """
    least: dict[tuple[object, ...], int] = {}
    for transfers in ranks:
        for each in transfers:
            key = (each.key, each.number)
            least[key] = min(least.get(key, each.span.duration), each.span.duration)
    spans: list[Span] = []
    for transfers in ranks:
        for each in transfers:
            span, late = each.span, each.span.duration - least[each.key, each.number]
            if late:
                middle = span.start + late
                spans.append(replace(span, role="waiting", end=middle))
                span = replace(span, start=middle)
            spans.append(span)
    return spans


def transfer_span(call: Call, rank: int, start: int, end: int) -> Span:
    return Span(call.name, call.unit, call.phase, "transfer", rank, call.axis, start, end)


def make_span(piece: Piece, role: str, rank: int, stream: str, start: int, end: int) -> Span:
    return Span(piece.name, piece.unit, piece.phase, role, rank, stream, start, end)


def join_spans(spans: list[Span]) -> list[Span]:
    """Spans that touch and say the same, as one."""
    joined: list[Span] = []
    for span in sorted(spans, key=lambda s: s.start):
        if joined and joined[-1].end == span.start:
            longer = replace(joined[-1], end=span.end)
            if replace(longer, start=span.start) == span:
                joined[-1] = longer
                continue
        joined.append(span)
    return joined
