"""Misuse that would otherwise train wrongly in silence: an optimizer from before sharding, a step
left half way.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

if TYPE_CHECKING:
    from shardwise.runtime.engine import Engine

_installed = False
# Which engines an optimizer's parameters belong to, found once per optimizer and number of
# parameter groups.
_engines_of: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, list[weakref.ref[Engine]]]]
_engines_of = weakref.WeakKeyDictionary()


def watch_optimizers(engine: Engine) -> None:
    """Check every optimizer at its `step` from now on. Installed with the first sharded model, not
    on import.
    """
    global _installed
    reference = weakref.ref(engine)
    for unit in engine.units:
        for parameter in unit.parameters.visible:
            parameter.__dict__["_shardwise_engine"] = reference
    if not _installed:
        _installed = True
        register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    known = _engines_of.get(optimizer)
    if known is None or known[0] != len(optimizer.param_groups):
        known = len(optimizer.param_groups), _find_engines(optimizer)
        _engines_of[optimizer] = known
    for reference in known[1]:
        engine = reference()
        if engine is not None:
            check_interrupted(engine)


def _find_engines(optimizer: torch.optim.Optimizer) -> list[weakref.ref[Engine]]:
    found: list[weakref.ref[Engine]] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moved = getattr(parameter, "_shardwise_moved", None)
            if moved is not None:
                raise RuntimeError(
                    f"{type(optimizer).__name__} was built before sw.shard and holds the old "
                    f"parameter {moved!r}, "
                    "which no longer trains; build the optimizer from model.parameters() after "
                    "sw.shard(model, plan)"
                )
            reference = getattr(parameter, "_shardwise_engine", None)
            if reference is not None and reference not in found:
                found.append(reference)
    return found


def check_interrupted(engine: Engine) -> None:
    """Error if the last micro-batch loop was left early."""
    if engine.interrupted is not None:
        raise RuntimeError(engine.interrupted)
