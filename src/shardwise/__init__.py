"""shardwise: sharded data-parallel training with one small engine, planned before it runs.

The public names are imported when first used, so that the command line answers without torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from shardwise import processor

if TYPE_CHECKING:
    from shardwise.comms.recording import record
    from shardwise.compat import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        MixedPrecisionPolicy,
        OffloadPolicy,
        UnshardHandle,
        fully_shard,
        register_fsdp_forward_method,
        replace_torch_fully_shard,
        share_comm_ctx,
    )
    from shardwise.measurement.profile.collect import profile
    from shardwise.planning.describe import describe
    from shardwise.planning.plan import Plan
    from shardwise.planning.search import plan, search
    from shardwise.planning.simulate import simulate
    from shardwise.reporting.api import report
    from shardwise.runtime.api import exposed_seconds, shard
    from shardwise.runtime.clip import clip_grad_norm
    from shardwise.runtime.local_step import local
    from shardwise.runtime.materialize import materialize
    from shardwise.runtime.microbatches import microbatches
    from shardwise.runtime.sharded_optimizer import ShardedOptimizer
    from shardwise.runtime.state import broadcast, full_state_dict

_HOMES = {
    "CPUOffloadPolicy": "compat",
    "DataParallelMeshDims": "compat",
    "FSDPModule": "compat",
    "MixedPrecisionPolicy": "compat",
    "OffloadPolicy": "compat",
    "Plan": "planning.plan",
    "ShardedOptimizer": "runtime.sharded_optimizer",
    "UnshardHandle": "compat",
    "broadcast": "runtime.state",
    "clip_grad_norm": "runtime.clip",
    "describe": "planning.describe",
    "exposed_seconds": "runtime.api",
    "full_state_dict": "runtime.state",
    "fully_shard": "compat",
    "local": "runtime.local_step",
    "materialize": "runtime.materialize",
    "microbatches": "runtime.microbatches",
    "plan": "planning.search",
    "profile": "measurement.profile.collect",
    "record": "comms.recording",
    "register_fsdp_forward_method": "compat",
    "replace_torch_fully_shard": "compat",
    "report": "reporting.api",
    "search": "planning.search",
    "shard": "runtime.api",
    "share_comm_ctx": "compat",
    "simulate": "planning.simulate",
}

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "ShardedOptimizer",
    "UnshardHandle",
    "broadcast",
    "clip_grad_norm",
    "describe",
    "exposed_seconds",
    "full_state_dict",
    "fully_shard",
    "local",
    "materialize",
    "microbatches",
    "plan",
    "profile",
    "record",
    "register_fsdp_forward_method",
    "replace_torch_fully_shard",
    "report",
    "search",
    "shard",
    "share_comm_ctx",
    "simulate",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'shardwise' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"shardwise.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Only what was found before: importing starts no process. Sharding a model on the host asks.
processor.settle(probe=False)

if os.environ.get("SHARDWISE_PROFILE"):  # set by `shardwise profile`, for every rank it starts
    importlib.import_module("shardwise.measurement.profile.auto")
