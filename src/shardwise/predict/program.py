"""The operations of one step on one rank, in the order in which its host issues them.

An operation runs on a stream. It starts when the one before it on the same stream and all of
`after` have ended and the host has begun to issue it. Memory moves in the order of the compute
stream: every change is tied to a moment of a compute operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwise.description.collectives import Members
from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    PassFacts,
    UnitDescription,
    UnitSegment,
)
from shardwise.description.workload import Recomputing, Workload
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.timeline import COMPUTE

# The CUDA caching allocator counts in blocks of this many bytes.
BLOCK = 512


def rounded(nbytes: float) -> int:
    """Bytes as an allocator counts them."""
    return math.ceil(nbytes / BLOCK) * BLOCK


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. A collective (`group` set) ends for all members of its group at once."""

    name: str
    unit: str
    phase: str
    role: str  # compute, copy, transfer, host
    stream: str
    seconds: float  # with the device to itself
    host: float = 0.0  # seconds to issue it
    after: tuple[int, ...] = ()
    group: str = ""  # the mesh axis of a collective
    link: str = ""  # transfers with the same link share its bandwidth
    share: float = 0.0  # of the compute that it takes meanwhile
    nbytes: int = 0  # of a collective's whole message
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Change:
    """Bytes that come or go at the start or the end of the compute operation number `at`."""

    at: int  # -1: the step's start
    ends: bool
    role: str
    nbytes: int


@dataclass(frozen=True)
class Program:
    """One rank's step."""

    ops: tuple[Op, ...]
    changes: tuple[Change, ...]


@dataclass
class Builder:
    """Collects a Program: operations on streams, and what the compute stream must wait for. The
    listener of `planning/executor.py` that asks what things cost.
    """

    costs: Costs
    strides: Mapping[str, int] = field(default_factory=dict)  # between ranks of an axis, if not 1
    phase: str = "forward"
    ops: list[Op] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    last_compute: int = -1
    _joined: list[int] = field(default_factory=list)

    def add(self, op: Op) -> int:
        """Queue an operation; gives its number."""
        if op.stream == COMPUTE:
            if self._joined:
                op = replace(op, after=(*op.after, *self._joined))
                self._joined.clear()
            self.last_compute = len(self.ops)
        self.ops.append(op)
        return len(self.ops) - 1

    def join(self, number: int) -> None:
        """The compute stream waits for operation `number` before it goes on."""
        if number >= 0:
            self._joined.append(number)

    def behind_compute(self) -> tuple[int, ...]:
        """For `after`: everything that compute has been given so far, waits included."""
        return (*((self.last_compute,) if self.last_compute >= 0 else ()), *self._joined)

    def compute(self, part: PassFacts, name: str, unit: str, peak: int | None = None) -> int:
        """Run a pass; its activations come and go around it. `peak`: the most bytes inside, if that
        is another than the pass says.
        """
        number = len(self.ops)
        kept = max(0, part.net_bytes)
        extra = max(0, (part.peak_bytes if peak is None else peak) - kept)
        self.changes += [
            Change(number, False, "activations", kept),
            Change(number, False, "temporary", extra),
            Change(number, True, "temporary", -extra),
            Change(number, True, "activations", part.net_bytes - kept),
        ]
        seconds, host = self.costs.compute(part), self.costs.issue(part)
        return self.add(Op(name, unit, self.phase, "compute", COMPUTE, seconds, host))

    def copy(
        self, name: str, unit: str, stream: str, nbytes: float, after: Sequence[int] = ()
    ) -> int:
        """A kernel that only moves bytes. Without streams it is the host's, so compute's."""
        stream = stream if self.costs.streams else COMPUTE
        if stream == COMPUTE:
            for number in after:
                self.join(number)
        waits = () if stream == COMPUTE else tuple(after)
        share = 0.0 if stream == COMPUTE else self.costs.copy_share
        seconds = self.costs.copy(nbytes, name)
        return self.add(
            Op(name, unit, self.phase, "copy", stream, seconds, after=waits, share=share)
        )

    def collective(
        self,
        kind: str,
        unit: str,
        axis: str,
        nbytes: int,
        ranks: int,
        after: Sequence[int],
        written: float = 0.0,
    ) -> int:
        """A collective on its group's stream. Emulated, it first copies the `written` bytes."""
        costs, phase = self.costs, self.phase
        members = Members(ranks, self.strides.get(axis, 1))
        seconds = costs.collective(kind, nbytes, members)
        host = costs.cluster.host.collective_s if costs.streams else 0.0
        if not costs.streams and ranks > 1:
            called = costs.call(kind, nbytes)
            start = self.add(Op(f"{kind} call", unit, phase, "copy", COMPUTE, called))
            seconds, after = max(0.0, seconds - called), (start,)
        if costs.emulated and costs.streams and written > 0:
            name = f"{kind} copy"
            copied = costs.copy(2 * written, name)
            self.add(Op(name, unit, phase, "copy", axis, copied, 0.0, tuple(after), share=1.0))
            seconds, after = max(0.0, seconds - copied), ()
        return self.add(
            Op(
                kind,
                unit,
                phase,
                "transfer",
                axis,
                seconds,
                host,
                tuple(after),
                axis,
                costs.link(members),
                costs.share,
                nbytes,
                ranks,
            )
        )

    def is_near(self, axis: str, ranks: int) -> bool:
        return self.costs.is_near(Members(ranks, self.strides.get(axis, 1)))

    def engine_work(self, name: str, unit: str) -> None:
        """The engine's own Python to gather, cast or reduce one unit: the host's time, and on a CPU
        compute's as well.
        """
        host = self.costs.cluster.host
        seconds = host.seconds_to_cast if name == "cast" else host.unit_s
        if self.costs.streams:
            self.ops.append(Op(name, unit, self.phase, "host", "host", 0.0, seconds))
        else:
            self.add(Op(name, unit, self.phase, "host", COMPUTE, seconds))

    def hold(self, role: str, nbytes: int) -> None:
        """Bytes come (or, negative, go) at this point of the compute stream."""
        if nbytes:
            counted = rounded(nbytes) if nbytes > 0 else -rounded(-nbytes)
            self.changes.append(Change(self.last_compute, True, role, counted))

    def build(self) -> Program:
        return Program(tuple(self.ops), tuple(self.changes))


class PeakCounter(Builder):
    """Counts bytes in the order in which a Builder would note them, and makes no operations: many
    times quicker where only the peak is asked for.
    """

    held = most = 0

    def peak(self) -> int:
        for change in self.changes:  # of the step's end
            self._move(change.nbytes)
        self.changes.clear()
        return self.most

    def _move(self, nbytes: int) -> None:
        self.held += nbytes
        self.most = max(self.most, self.held)

    def add(self, op: Op) -> int:
        return -1

    def compute(self, part: PassFacts, name: str, unit: str, peak: int | None = None) -> int:
        kept = max(0, part.net_bytes)
        self._move(kept)
        inside = part.peak_bytes if peak is None else peak
        self.most = max(self.most, self.held + inside - kept)
        self._move(part.net_bytes - kept)
        return -1

    def copy(self, *_: Any) -> int:
        return -1

    def collective(self, *_: Any) -> int:
        return -1

    def engine_work(self, *_: Any) -> None: ...

    def hold(self, role: str, nbytes: int) -> None:
        self._move(rounded(nbytes) if nbytes > 0 else -rounded(-nbytes))


@dataclass(frozen=True)
class Work:
    """One micro-batch as the schedule needs it: segments in forward order, with the numbers of the
    Plan's units that each one uses.
    """

    segments: tuple[tuple[str, UnitSegment], ...]
    uses: tuple[tuple[int, ...], ...]  # of each segment
    # For each segment: gradient bytes that its backward leaves, by unit of the Plan; and the units
    # of which some trained parameter gets no gradient.
    grads: tuple[Mapping[int, int], ...]
    lacking: tuple[tuple[int, ...], ...]
    without_gradient: frozenset[str] = frozenset()


def lay_work(plan: Plan, description: ModelDescription) -> Work:
    """Match the description's segments with the Plan's units by parameter names, so that units may
    be cut otherwise than the description is (merged blocks, buckets through the middle of one).
    """
    places = {
        p.name: (number, p)
        for number, unit in enumerate(plan.require_units())
        for p in unit.parameters
    }
    unit_of = {name: number for name, (number, _) in places.items()}
    uses: list[tuple[int, ...]] = []
    grads: list[dict[int, int]] = []
    lacking: list[tuple[int, ...]] = []
    idle = set(description.without_gradient)
    lacks = {unit_of[name] for name in idle if name in unit_of}
    ends: dict[str, int] = {}  # a described unit's last segment
    for unit, segment in description.segments:
        ends[unit.name] = segment.position
    for unit, segment in description.segments:
        missing = [p.name for p in unit.parameters if p.name not in unit_of]
        if missing:
            raise ValueError(
                f"parameter {missing[0]!r} of described unit {unit.name!r} is in no unit of the "
                "Plan: describe the model that the Plan was resolved for"
            )
        # A bucket may end inside of a module, and has its gradients with the next one's.
        used = [*(p.name for p in unit.parameters), *(segment.gradients or ())]
        uses.append(tuple(dict.fromkeys(unit_of[name] for name in used)))
        found: dict[int, int] = {}
        last = ends[unit.name] == segment.position
        of_unit = [p.name for p in unit.parameters] if last else []
        for name in of_unit if segment.gradients is None else segment.gradients:
            number, p = places[name]
            if p.trainable and name not in idle:
                _, compute, _ = plan.dtypes(p.dtype)
                found[number] = found.get(number, 0) + rounded(p.numel * compute.itemsize)
        grads.append(found)
        lacking.append(tuple(number for number in uses[-1] if number in lacks))
    segments = tuple((unit.name, segment) for unit, segment in description.segments)
    return Work(segments, tuple(uses), tuple(grads), tuple(lacking), frozenset(idle))


def scaled(description: ModelDescription, factor: float, kernels: bool = True) -> ModelDescription:
    """The same model on a micro-batch of another size: work and activations in proportion. Without
    `kernels`, activations alone.
    """
    if factor == 1:
        return description
    known: dict[int, PassFacts] = {}

    def scale(part: PassFacts) -> PassFacts:
        if id(part) not in known:
            work = part.kernels
            if kernels:
                work = tuple(_scale_kernel(k, factor) for k in part.kernels)
            peak, net = round(part.peak_bytes * factor), round(part.net_bytes * factor)
            # Gradients are as large as before.
            beside = max(peak, net, 0) - part.peak_bytes
            kept = part.keeping_bytes and part.keeping_bytes + beside
            before = round(part.before_bytes * factor)
            passing = part.passing_bytes and max(0, part.passing_bytes + beside)
            known[id(part)] = PassFacts(work, max(peak, net, 0), net, kept, before, passing)
        return known[id(part)]

    units = tuple(
        replace(
            unit,
            segments=tuple(
                replace(
                    s,
                    forward=scale(s.forward),
                    backward=scale(s.backward),
                    recompute=scale(s.recompute),
                    saved_bytes=round(s.saved_bytes * factor),
                    output_bytes=round(s.output_bytes * factor),
                )
                for s in unit.segments
            ),
        )
        for unit in description.units
    )
    return replace(description, units=units, input_bytes=round(description.input_bytes * factor))


def checkpointed(description: ModelDescription, how: str = "nonreentrant") -> ModelDescription:
    """The same model with blocks recomputed in backward, but never the root's: forward leaves only
    the block's output, which is the next one's input. A unit of several blocks counts as one.
    """
    recomputing = Recomputing.parse(how)
    if recomputing is None or recomputing.keeps_products:
        raise UserError(
            f"recomputing {how} cannot be derived from sums: describe the model by a trace on the "
            "meta device"
        )
    order = {unit.name: unit for unit, _ in description.segments if unit.modules != ("",)}
    chosen = set(recomputing.choose(list(order)))

    def change(segment: UnitSegment) -> UnitSegment:
        forward, kept = segment.forward, min(segment.output_bytes, segment.forward.net_bytes)
        again = forward.net_bytes - kept
        return replace(
            segment,
            forward=PassFacts(forward.kernels, forward.peak_bytes, kept),
            recompute=PassFacts(forward.kernels, max(forward.peak_bytes, again), again),
            checkpointed=True,
        )

    def change_unit(unit: UnitDescription) -> UnitDescription:
        if unit.name not in chosen:
            return unit
        return replace(unit, segments=tuple(change(s) for s in unit.segments))

    return replace(description, units=tuple(change_unit(unit) for unit in description.units))


def _scale_kernel(kernel: KernelFact, factor: float) -> KernelFact:
    return replace(kernel, flops=kernel.flops * factor, bytes=kernel.bytes * factor)


def works_of(
    plan: Plan, descriptions: ModelDescription | Mapping[int, ModelDescription], workload: Workload
) -> dict[int, Work]:
    """One `Work` for each micro-batch size of the workload: from the description of that size, or
    from the only one in proportion.
    """
    sizes = {workload.micro_batch}
    if workload.sizes is not None:
        sizes = {size for row in workload.sizes for size in row if size}
    if isinstance(descriptions, ModelDescription):
        base = descriptions
        return {n: lay_work(plan, scaled(base, n / workload.micro_batch)) for n in sorted(sizes)}
    missing = sizes - set(descriptions)
    if missing:
        raise ValueError(
            f"micro-batches of {sorted(missing)} sequences have no description, only "
            f"{sorted(descriptions)}: describe each size, or give one description for all"
        )
    return {size: lay_work(plan, descriptions[size]) for size in sorted(sizes)}
