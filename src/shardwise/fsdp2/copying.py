"""A deep copy of a sharded module: its own shards, hooks and settings, no communication."""

from __future__ import annotations

from typing import Any

from torch import nn

from shardwise.engine.state import (
    copy_module,
    repeat_unit,
)
from shardwise.fsdp2.state import State, states_in


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy `module` without its sharding, then give the copy the same.

    The copy starts as a model that has not run: its first forward forms an engine of its own.
    """
    states = list(dict.fromkeys(state for _, state in states_in(module)))
    classes = {id(m): type(m) for state in states for m in state.modules}
    for state in states:
        for unit in state.units:
            if unit.prepared:
                unit.free()
        state.detach()
        for m in state.modules:
            m.__class__ = type(m).__mro__[3]
    try:
        twin, copies = copy_module(module, (u for state in states for u in state.units), memo)
    finally:
        for state in states:
            state.attach()
            for m in state.modules:
                m.__class__ = classes[id(m)]
    for state in states:
        modules = [copies[id(m)] for m in state.modules]
        units = [repeat_unit(unit, copies) for unit in state.units]
        State(modules, units, state.mesh, state.precision, state.auto_keep)
        for m in state.modules:
            copies[id(m)].__class__ = classes[id(m)]
    return twin
