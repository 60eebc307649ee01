"""The engine: a unit's life as four short functions, before and after forward, before and after
backward.

    before forward    gather (and gather ahead), show
    after forward     hide, free unless the Plan keeps it
    before backward   gather (and gather ahead), show
    after backward    free, reduce

`hooks.Node` hangs them on modules; `Engine` holds what a pass needs to know.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.engine import guard, marks, torch_private
from shardwise.engine.agreement import Agreement
from shardwise.engine.hooks import Hold, Node
from shardwise.engine.lanes import Lanes
from shardwise.engine.mesh import Mesh
from shardwise.engine.order import Order
from shardwise.engine.policy import Policy
from shardwise.engine.reduce import Reducer
from shardwise.engine.unit import State, Unit
from shardwise.planning.plan import Plan


class Engine:
    """One sharded model on this rank."""

    def __init__(
        self, model: nn.Module, units: list[Unit], mesh: Mesh, policy: Policy, lanes: Lanes
    ) -> None:
        """`mesh` is the one that ranks agree on things over; units may move on others."""
        self.units, self.mesh, self.policy, self.lanes = units, mesh, policy, lanes
        self.plan: Plan | None = None  # where the units come from a Plan
        self.reducer = Reducer(policy, lanes)
        self.agreement = Agreement(policy, mesh)
        self.structure = guard.Structure(model)
        self.forward_order = Order(policy.forward_prefetch)
        self.backward_order = Order(policy.backward_prefetch)
        self.reduce_order: list[Unit] = []
        # The node whose forward is the outermost now; None between forwards.
        self.forward_root: Node | None = None
        # This backward's units, in the order in which their gradients were complete.
        self.ready: list[Unit] = []
        self.reduced = 0  # how many of reduce_order are issued in this backward
        self.hold: Hold | None = None  # of the forward that runs
        self._held: weakref.WeakSet[Hold] = weakref.WeakSet()  # of forwards that have a graph
        self.backward_runs = False
        self.last_backward = True  # False: a later one of this step waits for the sums
        self.micro: tuple[int, int] | None = None  # (index, total) inside sw.microbatches
        self.failed = False  # a forward of this step ended in an exception
        self.interrupted: str | None = None  # the last step was left early, and nobody was told
        self.backwards = 0  # backward passes that ended
        self.relayouts = 0  # times that the gradient buffers became others
        guard.mark(self)
        if not any(unit.parameters.master.is_meta for unit in units):
            self._prepare()

    def _prepare(self) -> None:
        """Make ready the units that are new, or whose parameters became others."""
        guard.check_memory(self.units)
        for unit in self.units:
            if not unit.prepared:
                unit.prepare(self.lanes.gather)
        guard.mark(self)
        self._follow_gradients()

    def share(self, lanes: Lanes) -> None:
        """Move on other lanes from now on."""
        self.reducer.finish()
        self.lanes = self.reducer.lanes = lanes
        for unit in self.units:
            unit.wait()
            unit.lane = lanes.gather

    def interrupt(self, message: str) -> None:
        """A micro-batch loop was left early: drop what its step has summed. Whoever then wants to
        use it gets `message`, unless an exception of the model's own told already.
        """
        if not (self.failed or self.backward_runs):
            self.interrupted = message
        self.reset()
        self._drop_gradients()

    def check_interrupted(self) -> None:
        """Error, once, if the last micro-batch loop was left early."""
        message, self.interrupted = self.interrupted, None
        if message is not None:
            raise RuntimeError(message)

    def forget_interrupted(self) -> None:
        """A new step begins: what is left of one left early is a warning."""
        message, self.interrupted = self.interrupted, None
        if message is not None:
            warnings.warn(message, stacklevel=3)

    @property
    def last_micro(self) -> bool:
        """The pass that runs now is the last of its step."""
        return self.micro is None or self.micro[0] == self.micro[1] - 1

    # Forward

    def begin_forward(self, node: Node) -> None:
        """An outermost module starts a pass, maybe the first of a step."""
        self.forward_root = node
        if marks.on is not None:
            marks.on.begin_forward()
        self.forget_interrupted()
        self.failed = False
        if self.backward_runs:
            self._abandon_backward()
        if self.micro is None or self.micro[0] == 0:
            self.structure.check(self.policy.may_grow)
            self._begin_step(node.units[:1])
        self.forward_order.begin()
        self.hold = Hold(self)
        self._held.add(self.hold)

    @property
    def awaits_backward(self) -> bool:
        """The graph of an earlier forward is still there, and its backward has not begun."""
        return any(hold.engine is not None for hold in self._held if hold is not self.hold)

    def _begin_step(self, first: Sequence[Unit]) -> None:
        """Look after all units. What the outermost module needs at once is sent for before the
        others are looked at, so that the host does that while it travels.
        """
        known = not self.agreement.first_pass
        early = [unit for unit in first if known and unit.prepared and not unit.follow()]
        self._renew(early)
        for unit in early:
            unit.gather()
        others = [unit for unit in self.units if unit not in early]
        if any([unit.follow() or not unit.prepared for unit in others]):
            self._prepare()
        self.agreement.check_values(self.units)
        self.follow_requires_grad()
        self._renew(others)

    def _renew(self, units: Sequence[Unit]) -> None:
        """What is gathered of the last step may be stale; cleared gradients are let go."""
        kept: list[Unit] = []
        for unit in units:
            if unit.state is not State.FREE and not unit.parameters.aliased:
                if self.policy.refreshes:
                    unit.stale = True
                elif self.awaits_backward or unit.adds_up:
                    unit.stale = unit.changed  # its step is under way
                else:
                    kept.append(unit)
            unit.forget_kept()
            if unit.gradients is not None and not unit.opened and unit.gradients.cleared:
                unit.gradients.drop()
        if kept:
            self.agreement.find_stale(kept)

    def end_forward(self, awaits_backward: bool) -> None:
        """The outermost module has run. Units whose modules did not all run are closed; without a
        backward, all is freed.
        """
        self.forward_root = self.hold = None
        refreshes = self.policy.refreshes
        for unit in self.units:
            unit.remaining = len(unit.modules)
            if not awaits_backward:
                if unit.options.stays_shown and unit.options.keep is True and not refreshes:
                    unit.keep_evaluated()  # the next forward finds it there
                    continue
                if self.policy.frees_after_step:
                    unit.free()
                unit.hide()
            elif unit.is_shown and not unit.options.stays_shown:
                self.after_forward(unit)
        self.agreement.end_first_pass(self.forward_order.names)

    def before_forward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it."""
        # Recomputation under activation checkpointing: backward's own order leads.
        if torch_private.inside_backward():
            self._bring(unit, self.backward_order, unit.options.gather_ahead_backward)
        else:
            if self.agreement.first_pass:
                self.agreement.check_unit(unit.name, len(self.forward_order.current))
            self._bring(unit, self.forward_order, unit.options.gather_ahead)

    def _bring(self, unit: Unit, order: Order, instead: list[Unit] | None) -> None:
        ahead = order.visit(unit)
        unit.gather()
        backward = order is self.backward_order
        for other in ahead if instead is None else instead:
            if not backward or other.options.gathers_in_backward:
                other.gather()
        unit.wait()
        unit.show()

    def after_forward(self, unit: Unit) -> None:
        """Hide the unit, and free it unless it is kept."""
        if torch_private.inside_backward():
            return  # recomputation: the backward that asked for it still needs the unit
        keep = unit.options.keep
        if not self.policy.frees_in_pass or keep is True:
            if not unit.options.stays_shown:
                unit.hide()
        elif keep is False:
            unit.free()
        else:
            unit.shrink()

    # Backward

    def open_backward(self) -> None:
        """The first sign of a backward pass."""
        if self.backward_runs:
            return
        self.backward_runs = True
        self.ready = []
        self.backward_order.begin(self.forward_order.current[::-1])
        torch_private.call_after_backward(self.end_backward)

    def before_backward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it, because checkpointing inside a
        unit's own forward recomputes with what hangs in the modules now.
        """
        if unit.options.gathers_in_backward:
            self._bring(unit, self.backward_order, unit.options.gather_ahead_backward)

    def gradient_arrived(self, unit: Unit) -> None:
        """All gradients of the unit are complete: its backward is over, unless those of its inputs
        are still to come.
        """
        if unit.open_inputs <= 0:
            self.after_backward(unit)

    def inputs_done(self, unit: Unit) -> None:
        """The gradients of the unit's inputs are complete: its backward is over. Parameters without
        a gradient by now were not used on this rank; the others reduce at this same moment, and
        collectives must keep their order.
        """
        if not unit.issued and (unit.left == 0 or not unit.untracked):
            self.after_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Free the unit and reduce its gradients, in the order the ranks agreed on."""
        if not self.backward_runs:
            self.open_backward()
        if self.policy.frees_in_pass and unit.frees_early and not unit.options.keep_after_backward:
            unit.free()
        if unit.gradients is None or unit.issued:
            return
        unit.expect_gradients()
        unit.issued = True
        self.ready.append(unit)
        if self.policy.during_backward:
            while self.reduced < len(self.reduce_order) and self.reduce_order[self.reduced].issued:
                self._reduce(self.reduce_order[self.reduced])
                self.reduced += 1

    def _reduce(self, unit: Unit) -> None:
        if self.policy.sync is None:
            self.reducer.reduce(unit, unit.options.scatters, unit.options.all_reduces)
        else:
            self.reducer.reduce(unit, *self.policy.syncs(self.last_micro))

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for the sums, hang them on the visible
        parameters.
        """
        if not self.ready and not any(unit.has_gradients for unit in self.reduce_order):
            # torch.autograd.grad: nothing was accumulated, so there is nothing to sum.
            self._close_backward()
            return
        late = [unit for unit in self.ready if unit.has_gradients]
        for unit in self.reduce_order[self.reduced :]:
            self._reduce(unit)
        # Gradients that came after their unit's reduce: a parameter of two re-entrant checkpoints.
        for unit in (unit for unit in self.reduce_order if unit in late):
            self._reduce(unit)
        if self.last_backward or not self.lanes.scatter.ordered:
            self.reducer.finish()
        self.backwards += 1
        if any(unit.complete for unit in self.reduce_order):
            self.end_step(ran=True)
        self._close_backward()

    def _close_backward(self) -> None:
        """Give back what only backward needed."""
        self._reset_backward()
        if marks.on is not None:
            marks.on.turn("", "optimizer")
        policy = self.policy
        for unit in self.units:
            if unit.options.keep_after_backward:
                continue
            unit.hide()
            if policy.frees_in_pass or (policy.frees_after_step and self.last_micro):
                unit.free()

    def end_step(self, ran: bool) -> None:
        """The sums are complete: hang them on the parameters."""
        if self.agreement.settles:
            names = [unit.name for unit in self.ready]
            order = self.agreement.settle(ran, self._missing(), names)
            if order is not None:
                self._reduce_in(order)
        try:
            for unit in self.reduce_order:
                if unit.complete and unit.parameters.echoes:
                    assert unit.gradients is not None
                    unit.gradients.attach_echoes()
            for unit in self.reduce_order:
                if unit.complete:
                    assert unit.gradients is not None
                    unit.gradients.attach(unit.options.zeroes_unused)
                    unit.opened = unit.complete = False
                    unit.attached_version = unit.parameters.version
        except BaseException:  # of a hook on a parameter
            self._drop_gradients()
            raise

    def _drop_gradients(self) -> None:
        """Take our sums off the parameters: they are not those of a whole step."""
        for unit in self.reduce_order:
            assert unit.gradients is not None
            unit.gradients.clear()

    def _missing(self) -> frozenset[str]:
        """Parameters of which this rank produced no gradient in this step."""
        trained = [unit.gradients for unit in self.reduce_order if unit.gradients is not None]
        return frozenset(name for gradients in trained for name in gradients.missing)

    def run_nothing(self) -> None:
        """A step without micro-batches on this rank's shard group: join the replicas with zeros."""
        for unit in self.reduce_order:
            self.reducer.contribute_zero(unit)
        self.reducer.finish()
        self.end_step(ran=False)

    def reset(self) -> None:
        """Forget the pass that an exception ended, with all that its step had summed."""
        self.failed = self.forward_root is not None
        self.forward_root = self.hold = None
        for unit in self.units:
            unit.remaining = len(unit.modules)
        self._abandon_backward()

    def _abandon_backward(self) -> None:
        """The last backward ended in an exception that the caller caught: forget its sums."""
        self.reducer.finish()
        for unit in self.units:
            unit.opened = unit.complete = False
            unit.accumulator = unit.partial = None
            for shown in unit.parameters.shown:
                shown.grad = None
        self._close_backward()

    def _reset_backward(self) -> None:
        self.backward_runs = False
        self.reduced = 0
        for unit in self.units:
            unit.issued = False
            unit.open_inputs = unit.untracked = 0
            unit.expect_gradients()

    def _reduce_in(self, names: Sequence[str]) -> None:
        """Reduce in the order of the first step's backward, what it did not reach at the end."""
        place = {name: i for i, name in enumerate(names)}
        self.reduce_order.sort(key=lambda unit: place.get(unit.name, len(place)))

    def follow_requires_grad(self) -> None:
        """Notice parameters frozen or unfrozen since the last pass."""
        if any([unit.follow_requires_grad() for unit in self.units]):
            self._follow_gradients()

    def _follow_gradients(self) -> None:
        """Other parameters are trained than before, or they stand in other memory."""
        self.relayouts += 1
        # Before any step has shown it: backward comes from the model's end, the root unit last.
        self.reduce_order = [unit for unit in reversed(self.units) if unit.gradients is not None]
        self.agreement.first = True
        for unit in self.reduce_order:
            self._count_gradients(unit)
        self._reset_backward()

    def _count_gradients(self, unit: Unit) -> None:
        # torch holds hooks where Python's garbage collector cannot look: hold nothing by them.
        engine_of, unit_of = weakref.ref(self), weakref.ref(unit)

        def arrived(_: torch.Tensor) -> None:
            unit, engine = unit_of(), engine_of()
            if unit is not None and engine is not None:
                unit.left -= 1
                if unit.left == 0:
                    engine.gradient_arrived(unit)

        assert unit.gradients is not None
        for shown in unit.gradients.shown:
            if not shown.__dict__.get("_shardwise_counted"):
                shown.__dict__["_shardwise_counted"] = True
                shown.register_post_accumulate_grad_hook(arrived)
