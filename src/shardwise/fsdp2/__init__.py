"""torch's `fully_shard` surface over shardwise's engine: translation only.

Nothing here computes or communicates by itself: a call becomes Units with Options, a setter changes
an Option, a hook is the engine's own.
"""

from shardwise.fsdp2.module import FSDPModule, UnshardHandle
from shardwise.fsdp2.policies import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from shardwise.fsdp2.replace import replace_torch_fully_shard
from shardwise.fsdp2.wrap import fully_shard, register_fsdp_forward_method, share_comm_ctx

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
