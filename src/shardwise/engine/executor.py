"""The schedule's verbs on tensors, and the lanes beside compute that they run on: CUDA streams, or
on a CPU nothing but the same words.

The order of memory is always that of the compute stream: a lane first waits for the moment at which
compute had allocated what the lane will touch, and compute waits for the lane before it reads or
frees it. What a lane allocates for itself lives and dies in the lane's own order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine import marks, torch_private
from shardwise.engine.arena import COMPUTE, REPLICAS, SCATTERS, Arena, Loan, Placed
from shardwise.engine.collectives import (
    DONE,
    After,
    Buffer,
    Group,
    Handle,
    add_up,
    allocate,
    let_go,
)
from shardwise.engine.extended import ExtendedParameters
from shardwise.schedule.executor import Held, Reduction
from shardwise.watch.page import ALL_REDUCE, GATHER, SCATTER, USE

if TYPE_CHECKING:
    from shardwise.engine.unit import Unit


_NOTHING = nullcontext()


class Lane:
    """One queue of communication work beside the compute stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A lane is ordered when work can be queued behind an operation that has not ended: streams
        # can, a host cannot.
        self.ordered = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.ordered else None
        # Queue what follows on this lane, after what the lane already has; or after everything
        # that compute has queued so far.
        self.inside = _Inside(self) if self.ordered else _NOTHING
        self.behind_compute = _Inside(self, behind_compute=True) if self.ordered else _NOTHING
        self.waited = 0.0  # host seconds blocked in `join`; on a CPU that is exposed communication

    @contextmanager
    def aside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Queue what follows on another stream, in this lane's order, if one is given. A host's
        stream orders nothing, but is the current one inside.
        """
        if stream is None or self.stream is None:
            with torch.cpu.stream(cast(Any, stream)):  # of None: nothing
                yield
            return
        stream.wait_stream(self.stream)
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self.stream.wait_stream(stream)

    def mark(self, event: torch.cuda.Event | None = None) -> Handle:
        """This moment of the lane, for compute to wait for."""
        if self.stream is None:
            return DONE
        return self.stream.record_event(event)

    def join(self, handle: Handle) -> None:
        """Make what runs now (the current stream, or the host) wait for `handle`."""
        if handle is DONE:
            return
        if isinstance(handle, torch.cuda.Event):
            torch_private.current_stream(self.device).wait_event(handle)
            return
        began = time.perf_counter()
        handle.wait()
        self.waited += time.perf_counter() - began


class _Inside:
    """The lane's stream as the current one. Made once: torch.cuda.stream builds three objects."""

    def __init__(self, lane: Lane, behind_compute: bool = False) -> None:
        assert lane.stream is not None
        self._stream, self._device = lane.stream, lane.device
        self._moment = torch.cuda.Event() if behind_compute else None
        self._outer: list[torch.cuda.Stream] = []

    def __enter__(self) -> None:
        outer = torch_private.current_stream(self._device)
        if self._moment is not None:
            self._moment.record(outer)
            self._stream.wait_event(self._moment)
        self._outer.append(outer)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._outer.pop())


@dataclass(eq=False)
class TensorHeld(Held):
    """A tensor; `buffer` is its memory, where that is taken again and again."""

    content: torch.Tensor | None
    buffer: Buffer | None = None


@dataclass(eq=False)
class TensorReduction(Reduction):
    unit: Unit
    gradients: list[torch.Tensor]
    lane: Lane = None  # type: ignore[assignment]  # where its last verb was queued


class TensorExecutor:
    """Moves one engine's tensors, on three lanes: gathers, scatters, sums over replicas."""

    def __init__(self, device: torch.device, arena: Arena | None = None) -> None:
        self.arena = arena  # lends the memory of a step, where a Plan says so
        self.gathers, self.scatters, self.replicas = Lane(device), Lane(device), Lane(device)
        self.ordered = self.gathers.ordered
        # In this backward: the lanes that were used.
        self._scattered = self._crossed = False
        self._offloads = False  # sums went to the host in this backward

    @property
    def waited(self) -> float | None:
        """Host seconds blocked by communication; None where streams wait instead."""
        if self.ordered:
            return None
        return self.gathers.waited + self.scatters.waited + self.replicas.waited

    @property
    def streams(self) -> list[torch.cuda.Stream]:
        """Of all lanes; none on a host."""
        lanes = self.gathers, self.scatters, self.replicas
        return [lane.stream for lane in lanes if lane.stream is not None]

    def make_event(self) -> torch.cuda.Event | None:
        """An event to mark moments with again and again; making one is dearer than recording it."""
        return torch.cuda.Event() if self.ordered else None

    # A unit

    def gather(self, unit: Unit) -> None:
        p, lane, gather = unit.parameters, self.gathers, unit.next_gather
        unit.gathered_version = unit.version
        if gather.group.track is not None:
            gather.group.track.add(GATHER, unit.name)
        # On a host the copy-out runs in `wait`: until then the staging alone is enough.
        if self.ordered or not gather.stages:
            if self._make_room(unit):
                gather = unit.next_gather
            p.buffer.allocate()
        with marked("gather", unit.name), lane.behind_compute:
            handle, unpack = gather.start()
            if self.ordered:
                handle.wait()
                if unpack is not None:
                    unpack()
                handle, unpack = lane.mark(unit.arrived), None
        unit.arriving = handle, unpack

    def _make_room(self, unit: Unit) -> bool:
        """Something may stand in the place of the full parameters, in a step of another order; true
        if the unit has another place now.
        """
        place, buffer = unit.parameters.buffer, unit.parameters.buffer
        while self.arena is not None and isinstance(buffer, Placed):
            standing = buffer.standing
            if standing is None:
                break
            self.arena.make_room(unit, standing)
            buffer = unit.parameters.buffer
        return buffer is not place

    def wait(self, unit: Unit) -> None:
        p, (handle, unpack) = unit.parameters, unit.arriving
        uses = unit.next_gather.group.uses
        if uses is not None:
            uses.add(USE, unit.name)
        self.gathers.join(handle)
        if unit.discards and isinstance(p.buffer, Placed) and p.buffer.waits_for_place:
            unit.next_gather.give_staging()
            unit.arriving = DONE, None
            return
        # On a host what was staged gets its place now.
        if self._make_room(unit):
            handle, unpack = unit.next_gather.start()
            self.gathers.join(handle)
        with marked("copy-out", unit.name):
            p.buffer.allocate()
            if unpack is not None:
                unpack()
        if unit.freed_at is not None:
            torch_private.set_writes(p.shown[0], unit.freed_at)
            unit.freed_at = None
        unit.arriving = DONE, None
        if isinstance(p, ExtendedParameters) and unit.places[0][2] is not p.shown[0]:
            unit.take_over(p.shown[0])

    def show(self, unit: Unit) -> None:
        unit.touched = True
        for places, key, shown, visible in unit.places:
            found = places.get(key)
            if found is visible or not lent(found, visible):
                places[key] = shown

    def hide(self, unit: Unit) -> None:
        for places, key, shown, visible in unit.places:
            found = places.get(key)
            if found is shown or not lent(found, visible):
                places[key] = visible

    def free(self, unit: Unit) -> None:
        p = unit.parameters
        p.buffer.release()
        if not p.buffer.allocated and unit.freed_at is None:
            # All shown parameters have one counter. A backward that reads them while they are freed
            # ends in torch's error about it: torch would read where no memory is.
            unit.freed_at = torch_private.writes_of(p.shown[0])
            torch_private.set_writes(p.shown[0], unit.freed_at + 1)

    def shrink(self, unit: Unit) -> None:
        assert unit.kept_piece is not None
        unit.kept_piece.fill()

    def forget_piece(self, unit: Unit) -> None:
        assert unit.kept_piece is not None
        unit.kept_piece.buffer.release()

    # A reduce

    def open(self, unit: Unit) -> bool:
        assert unit.gradients is not None
        return unit.gradients.open()

    def pack(self, unit: Unit, into_sums: bool, passes: bool) -> TensorReduction:
        gradients, custom, lane = unit.gradients, unit.options.custom_scatter, self.scatters
        assert gradients is not None
        found, buffer, loan, own = gradients.take(), None, None, gradients.slot
        if own is not None and isinstance(own.buffer, Placed) and own.buffer.standing is not None:
            own = None
        # Slots live in the lane's own memory: the next pack reuses one behind its reduce-scatter,
        # and compute waits for neither.
        with marked("pack", unit.name), self._start(unit):
            if passes and custom is None and own is not None:
                slot, buffer = own.pack(found), own.buffer
            else:
                into = gradients.sums if into_sums else None
                numel = gradients.shard_numel * unit.shard_ranks
                dtype = gradients.slot_dtype(passes)
                if custom is not None and unit.shard_ranks > 1:
                    into = allocate(custom, numel, dtype, unit.mesh.device)
                elif into is None and self.arena is not None and not gradients.fills_early:
                    stream = COMPUTE if self.packs_on_compute(unit) else SCATTERS
                    into, loan = self.arena.borrow("slot", unit.name, stream, numel, dtype)
                slot = gradients.pack(found, into, dtype)
                if into is None and not self.ordered and unit.shard_ranks > 1:
                    loan = partial(let_go, slot)
        held = TensorHeld(slot, into_sums, loan, buffer)
        if not self.ordered or self.packs_on_compute(unit):
            found.clear()  # they are packed
        if self.packs_on_compute(unit):
            return TensorReduction(unit, found, held, freed=DONE, lane=self.replicas)
        return TensorReduction(unit, found, held, freed=lane.mark(unit.packed), lane=lane)

    def packs_on_compute(self, unit: Unit) -> bool:
        """Where data parallel has streams, its gradients are packed where backward left them and
        go at once. A lane of its own, and the events that order it, cost the host more for each
        message than the copy costs the device, and with a message per tensor the host is the limit.
        """
        return self.ordered and unit.shard_ranks == 1 and unit.replicas > 1

    def _start(self, unit: Unit) -> AbstractContextManager[Any]:
        """Where a reduce begins: on the scatters' lane, or where compute is."""
        if self.packs_on_compute(unit):
            return _NOTHING
        self._scattered = True
        return self.scatters.behind_compute

    def zeros(self, unit: Unit) -> TensorReduction:
        gradients, lane = unit.gradients, self.scatters
        assert gradients is not None and gradients.sums is not None
        with self._start(unit):
            zeros = torch.zeros_like(
                gradients.sums, dtype=gradients.sum_dtype, device=unit.mesh.device
            )
        held = TensorHeld(zeros)
        if self.packs_on_compute(unit):
            return TensorReduction(unit, [], held, freed=DONE, lane=self.replicas)
        return TensorReduction(unit, [], held, freed=lane.mark(unit.packed), lane=lane)

    def scatter(self, reduction: TensorReduction, into_sums: bool) -> None:
        unit, lane, slot = reduction.unit, self.scatters, reduction.held.content
        gradients, options = unit.gradients, unit.options
        assert gradients is not None
        if options.divide_before != 1.0:
            with _NOTHING if self.packs_on_compute(unit) else lane.inside:
                slot.div_(options.divide_before)
        if unit.shard_ranks == 1:
            return
        custom, group = options.custom_scatter, unit.mesh.scatter
        if group.track is not None:
            group.track.add(SCATTER, unit.name)
        with marked("reduce", unit.name), lane.inside:
            rows, loan = gradients.sums, None
            if not into_sums or rows is None:
                numel, dtype = gradients.shard_numel, gradients.sum_dtype
                if custom is None and self.arena is not None:
                    rows, loan = self.arena.borrow("rows", unit.name, SCATTERS, numel, dtype)
                else:
                    rows = allocate(custom, numel, dtype, unit.mesh.device)
            if gradients.exchanges:
                handle = self._order(self._exchange(unit, slot, rows))
            else:
                handle = self._order(group.reduce_scatter(rows, slot, custom))
        reduction.held = TensorHeld(rows, into_sums, loan)
        reduction.lane, reduction.pending = lane, handle

    def all_reduce(self, reduction: TensorReduction) -> None:
        unit, lane, group = reduction.unit, self.replicas, reduction.unit.mesh.replicate
        self._crossed = True
        if group.track is not None:
            group.track.add(ALL_REDUCE, unit.name)
        if lane.stream is not None and not self.packs_on_compute(unit):
            assert self.scatters.stream is not None
            lane.stream.wait_stream(self.scatters.stream)
        assert unit.gradients is not None
        with marked("reduce", unit.name), lane.behind_compute:
            if unit.gradients.exchanges:
                self._exchange_whole(unit, group, reduction.held.content)
                handle = None
            else:
                handle = self._order(group.all_reduce(reduction.held.content))
        reduction.lane, reduction.pending = lane, handle

    def _borrow(
        self, role: str, unit: Unit, stream: str, numel: int
    ) -> tuple[torch.Tensor, Loan | None]:
        """Memory for gradients that travel."""
        assert unit.gradients is not None
        dtype = unit.gradients.reduce_dtype
        if self.arena is not None:
            return self.arena.borrow(role, unit.name, stream, numel, dtype)
        return torch.empty(numel, dtype=dtype, device=unit.mesh.device), None

    def _exchange(self, unit: Unit, slot: torch.Tensor, rows: torch.Tensor) -> Handle:
        """Send every rank its part of the slot; when it has ended, add up what came in `rows`, in
        their dtype and in the order of the ranks.
        """
        group, numel = unit.mesh.scatter, slot.numel()
        sent, give_sent = slot, None
        if slot.dtype != unit.gradients.reduce_dtype:  # type: ignore[union-attr]
            sent, give_sent = self._borrow("sent", unit, SCATTERS, numel)
            sent.copy_(slot)
        received, give_received = self._borrow("received", unit, SCATTERS, numel)
        if give_received is None and not self.ordered:
            give_received = partial(let_go, received)

        def end() -> None:
            add_up(received.view(group.size, -1), rows)
            for give in (give_sent, give_received):
                if give is not None:
                    give()

        return After(group.all_to_all(received, sent), end)

    def _exchange_whole(self, unit: Unit, group: Group, summed: torch.Tensor) -> None:
        """What an all-reduce does, but added in the dtype of `summed`: each rank adds one part,
        which is rounded once more when all gather it. A host waits: ranks that contribute zeros
        issue their reduces at once, and the two collectives of each have to stay in one order.
        """
        part = -(-summed.numel() // group.size)
        sent, give_sent = self._borrow("copies sent", unit, REPLICAS, part * group.size)
        received, give_received = self._borrow("copies received", unit, REPLICAS, part * group.size)
        sent[: summed.numel()].copy_(summed)
        sent[summed.numel() :].zero_()
        self.replicas.join(group.all_to_all(received, sent))
        own = summed[part * group.rank : part * (group.rank + 1)]
        add_up(received.view(group.size, -1)[:, : own.numel()], own)
        sent.view(group.size, -1)[group.rank, : own.numel()].copy_(own)
        mine = sent.view(group.size, -1)[group.rank]
        self.replicas.join(group.all_gather(sent, mine))
        summed.copy_(sent[: summed.numel()])
        for give in (give_sent, give_received):
            if give is not None:
                give()

    def _order(self, handle: Handle) -> Handle | None:
        """The lane waits for a collective at once; a host when it has to: that is then pending."""
        if self.ordered:
            handle.wait()
        return None if self.ordered or handle is DONE else handle

    def add(self, reduction: TensorReduction, to: Held) -> None:
        unit, lane = reduction.unit, self.scatters
        # Whole, it may be compute's own memory.
        with self._start(unit) if unit.shard_ranks == 1 else lane.inside:
            to.content.add_(reduction.held.content)

    def add_to_sums(self, reduction: TensorReduction, overwrites: bool) -> None:
        unit, lane, options = reduction.unit, reduction.lane, reduction.unit.options
        gradients, summed = unit.gradients, reduction.held.content
        assert gradients is not None and gradients.sums is not None
        rows, sums = summed[: gradients.layout.shard_numel], gradients.sums
        if options.after_reduce is not None:
            with lane.inside, lane.aside(options.after_reduce_stream):
                options.after_reduce(rows)
        if options.divide_after != 1.0:
            with lane.inside:
                rows.div_(options.divide_after)
        if reduction.held.in_sums:
            return
        with marked("add", unit.name), lane.behind_compute:
            if gradients.offload is not None:
                self._offloads = True
                summed = summed.to(sums.device) if not overwrites else summed
            if overwrites:
                sums.copy_(summed, non_blocking=True)
            else:
                sums.add_(summed)

    def drop(self, held: Any) -> None:
        if held.buffer is not None:
            held.buffer.release()
        if held.loan is not None:
            held.loan()
        held.content = held.loan = None

    def join(self, reduction: TensorReduction) -> None:
        reduction.lane.join(reduction.pending)
        reduction.pending = None

    def hold(self, reduction: TensorReduction) -> None:
        reduction.freed = reduction.lane.mark()

    def retire(self, reduction: TensorReduction) -> None:
        if self.ordered:
            reduction.lane.join(reduction.freed)
        reduction.gradients.clear()

    def forget(self) -> None:
        """Nothing is under way: what was queued since the last `finish` will never run."""
        self._scattered = self._crossed = self._offloads = False

    def finish(self) -> None:
        if self._scattered:
            self.scatters.join(self.scatters.mark())
        if self._crossed:
            self.replicas.join(self.replicas.mark())
        if self._offloads:
            for stream in (self.scatters.stream, self.replicas.stream):
                if stream is not None:
                    stream.synchronize()
        self.forget()


def marked(name: str, unit: str) -> AbstractContextManager[Any]:
    """What the host does inside is `name` for `unit`, if a profile listens."""
    return _NOTHING if marks.on is None else marks.on.range(name, unit)


def lent(found: Any, visible: nn.Parameter) -> bool:
    """What hangs in a parameter's place is no parameter: a tensor that `torch.func.functional_call`
    has put there for one call, which computes with it. (The parameter itself, detached, stands for
    the parameter.)
    """
    if type(found) is not DTensor:
        return type(found) is torch.Tensor
    if found is visible or isinstance(found, nn.Parameter):
        return False
    ours, theirs = (
        torch_private.local_of(each).untyped_storage().data_ptr() for each in (visible, found)
    )
    return ours != theirs
