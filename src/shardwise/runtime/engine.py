"""The engine: a unit's life as four short functions, before and after forward, before and after
backward.

    before forward    gather (and gather ahead), show
    after forward     hide, free unless the Plan keeps it
    before backward   gather (and gather ahead)
    after backward    free, reduce

`Node` hangs them on modules; `Engine` holds what a pass needs to know.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise.comms import versions
from shardwise.comms.lanes import Lane
from shardwise.planning.plan import DTYPES, Plan
from shardwise.runtime import guard, values
from shardwise.runtime.agreement import Agreement, order_units
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
        self.ready: list[
            Unit
        ] = []  # this backward's units in the order their gradients were complete
        self.reduced = 0  # how many of reduce_order are issued in this backward
        self.backward_runs = False
        self.micro: tuple[int, int] | None = None  # (index, total) inside sw.microbatches
        self.interrupted: str | None = None
        self.unseen: set[str] | None = (
            None  # trainable parameters without a gradient so far in this step
        )
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
            elif unit.is_shown and unit.modules[0] is not self.root.module:
                self.after_forward(unit)

    def before_forward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it."""
        if versions.inside_backward():
            # Recomputation under activation checkpointing: backward's own order leads.
            self.before_backward(unit)
        else:
            ahead = self.forward_order.visit(unit)
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
        self.backward_order.begin(self.forward_order.current[::-1])
        versions.call_after_backward(self.end_backward)

    def before_backward(self, unit: Unit) -> None:
        """Gather the unit and those the order expects next; show it."""
        ahead = self.backward_order.visit(unit)
        unit.gather()
        for other in ahead:
            other.gather()
        unit.wait()
        # Checkpointing inside a unit's own forward recomputes with what hangs in the modules now.
        unit.show()

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
        if self.frees_in_pass and unit.modules[0] is not self.root.module:
            unit.free()
        if unit.gradients is None or unit.issued:
            return
        unit.left = len(unit.gradients.shown)
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
        late = [u for u in self.ready if u.gradients and u.left != len(u.gradients.shown)]
        for unit in self.reduce_order:
            if not unit.issued:
                self._note_seen(unit)
        for unit in self.reduce_order[self.reduced :]:
            self.reducer.reduce(unit, self.last_micro)
        for unit in self.reduce_order:
            # A gradient that came after its unit's reduce (a parameter of two re-entrant
            # checkpoints).
            if unit in late:
                self.reducer.reduce(unit, self.last_micro)
        self.reducer.finish()
        self._reset_backward()
        if self.last_micro or self.plan.sync == "each":
            self.end_step(ran=True)
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
        self.ready = []
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

    def _reset_backward(self) -> None:
        self.backward_runs = False
        self.reduced = 0
        for unit in self.units:
            unit.issued = False
            unit.open_inputs = 0
            if unit.gradients is not None:
                unit.left = len(unit.gradients.shown)

    def _reduce_in(self, names: list[str]) -> None:
        """Reduce in the order of the first step's backward, what it did not reach at the end."""
        place = {name: i for i, name in enumerate(names)}
        self.reduce_order.sort(key=lambda unit: place.get(unit.name, len(place)))

    def follow_requires_grad(self) -> None:
        """Notice parameters frozen or unfrozen since the last pass."""
        changed = [unit for unit in self.units if unit.follow_requires_grad()]
        if changed or not self._hooked:
            self.reduce_order = order_units(self.units)
            self.agreement.first = self.agreement.tracks_unused = True
            self._reset_unseen()
            for unit in self.reduce_order:
                self._count_gradients(unit)
            self._reset_backward()

    def _count_gradients(self, unit: Unit) -> None:
        engine = weakref.ref(self)

        def arrived(_: torch.Tensor) -> None:
            unit.left -= 1
            if unit.left == 0:
                owner = engine()
                if owner is not None:
                    owner.gradient_arrived(unit)

        assert unit.gradients is not None
        for shown in unit.gradients.shown:
            if id(shown) not in self._hooked:
                self._hooked.add(id(shown))
                shown.register_post_accumulate_grad_hook(arrived)


class Node:
    """A module's hooks: which units run with it, and what its inputs and outputs tell."""

    def __init__(self, engine: Engine, module: nn.Module, units: list[Unit], root: bool) -> None:
        self.engine, self.module, self.units, self.is_root = engine, module, units, root
        # Freeing inside backward waits for the gradient of the unit's input: only then is every
        # weight used up.
        self.tracks_inputs = engine.frees_in_pass and not root
        for unit in units:
            unit.remaining = len(unit.modules)
        floating = [unit.casts_inputs for unit in units if unit.casts_inputs is not None]
        plan = engine.plan
        self.input_dtype = floating[0] if plan.compute_dtype and floating else None
        if root and plan.compute_dtype:
            self.input_dtype = DTYPES[plan.compute_dtype]
        self._register()

    def _register(self) -> None:
        module = self.module
        compiled = module._compiled_call_impl
        if compiled is None:
            module.register_forward_pre_hook(self._before, prepend=True, with_kwargs=True)
            module.register_forward_hook(self._after)
            return

        # `module.compile()` compiles the hooks too; these must run outside the compiled code.
        def call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before(module, args, kwargs)
            return self._after(module, args, compiled(*args, **kwargs))

        module._compiled_call_impl = call

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        engine = self.engine
        if self.is_root and not versions.inside_backward():
            engine.begin_forward()
        if self.input_dtype is not None:
            args, kwargs = values.cast((args, kwargs), self.input_dtype)
        for unit in self.units:
            if (
                unit.remaining == len(unit.modules)
                or unit.state is not State.READY
                or not unit.is_shown
            ):
                engine.before_forward(unit)
        if self.tracks_inputs and torch.is_grad_enabled():
            self._watch_inputs(args, kwargs)
        return args, kwargs

    def _watch_inputs(self, args: Any, kwargs: Any) -> None:
        """When the gradient of an input is complete, this module's backward is over."""
        units = [unit for unit in self.units if len(unit.modules) == 1]
        if not units:
            return
        for tensor in values.tensors((args, kwargs)):
            if tensor.requires_grad:
                watch = getattr(tensor, "_shardwise_watch", None)
                if watch is None:
                    watch = Watch(None)
                    tensor.register_hook(watch)
                for unit in units:
                    unit.open_inputs += 1
                    watch.consumers.append(partial(self._input_done, unit))
                return  # the first input tells

    def _input_done(self, unit: Unit) -> None:
        unit.open_inputs -= 1
        if unit.gradients is None:
            unit.free()
        else:
            self.engine.gradient_arrived(unit)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        engine = self.engine
        if self.is_root and engine.output_dtype is not None:
            output = values.cast(output, engine.output_dtype)
        watched = (
            [t for t in values.tensors(output) if t.requires_grad]
            if torch.is_grad_enabled()
            else []
        )
        if watched:
            for tensor in watched:
                watch = Watch(self._before_backward)
                tensor.register_hook(watch)
                tensor._shardwise_watch = watch  # type: ignore[attr-defined]
        for unit in self.units:
            unit.remaining -= 1
            if unit.remaining <= 0:
                unit.remaining = len(unit.modules)
                if not self.is_root:
                    engine.after_forward(unit)
        if self.is_root and not versions.inside_backward():
            engine.end_forward(awaits_backward=bool(watched))
            if watched and engine.frees_in_pass and engine.plan.keep_after_forward is False:
                for unit in self.units:
                    unit.free()
        return output

    def _before_backward(self) -> None:
        engine = self.engine
        engine.open_backward()
        for unit in self.units:
            engine.before_backward(unit)


class Watch:
    """A tensor hook: its gradient is complete, so those who consumed it are done and its producer
    is next.
    """

    def __init__(self, producer: Callable[[], None] | None) -> None:
        self.producer = producer
        self.consumers: list[Callable[[], None]] = []

    def __call__(self, gradient: torch.Tensor) -> None:
        for done in self.consumers:
            done()
        if self.producer is not None:
            self.producer()
