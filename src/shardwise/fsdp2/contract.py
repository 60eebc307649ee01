"""What torch and its helpers ask of a sharded module, beside FSDPModule's own methods.

torch's `fully_shard` enters each module in two lists of its composable APIs: a registry of names,
which `replicate` and others look into before they take a module, and a mapping to a state. Pipeline
schedules look for that state too: they let every micro-batch's backward add gradients up on its
rank, and after the last one reduce the state's groups one by one and call the end of backward. Here
the state has no groups, and the end does it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard

from shardwise.engine import torch_private
from shardwise.engine.engine import Engine

_KEY = inspect.unwrap(fully_shard)  # under which torch's `fully_shard.state` looks
NAME = _KEY.__name__


class TorchState(torch_private.FSDPState):
    """Answers in the place of torch's state: what it holds is that of a state at rest, and what it
    is asked to do the engine does.
    """

    _is_root: bool | None  # unknown until the first forward

    def get_engine(self) -> Engine:
        raise NotImplementedError

    def _lazy_init(self) -> None:
        self.get_engine()

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what backwards without sync have added up."""
        self.get_engine().reduce_accumulated()

    def _reset_iter_state(self) -> None:
        if self._is_root is False:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if self._is_root:
            self.get_engine().reset()


def announce(modules: Sequence[nn.Module], state: TorchState) -> None:
    """Enter modules as torch's `fully_shard` does."""
    item = torch_private.RegistryItem()
    for module in modules:
        module.__dict__.setdefault(torch_private.STATE_KEY, {})[_KEY] = state
        module.__dict__.setdefault(torch_private.REGISTRY_KEY, {})[NAME] = item
        torch_private.insert_module_state(module, state)


def withdraw(modules: Sequence[nn.Module]) -> None:
    for module in modules:
        del module.__dict__[torch_private.STATE_KEY][_KEY]
        del module.__dict__[torch_private.REGISTRY_KEY][NAME]
        torch_private.remove_module_state(module)


def settle(root: TorchState, states: Sequence[TorchState]) -> None:
    """The root is known: let all states in it say so."""
    root._state_ctx.all_states = list(states)
    for state in states:
        state._state_ctx, state._is_root = root._state_ctx, state is root


def state_of(module: nn.Module) -> Any:
    """torch's `fully_shard.state`."""
    return module.__dict__.get(torch_private.STATE_KEY, {}).get(_KEY)


def is_applied(module: nn.Module, name: str) -> bool:
    """Whether a composable API of torch, by the name of its function, has taken the module."""
    return name in module.__dict__.get(torch_private.REGISTRY_KEY, {})
