"""What every engine's step has in common: its units, what stays for the whole step, and the step's
end. `schedule_engine.py` and `schedule_fsdp2.py` fill in forward and backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.description.collectives import Members
from shardwise.description.workload import Workload
from shardwise.planning.memory import UnitBytes, size_of_unit
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.program import Builder, Change, Op, Program, Work, rounded
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
class UnitState:
    """One unit of the Plan while its step is laid out."""

    name: str
    sizes: UnitBytes
    count: int  # parameters
    casts: bool  # compute in another dtype than the master's
    is_root: bool
    frees_early: bool
    trained: bool
    scattered_bytes: int  # one rank's rows in the reduce dtype
    same_reduce: bool  # the gradient buffer has the reduce dtype
    # Ranks that have the unit's other rows, and the same rows; the axis of the latter.
    shard: int = 1
    replicate: int = 1
    replicas_axis: str = "replicate"
    gathered: bool = False
    allocated: bool = False
    stale: bool = False
    arrives: int = -1  # the operation that compute must wait for
    staged: int = 0  # bytes of staging that live until then (hosts)
    opened: bool = False  # a reduce of this micro-batch has looked at the gradient buffer
    summed: bool = False  # the gradient buffer holds a sum of this step
    overwrite: bool = False  # what the buffer holds is worth nothing
    accumulates: str = ""  # "", "flat" or "own": where gradients of sync="last" are summed
    partial: str = ""  # "", "flat" or "own": where delayed sums are
    grads: int = 0  # bytes of gradients that backward has left


@dataclass
class StepSchedule:
    """Lays out one rank's step; `forward` and `backward` are the engine's."""

    plan: Plan
    works: Mapping[int, Work]
    costs: Costs
    workload: Workload
    options: StepOptions = StepOptions()
    base_bytes: int = 0  # inputs, buffers, libraries' workspace
    b: Builder = field(init=False)
    units: list[UnitState] = field(init=False)

    def __post_init__(self) -> None:
        self.b = Builder(self.costs)
        self.units = [state_of(self.plan, i) for i in range(len(self.plan.require_units()))]
        self.shard = Members(self.plan.shard)
        self.replicas = Members(self.plan.replicate, self.plan.shard)

    def forward(self, work: Work) -> None:
        raise NotImplementedError

    def backward(self, work: Work, last: bool) -> None:
        raise NotImplementedError

    def begin_step(self) -> None:
        """Units that are whole already when the step starts."""

    def build(self, sizes: Sequence[int]) -> Program:
        """The Program of a rank whose micro-batches have `sizes` sequences."""
        b = self.b
        b.hold("other", self.base_bytes)
        b.hold("parameters", sum(rounded(u.sizes.master) for u in self.units))
        if self.options.optimizer:
            tensors = self.workload.state_tensors
            b.hold("state", tensors * sum(rounded(u.sizes.moment) for u in self.units))
        self.begin_step()
        for i, size in enumerate(sizes):
            self.forward(self.works[size])
            self.backward(self.works[size], last=i == len(sizes) - 1)
        if self.options.clip:
            self._clip()
        if self.options.optimizer:
            self._update()
        return b.build()

    def run_backward(self, work: Work, place: int, peaks: bool = True) -> None:
        """Recompute if the segment is checkpointed, then its backward. Gradients are counted from
        its end: by then it has given back more than they take.
        """
        name, segment = work.segments[place]
        if segment.checkpointed:
            self.b.compute(segment.recompute, "recompute", name, "backward")
        self.b.compute(segment.backward, "backward", name, "backward", peaks)
        for number, nbytes in work.grads[place].items():
            self.units[number].grads += nbytes
            self.b.hold("gradients", nbytes)

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
        b.copy("norm", "", "optimizer", COMPUTE, total)
        if self.plan.shard > 1:
            before = b.behind_compute()
            b.join(b.collective("all_reduce", "norm", "optimizer", "shard", 4, self.shard, before))
        b.copy("clip", "", "optimizer", COMPUTE, 2 * total)

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
            moved, extra = trained * (3 + 5 * tensors), rounded(largest)
        number = len(b.ops)
        b.changes.append(Change(number, False, "temporary", extra))
        b.changes.append(Change(number, True, "temporary", -extra))
        host = b.costs.cluster.host.op_s * len(self.units) if self.costs.streams else 0.0
        seconds = self.costs.copy(moved, "update")
        b.add(Op("update", "", "optimizer", "compute", COMPUTE, seconds, host))


def state_of(plan: Plan, number: int) -> UnitState:
    spec = plan.require_units()[number]
    replicate, shard = plan.axes_of(spec)
    own, compute, reduce = plan.dtypes(spec.parameters[0].dtype)
    trained = [p for p in spec.parameters if p.trainable]
    sizes = size_of_unit(plan, spec)
    is_root = spec.modules == ("",)
    return UnitState(
        name=spec.name,
        sizes=sizes,
        count=len(spec.parameters),
        casts=own != compute,
        is_root=is_root,
        frees_early=not is_root
        and (len(spec.modules) == 1 or len(trained) == len(spec.parameters)),
        trained=bool(trained),
        scattered_bytes=sizes.slot // shard,
        same_reduce=reduce == own,
        shard=shard,
        replicate=replicate,
        replicas_axis="all" if spec.whole else "replicate",
    )
