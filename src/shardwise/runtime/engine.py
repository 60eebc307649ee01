"""The engine: a unit's life as four short functions, before and after forward, before and after
backward.

    before forward    gather (and gather ahead), show
    after forward     hide, free unless the Plan keeps it
    before backward   gather (and gather ahead), show
    after backward    free, reduce

`hooks.Node` hangs them on modules; `Engine` holds what a pass needs to know.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from shardwise.comms import versions
from shardwise.comms.lanes import Lane
from shardwise.planning.plan import DTYPES, Plan
from shardwise.runtime import guard
from shardwise.runtime.agreement import Agreement, order_units
from shardwise.runtime.hooks import Node
from shardwise.runtime.order import Order
from shardwise.runtime.reduce import Reducer
from shardwise.sharding.attach import attach, find_device
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.unit import State, Unit


class Engine:
    """One sharded model on this rank."""

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        device = find_device(model)
        self.plan = plan.resolve(model)
        self.mesh = Mesh(self.plan, device)
        self.gather_lane = Lane(device)
        self.units = attach(model, self.plan, self.mesh, self.gather_lane)
        self.reducer = Reducer(self.plan, self.mesh, device)
        self.agreement = Agreement(self.plan, self.mesh)
        self.forward_order = Order(plan.forward_prefetch)
        self.backward_order = Order(plan.backward_prefetch)
        self.reduce_order = order_units(self.units)
        # This backward's units, in the order in which their gradients were complete.
        self.ready: list[Unit] = []
        self.reduced = 0  # how many of reduce_order are issued in this backward
        self.backward_runs = False
        self.micro: tuple[int, int] | None = None  # (index, total) inside sw.microbatches
        self.interrupted: str | None = None
        # Trainable parameters without a gradient so far in this step; None: nobody asks.
        self.unseen: set[str] | None = None
        self.backwards = 0  # backward passes that ended
        self.relayouts = 0  # times that freezing or thawing changed the gradient buffers
        # What the strategy's row says of the full parameters.
        kept = self.plan.strategy.parameters
        self.frees_in_pass = kept == "shard"
        self.frees_after_step = kept != "replicate"
        self.output_dtype = DTYPES[plan.output_dtype] if plan.output_dtype else None
        self._hooked: set[int] = set()
        self.root = self._hang(model)
        self.follow_requires_grad()

    def _hang(self, model: nn.Module) -> Node:
        """One node for every module that units run with; the model's own node is the root."""
        by_module: dict[int, tuple[nn.Module, list[Unit]]] = {id(model): (model, [])}
        for unit in self.units:
            for module in unit.modules:
                by_module.setdefault(id(module), (module, []))[1].append(unit)
        nodes = [Node(self, module, units, module is model) for module, units in by_module.values()]
        return nodes[0]

    @property
    def last_micro(self) -> bool:
        """The pass that runs now is the last of its step."""
        return self.micro is None or self.micro[0] == self.micro[1] - 1

    # Forward

    def begin_forward(self) -> None:
        """The root module starts a pass: a new step makes what is gathered stale, and cleared
        gradients' memory goes.
        """
        guard.check_interrupted(self)
        if self.backward_runs:
            self._abandon_backward()
        if self.micro is None or self.micro[0] == 0:
            self.follow_requires_grad()
            for unit in self.units:
                unit.stale = unit.state is not State.FREE
                unit.forget_kept()
                if unit.gradients is not None and not unit.opened and unit.gradients.cleared:
                    unit.gradients.buffer.release()
        self.forward_order.begin()

    def end_forward(self, awaits_backward: bool) -> None:
        """The root module has run. Units whose modules did not all run are closed; without a
        backward, all is freed.
        """
        for unit in self.units:
            unit.remaining = len(unit.modules)
            if not awaits_backward:
                if self.frees_after_step:
                    unit.free()
                unit.hide()
            elif unit.is_shown and not unit.is_root:
                self.after_forward(unit)
        if awaits_backward:
            self.agreement.check_first_forward(self.forward_order.names)

    def before_forward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it."""
        # Recomputation under activation checkpointing: backward's own order leads.
        backward = versions.inside_backward()
        self._bring(unit, self.backward_order if backward else self.forward_order)

    def _bring(self, unit: Unit, order: Order) -> None:
        ahead = order.visit(unit)
        unit.gather()
        for other in ahead:
            other.gather()
        unit.wait()
        unit.show()

    def after_forward(self, unit: Unit) -> None:
        """Hide the unit, and free it unless the Plan keeps it."""
        if versions.inside_backward():
            return  # recomputation: the backward that asked for it still needs the unit
        keep = self.plan.keep_after_forward
        if not self.frees_in_pass or keep is True:
            unit.hide()
        elif keep is False or keep is None:
            unit.free()
        else:
            unit.shrink()

    # Backward

    def open_backward(self) -> None:
        """The first sign of a backward pass."""
        if self.backward_runs:
            return
        guard.check_interrupted(self)
        self.backward_runs = True
        self.ready = []
        self.backward_order.begin(self.forward_order.current[::-1])
        versions.call_after_backward(self.end_backward)

    def before_backward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it, because checkpointing inside a
        unit's own forward recomputes with what hangs in the modules now.
        """
        self._bring(unit, self.backward_order)

    def gradient_arrived(self, unit: Unit) -> None:
        """All gradients of the unit, or those of all its inputs, are complete: when both are, its
        backward is over.
        """
        if unit.left == 0 and unit.open_inputs <= 0:
            self.after_backward(unit)

    def after_backward(self, unit: Unit) -> None:
        """Free the unit and reduce its gradients, in the order the ranks agreed on."""
        if not self.backward_runs:
            self.open_backward()
        if self.frees_in_pass and unit.frees_early:
            unit.free()
        if unit.gradients is None or unit.issued:
            return
        unit.expect_gradients()
        unit.issued = True
        self.ready.append(unit)
        if self.unseen is not None and self.unseen:
            self.unseen.difference_update(member.name for member in unit.gradients.members)
        if self.reducer.during_backward:
            while self.reduced < len(self.reduce_order) and self.reduce_order[self.reduced].issued:
                self.reducer.reduce(self.reduce_order[self.reduced], self.last_micro)
                self.reduced += 1

    def end_backward(self) -> None:
        """Backward is over: reduce what is left, wait for the sums, hang them on the visible
        parameters.
        """
        if not self.ready and not any(unit.has_gradients for unit in self.reduce_order):
            # torch.autograd.grad: nothing was accumulated, so there is nothing to sum.
            self._close_backward()
            return
        late = [unit for unit in self.ready if unit.has_gradients]
        for unit in self.reduce_order:
            if not unit.issued:
                self._note_seen(unit)
        for unit in self.reduce_order[self.reduced :]:
            self.reducer.reduce(unit, self.last_micro)
        # Gradients that came after their unit's reduce: a parameter of two re-entrant checkpoints.
        for unit in (unit for unit in self.reduce_order if unit in late):
            self.reducer.reduce(unit, self.last_micro)
        self.reducer.finish()
        self.backwards += 1
        if self.last_micro or self.plan.sync == "each":
            self.end_step(ran=True)
        self._close_backward()

    def _close_backward(self) -> None:
        """Give back what only backward needed."""
        self._reset_backward()
        for unit in self.units:
            unit.hide()
            if self.frees_in_pass or (self.frees_after_step and self.last_micro):
                unit.free()

    def end_step(self, ran: bool) -> None:
        """The sums are complete: agree on parameters that nobody used, and attach the rest."""
        if self.agreement.tracks_unused:
            unused = frozenset(self.unseen or ())
            names = [unit.name for unit in self.ready]
            absent, order = self.agreement.settle(ran, unused, names)
            if order is not None:
                self._reduce_in(order)
        else:
            absent = frozenset()
        for unit in self.reduce_order:
            assert unit.gradients is not None
            unit.gradients.attach(absent)
            unit.opened = False
        if self.last_micro:
            self._reset_unseen()

    def run_nothing(self) -> None:
        """A step without micro-batches on this rank's shard group: join the replicas with zeros."""
        for unit in self.reduce_order:
            self.reducer.contribute_zero(unit)
        self.reducer.finish()
        self.end_step(ran=False)

    def _note_seen(self, unit: Unit) -> None:
        if self.unseen is not None and unit.gradients is not None:
            for member, shown in zip(unit.gradients.members, unit.gradients.shown, strict=True):
                if shown.grad is not None:
                    self.unseen.discard(member.name)

    def _reset_unseen(self) -> None:
        """Which parameters go unused is followed only while the ranks compare it."""
        if not self.agreement.tracks_unused:
            self.unseen = None
            return
        trained = [unit.gradients for unit in self.reduce_order if unit.gradients]
        self.unseen = {member.name for gradients in trained for member in gradients.members}

    def _abandon_backward(self) -> None:
        """The last backward ended in an exception that the caller caught: forget its sums."""
        self.reducer.finish()
        for unit in self.units:
            unit.opened = False
            unit.accumulator = unit.partial = None
            for shown in unit.parameters.shown:
                shown.grad = None
        self._close_backward()

    def _reset_backward(self) -> None:
        self.backward_runs = False
        self.reduced = 0
        for unit in self.units:
            unit.issued = False
            unit.open_inputs = 0
            unit.expect_gradients()

    def _reduce_in(self, names: list[str]) -> None:
        """Reduce in the order of the first step's backward, what it did not reach at the end."""
        place = {name: i for i, name in enumerate(names)}
        self.reduce_order.sort(key=lambda unit: place.get(unit.name, len(place)))

    def follow_requires_grad(self) -> None:
        """Notice parameters frozen or unfrozen since the last pass."""
        changed = [unit for unit in self.units if unit.follow_requires_grad()]
        self.relayouts += bool(changed)
        if changed or not self._hooked:
            self.reduce_order = order_units(self.units)
            self.agreement.first = self.agreement.tracks_unused = True
            self._reset_unseen()
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
            if id(shown) not in self._hooked:
                self._hooked.add(id(shown))
                shown.register_post_accumulate_grad_hook(arrived)
