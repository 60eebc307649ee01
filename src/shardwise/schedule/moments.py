"""The moments of a step: a unit's four, and the begin and end of a pass.

    before forward    gather (and gather ahead), show
    after forward     hide, free unless it is kept
    before backward   gather (and gather ahead), show
    after backward    free, reduce

Whoever runs a step calls them: the engine from hooks on modules and gradients, the predictor from a
description of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from shardwise.schedule.executor import Executor
from shardwise.schedule.policy import Policy
from shardwise.schedule.unit import Reduces, ScheduledUnit, State, StepSums

U = TypeVar("U", bound=ScheduledUnit)


class Order(Generic[U]):
    """The order in which units run in one direction: recorded in one pass, replayed as gathers
    ahead in the next. A pass that deviates from the last one falls back to gathers on demand.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.expected: list[U] = []
        self.current: list[U] = []
        self._at = 0

    def begin(self, guess: list[U] | None = None) -> None:
        """Start a pass. What the last pass did is what this one is expected to do; `guess` serves
        before any.
        """
        if self.current:
            self.expected, self.current = self.current, []
        elif guess and not self.expected:
            self.expected = guess
        self._at = 0

    @property
    def names(self) -> tuple[str, ...]:
        """What the last pass ran, in order."""
        return tuple([unit.name for unit in self.current or self.expected])

    def visit(self, unit: U) -> list[U]:
        """`unit` runs now; the units to gather ahead."""
        self.current.append(unit)
        expected, at = self.expected, self._at
        if at >= len(expected) or expected[at] is not unit:
            try:
                at = expected.index(unit, at)
            except ValueError:
                return []
        self._at = at + 1
        return expected[at + 1 : at + 1 + self.depth]


class UnitPass:
    """How far one unit is in the passes under way."""

    def __init__(self, unit: ScheduledUnit) -> None:
        self.ran: set[int] = set()  # modules of it, in this forward; each may run again and again
        self.gradients_left = unit.gradient_count  # still to come in this backward
        self.open_inputs = 0  # inputs whose gradient is still to come
        self.untracked = 0  # calls whose inputs carry no gradient: nothing tells their end
        self.issued = False  # its gradients are complete, and reduced or waiting for their turn


class Pass(Generic[U]):
    """The forwards that wait for a backward, and that backward."""

    def __init__(self, units: Sequence[U]) -> None:
        self.of = {unit: UnitPass(unit) for unit in units}
        self.in_backward = self.makes_graph = False
        self.ready: list[U] = []  # in the order in which their gradients were complete
        self.reduced = 0  # how many of the reduce order are issued


class Schedule(Generic[U]):
    """One rank's steps."""

    def __init__(self, units: Sequence[U], policy: Policy, executor: Executor) -> None:
        self.units, self.policy, self.executor = list(units), policy, executor
        self.reduces = Reduces(executor, policy.depth(executor.ordered))
        self.forward_order: Order[U] = Order(policy.forward_prefetch)
        self.backward_order: Order[U] = Order(policy.backward_prefetch)
        # Ranks reduce in one order: the model's end first, until a step has shown the real one.
        self.reduce_order: list[U] = []
        self.current: Pass[U] = Pass(self.units)
        self.last_backward = True  # False: a later one of this step waits for the sums
        self.micro: tuple[int, int] | None = None  # (index, total) inside `microbatches`
        self.waits = False  # inside another model's: the sums over replicas wait for its end
        # A backward made a graph of itself (a gradient penalty): the next one, which goes through
        # it, needs at once what this one had gathered, and nobody tells which unit.
        self.keeps_graph = False

    def set_gradients(self) -> None:
        """Other parameters are trained than before."""
        self.forget_reduce_order()
        self.current = Pass(self.units)

    def forget_reduce_order(self) -> None:
        """Reduce in the order of the model, its end first."""
        self.reduce_order = [unit for unit in reversed(self.units) if unit.gradient_count]

    def reduce_in(self, names: Sequence[str]) -> None:
        """Reduce in this order from now on, and what it does not name at the end."""
        place = {name: i for i, name in enumerate(names)}
        self.reduce_order.sort(key=lambda unit: place.get(unit.name, len(place)))

    @property
    def first_micro(self) -> bool:
        """The pass that runs now is the first of its step."""
        return self.micro is None or self.micro[0] == 0

    @property
    def last_micro(self) -> bool:
        """The pass that runs now is the last of its step."""
        return self.micro is None or self.micro[0] == self.micro[1] - 1

    # Forward

    def renew(self, units: Sequence[U]) -> None:
        """A step begins: what is gathered of the last one is stale."""
        for unit in units:
            unit.stale = unit.state is not State.FREE and not unit.aliased
            unit.needed_on = False
            unit.forget_piece()

    def before_forward(self, unit: U, recomputes: bool = False) -> None:
        """Gather the unit and those the order expects next; show it. Where a backward recomputes a
        forward (activation checkpointing), backward's own order leads.
        """
        if recomputes:
            self._bring(unit, self.backward_order, unit.options.gather_ahead_backward)
        else:
            self._bring(unit, self.forward_order, unit.options.gather_ahead)

    def _bring(self, unit: U, order: Order[U], instead: list[U] | None) -> None:
        ahead = order.visit(unit)
        unit.gather()
        backward = order is self.backward_order
        for other in ahead if instead is None else instead:
            if not backward or other.options.gathers_in_backward:
                other.gather()
        unit.wait()
        unit.show()

    def after_forward(self, unit: U) -> None:
        """Hide the unit, and free it unless it is kept."""
        keep, needed = unit.options.keep, unit.needed_on or self.keeps_graph
        if not self.policy.frees_in_pass or keep is True or needed:
            if not unit.options.stays_shown:
                unit.hide()
        elif keep is False:
            unit.free()
        else:
            unit.shrink()

    def forget_forward(self) -> None:
        """No backward will come of the forward that ran."""
        for unit in self.units:
            self.current.of[unit].ran.clear()

    def end_forward(self) -> None:
        """The outermost module has run, and a backward will come: close the units whose modules did
        not all run. One that was gathered ahead in vain is waited for all the same: who sent it may
        keep the message until it is read here.
        """
        self.forget_forward()
        for unit in self.units:
            if unit.is_shown and not unit.options.stays_shown:
                self.after_forward(unit)
            unit.wait()

    # Backward

    def open_backward(self, makes_graph: bool = False) -> bool:
        """The first sign of a backward pass; false for a later one. `makes_graph`: one that another
        backward may go through.
        """
        if self.current.in_backward:
            return False
        self.current.in_backward = True
        self.current.makes_graph = makes_graph
        self.keeps_graph |= makes_graph
        self.current.ready = []
        self.backward_order.begin(self.forward_order.current[::-1])
        return True

    def before_backward(self, unit: U) -> None:
        """Gather the unit and those the order expects next; show it, because checkpointing inside a
        unit's own forward recomputes with what hangs in the modules now.
        """
        if unit.options.gathers_in_backward:
            self._bring(unit, self.backward_order, unit.options.gather_ahead_backward)

    def after_backward(self, unit: U) -> None:
        """Free the unit and reduce its gradients, in the order the ranks agreed on."""
        frees = self.policy.frees_in_pass and unit.frees_early
        frees = frees and not (unit.needed_on or unit.running or self.keeps_graph)
        if frees and not unit.options.keep_after_backward:
            unit.free()
        now = self.current
        progress = now.of[unit]
        if not unit.gradient_count or progress.issued:
            return
        progress.gradients_left = unit.gradient_count
        progress.issued = True
        now.ready.append(unit)
        if self.policy.during_backward:
            order = self.reduce_order
            while now.reduced < len(order) and now.of[order[now.reduced]].issued:
                self._reduce(order[now.reduced])
                now.reduced += 1

    def _reduce(self, unit: U) -> None:
        scatter, all_reduce = self.sync_now
        if self.policy.sync is None:
            scatter, all_reduce = unit.options.scatters, unit.options.all_reduces
        self.reduces.reduce(unit, scatter, all_reduce)

    @property
    def sync_now(self) -> tuple[bool, bool]:
        """Whether a Plan scatters, and all-reduces, the gradients of the pass that runs now."""
        sync, last = self.policy.sync, self.last_micro and not self.waits
        return last or sync != "last", last or (sync == "each" and not self.waits)

    def has_gradients(self, unit: U) -> bool:
        """Some of the gradients that this backward owes have arrived and are not reduced."""
        return self.current.of[unit].gradients_left != unit.gradient_count

    @property
    def accumulated(self) -> bool:
        """This backward has left gradients. (`torch.autograd.grad` leaves none.)"""
        return bool(self.current.ready) or any(map(self.has_gradients, self.reduce_order))

    def end_backward(self) -> None:
        """Reduce what is left, and wait for the sums."""
        now = self.current
        late = [unit for unit in now.ready if self.has_gradients(unit)]
        for unit in self.reduce_order[now.reduced :]:
            self._reduce(unit)
        # Gradients that came after their unit's reduce: a parameter of two re-entrant checkpoints.
        for unit in (unit for unit in self.reduce_order if unit in late):
            self._reduce(unit)
        if self.last_backward or not self.executor.ordered:
            self.reduces.finish()

    def hide(self) -> None:
        """Backward is over: hooks on gradients find the parameters that they are called with in
        their modules.
        """
        for unit in self.units:
            if not self._stays(unit):
                unit.hide()

    def _stays(self, unit: U) -> bool:
        """A backward inside of a forward leaves the modules that run as they are."""
        return unit.options.keep_after_backward or unit.running > 0

    def close_backward(self) -> None:
        """Give back what only backward needed."""
        self.keeps_graph = self.current.makes_graph
        self.current = Pass(self.units)
        self._give_back()

    def forget_graph(self) -> None:
        """No backward will come through the graph that one has made of itself."""
        self.keeps_graph = False
        self._give_back()

    def _give_back(self) -> None:
        frees = self.policy.frees_in_pass or (self.policy.frees_after_step and self.last_micro)
        frees = frees and not self.keeps_graph
        for unit in self.units:
            if not self._stays(unit):
                unit.hide()
                if frees and not unit.needed_on:
                    unit.free()
            unit.wait()  # gathered ahead in vain, maybe from the piece
            unit.forget_piece()

    def complete(self, units: Sequence[U]) -> None:
        """Sum over all ranks what earlier backwards of the step have left of these units."""
        for unit in units:
            self.reduces.reduce(unit, scatter=True, all_reduce=True)
        self.reduces.finish()

    def complete_units(self) -> list[U]:
        """Units whose sums are those of the whole step; the next reduce opens another."""
        found = [unit for unit in self.reduce_order if unit.sums.complete]
        for unit in found:
            unit.sums.opened = unit.sums.complete = False
        return found

    def run_nothing(self) -> None:
        """A step without micro-batches on this rank's shard group: join the replicas with zeros."""
        for unit in self.reduce_order:
            self.reduces.contribute_zero(unit)
        self.reduces.finish()

    def forget_sums(self) -> None:
        """Of all passes of the step."""
        self.reduces.finish()
        for unit in self.units:
            unit.sums = StepSums()

    def abandon(self) -> None:
        """An exception ended a pass."""
        self.reduces.finish()
        self.close_backward()
