"""Messages between ranks of one host, through memory that they share instead of gloo's sockets.

A message is copied into its sender's region (`regions.py` draws one) when it is issued; whoever
waits for it reads the others' regions itself, straight to where the result belongs, and says so
there. When all have, its memory is free for the next. So nothing runs beside the program: no
thread, no lock, and what is published can be read even after its sender has ended.

All ranks issue the same messages in the same order, as with any collective; an entry that differs
is an error. A wait sleeps in the kernel, and looks now and then whether the rank that it waits for
is still there.
"""

from __future__ import annotations

import gc
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shardwise.engine.regions import ENTRIES, PAGE, Region, make_region, map_regions, order_memory
from shardwise.planning.executor import NEAR_BYTES, NEAR_RANKS
from shardwise.watch import rank as watched

# Every rank reads what all others sent: of more ranks, gloo's ring is less work.
MOST_RANKS, LARGEST = NEAR_RANKS, NEAR_BYTES
_BLOCK = 2**16  # elements that are added at a time: they stay in the processor's cache
_LOOK_S = 0.05  # between two looks for a rank that has gone
_COLLECT_S = 0.5  # of waiting, before what nobody refers to is collected
_GRACE_S = 4.0  # for the watch, which knows more of what another rank did than this one does
_KINDS = {
    "all_gather": 1, "reduce_scatter": 2, "all_reduce": 3, "broadcast": 4, "add_part": 5,
    "share_part": 6,
}  # fmt: skip


class Gone(ConnectionError):
    """Another rank will not send what is waited for."""


Read = Callable[[Sequence[torch.Tensor]], None]  # of all ranks' messages, as bytes


class Message:
    """A message of this rank's that was issued, and the others' that belong to it: a `Handle`.
    `read` brings them together; without it whoever waited takes them from `found`, then `end`s.
    """

    def __init__(self, near: Near, number: int, entry: tuple[int, int], read: Read | None) -> None:
        self._near, self._number, self._entry, self._read = near, number, entry, read
        self.found: Sequence[torch.Tensor] = ()  # of all ranks, as bytes, once they are there
        self._ended = False
        # For a profile: it was on its way from when it was published until all others' were.
        self.started = time.perf_counter()
        self.ended: float | None = None

    @property
    def flow(self) -> Message:
        return self

    def wait(self) -> None:
        """Wait until all have sent theirs."""
        if self._ended or self.found:
            return
        try:
            self.found = self._near.receive(self._number, self._entry)
            self.ended = time.perf_counter()
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
        if not sys.is_finalizing():
            self.end()


class Near:
    """The ranks of a group, all on this host."""

    def __init__(self, regions: Sequence[Region], rank: int, timeout_s: float) -> None:
        self._regions, self._rank, self.size = regions, rank, len(regions)
        self._own, self._timeout_s = regions[rank], timeout_s
        self._others = [r for r in range(self.size) if r != rank]
        self._under_way: dict[int, tuple[int, int]] = {}  # by number: where, how many bytes
        self._issued = 0
        self.leave = weakref.finalize(self, self._own.close)  # or at the process's end

    def all_gather(self, *pairs: tuple[torch.Tensor, torch.Tensor]) -> Message:
        """Of each (output, input) every rank's `input`, one after the other, into `output`, of
        which it may be a part. All of them are one message.
        """
        sent, places, at = [], [], 0
        for output, input in pairs:
            own, parts = _bytes_of(input), _bytes_of(output).view(self.size, -1)
            if parts[self._rank].data_ptr() != own.data_ptr():
                parts[self._rank].copy_(own)
            sent.append((at, own))
            places.append((at, parts))
            at += own.numel()

        def read(messages: Sequence[torch.Tensor]) -> None:
            for start, parts in places:
                for rank in self._others:
                    parts[rank].copy_(messages[rank][start : start + parts.shape[1]])

        return self._issue("all_gather", at, sent, read)

    def post(self, source: torch.Tensor, dtype: torch.dtype) -> Message:
        """Every rank's `source` in another dtype, to be read by the caller."""
        nbytes = source.numel() * dtype.itemsize
        return self._issue("all_gather", nbytes, [(0, source)], None, dtype)

    def reduce_scatter(self, output: torch.Tensor, input: torch.Tensor) -> Message:
        """This rank's part of everybody's `input`, added in the order of the ranks."""
        sent, into = _bytes_of(input), output.data.view(-1)
        part = sent.numel() // self.size
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
            if self.size == 2:  # which comes first makes no difference
                into.add_(found[1 - self._rank])
            else:
                _add(found, into)

        return self._issue("all_reduce", sent.numel(), [(0, sent)], read)

    def part_of(self, tensor: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """A rank's part of a tensor, in elements and in place: of a short one it may be empty."""
        part = -(-tensor.numel() // self.size)
        start = part * (self._rank if rank is None else rank)
        return tensor.data.view(-1)[start : start + part]

    def add_part(self, tensor: torch.Tensor) -> Message:
        """The sum over ranks in this rank's part of `tensor`. The rest of it stays as it is."""
        sent, into = _bytes_of(tensor), self.part_of(tensor)

        def read(messages: Sequence[torch.Tensor]) -> None:
            _add([self.part_of(message.view(tensor.dtype)) for message in messages], into)

        return self._issue("add_part", sent.numel(), [(0, sent)], read)

    def share_part(self, tensor: torch.Tensor) -> Message:
        """Every rank's part of its `tensor`, in place of what others have there."""
        own = self.part_of(tensor)
        at = int(own.storage_offset() - tensor.storage_offset())

        def read(messages: Sequence[torch.Tensor]) -> None:
            for rank in self._others:
                self.part_of(tensor, rank).copy_(
                    self.part_of(messages[rank].view(tensor.dtype), rank)
                )

        pieces = [(at * tensor.itemsize, _bytes_of(own))]
        return self._issue("share_part", tensor.nbytes, pieces, read)

    def broadcast(self, tensor: torch.Tensor) -> Message:
        """The first rank's values, in place."""
        held = _bytes_of(tensor)

        def read(messages: Sequence[torch.Tensor]) -> None:
            if self._rank:
                held.copy_(messages[0])

        pieces = [] if self._rank else [(0, held)]
        return self._issue("broadcast", held.numel(), pieces, read)

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
        entry = _KINDS[kind], nbytes
        self._own.publish(number, *entry, start)
        return Message(self, number, entry, read)

    def _take(self, number: int, nbytes: int) -> int:
        """Memory for a message that all can read. There nearly always is some: else the others have
        not read for a very long time.
        """
        self._reclaim()
        wanted, until = -(-nbytes // PAGE) * PAGE, time.monotonic() + self._timeout_s
        collect = _Collector()
        while number - ENTRIES in self._under_way or (start := self._own.gaps.take(wanted)) is None:
            time.sleep(1e-3)
            collect.look()
            gone = [rank for rank in self._others if self._regions[rank].has_left]
            oldest = f"read message {min(self._under_way)}"
            self._check(bool(gone), until, (gone or self._others)[0], oldest)
            self._reclaim()
        self._under_way[number] = start, wanted
        return start

    def _reclaim(self) -> None:
        """Free the memory of messages that all have read; this rank may read its own, too."""
        for number in list(self._under_way):
            if self._own.is_read(number):
                self._own.gaps.give(*self._under_way.pop(number))

    def receive(self, number: int, entry: tuple[int, int]) -> list[torch.Tensor]:
        """All ranks' messages of this number, once they are there."""
        for rank in self._others:
            if self._regions[rank].published < number:
                self._wait_for(rank, number)
        order_memory()
        found = []
        for rank, region in enumerate(self._regions):
            kind, nbytes, start = region.entry(number)
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
        order_memory()
        for region in self._regions:
            region.acknowledge(number, self._rank)

    def _wait_for(self, rank: int, number: int) -> None:
        """Sleep until a rank has published so many messages."""
        region, until = self._regions[rank], time.monotonic() + self._timeout_s
        collect = _Collector()
        while (published := region.published) < number:
            region.sleep(published, _LOOK_S)
            collect.look()
            gone = region.has_left  # first: what it published before it left counts
            if region.published < number:
                self._check(gone, until, rank, f"sent message {number}")

    def _check(self, gone: bool, until: float, rank: int, what: str) -> None:
        """Error if a rank never will, or has not in time."""
        who = f"rank {rank} of a group of {self.size} on this host"
        if gone:
            _leave_to_watch()
            raise Gone(f"connection closed by peer: {who} has left, and has not {what}")
        if time.monotonic() > until:
            raise Gone(
                f"timed out waiting for {who}, which has not {what} in {self._timeout_s:.0f} s"
            )


class _Collector:
    """Of a rank that waits long: another one may wait in turn for a message to be read that only a
    cycle of references keeps here. Such are collected once.
    """

    def __init__(self) -> None:
        self._at = time.monotonic() + _COLLECT_S

    def look(self) -> None:
        if time.monotonic() > self._at:
            self._at = math.inf
            gc.collect()


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


Exchange = Callable[[object], list[Any]]


def meet(
    exchange: Exchange, size: int, rank: int, timeout_s: float, offers_memory: bool = True
) -> Near | None:
    """The memory that all ranks of a group share, if each can map that of each; else None, on all
    of them. All call it, and `exchange` tells everybody's word to everybody.
    """
    fd, offer = make_region() if offers_memory else (-1, None)
    try:
        offers = exchange(offer)
        hosts, pids = ({each[i] for each in offers if each is not None} for i in (0, 1))
        if None in offers or len(hosts) > 1 or len(pids) < size:
            return None
        regions = map_regions(offers)
        if not all(exchange(regions is not None)):
            return None
    finally:
        if fd >= 0:
            os.close(fd)
    assert regions is not None
    return Near(regions, rank, timeout_s)
