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

from shardwise.engine import marks
from shardwise.engine.collectives import DONE, Handle, allocate
from shardwise.engine.gradients import Gradients
from shardwise.engine.lanes import Lane, Lanes
from shardwise.engine.policy import Policy
from shardwise.engine.unit import Unit

Steps = Iterator[tuple[Lane, Handle]]


class Reduction:
    """One unit's reduce under way: the steps left, and the gradients that it packs."""

    def __init__(self, steps: Steps, found: list[torch.Tensor], packed: Handle | None) -> None:
        """`packed` is the moment after which `found` is no longer read; None: only the end is."""
        self.steps, self.found = steps, found
        self.waiting_for: tuple[Lane, Handle] | None = next(steps, None)
        assert self.waiting_for is not None
        self.lane = self.waiting_for[0]
        if self.lane.ordered:
            self._queue_rest()
            self.packed = packed or self.lane.mark()
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
        """Compute waits until the gradients may go: a host for the end, a stream for the pack."""
        if self.lane.ordered:
            self.lane.join(self.packed)
        while self.waiting_for is not None:
            lane, handle = self.waiting_for
            lane.join(handle)
            self.waiting_for = next(self.steps, None)
        self.found.clear()


class Reducer:
    """Turns the gradients that backward left on shown parameters into sums in the buffers."""

    def __init__(self, policy: Policy, lanes: Lanes) -> None:
        self.lanes = lanes
        self.ring: deque[Reduction] = deque()
        self.depth = policy.depth(lanes.scatter)
        # What the replica lane reads of the scatter lane's memory: rows, so 1/n of a slot. They
        # stay until backward's end, so that no lane and no compute waits for that lane before.
        self._crossing: list[torch.Tensor] = []
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
        sums = self._open(unit, gradients)
        lane, whole, custom = self.lanes.scatter, mesh.shard.size == 1, options.custom_scatter
        dtype, numel = gradients.reduce_dtype, gradients.shard_numel
        # The gradients' own memory takes the sum, where nothing has to be added to it or cast.
        direct = unit.overwrite and unit.partial is None and dtype == sums.dtype
        direct = direct and custom is None and gradients.offload is None
        adds_up = not scatter or unit.accumulator is not None
        found = gradients.take()
        # Slots live in the lane's own memory: the next pack reuses one behind its reduce-scatter,
        # and compute waits for neither.
        with marks.range("pack", unit.name), lane.behind_compute():
            reused = gradients.slot if not (adds_up or custom) else None
            if reused is not None:
                slot = reused.pack(found)
            else:
                into = sums if direct and whole else None
                if custom is not None:
                    into = allocate(custom, numel * mesh.shard.size, dtype, mesh.device)
                slot = gradients.pack(found, into)
            if slot is sums:
                unit.overwrite = False
            if unit.accumulator is not None:
                slot = unit.accumulator.add_(slot)
            unit.accumulator = None if scatter else slot
            scattered = slot
            if scatter and options.divide_before != 1.0:
                slot.div_(options.divide_before)
            if scatter and not whole:
                scattered = sums if direct else allocate(custom, numel, dtype, mesh.device)
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
        if whole and slot is not sums:
            # The other lane reads all of the slot, which is too much to keep until backward's end.
            self._start(Reduction(steps, [*found, slot], None))
        else:
            self._start(Reduction(steps, found, packed))
        if reused is not None:
            reused.buffer.release()  # in the lane's order: behind the reduce-scatter just queued

    def contribute_zero(self, unit: Unit) -> None:
        """Join the replicas' all-reduce of a step in which this rank's shard group ran no
        micro-batch.
        """
        gradients = unit.gradients
        assert gradients is not None
        sums, device = self._open(unit, gradients), unit.mesh.device
        zeros = torch.zeros_like(sums, dtype=gradients.reduce_dtype, device=device)
        steps = self._finish_steps(unit, gradients, zeros, unit.overwrite)
        unit.overwrite, unit.complete = False, True
        self._start(Reduction(steps, [zeros], None))

    @staticmethod
    def _open(unit: Unit, gradients: Gradients) -> torch.Tensor:
        """The memory of the step's sums; looked at by its first reduce."""
        if not unit.opened:
            unit.opened = True
            unit.overwrite = gradients.open()
        assert gradients.sums is not None
        return gradients.sums

    def finish(self) -> None:
        """Compute waits for every reduce under way."""
        while self.ring:
            self.ring.popleft().retire()
        self.lanes.scatter.join(self.lanes.scatter.mark())
        if self._crossed:
            self.lanes.replica.join(self.lanes.replica.mark())
        if self._offloads:
            for lane in (self.lanes.scatter, self.lanes.replica):
                lane.block_host()
        self._crossing.clear()
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
        lane = self.lanes.scatter
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
        lane, options = self.lanes.scatter, unit.options
        if unit.mesh.replicate.size > 1:
            lane, self._crossed = self.lanes.replica, True
            lane.follow(self.lanes.scatter)
            if unit.mesh.shard.size > 1:
                self._crossing.append(scattered)
            with marks.range("reduce", unit.name), lane.behind_compute():
                handle = unit.mesh.replicate.all_reduce(scattered)
            yield lane, handle
        rows, sums = scattered[: gradients.layout.shard_numel], gradients.sums
        assert sums is not None
        if options.after_reduce is not None:
            with lane.enter(), lane.aside(options.after_reduce_stream):
                options.after_reduce(rows)
        if options.divide_after != 1.0:
            with lane.enter():
                rows.div_(options.divide_after)
        if scattered is not sums:
            with marks.range("add", unit.name), lane.behind_compute():
                if gradients.offload is not None:
                    self._offloads = True
                    scattered = scattered.to(sums.device) if not overwrites else scattered
                if overwrites:
                    sums.copy_(scattered, non_blocking=True)
                else:
                    sums.add_(scattered)
            yield lane, DONE
