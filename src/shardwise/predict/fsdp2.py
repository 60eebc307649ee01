"""The step as torch's FSDP2 (`torch.distributed.fsdp.fully_shard`) issues it, for comparisons.

What differs from shardwise's engine: the copy-out of a gather and the copy-in of a reduce run on
the compute stream; in forward nothing is gathered ahead by rule, but the host runs ahead of the
device and a gather waits only for the copy-out before the last one; a reduce waits for the one
before it.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.predict.program import Work, rounded
from shardwise.predict.step import StepSchedule, UnitState
from shardwise.timeline import COMPUTE


@dataclass
class Fsdp2Schedule(StepSchedule):
    """`fully_shard` of every unit; the root's parameters stay whole from forward to backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan.strategy.parameters == "replicate":
            raise ValueError(
                f"fully_shard has no {self.plan.title!r}; use zero2, zero3 or hsdp over one of them"
            )
        if any(unit.whole for unit in self.plan.require_units()):
            raise ValueError("fully_shard keeps no parameters whole; leave out whole, whole_below")
        self.reshards = self.plan.strategy.parameters == "shard"
        self.copied_out = [-1, -1]  # the copy-outs before the last one, and the last one
        self.last_scatter = -1
        self.last_slot = 0
        self.ends: list[int] = []

    def forward(self, work: Work) -> None:
        first_use = work.first_use
        last_use = {u: place for place, units in enumerate(work.uses) for u in units}
        for unit in self.units:
            if unit.is_root:
                self._gather(unit, "forward", overlap=True)
                self._wait(unit, "forward")
        for place, (name, segment) in enumerate(work.segments):
            for number in work.uses[place]:
                if first_use[number] == place:
                    self._gather(self.units[number], "forward", overlap=True)
                    self._wait(self.units[number], "forward")
            self.b.compute(segment.forward, "forward", name, "forward")
            for number in work.uses[place]:
                unit = self.units[number]
                if self.reshards and not unit.is_root and last_use[number] == place:
                    self._free(unit)

    def backward(self, work: Work, last: bool) -> None:
        peaked, last_place = self.peak_of_loss(work), len(work.segments) - 1
        first_use = work.first_use
        order: list[UnitState] = [unit for unit in self.units if unit.is_root]
        for place in reversed(range(len(work.segments))):
            for number in work.uses[place]:
                if self.units[number] not in order:
                    order.append(self.units[number])
        for place in reversed(range(len(work.segments))):
            for number in work.uses[place]:
                unit = self.units[number]
                self._gather(unit, "backward", overlap=False)
                self._wait(unit, "backward")
                following = order.index(unit) + 1
                if following < len(order):
                    self._gather(order[following], "backward", overlap=False)
            self.run_backward(work, place, peaks=not (peaked and place == last_place))
            for number in work.uses[place]:
                if first_use[number] == place:
                    if self.reshards or last:
                        self._free(self.units[number])
                    if self.units[number].trained:
                        self._reduce(self.units[number], last)
        for end in self.ends:
            self.b.join(end)
        self.ends.clear()
        self._drop_slot()

    def _gather(self, unit: UnitState, phase: str, overlap: bool) -> None:
        if unit.sizes.aliased or unit.gathered:
            return
        unit.gathered = True
        b, full, n = self.b, unit.sizes.full, self.plan.shard
        b.engine_work("gather", unit.name, phase)
        # Forward: the buffer of the gather before the last one is free; backward: of the last one.
        waits_for = self.copied_out[0 if overlap else 1]
        before = (waits_for,) if waits_for >= 0 else ()
        b.hold("temporary", rounded(full))
        unit.staged = rounded(full)
        own = unit.sizes.master + full // n
        cast = b.copy("copy-in", unit.name, phase, "copy-in", own, before)
        unit.arrives = b.collective(
            "all_gather", unit.name, phase, "shard", full, self.shard, (cast,), full
        )

    def _wait(self, unit: UnitState, phase: str) -> None:
        if unit.arrives < 0:
            return
        b = self.b
        b.join(unit.arrives)
        unit.arrives = -1
        unit.allocated = True
        b.hold("full", rounded(unit.sizes.full))
        done = b.copy("copy-out", unit.name, phase, COMPUTE, 2 * unit.sizes.full)
        self.copied_out = [self.copied_out[1], done]
        b.hold("temporary", -unit.staged)
        unit.staged = 0

    def _free(self, unit: UnitState) -> None:
        if unit.sizes.aliased or not unit.gathered:
            return
        self._wait(unit, "backward")
        unit.gathered = unit.allocated = False
        self.b.hold("full", -rounded(unit.sizes.full))

    def _reduce(self, unit: UnitState, last: bool) -> None:
        b, sizes, plan = self.b, unit.sizes, self.plan
        b.engine_work("reduce", unit.name, "backward")
        if self.last_scatter >= 0:
            b.join(self.last_scatter)
            self._drop_slot()
        b.hold("slots", rounded(sizes.slot))
        b.copy("copy-in", unit.name, "backward", COMPUTE, unit.grads + sizes.slot)
        b.hold("gradients", -unit.grads)
        unit.grads = 0
        self.last_slot = rounded(sizes.slot)
        done = self.last_scatter = b.collective(
            "reduce_scatter", unit.name, "backward", "shard", sizes.slot, self.shard,
            b.behind_compute(), sizes.slot / plan.shard,
        )  # fmt: skip
        if not unit.summed:
            b.hold("gradients", rounded(unit.scattered_bytes))
        reduces = plan.replicate > 1 and (last or plan.sync == "each")
        if plan.replicate > 1 and not reduces and unit.summed:
            done = b.copy("add", unit.name, "backward", "reduce", 3 * unit.scattered_bytes, (done,))
        if reduces:
            done = b.collective(
                "all_reduce", unit.name, "backward", "replicate", unit.scattered_bytes,
                self.replicas, (done,),
            )  # fmt: skip
        if unit.summed and plan.sync != "scatter_each_reduce_last":
            done = b.copy("add", unit.name, "backward", "reduce", 3 * unit.scattered_bytes, (done,))
        unit.summed = True
        self.ends.append(done)

    def _drop_slot(self) -> None:
        self.b.hold("slots", -self.last_slot)
        self.last_slot = 0
        self.last_scatter = -1
