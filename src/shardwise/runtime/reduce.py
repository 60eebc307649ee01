"""Reducing gradients: pack a unit's gradients into a slot, scatter the sum, all-reduce it across
replicas.

    shown.grad --pack--> slot --reduce-scatter--> scattered --all-reduce--> gradient
                          |                           |
                     accumulator                   partial            (over micro-batches, by the
                     Plan's `sync`)

Everything is a sum; the loss carries the divisor.
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
    """One unit's reduce under way: the steps left, and the memory that must stay until they are
    done.
    """

    def __init__(self, steps: Steps, held: list[torch.Tensor], lane: Lane) -> None:
        self.steps, self.held, self.lane = steps, held, lane
        self.waiting_for: tuple[Lane, Handle] | None = next(steps, None)
        if lane.ordered:
            self._queue_rest()

    def _queue_rest(self) -> None:
        """Streams take the remaining steps now; only their end is left to wait for."""
        while self.waiting_for is not None:
            lane, handle = self.waiting_for
            with lane.enter():
                handle.wait()
            self.lane = lane
            self.waiting_for = next(self.steps, None)
        self.end = self.lane.mark()

    def retire(self) -> None:
        """Compute waits for the end; then the memory may go."""
        if self.lane.ordered:
            self.lane.join(self.end)
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
            self.depth = 2**31  # every unit has a slot of its own
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
        whole = self.mesh.shard.size == 1
        # The gradient buffer itself takes the sum, where nothing has to be added to it or cast.
        direct = (
            unit.overwrite and unit.partial is None and unit.reduce_dtype == gradients.flat.dtype
        )
        slot = pack(unit, gradients, gradients.flat if direct and whole else None)
        if slot is gradients.flat:
            unit.overwrite = False
        if self.sync == "last":
            if unit.accumulator is not None:
                slot = unit.accumulator.add_(slot)
            unit.accumulator = None if last else slot
            if not last:
                return
        scattered = slot
        if not whole:
            scattered = gradients.flat if direct else slot.new_empty(gradients.layout.shard_numel)
        overwrites = unit.overwrite
        if direct or last or not self._delays:
            unit.overwrite = False
        steps = self._steps(unit, gradients, slot, scattered, overwrites, last)
        self._start(Reduction(steps, [slot, scattered], self.scatter_lane))

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
        self._start(Reduction(steps, [zeros], self.scatter_lane))

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
            with lane.behind_compute():
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


def pack(unit: Unit, gradients: Gradients, into: torch.Tensor | None) -> torch.Tensor:
    """Take the gradients off the shown parameters and lay them rank after rank in the reduce dtype.

    A parameter without a gradient counts as zeros. A single evenly cut gradient of the right dtype
    is its own slot.
    """
    ranks, layout = gradients.layout.ranks, gradients.layout
    shown = gradients.shown
    found = [parameter.grad for parameter in shown]
    for parameter in shown:
        parameter.grad = None
    if len(found) == 1 and into is None and layout.rows[0].even:
        only = found[0]
        if only is not None and only.dtype == unit.reduce_dtype and only.is_contiguous():
            return only.view(-1)
    tensors = []
    for grad, parameter, rows in zip(found, shown, layout.rows, strict=True):
        if rows.part == 0:
            continue
        if grad is None:
            grad = torch.zeros_like(parameter)
        tensors.append(grad.expand(ranks) if rows.replicated else grad)
    slot = into
    if slot is None:
        slot = torch.empty(layout.full_numel, dtype=unit.reduce_dtype, device=gradients.flat.device)
    if tensors:
        versions.chunk_cat(tensors, ranks, slot.view(ranks, -1))
    return slot
