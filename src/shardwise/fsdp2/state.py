"""What one call of `fully_shard` leaves on its modules, and how an engine is formed of all calls at
the first forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from shardwise.engine import (
    checks,
)
from shardwise.engine.api import bind, unbind
from shardwise.engine.attach import owners_of
from shardwise.engine.engine import Engine
from shardwise.engine.executor import TensorExecutor
from shardwise.engine.extended import ExtendedParameters, is_extended
from shardwise.engine.hooks import Node
from shardwise.engine.mesh import Mesh
from shardwise.engine.storage import Member
from shardwise.engine.unit import Unit
from shardwise.fsdp2 import contract
from shardwise.fsdp2.policies import MixedPrecisionPolicy
from shardwise.schedule.policy import Policy

_ATTRIBUTE = "_shardwise_state"


class State(contract.TorchState):
    """One call: its modules, the units that their parameters form, and the hooks on them."""

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
        self.structures = [checks.Structure(module) for module in modules]
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
        self.attach(hang=False)

    def prepare(self) -> None:
        """Make the units ready to be gathered outside a forward."""
        self._set_extended_apart()
        for unit in self.units:
            unit.follow()
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
            if unit.prepared:
                unit.executor = executor

    def attach(self, hang: bool = True) -> None:
        """Let the modules know; put the hooks on them again."""
        for module in self.modules:
            module.__dict__[_ATTRIBUTE] = self
            bind(module, self.get_engine)
        contract.announce(self.modules, self)
        if hang:
            for node in self.nodes:
                node.hang()
        self._watch_state_dicts()

    def detach(self) -> None:
        """Take all of it off the modules again."""
        for node in self.nodes:
            node.unhang()
        for handle in self._handles:
            handle.remove()
        for module in self.modules:
            del module.__dict__[_ATTRIBUTE]
            unbind(module)
        contract.withdraw(self.modules)

    def _watch_state_dicts(self) -> None:
        """Whoever saves or loads finds the sharded parameters in their places."""
        self._handles = []
        for module in owners_of(self.units):
            self._handles.append(module.register_state_dict_pre_hook(self._before_saving))
            self._handles.append(module.register_load_state_dict_pre_hook(self._before_loading))

    def _before_saving(self, module: nn.Module, *_: Any) -> None:
        for unit in self.units:
            unit.hide()

    def _before_loading(self, module: nn.Module, *_: Any) -> None:
        for unit in self.units:
            unit.free()

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        """Met through the hooks above, in a copy of a part of the model that is not sharded by
        itself: the copy belongs to no unit, so nothing is to be done when it is saved or loaded.
        """
        nobody = object.__new__(State)
        nobody.units = []
        return nobody

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
        states: list[State] = []
        for name, state in states_in(root):
            if state.engine is not None:
                raise RuntimeError(
                    f"FSDP state has already been lazily initialized for {name}\n"
                    "FSDP requires running forward through the root module first"
                )
            if state not in states:
                states.append(state)
        for state in states:
            for structure in state.structures:
                structure.check()
            for home in state.homes:
                home.check()
        for state in states:
            state._set_extended_apart()
        if self.auto_keep:
            for unit in self.units:
                unit.options.keep = True
        units = [unit for state in states for unit in state.units]
        _name(root, states)
        for unit in units:
            unit.is_root = unit in self.units
            unit.follow()
        executor = next((s.executor for s in states if s.executor is not None), None)
        policy = Policy(reduce_depth=max(state.reduce_depth for state in states))
        mesh = units[0].mesh if units else self.mesh
        checks.check_memory(units)
        executor = executor or TensorExecutor(self.mesh.device)
        engine = Engine(root, units, mesh, policy, executor)
        engine.schedule.last_backward = self.is_last_backward
        for state in states:
            state.engine = engine
            for node in state.nodes:
                node.join(engine, is_root=node.module is root)
        contract.settle(self, states)
        if self.mesh.device.type != "cpu":
            self.nodes[0].input_device = self.mesh.device
        return engine


def state_of(module: nn.Module) -> State | None:
    state = module.__dict__.get(_ATTRIBUTE)
    return state if isinstance(state, State) else None


def states_in(root: nn.Module) -> Iterator[tuple[str, State]]:
    """Every sharded module in `root`, by name, with its state; a state of several modules comes
    several times.
    """
    for name, module in root.named_modules():
        state = state_of(module)
        if state is not None:
            yield name, state


def _name(root: nn.Module, states: list[State]) -> None:
    """Name parameters and units as the root does."""
    names: dict[tuple[int, str], list[str]] = {}
    for prefix, module in root.named_modules(remove_duplicate=False):
        for key in module._parameters:
            names.setdefault((id(module), key), []).append(f"{prefix}.{key}" if prefix else key)
    modules = {id(module): name or "root" for name, module in root.named_modules()}
    for state in states:
        label = ", ".join(modules[id(module)] for module in state.modules)
        for i, unit in enumerate(state.units):
            unit.name = label if len(state.units) == 1 else f"{label}[{i}]"
            for member in unit.parameters.members:
                member.names = [n for m, key in member.places for n in names[id(m), key]]
