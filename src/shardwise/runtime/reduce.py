"""Reducing gradients: pack a unit's gradients into a slot, scatter the sum, all-reduce it across
replicas.

    shown.grad --pack--> slot --reduce-scatter--> scattered --all-reduce--> gradient
                          |                           |
                     accumulator                   partial

Over the micro-batches of a step, `sync="last"` sums slots in the accumulator and the delayed policy
sums scattered gradients in the partial. Under a Plan everything is a sum, and the loss carries the
divisor; the compat surface divides, by itself, around the sum.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch

from shardwise.comms import marks, versions
from shardwise.comms.lanes import Lane, Lanes
from shardwise.comms.real import DONE, Handle
from shardwise.planning.placement import Rows
from shardwise.runtime.policy import Policy
from shardwise.sharding.gradients import Gradients
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
            return
        # A host goes on to the first thing that takes time: without shards, the all-reduce.
        while self.waiting_for is not None and self.waiting_for[1] is DONE:
            self.waiting_for = next(self.steps, None)

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

    def __init__(self, policy: Policy, lanes: Lanes) -> None:
        self.scatter_lane, self.replica_lane = lanes.scatter, lanes.replica
        self.ring: deque[Reduction] = deque()
        self.depth = policy.depth(self.scatter_lane)
        self._crossed = False  # the replica lane was used in this backward
        self._offloads = False  # sums went to the host in this backward

    def reduce(self, unit: Unit, scatter: bool, all_reduce: bool) -> None:
        """Start reducing `unit`'s gradients of one micro-batch: add them up, `scatter` the sum over
        the shard group, `all_reduce` it over the replicas. Waits for the oldest reduce when the
        ring is full.
        """
        gradients, options, mesh = unit.gradients, unit.options, unit.mesh
        assert gradients is not None
        while self.ring and len(self.ring) >= self.depth:
            self.ring.popleft().retire()
        self._open_buffer(unit, gradients)
        lane, whole, custom = self.scatter_lane, mesh.shard.size == 1, options.custom_scatter
        flat = gradients.flat
        # The gradient buffer itself takes the sum, where nothing has to be added to it or cast.
        direct = unit.overwrite and unit.partial is None and unit.reduce_dtype == flat.dtype
        direct = direct and custom is None and gradients.offload is None
        adds_up = not scatter or unit.accumulator is not None
        found = take_gradients(gradients)
        # Slots live in the lane's own memory: the next pack reuses one behind its reduce-scatter,
        # and compute waits for neither.
        with marks.range("pack", unit.name), lane.behind_compute():
            own = len(found) == 1 and found[0].dtype == unit.reduce_dtype  # it is its own slot
            reused = gradients.slot if not (adds_up or own or custom) else None
            if reused is not None:
                slot = reused.pack(found)
            else:
                into = flat if direct and whole else None
                if custom is not None:
                    numel = (gradients.layout.full_numel,)
                    into = custom.allocate(numel, dtype=unit.reduce_dtype, device=mesh.device)
                slot = pack(unit, gradients, found, into, borrow=not adds_up)
            if slot is flat:
                unit.overwrite = False
            if unit.accumulator is not None:
                slot = unit.accumulator.add_(slot)
            unit.accumulator = None if scatter else slot
            scattered = slot
            if scatter and options.divide_before != 1.0:
                slot.div_(options.divide_before)
            if scatter and not whole:
                scattered = flat if direct else self._make_scattered(unit, gradients, slot)
        packed = lane.mark(unit.packed)
        if not scatter:
            self._start(Reduction(iter([(lane, DONE)]), found, packed))
            return
        delays = mesh.replicate.size > 1 and not all_reduce
        overwrites = unit.overwrite
        if direct or not delays:
            unit.overwrite = False
        unit.complete = not delays
        steps = self._steps(unit, gradients, slot, scattered, overwrites, delays)
        # Memory that the other lane, or the reduce-scatter itself, still reads waits for the end.
        summed = scattered if unit.partial is None else unit.partial
        crosses = mesh.replicate.size > 1 and not (scattered is summed is flat)
        borrowed = any(grad.data_ptr() == slot.data_ptr() for grad in found)
        held = [*found, slot, scattered, summed]
        self._start(Reduction(steps, held, None if crosses or borrowed else packed))
        if reused is not None:
            reused.buffer.release()  # in the lane's order: behind the reduce-scatter just queued

    @staticmethod
    def _make_scattered(unit: Unit, gradients: Gradients, slot: torch.Tensor) -> torch.Tensor:
        numel, custom = gradients.layout.shard_numel, unit.options.custom_scatter
        if custom is None:
            return slot.new_empty(numel)
        made: torch.Tensor = custom.allocate((numel,), dtype=slot.dtype, device=slot.device)
        return made

    def contribute_zero(self, unit: Unit) -> None:
        """Join the replicas' all-reduce of a step in which this rank's shard group ran no
        micro-batch.
        """
        gradients = unit.gradients
        assert gradients is not None
        self._open_buffer(unit, gradients)
        zeros = torch.zeros_like(gradients.flat, dtype=unit.reduce_dtype, device=unit.mesh.device)
        steps = self._finish_steps(unit, gradients, zeros, unit.overwrite)
        unit.overwrite, unit.complete = False, True
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
            gradients.adopt()

    def finish(self) -> None:
        """Compute waits for every reduce under way."""
        while self.ring:
            self.ring.popleft().retire()
        self.scatter_lane.join(self.scatter_lane.mark())
        if self._crossed:
            self.replica_lane.join(self.replica_lane.mark())
        if self._offloads:
            for lane in (self.scatter_lane, self.replica_lane):
                lane.block_host()
        self._crossed = self._offloads = False

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
        delays: bool,
    ) -> Steps:
        """Reduce-scatter, then what follows; each yield is something to wait for first."""
        lane = self.scatter_lane
        if slot is scattered:
            yield lane, DONE
        else:
            with marks.range("reduce", unit.name), lane.enter():
                handle = unit.mesh.scatter.reduce_scatter(
                    scattered, slot, unit.options.custom_scatter
                )
            yield lane, handle
        if delays or unit.partial is not None:
            with lane.behind_compute() if slot is scattered else lane.enter():
                if unit.partial is None:
                    unit.partial = scattered
                else:
                    unit.partial.add_(scattered)
            if delays:
                return
            scattered, unit.partial = unit.partial, None
        yield from self._finish_steps(unit, gradients, scattered, overwrites)

    def _finish_steps(
        self, unit: Unit, gradients: Gradients, scattered: torch.Tensor, overwrites: bool
    ) -> Steps:
        """All-reduce across replicas, divide, and add to the gradient buffer."""
        lane, options = self.scatter_lane, unit.options
        if unit.mesh.replicate.size > 1:
            lane, self._crossed = self.replica_lane, True
            lane.follow(self.scatter_lane)
            with marks.range("reduce", unit.name), lane.behind_compute():
                handle = unit.mesh.replicate.all_reduce(scattered)
            yield lane, handle
        if options.after_reduce is not None:
            with lane.enter(), lane.aside(options.after_reduce_stream):
                options.after_reduce(scattered)
        if options.divide_after != 1.0:
            with lane.enter():
                scattered.div_(options.divide_after)
        if scattered is not gradients.flat:
            flat = gradients.flat
            with marks.range("add", unit.name), lane.behind_compute():
                if gradients.offload is not None:
                    self._offloads = True
                    scattered = scattered.to(flat.device) if not overwrites else scattered
                if overwrites:
                    flat.copy_(scattered, non_blocking=True)
                else:
                    flat.add_(scattered)
            yield lane, DONE


def take_gradients(gradients: Gradients) -> list[torch.Tensor]:
    """Take the gradients off the shown parameters; a parameter without one counts as zeros."""
    found = []
    for shown in gradients.shown:
        grad = shown.grad
        found.append(torch.zeros_like(shown) if grad is None else grad)
        shown.grad = None
    if gradients.nested:
        found = [
            member.nested.local_gradient(grad) if member.nested is not None else grad
            for member, grad in zip(gradients.members, found, strict=True)
        ]
    return found


def pack(
    unit: Unit,
    gradients: Gradients,
    found: list[torch.Tensor],
    into: torch.Tensor | None,
    borrow: bool,
) -> torch.Tensor:
    """Lay gradients rank after rank in the reduce dtype: one kernel for the unit.

    A single evenly cut gradient of the right dtype can be its own slot, if it is only borrowed.
    """
    layout = gradients.layout
    only = found[0]
    rows = layout.rows[0]
    alone = borrow and len(found) == 1 and into is None and rows.even and not rows.dim
    if alone and only.dtype == unit.reduce_dtype and only.is_contiguous():
        return only.view(-1)
    slot = into
    if slot is None:
        slot = torch.empty(layout.full_numel, dtype=unit.reduce_dtype, device=only.device)
    if gradients.odd:
        found = [
            _rank_after_rank(grad, rows)
            for grad, rows in zip(found, layout.rows, strict=True)
            if rows.part > 0
        ]
    if found:
        versions.chunk_cat(found, layout.ranks, slot.view(layout.ranks, -1))
    return slot


def _rank_after_rank(grad: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A gradient whose rows of dim 0 are what the ranks get."""
    if rows.replicated:
        return grad.expand(rows.ranks)
    if rows.dim:
        return grad.unflatten(rows.dim, (rows.ranks, -1)).movedim(rows.dim, 0).flatten(1)
    return grad
