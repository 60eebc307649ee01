"""Reducing gradients, as `engine/reduce.py` does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardwise.description.collectives import Members
from shardwise.planning.plan import Plan
from shardwise.planning.strategies import REDUCES
from shardwise.predict.program import Builder, rounded
from shardwise.predict.step import UnitState


@dataclass
class Reduction:
    """One reduce under way."""

    unit: UnitState
    released: int  # compute waits for this before what is held may go
    held: int  # gradients
    slots: int = 0  # bytes that the lane needs: the slot, and rows that are added to others
    rows: int = 0  # scattered bytes: what is all-reduced over the replicas, or added
    scatter: int = -1
    finish: bool = False  # a host still has to all-reduce and add
    last: bool = True
    direct: bool = False
    overwrites: bool = False


class Reducer:
    """Lays out reduces; the ring bounds how many are under way before compute waits.

    On streams a slot and its gradients are free behind the pack and the reduce-scatter, in the
    lane's own order. Only the scattered rows stay for the replicas' all-reduce, to the end of
    backward: compute waits for no all-reduce before that.
    """

    def __init__(self, plan: Plan, builder: Builder) -> None:
        self.plan, self.b, self.costs = plan, builder, builder.costs
        self.shard = Members(plan.shard)
        self.delays = plan.sync == "scatter_each_reduce_last"
        self.during_backward = plan.name != "ddp" or REDUCES[plan.reduce].during_backward
        self.ring: deque[Reduction] = deque()
        self.ends: dict[str, int] = {}  # the last operation of each lane: scatter, replica
        self.crossing = 0  # bytes of rows that stay until the replicas' all-reduces have ended
        if plan.name == "ddp" and plan.reduce == "naive":
            self.depth = 0
        elif plan.strategy.gradients == "replicate":
            self.depth = max(plan.reduce_depth, 2) if self.costs.streams else 2**31
        else:
            self.depth = plan.reduce_depth

    def reduce(self, unit: UnitState, last: bool) -> None:
        b, sizes, whole = self.b, unit.sizes, unit.shard == 1
        delays = self.delays and unit.replicate > 1
        while self.ring and len(self.ring) >= self.depth:
            self._retire(self.ring.popleft())
        b.engine_work("reduce", unit.name, "backward")
        self._open(unit)
        direct = unit.overwrite and not unit.partial and unit.same_reduce
        into_flat = direct and whole
        adds_up = self.plan.sync == "last"
        slot = 0 if into_flat else rounded(sizes.slot)
        b.hold("slots", slot)
        moved = unit.grads + sizes.slot
        packed = b.copy("pack", unit.name, "backward", "scatter", moved, b.behind_compute())
        before = (packed,) if self.costs.streams else b.behind_compute()
        if into_flat:
            unit.overwrite = False
        if adds_up:
            if unit.accumulates:
                packed = b.copy("add", unit.name, "backward", "scatter", 3 * sizes.slot, before)
                before = (packed,) if self.costs.streams else b.behind_compute()
                b.hold("slots", -slot)
                slot = 0
            if not last:
                self._accumulate(unit, packed, into_flat)
                return
            if unit.accumulates:
                slot = rounded(sizes.slot) if unit.accumulates == "own" else 0
                into_flat = whole and unit.accumulates == "flat"
                direct = direct or into_flat
                unit.accumulates = ""
        overwrites = unit.overwrite
        if direct or last or not delays:
            unit.overwrite = False
        scatter, rows = -1, 0
        if whole:
            slot, rows = 0, slot
        elif not direct:
            rows = rounded(unit.scattered_bytes)
            b.hold("slots", rows)
        if not whole:
            scatter = b.collective(
                "reduce_scatter", unit.name, "backward", "shard", sizes.slot, self.shard, before,
                sizes.slot / self.plan.shard,
            )  # fmt: skip
        elif self.costs.streams:
            scatter = packed
        entry = Reduction(
            unit, packed, unit.grads, slot, rows, scatter, True, last, direct, overwrites
        )
        unit.grads = 0
        if self.costs.streams:
            self._queue_rest(entry)
            self._let_go(entry, all_of_it=not whole or into_flat)
        self._start(entry)

    def _let_go(self, entry: Reduction, all_of_it: bool) -> None:
        """On streams: what is the lane's own goes in its order, and rows that cross to the other
        lane stay until that one is done. Where nothing is scattered the slot itself crosses, which
        is too much to keep: that waits in the ring.
        """
        if not all_of_it:
            entry.released = max(self.ends.values())
            return
        crosses = entry.unit.replicate > 1 and not entry.finish
        self.b.hold("slots", -entry.slots - (0 if crosses else entry.rows))
        self.crossing += entry.rows if crosses else 0
        entry.slots = entry.rows = 0

    def _accumulate(self, unit: UnitState, packed: int, into_flat: bool) -> None:
        """The slot becomes, or has joined, the accumulator, which stays until the last
        micro-batch.
        """
        if not unit.accumulates:
            unit.accumulates = "flat" if into_flat else "own"
        self._start(Reduction(unit, packed, unit.grads))
        unit.grads = 0

    def _open(self, unit: UnitState) -> None:
        if not unit.opened:
            unit.opened = True
            # The step's first reduce overwrites; a later micro-batch's adds.
            unit.overwrite = not unit.summed
            if unit.overwrite:
                self.b.hold("gradients", rounded(unit.sizes.gradient))
                unit.summed = True

    def _queue_rest(self, entry: Reduction) -> None:
        """After the reduce-scatter: delayed sums, the all-reduce, the addition to the buffer."""
        b, unit, name = self.b, entry.unit, entry.unit.name
        done = entry.scatter
        shard_bytes = unit.scattered_bytes

        def then() -> tuple[int, ...]:
            return ((done,) if done >= 0 else ()) if self.costs.streams else b.behind_compute()

        in_flat, lane = entry.direct, "scatter"
        if self.delays and unit.replicate > 1:
            if not unit.partial:
                unit.partial = "flat" if entry.direct else "own"
                entry.rows = 0  # the sums stay for the step
            else:
                done = b.copy("add", name, "backward", lane, 3 * shard_bytes, then())
                entry.slots, entry.rows = entry.slots + entry.rows, 0
            self.ends[lane] = done
            if not entry.last:
                return
            in_flat = unit.partial == "flat"
            if not in_flat:
                entry.rows = rounded(shard_bytes)
            unit.partial = ""
        if unit.replicate > 1:
            lane, others = "replica", Members(unit.replicate, unit.shard)
            done = b.collective(
                "all_reduce", name, "backward", unit.replicas_axis, shard_bytes, others,
                (*then(), *b.behind_compute()),
            )  # fmt: skip
            if not self.costs.streams:
                b.join(done)
        if self.plan.average and self.plan.world > 1:
            done = b.copy("divide", name, "backward", lane, 2 * shard_bytes, then())
        if not in_flat:
            times = 2 if entry.overwrites else 3
            done = b.copy("add", name, "backward", lane, times * shard_bytes, then())
        self.ends[lane] = done
        entry.finish = False

    def _start(self, entry: Reduction) -> None:
        self.ring.append(entry)
        if self.depth == 0:
            self.finish()

    def _retire(self, entry: Reduction) -> None:
        """Compute waits until the memory may go; a host then does the rest of the reduce."""
        b = self.b
        if self.costs.streams:
            b.join(entry.released)
        elif entry.finish:
            b.join(entry.scatter)
            self._queue_rest(entry)
        b.hold("gradients", -entry.held)
        b.hold("slots", -entry.slots - entry.rows)

    def finish(self) -> None:
        while self.ring:
            self._retire(self.ring.popleft())
        if self.costs.streams:
            for end in self.ends.values():
                self.b.join(end)
        self.ends.clear()
        self.b.hold("slots", -self.crossing)
        self.crossing = 0
