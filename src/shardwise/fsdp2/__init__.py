"""torch's `fully_shard` surface over shardwise's engine: translation only.

Nothing here computes or communicates by itself: a call becomes Units with Options, a setter changes
an Option, a hook is the engine's own. The policies are torch's own classes, so that whoever tests
with `isinstance` finds them.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.engine.torch_private import DataParallelMeshDims
from shardwise.fsdp2.companions import (
    register_fsdp_forward_method,
    replace_torch_fully_shard,
    share_comm_ctx,
)
from shardwise.fsdp2.module import FSDPModule, UnshardHandle
from shardwise.fsdp2.wrap import fully_shard

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "replace_torch_fully_shard",
    "share_comm_ctx",
]
