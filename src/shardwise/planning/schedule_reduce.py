"""Reducing gradients, as `runtime/reduce.py` does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from shardwise.description.collectives import Members
from shardwise.planning.plan import Plan
from shardwise.planning.schedule import Builder, rounded
from shardwise.planning.schedule_step import UnitState
from shardwise.planning.strategies import REDUCES


@dataclass
class Reduction:
    """One reduce under way."""

    unit: UnitState
    released: int  # compute waits for this before `held` may go
    held: int  # gradients
    slots: int  # slot and scattered bytes that go with it
    scatter: int = -1
    finish: bool = False  # a host still has to all-reduce and add
    last: bool = True
    direct: bool = False
    overwrites: bool = False


class Reducer:
    """Lays out reduces; the ring bounds how many are under way before compute waits."""

    def __init__(self, plan: Plan, builder: Builder) -> None:
        self.plan, self.b, self.costs = plan, builder, builder.costs
        self.shard = Members(plan.shard)
        self.delays = plan.sync == "scatter_each_reduce_last"
        self.during_backward = plan.name != "ddp" or REDUCES[plan.reduce].during_backward
        self.ring: deque[Reduction] = deque()
        self.lane_end = -1  # the last operation of the lanes
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
        # A single gradient is its own slot, unless it would have to stay as the accumulator.
        adds_up = self.plan.sync == "last"
        borrowed = unit.own_slot and unit.even and not into_flat and not adds_up
        slot = 0 if into_flat or borrowed else rounded(sizes.slot)
        before = b.behind_compute()
        packed = -1
        b.hold("slots", slot)
        if not borrowed:
            moved = unit.grads + sizes.slot
            packed = b.copy("pack", unit.name, "backward", "scatter", moved, before)
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
                direct = direct or (whole and unit.accumulates == "flat")
                unit.accumulates = ""
        overwrites = unit.overwrite
        if direct or last or not delays:
            unit.overwrite = False
        scattered = 0 if whole or direct else rounded(unit.scattered_bytes)
        b.hold("slots", scattered)
        scatter = -1
        if not whole:
            scatter = b.collective(
                "reduce_scatter", unit.name, "backward", "shard", sizes.slot, self.shard, before,
                sizes.slot / self.plan.shard,
            )  # fmt: skip
        elif self.costs.streams and packed >= 0:
            scatter = packed
        crosses = unit.replicate > 1 and not (direct and unit.partial != "own")
        entry = Reduction(
            unit, packed, unit.grads, scattered, scatter, True, last, direct, overwrites
        )
        unit.grads = 0
        reused = self.costs.streams and unit.even and not whole and not adds_up
        if self.costs.streams:
            self._queue_rest(entry)
            if crosses or borrowed or packed < 0:
                entry.released = self.lane_end if self.lane_end >= 0 else packed
        if reused and not borrowed:
            b.hold("slots", -slot)
        else:
            entry.slots += slot
        self._start(entry)

    def _accumulate(self, unit: UnitState, packed: int, into_flat: bool) -> None:
        """The slot becomes, or has joined, the accumulator, which stays until the last
        micro-batch.
        """
        if not unit.accumulates:
            unit.accumulates = "flat" if into_flat else "own"
        self._start(Reduction(unit, packed, unit.grads, 0))
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

        in_flat = entry.direct
        if self.delays and unit.replicate > 1:
            if not unit.partial:
                unit.partial = "flat" if entry.direct else "own"
                if unit.partial == "own":
                    entry.slots -= rounded(shard_bytes)  # the sums stay for the step
            else:
                done = b.copy("add", name, "backward", "scatter", 3 * shard_bytes, then())
            if not entry.last:
                self.lane_end = done
                return
            in_flat = unit.partial == "flat"
            if not in_flat:
                entry.slots += rounded(shard_bytes)
            unit.partial = ""
        if unit.replicate > 1:
            others = Members(unit.replicate, unit.shard)
            done = b.collective(
                "all_reduce", name, "backward", unit.replicas_axis, shard_bytes, others,
                (*then(), *b.behind_compute()),
            )  # fmt: skip
            if not self.costs.streams:
                b.join(done)
        if self.plan.average and self.plan.world > 1:
            done = b.copy("divide", name, "backward", "scatter", 2 * shard_bytes, then())
        if not in_flat:
            times = 2 if entry.overwrites else 3
            done = b.copy("add", name, "backward", "scatter", times * shard_bytes, then())
        self.lane_end = done
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
        b.hold("slots", -entry.slots)

    def finish(self) -> None:
        while self.ring:
            self._retire(self.ring.popleft())
        if self.costs.streams:
            self.b.join(self.lane_end)
            self.lane_end = -1
