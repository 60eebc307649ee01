"""Misuse that would otherwise train wrongly in silence: an optimizer from before sharding, a step
left half way.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.runtime.local_step import end_step, step_locally

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine
    from shardwise.sharding.unit import Unit

_installed = False
_marked = 0  # engines so far
# Which engines an optimizer's parameters belong to, and what that was found from: how many
# parameter groups and engines there were.
_engines_of: weakref.WeakKeyDictionary[
    torch.optim.Optimizer, tuple[tuple[int, int], list[weakref.ref[Engine]]]
] = weakref.WeakKeyDictionary()


def watch_optimizers() -> None:
    """Check every optimizer at its `step` from now on, and let those over sharded parameters step
    on local rows. Installed with the first sharded model, not on import.
    """
    global _installed
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)
        register_optimizer_step_post_hook(end_step)


def check_memory(units: list[Unit]) -> None:
    """Error that lists the parameters still without memory."""
    missing = [
        member.name
        for unit in units
        if unit.parameters.master.is_meta
        for member in unit.parameters.members
    ]
    if missing:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {missing}\nFor example, call "
            "module.to_empty(device) to materialize to device and call module.reset_parameters() "
            "on each module to initialize values, or shardwise.materialize(module), which does "
            "both and lists what nobody initialised."
        )


def mark(engine: Engine) -> None:
    """Let every visible parameter know its engine."""
    global _marked
    _marked += 1
    reference = weakref.ref(engine)
    for unit in engine.units:
        for parameter in unit.parameters.visible:
            parameter.__dict__["_shardwise_engine"] = reference


class Structure:
    """The modules and parameters of a model when it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        modules = list(model.modules())
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._known = [list(children.values()) for children in self._children]
        self._count = sum(map(len, self._parameters))
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def check(self) -> None:
        """Error if a module or a parameter was added, removed or replaced since. (A parameter put
        in another's place is found when its unit is shown.)
        """
        same = [list(children.values()) for children in self._children] == self._known
        if same and sum(map(len, self._parameters)) == self._count:
            return
        raise RuntimeError(
            f"{self._where()} was added, removed or replaced after sharding; it would be neither "
            "sharded nor trained. Change the model before it is sharded"
        )

    def _where(self) -> str:
        """The first thing that is not as it was."""
        model = self.model()
        assert model is not None
        known = {id(module) for children in self._known for module in children}
        for name, module in model.named_modules():
            if name and id(module) not in known:
                return f"the module {name!r} ({type(module).__name__})"
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return f"the parameter {min(names ^ self._names, default='?')!r}"


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _engines_of.get(optimizer)
    found_from = len(optimizer.param_groups), _marked
    if known is None or known[0] != found_from:
        known = found_from, _find_engines(optimizer)
        _engines_of[optimizer] = known
    for reference in known[1]:
        engine = reference()
        if engine is not None:
            check_interrupted(engine)
    if known[1]:
        step_locally(optimizer, args, kwargs)


def _find_engines(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Engine]]:
    found: list[weakref.ref[Engine]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moved = getattr(parameter, "_shardwise_moved", None)
            if moved is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built before sharding and holds the old "
                    f"parameter {moved!r}, "
                    "which no longer trains; build the optimizer from model.parameters() after "
                    "sw.shard(model, plan) or fully_shard(model)"
                )
            reference = getattr(parameter, "_shardwise_engine", None)
            if reference is not None and reference not in found:
                found.append(reference)
    return found


def check_interrupted(engine: Engine) -> None:
    """Error if the last micro-batch loop was left early."""
    if engine.interrupted is not None:
        raise RuntimeError(engine.interrupted)
