"""What torch's pipeline schedules ask of a sharded stage, beside FSDPModule's own methods.

They let every micro-batch's backward add gradients up on its rank. After the last one they look for
torch's own state of the stage, reduce its groups one by one and then call the end of backward. Here
the end does it all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed.fsdp import fully_shard

from shardwise.runtime.engine import Engine

_KEY = inspect.unwrap(fully_shard)  # under which torch's `fully_shard.state` looks


class Stage:
    """Answers in the place of torch's state."""

    def __init__(self, find_engine: Callable[[], Engine]) -> None:
        self._find_engine = find_engine
        self._state_ctx = SimpleNamespace(all_states=[])

    def _root_post_backward_final_callback(self) -> None:
        """Reduce what backwards without sync have added up."""
        engine = self._find_engine()
        engine.ready = list(engine.reduce_order)
        engine.end_backward()


def announce(module: nn.Module, find_engine: Callable[[], Engine]) -> None:
    """Let `fully_shard.state(module)` find a Stage."""
    module.__dict__.setdefault(STATE_KEY, {})[_KEY] = Stage(find_engine)


def withdraw(module: nn.Module) -> None:
    del module.__dict__[STATE_KEY][_KEY]


def stage_of(module: nn.Module) -> Any:
    """torch's `fully_shard.state`."""
    return module.__dict__.get(STATE_KEY, {}).get(_KEY)
