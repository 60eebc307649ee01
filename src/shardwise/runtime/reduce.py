"""Reducing gradients: pack a unit's gradients into a slot, scatter the sum, all-reduce it across
replicas.

    shown.grad --pack--> slot --reduce-scatter--> scattered --all-reduce--> gradient
                          |                           |
                     accumulator                   partial

Over the micro-batches of a step, `sync="last"` sums slots in the accumulator and the delayed policy
sums scattered gradients in the partial. Everything is a sum; the loss carries the divisor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from shardwise.comms import versions
from shardwise.comms.lanes import Lane
from shardwise.comms.real import DONE, Handle
from shardwise.planning.plan import Plan
from shardwise.planning.strategies import REDUCES
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.storage import Gradients
from shardwise.sharding.unit import Unit

Steps = Iterator[tuple[Lane, Handle]]


class Reduction:
    """One unit's reduce under way: the steps left, and the memory that must stay until then."""

    def __init__(self, steps: Steps, held: list[torch.Tensor], packed: Handle | None) -> None:
        """`packed` is the moment after which `held` is no longer read; None: only the end is."""
        self.steps, self.held = steps, held
        self.waiting_for: tuple[Lane, Handle] | None = next(steps, None)
        assert self.waiting_for is not None
        self.lane = self.waiting_for[0]
        if self.lane.ordered:
            self._queue_rest()
            self.released = packed or self.lane.mark()

    def _queue_rest(self) -> None:
        """Streams take the remaining steps now; none of it blocks the host."""
        while self.waiting_for is not None:
            self.lane, handle = self.waiting_for
            if handle is not DONE:
                with self.lane.enter():
                    handle.wait()
            self.waiting_for = next(self.steps, None)

    def retire(self) -> None:
        """Compute waits until the memory may go: a host for the end, a stream for the moment."""
        if self.lane.ordered:
            self.lane.join(self.released)
        while self.waiting_for is not None:
            lane, handle = self.waiting_for
            lane.join(handle)
            self.waiting_for = next(self.steps, None)
        self.held.clear()


class Reducer:
    """Turns the gradients that backward left on shown parameters into sums in the buffers."""

    def __init__(self, plan: Plan, mesh: Mesh, device: torch.device) -> None:
        self.sync, self.mesh = plan.sync, mesh
        self.scatter_lane, self.replica_lane = Lane(device), Lane(device)
        self.ring: deque[Reduction] = deque()
        if plan.name == "ddp" and plan.reduce == "naive":
            self.depth = 0  # one call, its wait, the next call
        elif plan.strategy.gradients == "replicate":
            # On a host every unit has a slot of its own; streams wait for a pack only, so their
            # gradients need not stay.
            self.depth = max(plan.reduce_depth, 2) if self.scatter_lane.ordered else 2**31
        else:
            self.depth = plan.reduce_depth
        self._delays = plan.sync == "scatter_each_reduce_last" and plan.replicate > 1
        self.during_backward = plan.name != "ddp" or REDUCES[plan.reduce].during_backward

    def reduce(self, unit: Unit, last: bool) -> None:
        """Start reducing `unit`'s gradients of one micro-batch. Waits for the oldest reduce when
        the ring is full.
        """
        gradients = unit.gradients
        assert gradients is not None
        while self.ring and len(self.ring) >= self.depth:
            self.ring.popleft().retire()
        self._open_buffer(unit, gradients)
        lane, whole = self.scatter_lane, self.mesh.shard.size == 1
        flat = gradients.flat
        # The gradient buffer itself takes the sum, where nothing has to be added to it or cast.
        direct = unit.overwrite and unit.partial is None and unit.reduce_dtype == flat.dtype
        found = take_gradients(gradients)
        # Slots live in the lane's own memory: the next pack reuses one behind its reduce-scatter,
        # and compute waits for neither.
        with lane.behind_compute():
            own = len(found) == 1 and found[0].dtype == unit.reduce_dtype  # it is its own slot
            reused = gradients.slot if self.sync != "last" and not own else None
            if reused is not None:
                slot = reused.pack(found)
            else:
                slot = pack(unit, gradients, found, flat if direct and whole else None)
            if slot is flat:
                unit.overwrite = False
            if self.sync == "last":
                if unit.accumulator is not None:
                    slot = unit.accumulator.add_(slot)
                unit.accumulator = None if last else slot
            scattered = slot
            if not whole:
                scattered = flat if direct else slot.new_empty(gradients.layout.shard_numel)
        packed = lane.mark(unit.packed)
        if self.sync == "last" and not last:
            self._start(Reduction(iter([(lane, DONE)]), found, packed))
            return
        overwrites = unit.overwrite
        if direct or last or not self._delays:
            unit.overwrite = False
        steps = self._steps(unit, gradients, slot, scattered, overwrites, last)
        # Memory that the other lane, or the reduce-scatter itself, still reads waits for the end.
        summed = scattered if unit.partial is None else unit.partial
        crosses = self.mesh.replicate.size > 1 and not (scattered is summed is flat)
        borrowed = any(grad.data_ptr() == slot.data_ptr() for grad in found)
        held = [*found, slot, scattered, summed]
        self._start(Reduction(steps, held, None if crosses or borrowed else packed))
        if reused is not None:
            reused.buffer.release()  # in the lane's order: behind the reduce-scatter just queued

    def contribute_zero(self, unit: Unit) -> None:
        """Join the replicas' all-reduce of a step in which this rank's shard group ran no
        micro-batch.
        """
        gradients = unit.gradients
        assert gradients is not None
        self._open_buffer(unit, gradients)
        zeros = torch.zeros_like(gradients.flat, dtype=unit.reduce_dtype)
        steps = self._finish_steps(gradients, zeros, unit.overwrite)
        unit.overwrite = False
        self._start(Reduction(steps, [zeros], None))

    @staticmethod
    def _open_buffer(unit: Unit, gradients: Gradients) -> None:
        """At a step's first reduce: the sum overwrites the buffer if no gradient hangs on a
        parameter, else adds.
        """
        if unit.opened:
            return
        unit.opened = True
        unit.overwrite = gradients.cleared
        gradients.buffer.allocate()
        if not unit.overwrite:
            gradients.clear_missing()

    def finish(self) -> None:
        """Compute waits for every reduce under way."""
        while self.ring:
            self.ring.popleft().retire()
        self.scatter_lane.join(self.scatter_lane.mark())
        if self.mesh.replicate.size > 1:
            self.replica_lane.join(self.replica_lane.mark())

    def _start(self, reduction: Reduction) -> None:
        self.ring.append(reduction)
        if self.depth == 0:
            self.finish()

    def _steps(
        self,
        unit: Unit,
        gradients: Gradients,
        slot: torch.Tensor,
        scattered: torch.Tensor,
        overwrites: bool,
        last: bool,
    ) -> Steps:
        """Reduce-scatter, then what follows; each yield is something to wait for first."""
        lane = self.scatter_lane
        if slot is scattered:
            yield lane, DONE
        else:
            with lane.enter():
                handle = self.mesh.shard.reduce_scatter(scattered, slot)
            yield lane, handle
        if self._delays:
            with lane.behind_compute() if slot is scattered else lane.enter():
                if unit.partial is None:
                    unit.partial = scattered
                else:
                    unit.partial.add_(scattered)
            if not last:
                return
            scattered, unit.partial = unit.partial, None
        yield from self._finish_steps(gradients, scattered, overwrites)

    def _finish_steps(
        self, gradients: Gradients, scattered: torch.Tensor, overwrites: bool
    ) -> Steps:
        """All-reduce across replicas, and add to the gradient buffer."""
        lane = self.scatter_lane
        if self.mesh.replicate.size > 1:
            lane = self.replica_lane
            lane.follow(self.scatter_lane)
            with lane.behind_compute():
                handle = self.mesh.replicate.all_reduce(scattered)
            yield lane, handle
        if scattered is not gradients.flat:
            with lane.behind_compute():
                if overwrites:
                    gradients.flat.copy_(scattered)
                else:
                    gradients.flat.add_(scattered)
            yield lane, DONE


def take_gradients(gradients: Gradients) -> list[torch.Tensor]:
    """Take the gradients off the shown parameters; a parameter without one counts as zeros."""
    found = []
    for shown in gradients.shown:
        grad = shown.grad
        found.append(torch.zeros_like(shown) if grad is None else grad)
        shown.grad = None
    return found


def pack(
    unit: Unit, gradients: Gradients, found: list[torch.Tensor], into: torch.Tensor | None
) -> torch.Tensor:
    """Lay gradients rank after rank in the reduce dtype: one kernel for the unit.

    A single evenly cut gradient of the right dtype is its own slot.
    """
    layout = gradients.layout
    only = found[0]
    alone = len(found) == 1 and into is None and layout.rows[0].even
    if alone and only.dtype == unit.reduce_dtype and only.is_contiguous():
        return only.view(-1)
    slot = into
    if slot is None:
        slot = torch.empty(layout.full_numel, dtype=unit.reduce_dtype, device=only.device)
    if gradients.odd:
        found = [
            grad.expand(layout.ranks) if rows.replicated else grad
            for grad, rows in zip(found, layout.rows, strict=True)
            if rows.part > 0
        ]
    if found:
        versions.chunk_cat(found, layout.ranks, slot.view(layout.ranks, -1))
    return slot
