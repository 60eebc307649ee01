"""One rank's step as a Program: the schedule driven over a described model, and the step's end.

`EngineStep` is shardwise's own; `fsdp2.py` lays out the step of torch's engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.description.model import PassFacts
from shardwise.description.workload import Workload
from shardwise.planning.executor import PlannedExecutor, PlannedUnit, size_of_moment
from shardwise.planning.memory import plan_schedule
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.program import Builder, Change, Op, PeakCounter, Program, Work, rounded
from shardwise.schedule.arena import Layout, Lives, lay_out
from shardwise.schedule.drive import Part, run_backward, run_forward, settle
from shardwise.timeline import COMPUTE

UPDATES = ("fused", "foreach", "single")


@dataclass(frozen=True)
class StepOptions:
    """What a step does beside forward and backward."""

    optimizer: bool = True
    update: str = "fused"  # the optimizer's kernels: one for all, one per operation, per tensor
    clip: bool = False
    # The model returns its loss. If not, the loss is the caller's: its backward is over before the
    # engine hears of the model's, and gathers nothing ahead of it.
    loss_inside: bool = True

    def __post_init__(self) -> None:
        if self.update not in UPDATES:
            raise ValueError(f"StepOptions.update is {self.update!r}, expected one of {UPDATES}")


@dataclass
class Step:
    """Lays out one rank's step; `forward` and `backward` are an engine's."""

    plan: Plan
    works: Mapping[int, Work]
    costs: Costs
    workload: Workload
    options: StepOptions = StepOptions()
    base_bytes: int = 0  # inputs, buffers, libraries' workspace
    agreed: bool = True  # every rank runs micro-batches, so that they know one order of reduces
    b: Builder = field(init=False)
    units: list[PlannedUnit] = field(init=False)

    def __post_init__(self) -> None:
        self.b = Builder(self.costs, {"replicate": self.plan.shard})

    def forward(self, work: Work) -> None:
        raise NotImplementedError

    def backward(self, work: Work, last: bool) -> None:
        raise NotImplementedError

    def begin(self) -> None:
        """Make the units; some are whole already when the step starts."""
        raise NotImplementedError

    def run_nothing(self) -> None:
        """A step without micro-batches."""

    def peak(self, sizes: Sequence[int]) -> int:
        """The most bytes at any moment of that Program, which is not made."""
        counter = PeakCounter(self.costs)
        self.b = counter
        self.build(sizes)
        return counter.peak()

    def build(self, sizes: Sequence[int]) -> Program:
        """The Program of a rank whose micro-batches have `sizes` sequences."""
        b = self.b
        b.hold("other", self.base_bytes)
        self.begin()
        b.hold("parameters", sum(rounded(u.sizes.master) for u in self.units))
        if self.options.optimizer:
            tensors = self.workload.state_tensors
            b.hold("state", tensors * sum(map(rounded, self._moments())))
        for i, size in enumerate(sizes):
            b.phase = "forward"
            self.micro = (i, len(sizes))
            self.forward(self.works[size])
            b.phase = "backward"
            self.backward(self.works[size], last=i == len(sizes) - 1)
        if not sizes:
            b.phase = "backward"
            self.run_nothing()
        b.phase = "optimizer"
        if self.options.clip:
            self._clip()
        if self.options.optimizer:
            self._update()
        return b.build()

    def _moments(self) -> list[int]:
        """One tensor of optimizer state of each unit. A parameter that gets no gradient has none:
        no optimizer makes state before the first gradient.
        """
        idle = {name for work in self.works.values() for name in work.without_gradient}
        units = self.plan.require_units()
        if not idle:
            return [unit.sizes.moment for unit in self.units]
        return [size_of_moment(self.plan, unit, idle) for unit in units]

    def run_segment_backward(self, work: Work, place: int, peaks: bool = True) -> None:
        """Recompute if the segment is checkpointed, then its backward. Gradients are counted from
        its end: by then it has given back more than they take.
        """
        name, segment = work.segments[place]
        if segment.checkpointed:
            self.b.compute(segment.recompute, "recompute", name)
        grads = [(self.units[number], nbytes) for number, nbytes in work.grads[place].items()]
        peak = self.peak_inside(segment.backward, [unit for unit, _ in grads]) if peaks else 0
        for unit, _ in grads:
            self._hold(unit, 0 if unit.held_grads else self.taken_at_first(unit))
        self.b.compute(segment.backward, "backward", name, peak)
        for unit, nbytes in grads:
            unit.grads += nbytes
            self._hold(unit, 0 if self.taken_at_first(unit) else nbytes)

    def _hold(self, unit: Any, nbytes: int) -> None:
        unit.held_grads += nbytes
        self.b.hold("gradients", nbytes)

    def taken_at_first(self, unit: Any) -> int:
        """What a unit takes for all of its gradients when the first one comes."""
        return 0

    def peak_inside(self, part: PassFacts, units: Sequence[Any]) -> int:
        """The most bytes inside a segment's backward, once its units have taken what they take at
        first.
        """
        return part.peak_bytes

    def peak_of_loss(self, work: Work) -> bool:
        """A loss outside the model has its peak before the engine's first gather of backward; true
        if so.
        """
        if self.options.loss_inside or not work.segments:
            return False
        last = work.segments[-1][1]
        peak = (last.recompute if last.checkpointed else last.backward).peak_bytes
        self.b.hold("temporary", peak)
        self.b.hold("temporary", -peak)
        return True

    def _clip(self) -> None:
        b = self.b
        total = sum(u.sizes.gradient for u in self.units)
        b.copy("norm", "", COMPUTE, total)
        if self.plan.shard > 1:
            before = b.behind_compute()
            b.join(b.collective("all_reduce", "norm", "shard", 4, self.plan.shard, before))
        b.copy("clip", "", COMPUTE, 2 * total)

    def _update(self) -> None:
        """Read parameters, gradients and states; write parameters and states."""
        b, tensors = self.b, self.workload.state_tensors
        trained = sum(u.sizes.gradient for u in self.units)
        largest = max((u.sizes.gradient for u in self.units), default=0)
        moved = trained * (3 + 2 * tensors)
        extra = 0
        if self.options.update == "foreach":
            # One kernel for each operation of the update, with a list of temporaries.
            moved, extra = trained * (3 + 5 * tensors), rounded(trained)
        elif self.options.update == "single":
            # The root of the second moments, and it divided, stand side by side.
            moved, extra = trained * (3 + 5 * tensors), 2 * rounded(largest)
        number = len(b.ops)
        b.changes.append(Change(number, False, "temporary", extra))
        b.changes.append(Change(number, True, "temporary", -extra))
        host = b.costs.cluster.host.op_s * len(self.units) if self.costs.streams else 0.0
        seconds = self.costs.copy(moved, "update")
        b.add(Op("update", "", "optimizer", "compute", COMPUTE, seconds, host))


class EngineStep(Step):
    """The step of shardwise's own engine: its schedule, driven without tensors."""

    block = 0  # bytes of its arena

    def build(self, sizes: Sequence[int]) -> Program:
        if self.plan.has_arena(self.costs.streams):
            self.block = self._lay_out(sizes).nbytes
        return super().build(sizes)

    def _lay_out(self, sizes: Sequence[int]) -> Layout:
        """The arena that such a step takes, by the lives of its pieces."""
        trial = EngineStep(
            self.plan, self.works, self.costs, self.workload, self.options, agreed=self.agreed
        )
        trial.b = PeakCounter(self.costs)
        Step.build(trial, sizes)
        assert trial.lives is not None
        return lay_out(trial.lives.end_step())

    def begin(self) -> None:
        self.lives = Lives() if self.plan.has_arena(self.costs.streams) else None
        executor = PlannedExecutor(
            self.plan, self.b, self.costs.streams, self.lives, in_block=self.block > 0
        )
        self.b.hold("full", self.block)
        self.schedule = plan_schedule(self.plan, executor)
        self.units = self.schedule.units
        self._made: dict[int, list[Part[PlannedUnit]]] = {}  # by the id of their work

    def _parts(self, work: Work) -> list[Part[PlannedUnit]]:
        parts = self._made.get(id(work))
        if parts is None:
            parts = self._make_parts(work)
            if not self._made:
                settle(self.schedule, parts, self.agreed)
            self._made[id(work)] = parts
        return parts

    def _make_parts(self, work: Work) -> list[Part[PlannedUnit]]:
        return [
            Part(
                tuple(self.units[i] for i in used),
                tuple(self.units[i] for i in lacking),
                segment.checkpointed,
                bool(segment.backward.kernels),
            )
            for used, lacking, (_, segment) in zip(
                work.uses, work.lacking, work.segments, strict=True
            )
        ]

    def forward(self, work: Work) -> None:
        self.schedule.micro = self.micro

        def compute(place: int) -> None:
            name, segment = work.segments[place]
            self.b.compute(segment.forward, "forward", name)

        run_forward(self.schedule, self._parts(work), compute)

    def backward(self, work: Work, last: bool) -> None:
        peaked, last_place = self.peak_of_loss(work), len(work.segments) - 1

        def compute(place: int) -> None:
            self.run_segment_backward(work, place, not (peaked and place == last_place))

        run_backward(self.schedule, self._parts(work), compute)

    def taken_at_first(self, unit: Any) -> int:
        """A host copies data parallel's gradients to the unit's slot as they come."""
        return 0 if self.costs.streams or unit.shard_ranks > 1 else int(unit.sizes.slot)

    def peak_inside(self, part: PassFacts, units: Sequence[Any]) -> int:
        """On a host gradients of data parallel pass by, to a slot that is taken when the first has
        come; those of a unit that is cut stay until all have come.
        """
        if self.costs.streams or not (units and part.keeping_bytes):
            return part.peak_bytes
        if not all(map(self.taken_at_first, units)) or not part.before_bytes:
            return part.keeping_bytes
        if any(unit.held_grads for unit in units):
            return max(part.before_bytes, part.passing_bytes)
        self.b.hold("temporary", part.before_bytes)
        self.b.hold("temporary", -part.before_bytes)
        return part.passing_bytes

    def run_nothing(self) -> None:
        self.schedule.run_nothing()
