"""From the traced step to a timed one: what only a trace knows, between the same marks.

On a host, tracing every operation costs several percent of a step. The timed steps have marks
alone; the last one is traced and not timed. Where both went through the same marks, a moment of the
traced step is one of the timed step, evenly between two marks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from shardwise.engine.marks import Call, Marks, Wait
from shardwise.profiling.spans import WAIT_NS

Window = tuple[int, int]
Mark = tuple[int, tuple[str, ...]]


class Carry:
    """Moments of the step `source` as moments of the step `target`."""

    def __init__(self, marks: Marks, source: Window, target: Window) -> None:
        self.marks, self.source, self.target = marks, source, target
        # Tracing begins with the forward; what a step does before it is not compared.
        self._opened = [_first_forward(marks, window) for window in (source, target)]
        here = _sequence(marks, self._opened[0], source[1])
        there = _sequence(marks, self._opened[1], target[1])
        self.difference = _differ(here, there)
        self._here = [source[0], *[time for time, _ in here], source[1]]
        self._there = [target[0], *[time for time, _ in there], target[1]]

    def time(self, moment: int) -> int:
        """This moment of the source in the target."""
        at = min(max(bisect_right(self._here, moment) - 1, 0), len(self._here) - 2)
        share = (moment - self._here[at]) / max(1, self._here[at + 1] - self._here[at])
        begin, end = self._there[at], self._there[at + 1]
        return round(begin + min(max(share, 0.0), 1.0) * (end - begin))

    def times(self, moments: Iterable[int]) -> list[int]:
        return [self.time(moment) for moment in moments]

    def windows(self, found: Iterable[Window]) -> list[Window]:
        return [(self.time(start), self.time(end)) for start, end in found]

    def calls(self) -> None:
        """Give the target's collectives the beginnings and ends that the trace has of the source's.

        Where the host stood still for one, it ended when the host went on, less what waking up took
        in the source; an emulated network has told already.
        """
        traced = _calls_in(self.marks, self._opened[0], self.source[1])
        timed = _calls_in(self.marks, self._opened[1], self.target[1])
        waits: dict[int, Wait] = {}
        for made in self.marks.ranges:
            if isinstance(made, Wait):
                waits.setdefault(id(made.call), made)
        for known, call in zip(traced, timed, strict=True):
            if call.begun is not None or known.begun is None or known.end is None:
                continue
            end, wait, waited = self.time(known.end), waits.get(id(call)), waits.get(id(known))
            if wait is not None and wait.end - wait.start > WAIT_NS:
                waking = 0
                if waited is not None and known.end > waited.start:
                    waking = max(0, waited.end - known.end)
                end = max(wait.start, wait.end - waking)
            elif wait is not None:
                end = min(end, wait.end)
            call.begun, call.end = min(self.time(known.begun), end), end


def _first_forward(marks: Marks, window: Window) -> int:
    return next((time for time in marks.roots if window[0] <= time < window[1]), window[0])


def _calls_in(marks: Marks, start: int, end: int) -> list[Call]:
    return [call for call in marks.calls if start <= call.start < end]


def _sequence(marks: Marks, start: int, end: int) -> list[Mark]:
    """All marks in between, by time."""
    found: list[Mark] = [(time, ("context", unit, phase)) for time, unit, phase in marks.contexts]
    for made in marks.ranges:
        names = made.name, made.unit, made.phase
        found += [(made.start, ("begins", *names)), (made.end, ("ends", *names))]
    for call in marks.calls:
        names = call.name, call.unit, call.phase
        found += [(call.start, ("called", *names)), (call.issued, ("issued", *names))]
    return sorted(mark for mark in found if start <= mark[0] < end)


def _differ(here: Sequence[Mark], there: Sequence[Mark]) -> str:
    """Where two steps first go different ways; nothing if they do not."""
    for (_, first), (_, second) in zip(here, there, strict=False):
        if first != second:
            return f"{' '.join(second)} where the traced step has {' '.join(first)}"
    if len(here) != len(there):
        return f"{len(there)} marks where the traced step has {len(here)}"
    return ""
