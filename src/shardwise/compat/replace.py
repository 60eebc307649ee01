"""For libraries that import `fully_shard` from torch themselves."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed.fsdp as fsdp


def replace_torch_fully_shard() -> Callable[[], None]:
    """From now on `from torch.distributed.fsdp import fully_shard` gives shardwise's, and so with
    `register_fsdp_forward_method` and `share_comm_ctx`. Call it before the library imports the
    names, which most do inside their functions. Returns a function that puts torch's back.
    """
    import shardwise.compat as ours

    names = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")
    before = {name: getattr(fsdp, name) for name in names}
    for name in names:
        setattr(fsdp, name, getattr(ours, name))

    def put_back() -> None:
        for name, value in before.items():
            setattr(fsdp, name, value)

    return put_back
