"""Reducing gradients, and the ring of reduces under way.

    gradients --pack--> slot --scatter--> rows --all-reduce--> rows --add--> sums
                         |                 |
                    accumulator         partial

Over the micro-batches of a step, `sync="last"` sums slots in the accumulator and the delayed policy
sums rows in the partial. Where the sums' own memory can take a result, it does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shardwise.schedule.executor import Executor, Held, Reduction
from shardwise.schedule.unit import ScheduledUnit

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
