"""The memory that a rank writes and its watcher reads: where the rank is, and the order of its
collectives in each process group.

    word 0         where it is: phase, unit
    word 1         steps that have ended
    word 16 + t    track t: how many collectives were issued, or words exchanged over the store
    then, for each track, a ring of entries: the hash of the whole order up to it; verb, unit, step

A track is one process group, or the ranks of one as they agree over the store. Its hash after n
collectives is the same on all ranks of the group, or their orders differ. A second track of a group
has the units that were gathered, in the order in which they were needed: gathers that come ahead of
need may match where that does not. A third has all units that ran, which tells more of why.
"""

from __future__ import annotations

import mmap
import os
import zlib

TRACKS, RING, _WORDS = 32, 2048, 48
NBYTES = 8 * (_WORDS + TRACKS * RING * 2)
VERBS = ("gather", "reduce-scatter", "all-reduce", "forward", "backward", "exchange", "use")
GATHER, SCATTER, ALL_REDUCE, FORWARD, BACKWARD, EXCHANGE, USE = range(7)
BETWEEN = 15  # no unit runs
RUNS = "runs of "  # before a group's name: the order in which its ranks run units
USES = "uses of "  # the order in which its ranks come to need what was gathered
WORDS = "words of "  # what its ranks tell each other over the store
_PRIME, _MASK = 0x100000001B3, (1 << 64) - 1


def make() -> int:
    """A descriptor of a new page; nothing on a disk holds it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("shardwise-watch")
    else:
        import tempfile

        fd, path = tempfile.mkstemp(prefix="shardwise-watch-")
        os.unlink(path)
    os.ftruncate(fd, NBYTES)
    return fd


def open_words(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, NBYTES)).cast("Q")


class Page:
    """Where this rank is, as it goes."""

    def __init__(self, fd: int, units: Units) -> None:
        self._words, self._units = open_words(fd), units

    def track(self, number: int) -> Track:
        return Track(self._words, number, self._units)

    def enter(self, verb: int, unit: str, track: Track | None) -> None:
        """It now runs a unit: its forward, or its backward."""
        self._words[0] = self._units[unit][0] << 4 | verb
        if track is not None:
            track.add(verb, unit)

    def end_step(self) -> None:
        self._words[0] = BETWEEN
        self._words[1] += 1


class Track:
    """One process group's collectives, as this rank issues them."""

    def __init__(self, words: memoryview, number: int, units: Units) -> None:
        self._words, self._units = words, units
        self._count_at, self._ring_at = 16 + number, _WORDS + number * RING * 2
        self.count = self.hash = 0

    def add(self, verb: int, unit: str) -> None:
        """`verb` of `unit` is about to be issued. The entry is written before the count."""
        words, (number, code) = self._words, self._units[unit]
        self.count = count = self.count + 1
        self.hash = value = ((self.hash ^ (code + verb)) * _PRIME) & _MASK
        at = self._ring_at + count % RING * 2
        words[at] = value
        words[at + 1] = words[1] << 32 | number << 4 | verb
        words[self._count_at] = count


class Units(dict[str, tuple[int, int]]):
    """The number and the code of each unit by its name; the code is the same on every rank."""

    def __missing__(self, name: str) -> tuple[int, int]:
        self[name] = known = (len(self) & 0xFFFFFFF, zlib.crc32(name.encode()) << 3)
        self.met(known[0], name)
        return known

    def met(self, number: int, name: str) -> None:
        """A new name; its watcher has to be told."""


class Reader:
    """The page as the watcher sees it."""

    def __init__(self, fd: int) -> None:
        self._words = open_words(fd)
        self.units: dict[int, str] = {}

    def count(self, track: int) -> int:
        return self._words[16 + track]

    @property
    def place(self) -> str:
        """Where the rank is, in words."""
        word, step = self._words[0], self._words[1] + 1
        verb, unit = word & 15, self.units.get(word >> 4)
        if verb not in (FORWARD, BACKWARD) or unit is None:
            return f"after step {step - 1}" if step > 1 else ""
        return f"in step {step}, {VERBS[verb]} of unit {unit}"

    def hash_at(self, track: int, count: int) -> int | None:
        """The hash of the first `count` collectives; None if the ring no longer has it."""
        if count == 0:
            return 0
        at = _WORDS + track * RING * 2 + count % RING * 2
        value = self._words[at]
        return value if 0 <= self.count(track) - count < RING - 1 else None

    def entries(self, track: int, start: int) -> list[list[object]]:
        """[count, hash, verb, unit, step] of all from `start` on that the ring still has."""
        found: list[list[object]] = []
        for count in range(max(start, self.count(track) - RING + 2, 1), self.count(track) + 1):
            at = _WORDS + track * RING * 2 + count % RING * 2
            value, word = self._words[at], self._words[at + 1]
            unit = self.units.get(word >> 4 & 0xFFFFFFF, "?")
            found.append([count, value, VERBS[word & 15], unit, (word >> 32) + 1])
        return found
