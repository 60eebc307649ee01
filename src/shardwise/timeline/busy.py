"""Intervals of time: their union, and what of it lies between two moments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Generic, TypeVar

Time = TypeVar("Time", int, float)  # nanoseconds of a timeline; elsewhere also seconds


class Busy(Generic[Time]):
    """The union of some intervals. Questions about two moments are answered in few steps, also
    where it has very many stretches.
    """

    def __init__(self, intervals: Iterable[tuple[Time, Time]], gap: int = 0) -> None:
        self.stretches: list[tuple[Time, Time]] = union(intervals, gap)
        self._starts: list[Time] = [start for start, _ in self.stretches]
        self._before: list[Time] = [0]  # how long the stretches before each are
        for start, end in self.stretches:
            self._before.append(self._before[-1] + end - start)

    def between(self, start: Time, end: Time) -> Time:
        """How much of the time between two moments is busy."""
        return self._until(end) - self._until(start)

    def _until(self, time: Time) -> Time:
        i = bisect_right(self._starts, time) - 1
        if i < 0:
            return 0
        start, end = self.stretches[i]
        return self._before[i] + min(time, end) - start

    def inside(self, start: Time, end: Time) -> Iterator[tuple[Time, Time]]:
        """The busy stretches between two moments."""
        i = max(0, bisect_right(self._starts, start) - 1)
        while i < len(self.stretches) and self.stretches[i][0] < end:
            begin, stop = max(self.stretches[i][0], start), min(self.stretches[i][1], end)
            if stop > begin:
                yield begin, stop
            i += 1

    def outside(self, start: Time, end: Time) -> Iterator[tuple[Time, Time]]:
        """The stretches between two moments that are not busy."""
        at = start
        for begin, stop in self.inside(start, end):
            if begin > at:
                yield at, begin
            at = stop
        if end > at:
            yield at, end


def union(intervals: Iterable[tuple[Time, Time]], gap: int = 0) -> list[tuple[Time, Time]]:
    """Sorted, disjoint, covering the same; those that are at most `gap` apart are joined."""
    joined: list[tuple[Time, Time]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and start <= joined[-1][1] + gap:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
