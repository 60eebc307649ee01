"""A unit as its schedule sees it: the states it passes through, and what a step has of it.

    gather            wait              free
FREE ----> GATHERING ----> READY ------------> FREE
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from shardwise.schedule.executor import Executor, Held, Reduction
from shardwise.schedule.policy import UnitPolicy


class State(Enum):
    FREE = "free"
    GATHERING = "gathering"
    READY = "ready"


@dataclass
class StepSums:
    """How far the sums of a unit's gradients are, over the micro-batches of a step."""

    opened: bool = False  # a reduce of this step has looked at the gradient buffer
    overwrite: bool = False  # what the buffer holds is worth nothing: the next sum overwrites it
    accumulator: Held | None = None  # local gradients not yet scattered
    partial: Held | None = None  # scattered sums not yet all-reduced
    complete: bool = False  # summed over all ranks

    @property
    def wait_for_more(self) -> bool:
        """Gradients of this step wait for those of a later pass."""
        return self.accumulator is not None or self.partial is not None


class ScheduledUnit:
    """Facts and states of one unit. Executors extend it by what they hold of it."""

    executor: Executor
    aliased = False  # the full unit is the master itself: nothing to gather, nothing to free
    keeps_piece = False  # it can keep 1/k of itself from forward to backward
    gradient_count = 0  # trainable parameters
    trains_all = True

    def __init__(
        self,
        name: str,
        policy: UnitPolicy,
        *,
        is_root: bool = False,
        module_count: int = 1,
        shard: int = 1,
        replicate: int = 1,
    ) -> None:
        self.name, self.options = name, policy
        self.is_root, self.module_count = is_root, module_count
        self.shard_ranks, self.replicas = shard, replicate
        self.state = State.FREE
        self.stale = False  # full is older than master: from an optimizer step to the next gather
        self.is_shown = False
        self.running = 0  # forwards of its modules that are under way
        self.needed_on = False  # a backward that nobody sees may come to it until the step is over
        self.piece = False  # 1/k of it is kept, and backward gathers that
        self.sums = StepSums()

    @property
    def sums_take_reduces(self) -> bool:
        """The memory of the sums can take a reduce's output as it is."""
        raise NotImplementedError

    @property
    def frees_early(self) -> bool:
        """Complete gradients prove that backward needs the unit no more. Not so for the root, whose
        modules are everywhere, nor for several modules of which some weights are frozen.
        """
        return not self.is_root and (self.module_count == 1 or self.trains_all)

    def gather(self) -> None:
        """Start bringing the full parameters together, unless they are there or on their way."""
        if self.state is not State.FREE:
            if not self.stale:
                return
            self.wait()
        self.stale = False
        if not self.aliased:
            self.executor.gather(self)
            self.state = State.GATHERING

    def wait(self) -> None:
        """Let compute wait for the gather under way, if any."""
        if self.state is State.GATHERING:
            self.executor.wait(self)
            self.forget_piece()
            self.state = State.READY

    def show(self) -> None:
        if not self.is_shown or self.keeps_piece:
            self.executor.show(self)
            self.is_shown = True

    def hide(self) -> None:
        if self.is_shown:
            self.executor.hide(self)
            self.is_shown = False

    def free(self) -> None:
        """Give the full parameters' memory back."""
        self.hide()
        if self.state is not State.FREE and not self.aliased:
            self.wait()
            self.executor.free(self)
            self.state = State.FREE

    def shrink(self) -> None:
        """Free all but this rank's piece in the smaller group of keep_after_forward = k."""
        keeps = self.keeps_piece and self.state is State.READY
        if keeps:
            self.executor.shrink(self)
        self.free()
        self.piece = keeps

    def forget_piece(self) -> None:
        """What a smaller group kept is worth nothing: it is gathered, or of another step."""
        if self.piece:
            self.piece = False
            self.executor.forget_piece(self)


Verbs = Iterator[None]  # the rest of a reduce; what it yields at may have to be waited for


class Reduces:
    """The reduces of one rank. When `depth` of them are under way, compute waits for the oldest."""

    def __init__(self, executor: Executor, depth: int) -> None:
        self.executor, self.depth = executor, depth
        self._ring: deque[tuple[Reduction, Verbs]] = deque()
        # On ordered lanes: rows that the replicas' lane reads. They stay until backward's end, so
        # that neither the other lane nor compute waits for that lane before.
        self._crossing: list[Held] = []

    def reduce(self, unit: ScheduledUnit, scatter: bool, all_reduce: bool) -> None:
        """Start reducing `unit`'s gradients of one micro-batch: add them up, `scatter` the sum over
        the shard group, `all_reduce` it over the replicas.
        """
        while self._ring and len(self._ring) >= self.depth:
            self._retire(*self._ring.popleft())
        sums, executor = unit.sums, self.executor
        self._open(unit)
        direct = sums.overwrite and sums.partial is None and unit.sums_take_reduces
        whole = unit.shard_ranks == 1
        passes = scatter and sums.accumulator is None
        reduction = executor.pack(unit, direct and whole, passes)
        if reduction.held.in_sums:
            sums.overwrite = False
        if sums.accumulator is not None:
            self._merge(reduction, sums.accumulator)
        sums.accumulator = None if scatter else reduction.held
        if not scatter:
            self._start(reduction, iter(()))
            return
        delays = unit.replicas > 1 and not all_reduce
        overwrites = sums.overwrite
        if direct or not delays:
            sums.overwrite = False
        sums.complete = not delays
        self._start(reduction, self._sum(reduction, direct, overwrites, delays))

    def contribute_zero(self, unit: ScheduledUnit) -> None:
        """Join the replicas' all-reduce of a step in which this rank's shard group ran nothing."""
        self._open(unit)
        overwrites = unit.sums.overwrite
        unit.sums.overwrite, unit.sums.complete = False, True
        reduction = self.executor.zeros(unit)
        self._start(reduction, self._complete(reduction, overwrites))

    def finish(self) -> None:
        """Compute waits for every reduce under way."""
        while self._ring:
            self._retire(*self._ring.popleft())
        self.executor.finish()
        for rows in self._crossing:
            self._drop(rows)
        self._crossing.clear()

    def _open(self, unit: ScheduledUnit) -> None:
        """The memory of the step's sums; looked at by its first reduce."""
        if not unit.sums.opened:
            unit.sums.opened = True
            unit.sums.overwrite = self.executor.open(unit)

    def _merge(self, reduction: Reduction, earlier: Held) -> None:
        """What was summed before takes in what is held, and is held from now on."""
        self.executor.add(reduction, earlier)
        self._drop(reduction.held)
        reduction.held = earlier

    def _drop(self, held: Held) -> None:
        if not held.in_sums:
            self.executor.drop(held)

    def _sum(self, reduction: Reduction, direct: bool, overwrites: bool, delays: bool) -> Verbs:
        sums, slot = reduction.unit.sums, reduction.held
        self.executor.scatter(reduction, direct)
        yield
        if slot is not reduction.held:
            self._drop(slot)
        if delays or sums.partial is not None:
            if sums.partial is None:
                sums.partial = reduction.held
            else:
                self._merge(reduction, sums.partial)
            if delays:
                return
            sums.partial = None
        yield from self._complete(reduction, overwrites)

    def _complete(self, reduction: Reduction, overwrites: bool) -> Verbs:
        unit, executor = reduction.unit, self.executor
        if unit.replicas > 1:
            executor.all_reduce(reduction)
            yield
        executor.add_to_sums(reduction, overwrites)
        if not executor.ordered or unit.replicas == 1:
            self._drop(reduction.held)
        elif unit.shard_ranks > 1:
            self._crossing.append(reduction.held)
        elif not reduction.held.in_sums:
            # The other lane reads a whole slot: too much to keep to backward's end.
            executor.hold(reduction)
            reduction.goes_last = reduction.held

    def _start(self, reduction: Reduction, verbs: Verbs) -> None:
        executor = self.executor
        if executor.ordered:
            for _ in verbs:  # lanes take all of it now; none of it blocks the host
                pass
        else:
            _advance(reduction, verbs)
        self._ring.append((reduction, verbs))
        if self.depth == 0:
            self.finish()

    def _retire(self, reduction: Reduction, verbs: Verbs) -> None:
        while reduction.pending is not None:
            self.executor.join(reduction)
            _advance(reduction, verbs)
        self.executor.retire(reduction)
        if reduction.goes_last is not None:
            self._drop(reduction.goes_last)


def _advance(reduction: Reduction, verbs: Verbs) -> None:
    """A host goes on to the next thing that takes time."""
    for _ in verbs:
        if reduction.pending is not None:
            return
