"""Which engine a parameter belongs to, and misuse that would otherwise train wrongly in silence:
parameters without memory, a model that was changed after sharding.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine
    from shardwise.engine.unit import Unit

_ATTRIBUTE = "_shardwise_engine"
marked = 0  # how often parameters were told their engine


def mark(engine: Engine) -> None:
    """Let every visible parameter know its engine."""
    global marked
    marked += 1
    reference = weakref.ref(engine)
    for unit in engine.units:
        for parameter in unit.parameters.visible:
            parameter.__dict__[_ATTRIBUTE] = reference


def engine_of(parameter: torch.Tensor) -> Engine | None:
    """The engine that shards a parameter, if one does."""
    reference: weakref.ref[Engine] | None = parameter.__dict__.get(_ATTRIBUTE)
    return reference() if reference is not None else None


def engines_of(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """The engines that shard any of these parameters, each once."""
    return list(dict.fromkeys(filter(None, map(engine_of, parameters))))


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


class Structure:
    """The modules and parameters of a model when it was sharded."""

    def __init__(self, model: nn.Module) -> None:
        self.model = weakref.ref(model)
        self._record(model)

    def _record(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children = [module._modules for module in modules]
        self._parameters = [module._parameters for module in modules]
        self._known = self._look()
        self._count = sum(map(len, self._parameters))
        self._owners = _owners(self._parameters)
        self._names = {name for name, _ in model.named_parameters(remove_duplicate=False)}

    def _look(self) -> tuple[list[int], list[nn.Module | None]]:
        """How many children every module has, and which."""
        children = self._children
        return list(map(len, children)), list(chain.from_iterable(map(dict.values, children)))

    def check(self, may_grow: bool = True) -> None:
        """Error if a module with parameters, or a parameter, was replaced since, or unless it
        `may_grow` added or taken out. (A parameter put in another's place is found when its unit is
        shown.) What was added and nobody shards trains as torch trains it: each rank its own.
        """
        if self._look() == self._known and sum(map(len, self._parameters)) == self._count:
            return
        model = self.model()
        assert model is not None
        owners = _owners(module._parameters for module in model.modules())
        # Else it is something around known modules (torch.compile, a checkpoint wrapper), or one
        # without parameters.
        if owners != self._owners:
            grown = all(set(keys) <= set(owners.get(i, ())) for i, keys in self._owners.items())
            # A module taken out, whole and for nothing else, is one that no step runs any more.
            shrunk = all(self._owners.get(i) == keys for i, keys in owners.items())
            if not (may_grow and (grown or shrunk)):
                raise RuntimeError(
                    f"{self._where()} was added, removed or replaced after sharding; it would be "
                    "neither sharded nor trained. Change the model before it is sharded (adapters, "
                    "too, are added before)"
                )
            self._warn_of_added(model)
        self._record(model)

    def _warn_of_added(self, model: nn.Module) -> None:
        """Name trainable parameters that no engine and no DTensor keeps alike on all ranks."""
        added = [
            name
            for name, parameter in model.named_parameters()
            if name not in self._names and parameter.requires_grad
            if not isinstance(parameter, DTensor) and engine_of(parameter) is None
        ]
        if added and dist.get_world_size() > 1:
            warnings.warn(
                f"{added[0]!r}{f' and {len(added) - 1} more' if added[1:] else ''} came into the "
                "model after it was sharded: each rank trains its own, as under torch's "
                "fully_shard. Call fully_shard on the modules that have them, or all-reduce their "
                "gradients yourself",
                stacklevel=2,
            )

    def _where(self) -> str:
        """The first thing that is not as it was."""
        model = self.model()
        assert model is not None
        known = {id(module) for module in self._known[1]}
        for name, module in model.named_modules():
            if name and id(module) not in known:
                return f"the module {name!r} ({type(module).__name__})"
        names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return f"the parameter {min(names ^ self._names, default='?')!r}"


def _owners(dicts: Iterable[dict[str, Any]]) -> dict[int, tuple[str, ...]]:
    """Who has parameters of its own, and under which keys."""
    return {id(own): tuple(own) for own in dicts if any(p is not None for p in own.values())}
