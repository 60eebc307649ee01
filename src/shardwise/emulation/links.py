"""What an emulated collective costs, and how transfers share the links they run over.

A `Transfer` has a fixed part (start-up, latency) that nothing changes, and a moving part that takes
its time alone and longer in company: when the shares that all moving transfers use of a link sum to
more than the whole, each slows by that sum. Two that fill one link get half of it each, and end
when the sum of their bytes would. Transfers of one group follow one another.

`HostLinks` does this by a clock that the caller reads: the step itself on a CPU, and for a GPU the
process of `emulated_clock`.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

MOST_LINKS = 4  # different links of one emulation
_INSTANT = 1e-8  # seconds; above what rounding leaves of a clock that counts from boot


@dataclass(frozen=True)
class Transfer:
    """The time of one collective, and the share (0 to 1] of each link that it uses alone."""

    fixed: float
    moving: float
    uses: tuple[tuple[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """With the links to itself."""
        return self.fixed + self.moving

    def less(self, seconds: float) -> Transfer:
        """Without what something else adds to it; that comes off the fixed part first."""
        fixed = self.fixed - seconds
        moving = max(0.0, self.moving + min(0.0, fixed))
        return replace(self, fixed=max(0.0, fixed), moving=moving)


NO_TIME = Transfer(0.0, 0.0)


class NetworkModel(Protocol):
    """Says what a collective over these ranks costs. `nbytes` is the whole buffer: what an
    all-gather gives, a reduce-scatter takes, an all-reduce changes.
    """

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer: ...


@dataclass(frozen=True)
class Network:
    """The same link for every group of ranks. The default is free: data arrives, nobody waits."""

    bandwidth: float = math.inf  # bytes per second that one rank sends
    latency: float = 0.0  # seconds per collective
    shared: bool = False  # the groups of a rank share one link; else each has its own

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"Network.bandwidth is {self.bandwidth}, expected bytes/s above 0")
        if not self.latency >= 0:
            raise ValueError(f"Network.latency is {self.latency}, expected seconds, at least 0")

    def seconds(self, nbytes: int, ranks: int, rounds: int = 1) -> float:
        """A ring's time for a message of `nbytes`; an all-reduce goes round twice."""
        return self.latency + rounds * nbytes * (ranks - 1) / ranks / self.bandwidth

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
        seconds = self.seconds(nbytes, len(ranks), 2 if collective == "all_reduce" else 1)
        uses = (("network", 1.0),) if self.shared else ()
        return Transfer(self.latency, seconds - self.latency, uses)


class Flow:
    """One transfer under way; `started` and `ended` are the clock when it got the wire and when it
    was through.
    """

    def __init__(self, transfer: Transfer) -> None:
        self.fixed, self.moving = transfer.fixed, transfer.moving
        self.uses = transfer.uses
        self.started: float | None = None
        self.ended: float | None = None

    @property
    def moves(self) -> bool:
        return self.fixed <= _INSTANT


class HostLinks:
    """Flows by a clock that the caller reads. Only the first flow of each group is on the wire."""

    def __init__(self) -> None:
        self._now = 0.0
        self._queues: dict[Hashable, deque[Flow]] = {}

    def add(self, now: float, group: Hashable, transfer: Transfer) -> Flow:
        flow = Flow(transfer)
        self._advance(now)
        self._queues.setdefault(group, deque()).append(flow)
        self._drop_ended()
        return flow

    def end_of(self, now: float, flow: Flow) -> float:
        """When `flow` ends if nothing joins it."""
        self._advance(now)
        if flow.ended is not None:
            return flow.ended
        ahead = HostLinks()
        ahead._now = self._now
        twins = {id(one): copy.copy(one) for queue in self._queues.values() for one in queue}
        ahead._queues = {
            group: deque(twins[id(one)] for one in queue) for group, queue in self._queues.items()
        }
        twin = twins[id(flow)]
        while twin.ended is None:
            ahead._advance(ahead._now + ahead._next())
        return twin.ended

    def wait(self, flow: Flow) -> float:
        """Sleep until `flow` has ended; give the seconds that took."""
        began = now = time.perf_counter()
        while (left := self.end_of(now, flow) - now) > 0:
            time.sleep(left)
            now = time.perf_counter()
        return now - began

    def _heads(self) -> list[Flow]:
        return [queue[0] for queue in self._queues.values() if queue]

    def _slowdowns(self, heads: list[Flow]) -> list[float]:
        loads: dict[str, float] = {}
        for flow in heads:
            if flow.moves:
                for link, share in flow.uses:
                    loads[link] = loads.get(link, 0.0) + share
        return [max([1.0, *(loads.get(link, 0.0) for link, _ in flow.uses)]) for flow in heads]

    def _next(self) -> float:
        """Seconds until the first change: a flow starts to move, or ends."""
        heads = self._heads()
        return min(
            flow.moving * slow if flow.moves else flow.fixed
            for flow, slow in zip(heads, self._slowdowns(heads), strict=True)
        )

    def _advance(self, until: float) -> None:
        self._drop_ended()
        while (heads := self._heads()) and self._now < until:
            step = min(self._next(), until - self._now)
            self._now += step
            for flow, slow in zip(heads, self._slowdowns(heads), strict=True):
                if flow.moves:
                    flow.moving -= step / slow
                else:
                    flow.fixed -= step
            self._drop_ended()
        self._now = max(self._now, until)

    def _drop_ended(self) -> None:
        for queue in self._queues.values():
            while queue:
                head = queue[0]
                head.started = self._now if head.started is None else head.started
                if not (head.moves and head.moving <= _INSTANT):
                    break
                queue.popleft().ended = self._now
