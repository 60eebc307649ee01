"""Messages between ranks of one host, through memory that they share instead of gloo's sockets.

Every rank of a group has a region, which all of them map when they meet:

    | published, closed, token | entries: what each message is, and where | acks | messages ... |

A message is copied into its sender's region when it is issued, and `published` counts it; whoever
waits for it reads the others' regions itself, straight to where the result belongs, and writes that
it has read (an ack) beside the sender's entry. When all have, its memory is free for the next. So
nothing runs beside the program: no thread, no lock, and what is published can be read even after
its sender has ended.

All ranks issue the same messages in the same order, as with any collective; an entry that differs
is an error. A wait sleeps in the kernel (a futex on `published`), and looks now and then whether
the rank that it waits for is still there.
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
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from shardwise.planning.executor import NEAR_BYTES, NEAR_RANKS
from shardwise.watch import rank as watched

OFF = "SHARDWISE_SHARED_MEMORY"  # "0" leaves everything to gloo
# Every rank reads what all others sent: of more ranks, gloo's ring is less work.
MOST_RANKS, LARGEST = NEAR_RANKS, NEAR_BYTES
_REGION = 64 * 2**30  # addresses of a region: pages are taken when they are first written
_ENTRIES = 1024  # messages of a rank that somebody may still have to read
_HEAD, _ENTRY = 8, 4  # words of 8 bytes
_PUBLISHED, _CLOSED, _TOKEN = 0, 1, 2  # words of the head
_ALIGNED = 4096
_BLOCK = 2**16  # elements that are added at a time: they stay in the processor's cache
_LOOK_S = 0.05  # between two looks for a rank that has gone
_GRACE_S = 4.0  # for the watch, which knows more of what another rank did than this one does
_KINDS = {"all_gather": 1, "reduce_scatter": 2, "all_reduce": 3}
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_PASSES = 0 if platform.machine() == "x86_64" else 2


class Gone(ConnectionError):
    """Another rank will not send what is waited for."""


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
        self.pid = pid
        self._map = mmap.mmap(fd, _REGION)
        self.first = (_HEAD + _ENTRIES * (_ENTRY + ranks)) * 8  # byte of a message
        self.words = memoryview(self._map)[: self.first].cast("q")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._watched: Any = None  # tells that its process has ended

    def bytes_at(self, start: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self._map, dtype=torch.uint8, count=nbytes, offset=start)

    def entry(self, number: int) -> int:
        """The first word of the entry of a message."""
        return _HEAD + number % _ENTRIES * _ENTRY

    def ack(self, number: int, rank: int, ranks: int) -> int:
        """The word in which a rank says that it has read a message."""
        return _HEAD + _ENTRIES * _ENTRY + number % _ENTRIES * ranks + rank

    @property
    def has_ended(self) -> bool:
        """Its process is no more. (One that has ended and was not waited for yet still has a
        number, so asking for that would not tell.)
        """
        if self._watched is None:
            try:
                fd = os.pidfd_open(self.pid)
            except ProcessLookupError:
                return True
            self._watched = select.poll()
            self._watched.register(fd, select.POLLIN)
            self._fd = fd
        return bool(self._watched.poll(0))

    def __del__(self) -> None:
        if getattr(self, "_watched", None) is not None:
            os.close(self._fd)


Read = Callable[[Sequence[torch.Tensor]], None]  # of all ranks' messages, as bytes


class Message:
    """A message of this rank's that was issued, and the others' that belong to it: a `Handle`.
    `read` brings them together; without it whoever waited takes them from `found`, then `end`s.
    """

    def __init__(self, near: Near, number: int, entry: tuple[int, int], read: Read | None) -> None:
        self._near, self._number, self._entry, self._read = near, number, entry, read
        self.found: Sequence[torch.Tensor] = ()  # of all ranks, as bytes, once they are there
        self._ended = False

    def wait(self) -> None:
        """Wait until all have sent theirs."""
        if self._ended or self.found:
            return
        try:
            self.found = self._near.receive(self._number, self._entry)
            if self._read is not None:
                self._read(self.found)
        except BaseException:
            self.end()
            raise
        if self._read is not None:
            self.end()

    def end(self) -> None:
        """Nobody reads it here any more: its senders may have their memory back."""
        if not self._ended:
            self._ended, self.found, self._read = True, (), None
            self._near.acknowledge(self._number)

    def __del__(self) -> None:
        self.end()


class Near:
    """The ranks of a group, all on this host."""

    def __init__(self, regions: Sequence[Region], rank: int, timeout_s: float) -> None:
        self._regions, self._rank, self._size = regions, rank, len(regions)
        self._own, self._timeout_s = regions[rank], timeout_s
        self._others = [r for r in range(self._size) if r != rank]
        self._gaps = Gaps(-(-self._own.first // _ALIGNED) * _ALIGNED, _REGION)
        self._under_way: dict[int, tuple[int, int]] = {}  # by number: where, how many bytes
        self._issued = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fence = threading.Lock()

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Message:
        """Every rank's `input`, one after the other, into `output`, of which it may be a part."""
        sent, places = _bytes_of(input), _bytes_of(output).view(self._size, -1)
        if places[self._rank].data_ptr() != sent.data_ptr():
            places[self._rank].copy_(sent)

        def read(messages: Sequence[torch.Tensor]) -> None:
            for rank in self._others:
                places[rank].copy_(messages[rank])

        return self._issue("all_gather", sent.numel(), [(0, sent)], read)

    def post(self, source: torch.Tensor, dtype: torch.dtype) -> Message:
        """Every rank's `source` in another dtype, to be read by the caller."""
        nbytes = source.numel() * dtype.itemsize
        return self._issue("all_gather", nbytes, [(0, source)], None, dtype)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Message:
        """This rank's part of everybody's `input`, added in the order of the ranks."""
        sent, into = _bytes_of(input), output.data.view(-1)
        part = sent.numel() // self._size
        own = slice(part * self._rank, part * (self._rank + 1))
        pieces = [(0, sent[: own.start]), (own.stop, sent[own.stop :])]  # for the others

        def read(messages: Sequence[torch.Tensor]) -> None:
            parts = [message[own].view(input.dtype) for message in messages]
            parts[self._rank] = sent[own].view(input.dtype)
            _add(parts, into)

        return self._issue("reduce_scatter", sent.numel(), pieces, read)

    def all_reduce(self, tensor: torch.Tensor) -> Message:
        """The sum over ranks, in place, added in the same order on each."""
        sent, into = _bytes_of(tensor), tensor.data.view(-1)

        def read(messages: Sequence[torch.Tensor]) -> None:
            found = [message.view(tensor.dtype) for message in messages]
            if self._size == 2:  # which comes first makes no difference
                into.add_(found[1 - self._rank])
            else:
                _add(found, into)

        return self._issue("all_reduce", sent.numel(), [(0, sent)], read)

    def _issue(
        self,
        kind: str,
        nbytes: int,
        pieces: list[tuple[int, torch.Tensor]],
        read: Read | None,
        dtype: torch.dtype = torch.uint8,
    ) -> Message:
        """Copy the pieces of a message to their places in it, as `dtype`, and publish it."""
        self._issued = number = self._issued + 1
        start = self._take(number, nbytes)
        for at, piece in pieces:
            if piece.numel():
                size = piece.numel() * dtype.itemsize
                self._own.bytes_at(start + at, size).view(dtype).copy_(piece)
        own, entry = self._own, (_KINDS[kind], nbytes)
        words, at = own.words, own.entry(number)
        words[at], words[at + 1], words[at + 2] = *entry, start
        self._order_memory()
        words[_PUBLISHED] = number
        self._wake()
        return Message(self, number, entry, read)

    def _take(self, number: int, nbytes: int) -> int:
        """Memory for a message that all can read. There nearly always is some: else the others have
        not read for a very long time.
        """
        self._reclaim()
        wanted, until = -(-nbytes // _ALIGNED) * _ALIGNED, time.monotonic() + self._timeout_s
        while number - _ENTRIES in self._under_way or (start := self._gaps.take(wanted)) is None:
            time.sleep(1e-3)
            gone = [rank for rank in self._others if self._has_left(rank)]
            oldest = f"read message {min(self._under_way)}"
            self._check(bool(gone), until, (gone or self._others)[0], oldest)
            self._reclaim()
        self._under_way[number] = start, wanted
        return start

    def _reclaim(self) -> None:
        """Free the memory of messages that all have read; this rank may read its own, too."""
        words, size = self._own.words, self._size
        for number in list(self._under_way):
            first = self._own.ack(number, 0, size)
            if all(words[first + rank] == number for rank in range(size)):
                self._gaps.give(*self._under_way.pop(number))

    def receive(self, number: int, entry: tuple[int, int]) -> list[torch.Tensor]:
        """All ranks' messages of this number, once they are there."""
        for rank in self._others:
            if self._regions[rank].words[_PUBLISHED] < number:
                self._wait_for(rank, number)
        self._order_memory()
        found = []
        for rank, region in enumerate(self._regions):
            at = region.entry(number)
            kind, nbytes, start = region.words[at : at + 3].tolist()
            if (kind, nbytes) != entry:
                _leave_to_watch()
                names = {value: name for name, value in _KINDS.items()}
                raise RuntimeError(
                    f"ranks of one group call different collectives: message {number} is an "
                    f"{names[entry[0]]} of {entry[1]} bytes on rank {self._rank} of the group, and "
                    f"an {names.get(kind, kind)} of {nbytes} bytes on rank {rank}"
                )
            found.append(region.bytes_at(start, nbytes))
        return found

    def acknowledge(self, number: int) -> None:
        """This rank reads a message no more."""
        if os.getpid() != self._own.pid:  # a copy of the process, which is no rank
            return
        self._order_memory()
        for region in self._regions:
            region.words[region.ack(number, self._rank, self._size)] = number

    def _wait_for(self, rank: int, number: int) -> None:
        """Sleep until a rank has published so many messages."""
        region, until = self._regions[rank], time.monotonic() + self._timeout_s
        pause = _Timespec(0, int(_LOOK_S * 1e9))
        while (published := region.words[_PUBLISHED]) < number:
            # Returns at once if `published` has moved meanwhile.
            self._libc.syscall(
                _FUTEX, ctypes.c_void_p(region.address), _FUTEX_WAIT,
                ctypes.c_uint32(published & 0xFFFFFFFF), ctypes.byref(pause), None, 0,
            )  # fmt: skip
            gone = self._has_left(rank)  # first: what it published before it left counts
            if region.words[_PUBLISHED] < number:
                self._check(gone, until, rank, f"sent message {number}")

    def _has_left(self, rank: int) -> bool:
        region = self._regions[rank]
        return bool(region.words[_CLOSED]) or region.has_ended

    def _check(self, gone: bool, until: float, rank: int, what: str) -> None:
        """Error if a rank never will, or has not in time."""
        who = f"rank {rank} of a group of {self._size} on this host"
        if gone:
            _leave_to_watch()
            raise Gone(f"connection closed by peer: {who} has left, and has not {what}")
        if time.monotonic() > until:
            raise Gone(
                f"timed out waiting for {who}, which has not {what} in {self._timeout_s:.0f} s"
            )

    def _wake(self) -> None:
        """Let whoever sleeps for this rank look again."""
        address = ctypes.c_void_p(self._own.address)
        self._libc.syscall(_FUTEX, address, _FUTEX_WAKE, ctypes.c_uint32(2**31 - 1), None, None, 0)

    def _order_memory(self) -> None:
        """What was written before is seen before what is written after, and so for reads. x86 keeps
        that order by itself; elsewhere the two passes of a lock do.
        """
        for _ in range(_PASSES):
            with self._fence:
                pass

    def __del__(self) -> None:
        if os.getpid() == self._own.pid:
            self._own.words[_CLOSED] = 1
            self._wake()


def _add(parts: Sequence[torch.Tensor], into: torch.Tensor) -> None:
    """The sum of all parts in their order, block by block, in the dtype of `into`."""
    first, *rest = parts
    for start in range(0, into.numel(), _BLOCK):
        block = slice(start, start + _BLOCK)
        total = into[block]
        total.copy_(first[block])
        for part in rest:
            total.add_(part[block])


def _leave_to_watch() -> None:
    """Another rank's fault is about to be an error here. Where ranks are watched, this one is ended
    first, with one message of what happened where.
    """
    if watched.on is not None:
        time.sleep(_GRACE_S)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory. Writes to it leave the counter alone that autograd checks."""
    return tensor.data.view(-1).view(torch.uint8)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


Exchange = Callable[[object], list[Any]]


def meet(
    exchange: Exchange, size: int, rank: int, timeout_s: float, offers_memory: bool = True
) -> Near | None:
    """The memory that all ranks of a group share, if each can map that of each; else None, on all
    of them. All call it, and `exchange` tells everybody's word to everybody.
    """
    fd, offer = _make_region() if offers_memory else (-1, None)
    try:
        offers = exchange(offer)
        hosts, pids = ({each[i] for each in offers if each is not None} for i in (0, 1))
        if None in offers or len(hosts) > 1 or len(pids) < size:
            return None
        regions = _map_regions(offers)
        if not all(exchange(regions is not None)):
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    assert regions is not None
    return Near(regions, rank, timeout_s)


def _make_region() -> tuple[int, tuple[str, int, int, int] | None]:
    """A new region, and how others find it: on which host, in which process, by which number, and
    what stands in it; none where there cannot be one.
    """
    known = sys.platform == "linux" and _FUTEX is not None and hasattr(os, "pidfd_open")
    if not known or os.environ.get(OFF) == "0":
        return -1, None
    try:
        fd = os.memfd_create("shardwise", os.MFD_CLOEXEC)
    except OSError:
        return -1, None
    try:
        os.ftruncate(fd, _REGION)
        token = secrets.randbits(62)
        os.pwrite(fd, struct.pack("q", token), _TOKEN * 8)
        os.close(os.pidfd_open(os.getpid()))
        return fd, (_host(), os.getpid(), fd, token)
    except OSError:
        return fd, None


def _host() -> str:
    """Ranks that have all of this in common see each other's processes, and cost nothing on a link:
    network namespaces of one machine may stand for several.
    """
    spaces = [os.readlink(f"/proc/self/ns/{space}") for space in ("pid", "net")]
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return " ".join([boot, *spaces])


def _map_regions(offers: Sequence[tuple[str, int, int, int]]) -> list[Region] | None:
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
        if regions[-1].words[_TOKEN] != token:
            return None
    return regions
