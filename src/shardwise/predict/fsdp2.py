"""The step as torch's FSDP2 (`torch.distributed.fsdp.fully_shard`) issues it, for comparisons.

What differs from shardwise's engine: the copy-out of a gather and the copy-in of a reduce run on
the compute stream; in forward nothing is gathered ahead by rule, but the host runs ahead of the
device and a gather waits only for the copy-out before the last one; a reduce waits for the one
before it. On a host (gloo) it has no streams: every collective is waited for where it is called.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardwise.planning.executor import PlannedUnit
from shardwise.planning.rows import lay_out
from shardwise.predict.program import Work
from shardwise.predict.step import Step
from shardwise.schedule.unit import State
from shardwise.timeline import COMPUTE


@dataclass
class Fsdp2Step(Step):
    """`fully_shard` of every unit; the root's parameters stay whole from forward to backward."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.plan.strategy.parameters == "replicate":
            raise ValueError(
                f"fully_shard has no {self.plan.title!r}; use zero2, zero3 or hsdp over one of them"
            )
        if any(unit.whole for unit in self.plan.require_units()):
            raise ValueError(
                "fully_shard keeps no parameters whole; use whole=() and whole_below=0"
            )
        self.reshards = self.plan.strategy.parameters == "shard"
        self.copied_out = [-1, -1]  # the copy-outs before the last one, and the last one
        self.last_scatter = -1
        self.last_slot = 0
        self.ends: list[int] = []

    def begin(self) -> None:
        self.units = [PlannedUnit(self.plan, i) for i in range(len(self.plan.require_units()))]

    def forward(self, work: Work) -> None:
        first_use, last_use = _uses(work)
        for unit in self.units:
            if unit.is_root:
                self._gather(unit, overlap=True)
                self._wait(unit)
        for place, (name, segment) in enumerate(work.segments):
            for number in work.uses[place]:
                if first_use[number] == place:
                    self._gather(self.units[number], overlap=True)
                    self._wait(self.units[number])
            self.b.compute(segment.forward, "forward", name)
            for number in work.uses[place]:
                unit = self.units[number]
                if self.reshards and not unit.is_root and last_use[number] == place:
                    self._free(unit)

    def backward(self, work: Work, last: bool) -> None:
        peaked, last_place = self.peak_of_loss(work), len(work.segments) - 1
        runs = [place for place, (_, s) in enumerate(work.segments) if s.backward.kernels]
        roots = [unit for unit in self.units if unit.is_root]
        inner = [[self.units[i] for i in used if not self.units[i].is_root] for used in work.uses]
        # Gathers ahead follow forward's order, also to units that have no backward.
        order = [*roots, *dict.fromkeys(unit for units in reversed(inner) for unit in units)]
        for unit in roots:
            self._before_backward(unit, order)
        for place in reversed(runs):
            for unit in inner[place]:
                self._before_backward(unit, order)
            self.run_segment_backward(work, place, peaks=not (peaked and place == last_place))
            for unit in inner[place]:
                if place > runs[0] and not any(unit in inner[p] for p in runs if p < place):
                    self._after_backward(unit, work, last)
        # What takes no input with a gradient hears of its end with the whole backward's.
        for unit in order:
            if unit.is_root or unit in inner[runs[0]]:
                self._after_backward(unit, work, last)
            elif self.reshards or last:
                self._free(unit)
        for end in self.ends:
            self.b.join(end)
        self.ends.clear()
        self._drop_slot()

    def _before_backward(self, unit: PlannedUnit, order: list[PlannedUnit]) -> None:
        self._gather(unit, overlap=False)
        self._wait(unit)
        for following in order[order.index(unit) + 1 :][:1]:
            self._gather(following, overlap=False)

    def _after_backward(self, unit: PlannedUnit, work: Work, last: bool) -> None:
        if self.reshards or last:
            self._free(unit)
        if unit.gradient_count:
            self._reduce(unit, work.without_gradient, last)

    def _gather(self, unit: PlannedUnit, overlap: bool) -> None:
        if unit.sizes.aliased or unit.state is not State.FREE:
            return
        unit.state = State.READY
        b, full, n = self.b, unit.sizes.full, self.plan.shard
        b.engine_work("gather", unit.name)
        # Forward: the buffer of the gather before the last one is free; backward: of the last one.
        waits_for = self.copied_out[0 if overlap else 1]
        before = (waits_for,) if waits_for >= 0 else ()
        b.hold("temporary", full)
        unit.staged = full
        own = unit.sizes.master + full // n
        cast = b.copy("copy-in", unit.name, "copy-in", own, before)
        unit.arrives = self._send("all_gather", unit.name, "shard", full, n, (cast,), full)

    def _wait(self, unit: PlannedUnit) -> None:
        if unit.arrives < 0:
            return
        b = self.b
        b.join(unit.arrives)
        unit.arrives = -1
        b.hold("full", unit.sizes.full)
        done = b.copy("copy-out", unit.name, COMPUTE, 2 * unit.sizes.full)
        self.copied_out = [self.copied_out[1], done]
        b.hold("temporary", -unit.staged)
        unit.staged = 0

    def _free(self, unit: PlannedUnit) -> None:
        if unit.sizes.aliased or unit.state is State.FREE:
            return
        self._wait(unit)
        unit.state = State.FREE
        self.b.hold("full", -unit.sizes.full)

    def _reduce(self, unit: PlannedUnit, unused: frozenset[str], last: bool) -> None:
        b, plan = self.b, self.plan
        if plan.sync == "last" and not last:
            return  # gradients stay whole on their rank, and the next ones are added to them
        rows = self._rows(unit, unused)
        slot = rows * plan.shard
        b.engine_work("reduce", unit.name)
        if self.last_scatter >= 0:
            b.join(self.last_scatter)
            self._drop_slot()
        b.hold("slots", slot)
        b.copy("copy-in", unit.name, COMPUTE, unit.grads + slot)
        b.hold("gradients", -unit.grads)
        unit.grads = 0
        self.last_slot = slot
        done = self.last_scatter = self._send(
            "reduce_scatter", unit.name, "shard", slot, plan.shard, b.behind_compute(), rows
        )
        if not unit.summed:
            b.hold("gradients", rows)
        reduces = plan.replicate > 1 and (last or plan.sync == "each")
        if plan.replicate > 1 and not reduces and unit.summed:
            done = b.copy("add", unit.name, "reduce", 3 * rows, (done,))
        if reduces:
            done = self._send("all_reduce", unit.name, "replicate", rows, plan.replicate, (done,))
        if unit.summed and plan.sync != "scatter_each_reduce_last":
            done = b.copy("add", unit.name, "reduce", 3 * rows, (done,))
        unit.summed = True
        self.ends.append(done)

    def _send(self, *collective: Any) -> int:
        """A collective, as the builder takes it; a host stands still until it is over."""
        done = self.b.collective(*collective)
        if not self.costs.streams:
            self.b.join(done)
        return done

    def _rows(self, unit: PlannedUnit, unused: frozenset[str]) -> int:
        """One rank's part of a reduce: of the parameters that have a gradient, and nothing else."""
        spec = self.plan.require_units()[self.units.index(unit)]
        shapes = [p.shape for p in spec.parameters if p.trainable and p.name not in unused]
        reduce = self.plan.dtypes(spec.parameters[0].dtype)[2]
        return lay_out(shapes, self.plan.shard).shard_numel * reduce.itemsize

    def _drop_slot(self) -> None:
        self.b.hold("slots", -self.last_slot)
        self.last_slot = 0
        self.last_scatter = -1


def _uses(work: Work) -> tuple[dict[int, int], dict[int, int]]:
    """The first and the last segment, in forward order, of each unit."""
    pairs = [(unit, place) for place, units in enumerate(work.uses) for unit in units]
    return dict(reversed(pairs)), dict(pairs)
