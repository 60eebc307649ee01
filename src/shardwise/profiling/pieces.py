"""The host's time of a step in pieces: at each moment it is under one mark, or in the context of a
unit. Both attributions, of a computing host's time and of a device's kernels, read them.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from shardwise.engine.marks import CallMark, Marks, RangeMark
from shardwise.timeline import COMPUTE, Span


@dataclass(frozen=True)
class Piece:
    """A stretch of the host's time under one mark; without one, in the context of a unit."""

    start: int
    end: int
    unit: str
    phase: str
    mark: RangeMark | CallMark | None

    @property
    def name(self) -> str:
        if isinstance(self.mark, CallMark):
            return f"{self.mark.name} call"
        if self.mark is not None:
            return self.mark.name
        return "update" if self.phase == "optimizer" else self.phase

    @property
    def role(self) -> str:
        return COMPUTE if self.mark is None else "copy"

    def span(self, role: str, rank: int, stream: str, start: int, end: int) -> Span:
        """Work of this piece that ran on `stream` from `start` to `end`."""
        return Span(self.name, self.unit, self.phase, role, rank, stream, start, end)


class HostPieces:
    """The host's time from `start` to `end` in pieces, to be asked for a moment."""

    def __init__(self, marks: Marks, start: int, end: int) -> None:
        self.pieces = _cut(marks, start, end)
        self._starts = [piece.start for piece in self.pieces]

    def at(self, moment: int) -> Piece:
        return self.pieces[max(0, bisect_right(self._starts, moment) - 1)]


def _cut(marks: Marks, start: int, end: int) -> list[Piece]:
    """Where marks lie inside each other, a piece is of the innermost."""
    calls = [call for call in marks.calls if call.issued]
    ranges: list[RangeMark | CallMark] = [*marks.ranges, *calls]
    # At one moment ranges end first, then the context changes, then ranges begin.
    changes = [(time, 1, i) for i, (time, _, _) in enumerate(marks.contexts)]
    for i, made in enumerate(ranges):
        ended = made.issued if isinstance(made, CallMark) else made.end
        changes += [(made.start, 2, i), (ended, 0, i)]
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
