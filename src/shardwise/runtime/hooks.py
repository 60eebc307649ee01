"""Hooks: what a module's forward, and the gradients of its inputs and outputs, tell the engine."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardwise.comms import versions
from shardwise.planning.plan import DTYPES
from shardwise.runtime import values
from shardwise.sharding.unit import State, Unit

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine


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
                if tensor.grad_fn is None:
                    # A leaf may come again in every step and would gather hooks: free at the end.
                    for unit in units:
                        unit.open_inputs += 1
                    return
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
        if unit.gradients is None and unit.open_inputs <= 0:
            unit.free()
        elif unit.gradients is not None:
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
