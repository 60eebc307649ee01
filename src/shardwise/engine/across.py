"""All-reduces over several hosts with several ranks on each: added inside a host first, through the
memory that its ranks share, and only then between hosts.

A ring of all n ranks sends 2 (n - 1) / n of a message over each host's link, one of h hosts
2 (h - 1) / h: two thirds of it for two hosts of two ranks. Each rank of a host adds up one part of
a message and exchanges it with its counterparts on the other hosts, over gloo; then all ranks of
the host read the sums from each other.

Two threads do that beside the program, as gloo's do theirs: one adds and sends, one waits and
shares. Both take messages in the order in which they were issued, which is the same on all ranks,
so a message waits for no rank's program to come anywhere but to its issue.
"""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from queue import SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.engine import torch_private
from shardwise.engine.near import MOST_RANKS, Near, meet
from shardwise.engine.words import Control, PerWorld

_PATIENCE_S = 2.0

if TYPE_CHECKING:
    Jobs = SimpleQueue["Sum | None"]  # None: no more


@dataclass(eq=False)
class Sum:
    """One message: a `Handle`."""

    tensor: torch.Tensor | None
    sent: Any = None  # what gloo waits for
    error: BaseException | None = None
    # For a profile: when it was issued, and when it had come.
    started: float = field(default_factory=time.perf_counter)
    ended: float | None = None
    _has_come: Event = field(default_factory=Event)

    @property
    def flow(self) -> Sum:
        return self

    def wait(self) -> None:
        """Wait until the sum stands in the tensor."""
        self._has_come.wait()
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None = None) -> None:
        self.tensor = self.sent = None
        self.error, self.ended = error, time.perf_counter()
        self._has_come.set()


class Across:
    """The ranks of a group, as many on each of its hosts. `adds` and `shares` are the memory of
    this host's, for each thread its own; `between` are this rank's counterparts on all hosts.
    """

    def __init__(self, adds: Near, shares: Near, between: dist.ProcessGroup) -> None:
        self._issued: Jobs = SimpleQueue()
        added: Jobs = SimpleQueue()
        threads = [
            Thread(target=_add_all, args=(self._issued, added, adds, between), daemon=True),
            Thread(target=_share_all, args=(added, shares), daemon=True),
        ]
        for thread in threads:
            thread.start()
        weakref.finalize(self, _end, self._issued, threads)  # or at the process's end

    def all_reduce(self, tensor: torch.Tensor) -> Sum:
        """The sum over ranks, in place: the same on each."""
        issued = Sum(tensor)
        self._issued.put(issued)
        return issued


def _end(issued: Jobs, threads: list[Thread]) -> None:
    """Let the threads end while the interpreter is whole: one of them may be the last to hold a
    group of gloo's. One that waits for a rank that has gone is left to the process's end.
    """
    issued.put(None)
    for thread in threads:
        thread.join(_PATIENCE_S)


def _add_all(issued: Jobs, added: Jobs, near: Near, between: dist.ProcessGroup) -> None:
    while _add(issued.get(), added, near, between):
        pass


@torch.no_grad()
def _add(job: Sum | None, added: Jobs, near: Near, between: dist.ProcessGroup) -> bool:
    """Add this rank's part inside the host, and send it to the others. False if it was the last."""
    if job is None:
        added.put(None)
        return False
    try:
        assert job.tensor is not None
        near.add_part(job.tensor).wait()
        part = near.part_of(job.tensor)
        if part.numel():
            job.sent = dist.all_reduce(part, group=between, async_op=True)
    except BaseException as error:
        job.end(error)
    else:
        added.put(job)
    return True


def _share_all(added: Jobs, near: Near) -> None:
    while _share(added.get(), near):
        pass


@torch.no_grad()
def _share(job: Sum | None, near: Near) -> bool:
    """Wait for a part, and let the ranks of the host have it. False if it was the last."""
    if job is None:
        return False
    try:
        if job.sent is not None:
            job.sent.wait()
        assert job.tensor is not None
        near.share_part(job.tensor).wait()
    except BaseException as error:
        job.end(error)
    else:
        job.end()
    return True


_across: PerWorld[Across | None] = PerWorld()


def across_of(group: Any, control: Control, device: torch.device) -> Across | None:
    """How ranks on several hosts add up; None where they are not as many on each of several, or
    cannot share memory. The first call of a group is a collective one.
    """
    rank = dist.get_rank(group)
    timeout_s = torch_private.timeout_of(group, device)

    def make() -> Across | None:
        hosts = control.find_hosts()
        sizes = {len(places) for places in hosts}
        if len(hosts) < 2 or len(sizes) > 1 or not 1 < sizes.pop() <= MOST_RANKS:
            return None
        own = next(places for places in hosts if rank in places)
        at, offers = own.index(rank), torch_private.calls_are_torchs()
        inside = control.among(own, "sums inside a host of")
        both = [meet(inside.exchange, len(own), at, timeout_s, offers) for _ in range(2)]
        if not all(control.exchange(None not in both)):
            return None
        ranks = dist.get_process_group_ranks(group)
        between = dist.new_group(
            [ranks[places[at]] for places in hosts],
            timeout=timedelta(seconds=timeout_s),
            backend="gloo",
            use_local_synchronization=True,
        )
        adds, shares = both
        assert adds is not None and shares is not None
        return Across(adds, shares, between)

    return _across.get(group.group_name, make)
