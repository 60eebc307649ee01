"""For libraries that import `fully_shard` from torch themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch.distributed._composable.fsdp  # noqa: F401  an older home of the same names
import torch.distributed.fsdp as fsdp

_NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def replace_torch_fully_shard() -> Callable[[], None]:
    """From now on `from torch.distributed.fsdp import fully_shard` gives shardwise's, and so with
    `register_fsdp_forward_method` and `share_comm_ctx`. Modules that have imported torch's before
    get shardwise's too, under whatever name. What holds a function elsewhere (in a class, a dict, a
    default argument) keeps it. Returns a function that puts torch's back.
    """
    import shardwise.fsdp2 as ours

    replaced: list[tuple[dict[str, Any], str, Any]] = []
    by_theirs = {
        id(getattr(fsdp, name)): getattr(ours, name) for name in _NAMES if hasattr(fsdp, name)
    }
    for namespace, name, value in _global_names():
        own = by_theirs.get(id(value))
        if own is not None and own is not value:
            replaced.append((namespace, name, value))
            namespace[name] = own

    def put_back() -> None:
        for namespace, name, value in replaced:
            namespace[name] = value

    return put_back


def _global_names() -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Every global of every module there is, but for our own. Asks no module for an attribute:
    a lazy one would import it.
    """
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and module_name.partition(".")[0] != "shardwise":
            namespace = vars(module)
            for name, value in list(namespace.items()):
                yield namespace, name, value
