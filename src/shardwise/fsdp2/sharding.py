"""What one call of `fully_shard` leaves on its modules, and how an engine is formed of all calls at
the first forward.

torch's `fully_shard` enters each module in two lists of its composable APIs: a registry of names,
which `replicate` and others look into before they take a module, and a mapping to a state. Pipeline
schedules look for that state too: they let every micro-batch's backward add gradients up on its
rank, and after the last one reduce the state's groups one by one and call the end of backward. Here
the state has no groups, and the end does it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from shardwise.engine import checks, torch_private
from shardwise.engine.api import bind, unbind
from shardwise.engine.engine import Engine, Structure
from shardwise.engine.executor import TensorExecutor
from shardwise.engine.extended import ExtendedParameters, is_extended
from shardwise.engine.hooks import Node
from shardwise.engine.mesh import Mesh
from shardwise.engine.state import copy_module, repeat_unit
from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit
from shardwise.schedule.policy import Policy

_KEY = inspect.unwrap(fully_shard)  # under which torch's `fully_shard.state` looks
NAME = _KEY.__name__


class Sharding(torch_private.FSDPState):
    """One call: its modules, the units that their parameters form, and the hooks on them.

    It also answers in the place of torch's state: what it holds is that of a state at rest, and
    what it is asked to do the engine does.
    """

    _is_root: bool | None  # unknown until the first forward

    def __init__(
        self,
        modules: list[nn.Module],
        units: list[Unit],
        mesh: Mesh,
        precision: MixedPrecisionPolicy,
        auto_keep: bool,
    ) -> None:
        super().__init__()
        self.modules, self.units, self.mesh, self.precision = modules, units, mesh, precision
        self.structures = [Structure(module) for module in modules]
        self.auto_keep = auto_keep  # nobody said what is kept after forward: the root is
        self.homes: list[Any] = []  # where this call's parameters went (ties.Home)
        self.executor: TensorExecutor | None = None
        self.engine: Engine | None = None
        self.reduce_depth = 1
        self.is_last_backward = True
        casts = precision.param_dtype if precision.cast_forward_inputs else None
        self.nodes = [
            Node(module, units, self._form, casts, precision.output_dtype) for module in modules
        ]
        self._announce()

    def prepare(self) -> None:
        """Make the units ready to be gathered outside a forward."""
        self._set_extended_apart()
        for unit in self.units:
            unit.adopt_changes()
            if not unit.prepared:
                checks.check_memory([unit])
                unit.prepare(self.get_executor())

    def _set_extended_apart(self) -> None:
        """A parameter whose local tensor was given its own all-gather since travels alone. What
        users hold stays what it is.
        """
        for unit in list(self.units):
            p = unit.parameters
            extended = [is_extended(visible) for visible in p.visible]
            if isinstance(p, ExtendedParameters) or not any(extended):
                continue
            unit.free()
            groups: dict[int, list[Member]] = {}
            for i, (member, visible) in enumerate(zip(p.members, p.visible, strict=True)):
                again = replace(member, original=visible, sharded=True, stays=True)
                groups.setdefault(i if extended[i] else -1, []).append(again)
            at = self.units.index(unit)
            self.units[at : at + 1] = [
                Unit(unit.name, unit.modules, members, unit.mesh, unit.options)
                for members in groups.values()
            ]

    def get_executor(self) -> TensorExecutor:
        if self.engine is not None:
            return self.engine.executor
        if self.executor is None:
            self.executor = TensorExecutor(self.mesh.device)
        return self.executor

    def share(self, executor: TensorExecutor) -> None:
        """Move on other lanes from now on."""
        self.executor = executor
        if self.engine is not None:
            self.engine.share(executor)
        for unit in self.units:
            unit.executor = executor

    @contextmanager
    def taken_off(self) -> Iterator[None]:
        """Inside, the modules are as they were before the call, but for their parameters."""
        for unit in self.units:
            unit.free()
        for node in self.nodes:
            node.unhang()
        for handle in self._handles:
            handle.remove()
        classes = [type(module) for module in self.modules]
        for module in self.modules:
            unbind(module)
            del module.__dict__[torch_private.STATE_KEY][_KEY]
            del module.__dict__[torch_private.REGISTRY_KEY][NAME]
            torch_private.remove_module_state(module)
            module.__class__ = type(module).__mro__[cast(Any, module)._orig_cls_mro_index]
        try:
            yield
        finally:
            for module, kind in zip(self.modules, classes, strict=True):
                module.__class__ = kind
            for node in self.nodes:
                node.hang()
            self._announce()

    def _announce(self) -> None:
        """Enter the modules as torch's `fully_shard` does. Whoever saves or loads finds the sharded
        parameters in their places.
        """
        item = torch_private.RegistryItem()
        for module in self.modules:
            bind(module, self.get_engine)
            module.__dict__.setdefault(torch_private.STATE_KEY, {})[_KEY] = self
            module.__dict__.setdefault(torch_private.REGISTRY_KEY, {})[NAME] = item
            torch_private.insert_module_state(module, self)
        self._handles = []
        members = [member for unit in self.units for member in unit.parameters.members]
        owners = {id(module): module for member in members for module, _ in member.places}
        for module in owners.values():
            self._handles.append(module.register_state_dict_pre_hook(self._before_saving))
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_loading))

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        for unit in self.units:
            unit.hide()

    def _before_loading(self, module: nn.Module, *_: Any) -> None:
        for unit in self.units:
            unit.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """Met through the hooks above, in a copy of a part of the model that is not sharded by
        itself: the copy belongs to no unit, so nothing is to be done when it is saved or loaded.
        """
        nobody = object.__new__(Sharding)
        nobody.units = []
        return nobody

    # What torch asks of its state

    def _lazy_init(self) -> None:
        self.get_engine()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what backwards without sync have added up."""
        self.get_engine().reduce_accumulated()

    def _reset_iter_state(self) -> None:
        if self._is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if self.engine is not None:
            self.engine.reset()

    # The engine

    def get_engine(self) -> Engine:
        """The engine that this call's units belong to; formed of what is inside, if none is yet."""
        return self.engine or self._form()

    def _form(self) -> Engine:
        """The first forward runs through this call's module: it is the root of an engine of all
        calls inside it.
        """
        if len(self.modules) > 1:
            raise RuntimeError(f"FSDP requires a single root module but got {tuple(self.modules)}")
        root = self.modules[0]
        shardings = shardings_in(root)
        for name, module in root.named_modules():
            sharding = sharding_of(module)
            if sharding is not None and sharding.engine is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
        for sharding in shardings:
            for structure in sharding.structures:
                structure.check()
            for home in sharding.homes:
                home.check()
        for sharding in shardings:
            sharding._set_extended_apart()
        if self.auto_keep:
            for unit in self.units:
                unit.options.keep = True
        units = [unit for sharding in shardings for unit in sharding.units]
        _name_units(root, shardings)
        for unit in units:
            unit.is_root = unit in self.units
            unit.adopt_changes()
        executor = next((s.executor for s in shardings if s.executor is not None), None)
        policy = Policy(reduce_depth=max(sharding.reduce_depth for sharding in shardings))
        mesh = units[0].mesh if units else self.mesh
        checks.check_memory(units)
        executor = executor or TensorExecutor(self.mesh.device)
        engine = Engine(root, units, mesh, policy, executor)
        engine.schedule.last_backward = self.is_last_backward
        torch_private.join_states(self, shardings)
        for sharding in shardings:
            sharding.engine = engine
            for node in sharding.nodes:
                node.join(engine, is_root=node.module is root)
        if self.mesh.device.type != "cpu":
            self.nodes[0].input_device = self.mesh.device
        return engine


def _name_units(root: nn.Module, shardings: list[Sharding]) -> None:
    """Name parameters and units as the root does."""
    names: dict[tuple[int, str], list[str]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key in torch_private.parameters_of(module):
            names.setdefault((id(module), key), []).append(f"{prefix}.{key}" if prefix else key)
    modules = {id(module): name or "root" for name, module in root.named_modules()}
    for sharding in shardings:
        label = ", ".join(modules[id(module)] for module in sharding.modules)
        for i, unit in enumerate(sharding.units):
            unit.name = label if len(sharding.units) == 1 else f"{label}[{i}]"
            for member in unit.parameters.members:
                member.names = [n for m, key in member.places for n in names[id(m), key]]


def state_of(module: nn.Module) -> Any:
    """torch's `fully_shard.state`: that of either engine."""
    return module.__dict__.get(torch_private.STATE_KEY, {}).get(_KEY)


def sharding_of(module: nn.Module) -> Sharding | None:
    state = state_of(module)
    return state if isinstance(state, Sharding) else None


def shardings_in(*roots: nn.Module) -> list[Sharding]:
    """Of every sharded module inside, each once."""
    found = (sharding_of(module) for root in roots for module in root.modules())
    return list(dict.fromkeys(sharding for sharding in found if sharding is not None))


def is_applied(module: nn.Module, name: str) -> bool:
    """Whether a composable API of torch, by the name of its function, has taken the module."""
    return name in module.__dict__.get(torch_private.REGISTRY_KEY, {})


def copy_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a sharded module, with its own shards, hooks and settings: copy it without its
    sharding, then give the copy the same. No communication.

    The copy starts as a model that has not run: its first forward forms an engine of its own.
    """
    shardings = shardings_in(module)
    with ExitStack() as stack:
        for sharding in shardings:
            stack.enter_context(sharding.taken_off())
        twin, copies = copy_module(module, memo)
    for sharding in shardings:
        modules = [copies[id(m)] for m in sharding.modules]
        again = [repeat_unit(unit, copies) for unit in sharding.units]
        Sharding(modules, again, sharding.mesh, sharding.precision, sharding.auto_keep)
        for ours, theirs in zip(sharding.modules, modules, strict=True):
            theirs.__class__ = type(ours)
    return twin
