"""torch's functions beside `fully_shard`; and shardwise's functions put in the place of torch's,
for libraries that import them from torch themselves.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import torch.distributed.fsdp as fsdp
from torch import nn

from shardwise.engine import torch_private
from shardwise.engine.hooks import node_of
from shardwise.fsdp2.sharding import Sharding, sharding_of
from shardwise.fsdp2.wrap import fully_shard


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let another method gather and free the module's parameters as `forward` does: of a module
    that `fully_shard` was called on, or that a Plan's unit runs with (the model itself always is
    one). Does nothing for any other.
    """
    if node_of(module) is None:
        return
    if not hasattr(module, method_name):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    # A deep copy of the module takes its method along: that one works on the copy.
    is_own = isinstance(method, MethodType) and method.__self__ is module
    function = method.__func__ if is_own else None

    @functools.wraps(method)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        node = node_of(self)
        assert node is not None
        return node.run(method if function is None else MethodType(function, self), *args, **kwargs)

    setattr(module, method_name, MethodType(call, module))


def share_comm_ctx(modules: list[fsdp.FSDPModule]) -> None:
    """Let several sharded models (the stages of a pipeline) use the same streams."""
    shardings: list[Sharding] = []
    for module in modules:
        sharding = sharding_of(module) if isinstance(module, nn.Module) else None
        if sharding is None:
            raise ValueError(f"Expects list of FSDPModules but got {module}")
        shardings.append(sharding)
    for sharding in shardings[1:]:
        sharding.share(shardings[0].get_executor())


def replace_torch_fully_shard() -> Callable[[], None]:
    """From now on `from torch.distributed.fsdp import fully_shard` gives shardwise's, and so with
    `register_fsdp_forward_method` and `share_comm_ctx`. Modules that have imported torch's before
    get shardwise's too, under whatever name. What holds a function elsewhere (in a class, a dict, a
    default argument) keeps it. Returns a function that puts torch's back.
    """
    torch_private.load_older_home()
    ours = (fully_shard, register_fsdp_forward_method, share_comm_ctx)
    by_theirs = {
        id(getattr(fsdp, own.__name__)): own for own in ours if hasattr(fsdp, own.__name__)
    }
    replaced: list[tuple[dict[str, Any], str, Any]] = []
    for module_name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or module_name.partition(".")[0] == "shardwise":
            continue
        globals_there = vars(module)  # asking a lazy module for an attribute would import it
        for name, theirs in list(globals_there.items()):
            own = by_theirs.get(id(theirs))
            if own is not None and own is not theirs:
                replaced.append((globals_there, name, theirs))
                globals_there[name] = own

    def put_back() -> None:
        for globals_there, name, theirs in replaced:
            globals_there[name] = theirs

    return put_back
