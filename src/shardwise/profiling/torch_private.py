"""torch's private names that only measuring needs, here and in the rooms above: what each is for,
and what is lost without it. Where torch versions differ stands in `engine/torch_private.py`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch

# Whether torch's profiler runs; a process has only one. Without it a second start fails somewhere
# inside torch, with an error that does not say so.
profiler_runs = torch.autograd._profiler_enabled

# The history of CUDA's allocator, block by block. Without it memory has no curve on a GPU, only a
# peak.
record_allocations = torch.cuda.memory._record_memory_history
allocator_snapshot = torch.cuda.memory._snapshot

# Keeps a GPU busy for so many cycles. Without it a short kernel's time is that of its launch.
spin = torch.cuda._sleep

# The communication hooks of a DistributedDataParallel model. Without it an emulated network would
# put its hook over a user's.
comm_hooks_of = attrgetter("_comm_hooks")


def fsdp_param_group_module() -> Any:
    """Where torch's FSDP2 looks up the `record_function` that names its work. Without it a profile
    of torch's engine has no gathers and reduces.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group


def fake_store() -> Any:
    """A store for the "fake" backend, whose groups send nothing; the import registers the backend.
    Without it a process cannot be one rank of an emulated cluster.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
