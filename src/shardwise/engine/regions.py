"""Memory that ranks of one host share: a region of each, which all of them map.

    | published, closed, token | entries: what each message is, and where | acks | messages ... |

Only its owner writes to a region, but for the acks: there each rank writes, beside the entry of a
message, that it has read it. `near.py` says what is sent so.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import secrets
import select
import struct
import sys
import threading
from bisect import bisect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

OFF = "SHARDWISE_SHARED_MEMORY"  # "0" leaves everything to gloo
ENTRIES = 1024  # messages of a rank that somebody may still have to read
_ADDRESSES = 64 * 2**30  # of a region: pages are taken when they are first written
PAGE = 4096
_HEAD, _ENTRY = 8, 4  # words of 8 bytes
_PUBLISHED, _CLOSED, _TOKEN = 0, 1, 2  # words of the head
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PASSES = 0 if platform.machine() == "x86_64" else 2
_fence = threading.Lock()
Offer = tuple[str, int, int, int]  # a region's host, process, number there, and token


def order_memory() -> None:
    """What was written before is seen before what is written after, and so for reads. x86 keeps
    that order by itself; elsewhere the two passes of a lock do.
    """
    for _ in range(_PASSES):
        with _fence:
            pass


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Gaps:
    """Which bytes of a region nobody uses."""

    def __init__(self, start: int, end: int) -> None:
        self._gaps = [(start, end)]  # in order, and none beside another

    def take(self, nbytes: int) -> int | None:
        """Where so many are free, the first such place; None if there is none."""
        for i, (start, end) in enumerate(self._gaps):
            if end - start >= nbytes:
                self._gaps[i : i + 1] = [(start + nbytes, end)] if end - start > nbytes else []
                return start
        return None

    def give(self, start: int, nbytes: int) -> None:
        end = start + nbytes
        i = bisect(self._gaps, (start, end))
        if i < len(self._gaps) and self._gaps[i][0] == end:
            end = self._gaps.pop(i)[1]
        if i and self._gaps[i - 1][1] == start:
            i -= 1
            start = self._gaps.pop(i)[0]
        self._gaps.insert(i, (start, end))


class Region:
    """One rank's memory, as this process maps it."""

    def __init__(self, fd: int, ranks: int, pid: int) -> None:
        self.pid, self._ranks = pid, ranks
        self._map = mmap.mmap(fd, _ADDRESSES)
        self._map.madvise(mmap.MADV_DONTDUMP)
        head = (_HEAD + ENTRIES * (_ENTRY + ranks)) * 8
        self._words = memoryview(self._map)[:head].cast("q")
        self._address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(self._map)))
        self._libc = ctypes.CDLL(None)
        self._watched: Any = None  # tells that its process has ended
        self.gaps = Gaps(-(-head // PAGE) * PAGE, _ADDRESSES)

    def bytes_at(self, start: int, nbytes: int) -> torch.Tensor:
        if not nbytes:  # parameters without elements
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)

    # What its owner says

    @property
    def token(self) -> int:
        return self._words[_TOKEN]

    @property
    def published(self) -> int:
        """How many messages."""
        return self._words[_PUBLISHED]

    def publish(self, number: int, kind: int, nbytes: int, start: int) -> None:
        """Let the others have a message, which is written."""
        at = _HEAD + number % ENTRIES * _ENTRY
        words = self._words
        words[at], words[at + 1], words[at + 2] = kind, nbytes, start
        order_memory()
        words[_PUBLISHED] = number
        self._wake()

    def entry(self, number: int) -> tuple[int, int, int]:
        """Of a message: kind, bytes, and where it is."""
        at = _HEAD + number % ENTRIES * _ENTRY
        return self._words[at], self._words[at + 1], self._words[at + 2]

    def close(self) -> None:
        """Nothing more will be sent; who waits for it shall know. Not in a copy of the process."""
        if os.getpid() == self.pid:
            self._words[_CLOSED] = 1
            self._wake()

    # What others say

    def acknowledge(self, number: int, rank: int) -> None:
        """A rank has read a message."""
        self._words[self._acks(number) + rank] = number

    def is_read(self, number: int) -> bool:
        """By all, its owner too."""
        first = self._acks(number)
        return all(self._words[first + rank] == number for rank in range(self._ranks))

    def _acks(self, number: int) -> int:
        return _HEAD + ENTRIES * _ENTRY + number % ENTRIES * self._ranks

    # Waiting

    def sleep(self, published: int, seconds: float) -> None:
        """Until more than so many messages are published; returns at once if they are, and after
        some seconds in any case.
        """
        pause = _Timespec(0, int(seconds * 1e9))
        seen = ctypes.c_uint32(published & 0xFFFFFFFF)
        self._libc.syscall(_FUTEX, self._address, _FUTEX_WAIT, seen, ctypes.byref(pause), None, 0)

    def _wake(self) -> None:
        everybody = ctypes.c_uint32(2**31 - 1)
        self._libc.syscall(_FUTEX, self._address, _FUTEX_WAKE, everybody, None, None, 0)

    @property
    def has_left(self) -> bool:
        """Its owner has closed it, or has ended. (A process that has ended and was not waited for
        yet still has a number, so asking for that would not tell.)
        """
        if self._words[_CLOSED]:
            return True
        if self._watched is None:
            try:
                self._fd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            self._watched = select.poll()
            self._watched.register(self._fd, select.POLLIN)
        return bool(self._watched.poll(0))

    def __del__(self) -> None:
        if getattr(self, "_watched", None) is not None:
            os.close(self._fd)


def make_region() -> tuple[int, Offer | None]:
    """A new region, and how others find it; none where there cannot be one."""
    known = sys.platform == "linux" and _FUTEX is not None and hasattr(os, "pidfd_open")
    if not known or os.environ.get(OFF) == "0":
        return -1, None
    try:
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
    except OSError:
        return -1, None
    try:
        os.ftruncate(fd, _ADDRESSES)
        token = secrets.randbits(62)
        os.pwrite(fd, struct.pack("q", token), _TOKEN * 8)
        os.close(os.pidfd_open(os.getpid()))
        return fd, (host(), os.getpid(), fd, token)
    except OSError:
        return fd, None


def host() -> str:
    """Ranks that have all of this in common see each other's processes, and cost nothing on a link:
    network namespaces of one machine may stand for several.
    """
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return " ".join([boot, *spaces])


def map_regions(offers: Sequence[Offer]) -> list[Region] | None:
    """The regions of all ranks; None if one cannot be mapped."""
    regions = []
    for _, pid, theirs, token in offers:
        try:
            fd = os.open(f"/proc/{pid}/fd/{theirs}", os.O_RDWR | os.O_CLOEXEC)
            try:
                regions.append(Region(fd, len(offers), pid))
            finally:
                os.close(fd)
        except (OSError, ValueError):  # not allowed, or no room for so many addresses
            return None
        if regions[-1].token != token:
            return None
    return regions
