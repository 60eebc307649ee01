"""One block of memory for all that a step takes and gives back: how long each piece lives, and
where it stands so that no two that live at once overlap.

A piece is known by its role, its unit and, where a unit has several at once, a number. It has one
place for all its lives in a step. Pieces of different streams never share memory: what one stream
gives back, another may not take before the two have met.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

ALIGNMENT = 512  # bytes: what CUDA's allocator gives, and more than any kernel asks for

Key = tuple[str, str, int]  # role, unit, number


@dataclass
class Life:
    """One piece: its bytes, the stream in whose order it comes and goes, and when it is there."""

    key: Key
    nbytes: int
    stream: str
    spans: list[tuple[int, int]] = field(default_factory=list)

    def meets(self, other: Life) -> bool:
        """Whether there is a moment at which both are there."""
        return any(a < d and c < b for a, b in self.spans for c, d in other.spans)


class Lives:
    """Notes what comes and goes in a step."""

    def __init__(self) -> None:
        self.lives: dict[Key, Life] = {}
        self.there: dict[Key, int] = {}  # since when
        self.noting = True  # False: only what is there is known
        self._now = 0

    def take(self, role: str, unit: str, nbytes: int, stream: str) -> Key:
        """A piece belongs to one stream: what two streams take by turns has two roles."""
        number = 0
        while (role, unit, number) in self.there:
            number += 1
        key = role, unit, number
        if not self.noting:
            self.there[key] = 0
            return key
        life = self.lives.setdefault(key, Life(key, nbytes, stream))
        assert life.stream == stream, f"{key} is of {life.stream}, not of {stream}"
        life.nbytes = max(life.nbytes, nbytes)
        self.there[key] = self._tick()
        return key

    def give(self, key: Key) -> None:
        since = self.there.pop(key, None)
        if self.noting and since is not None:
            self.lives[key].spans.append((since, self._tick()))

    def begin_step(self) -> None:
        """Forget the last one; what is still there was there before this one."""
        lives = {key: self.lives[key] for key in self.there}
        for life in lives.values():
            life.spans.clear()
        self.lives, self._now = lives, 0
        self.there = dict.fromkeys(self.there, 0)

    def end_step(self) -> list[Life]:
        """All pieces of the step. One that outlives it is there all the time."""
        end = self._tick()
        for key in self.there:
            self.lives[key].spans[:] = [(0, end)]
        return [life for life in self.lives.values() if life.nbytes]

    def _tick(self) -> int:
        self._now += 1
        return self._now


@dataclass(frozen=True)
class Layout:
    """Where each piece stands in the block, in bytes from its start."""

    offsets: dict[Key, int]
    sizes: dict[Key, int]
    nbytes: int

    def sharing(self) -> dict[Key, tuple[Key, ...]]:
        """For each piece those whose memory overlaps its own."""
        keys = list(self.offsets)
        return {key: tuple(k for k in keys if k != key and self._overlap(key, k)) for key in keys}

    def _overlap(self, one: Key, other: Key) -> bool:
        starts = self.offsets[one], self.offsets[other]
        return starts[0] < starts[1] + self.sizes[other] and starts[1] < starts[0] + self.sizes[one]


def lay_out(lives: Iterable[Life]) -> Layout:
    """Best fit: the largest piece first, each into the smallest gap that holds it among those that
    live when it does; the streams one after the other.
    """
    by_stream: dict[str, list[Life]] = {}
    for life in sorted(lives, key=lambda life: (-life.nbytes, life.key)):
        by_stream.setdefault(life.stream, []).append(life)
    offsets: dict[Key, int] = {}
    sizes: dict[Key, int] = {}
    begin = 0
    for stream in sorted(by_stream):
        placed: list[tuple[int, int, Life]] = []  # start, end
        for life in by_stream[stream]:
            size = -(-life.nbytes // ALIGNMENT) * ALIGNMENT
            busy = sorted((start, end) for start, end, other in placed if other.meets(life))
            start = _best_gap(busy, size, begin)
            placed.append((start, start + size, life))
            offsets[life.key], sizes[life.key] = start, life.nbytes
        begin = max((end for _, end, _ in placed), default=begin)
    return Layout(offsets, sizes, begin)


def _best_gap(busy: list[tuple[int, int]], size: int, begin: int) -> int:
    best: tuple[int, int] | None = None  # what would be left over, start
    at = begin
    for start, end in busy:
        if start - at >= size and (best is None or start - at - size < best[0]):
            best = start - at - size, at
        at = max(at, end)
    return at if best is None else best[1]
