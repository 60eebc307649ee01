"""How long something ran between two moments."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable


class Busy:
    """The union of some intervals, asked for its length between two moments in few steps, also
    where it has very many stretches.
    """

    def __init__(self, intervals: Iterable[tuple[int, int]]) -> None:
        self.stretches = union(intervals)
        self._starts = [start for start, _ in self.stretches]
        self._before = [0]  # nanoseconds of the stretches before each
        for start, end in self.stretches:
            self._before.append(self._before[-1] + end - start)

    def between(self, start: int, end: int) -> int:
        """Nanoseconds between two moments."""
        return self._until(end) - self._until(start)

    def _until(self, time: int) -> int:
        i = bisect_right(self._starts, time) - 1
        if i < 0:
            return 0
        start, end = self.stretches[i]
        return self._before[i] + min(time, end) - start


def union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint, covering the same."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined
