"""For libraries that import `fully_shard` from torch themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed._composable.fsdp as older
import torch.distributed.fsdp as fsdp


def replace_torch_fully_shard() -> Callable[[], None]:
    """From now on `from torch.distributed.fsdp import fully_shard` gives shardwise's, and so with
    `register_fsdp_forward_method` and `share_comm_ctx`. Call it before the library imports the
    names, which most do inside their functions. Returns a function that puts torch's back.
    """
    import shardwise.compat as ours

    names = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    # The second is an older home of the same names, from which some still import.
    homes = [(home, name) for home in (fsdp, older) for name in names]
    before = [(home, name, getattr(home, name)) for home, name in homes if hasattr(home, name)]
    for home, name, _ in before:
        setattr(home, name, getattr(ours, name))

    def put_back() -> None:
        for home, name, value in before:
            setattr(home, name, value)

    return put_back
