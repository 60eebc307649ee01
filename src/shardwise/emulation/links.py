"""Transfers under way over shared links, by a clock that the caller reads.

Transfers of one group follow one another; those of different groups share links as
`description/collectives.py` says. The step itself reads the clock on a CPU, and for a GPU the
process of `clock.py`.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict, deque
from collections.abc import Hashable
from dataclasses import dataclass, replace

from shardwise.description.collectives import LinkShares, slowdown
from shardwise.emulation.networks import Transfer

_INSTANT = 1e-8  # seconds; above what rounding leaves of a clock that counts from boot


@dataclass(eq=False)
class Flow:
    """What is left of one transfer; `started` and `ended` are the clock when it got the wire and
    when it was through.
    """

    fixed: float
    moving: float
    uses: LinkShares
    joins: float = 0.0  # by the clock: when the last of its ranks is there
    started: float | None = None
    ended: float | None = None

    @property
    def moves(self) -> bool:
        return self.fixed <= _INSTANT


class HostLinks:
    """Flows by a clock that the caller reads. Only the first flow of each group is on the wire."""

    def __init__(self) -> None:
        self._now = 0.0
        self._queues: dict[Hashable, deque[Flow]] = {}

    def add(self, now: float, group: Hashable, transfer: Transfer, step_began: float = 0.0) -> Flow:
        joins = step_began + transfer.joins if transfer.joins else 0.0
        flow = Flow(transfer.fixed, transfer.moving, transfer.uses, joins)
        self._advance(now)
        self._queues.setdefault(group, deque()).append(flow)
        self._drop_ended()
        return flow

    def end_of(self, now: float, flow: Flow) -> float:
        """When `flow` ends if nothing joins it."""
        self._advance(now)
        if flow.ended is not None:
            return flow.ended
        ahead, twins = HostLinks(), dict[Flow, Flow]()
        ahead._now = self._now
        for group, queue in self._queues.items():
            copies = ahead._queues[group] = deque(replace(one) for one in queue)
            twins.update(zip(queue, copies, strict=True))
        twin = twins[flow]
        ahead._advance(math.inf, until_ended=twin)
        assert twin.ended is not None
        return twin.ended

    def wait(self, flow: Flow) -> tuple[float, float]:
        """Sleep until `flow` has ended; gives when that began and when it was over."""
        began = now = time.perf_counter()
        while (left := self.end_of(now, flow) - now) > 0:
            time.sleep(left)
            now = time.perf_counter()
        return began, now

    def _advance(self, until: float, until_ended: Flow | None = None) -> None:
        self._drop_ended()
        while self._now < until and (heads := self._heads()):
            if until_ended is not None and until_ended.ended is not None:
                return
            # To the first change: a flow starts to move, or ends.
            changes = (flow.moving * slow if flow.moves else flow.fixed for flow, slow in heads)
            step = min(until - self._now, *changes)
            self._now += step
            for flow, slow in heads:
                if flow.moves:
                    flow.moving -= step / slow
                else:
                    flow.fixed -= step
            self._drop_ended()
        self._now = max(self._now, until)

    def _heads(self) -> list[tuple[Flow, float]]:
        """The flows on the wire, and how much longer than alone each takes to move its bytes."""
        heads = [queue[0] for queue in self._queues.values() if queue]
        in_use: dict[str, float] = defaultdict(float)
        for flow in heads:
            if flow.moves:
                for link, share in flow.uses:
                    in_use[link] += share
        return [(flow, slowdown(in_use[link] for link, _ in flow.uses)) for flow in heads]

    def _drop_ended(self) -> None:
        for queue in self._queues.values():
            while queue:
                head = queue[0]
                if head.started is None:
                    head.started = self._now
                    head.fixed += max(0.0, head.joins - self._now)
                if not (head.moves and head.moving <= _INSTANT):
                    break
                queue.popleft().ended = self._now
