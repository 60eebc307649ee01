"""shardwise: sharded data-parallel training with one small engine, planned before it runs.

The public names are imported when first used, so that the command line answers without torch.
"""

import importlib
import os
from typing import TYPE_CHECKING, Any

from shardwise import processor

if TYPE_CHECKING:
    from shardwise.calibration.auto import compare, shard
    from shardwise.calibration.search import plan, search
    from shardwise.checkpoint import CheckpointError, save
    from shardwise.engine.api import exposed_seconds, local
    from shardwise.engine.capture import capture
    from shardwise.engine.clip import clip_grad_norm
    from shardwise.engine.engine import microbatches
    from shardwise.engine.grouped_step import sharded_step
    from shardwise.engine.records import record
    from shardwise.engine.sharded_optimizer import ShardedOptimizer
    from shardwise.engine.state import broadcast, full_state_dict, materialize
    from shardwise.fsdp2 import (
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
    from shardwise.graph.compile import compile
    from shardwise.interchange import load
    from shardwise.planning.plan import Plan
    from shardwise.predict.describe import describe, recompute
    from shardwise.predict.simulate import simulate
    from shardwise.profiling.collect import profile
    from shardwise.reporting.report import report

_HOMES = {
    "CPUOffloadPolicy": "fsdp2",
    "CheckpointError": "checkpoint",
    "DataParallelMeshDims": "fsdp2",
    "FSDPModule": "fsdp2",
    "MixedPrecisionPolicy": "fsdp2",
    "OffloadPolicy": "fsdp2",
    "Plan": "planning.plan",
    "ShardedOptimizer": "engine.sharded_optimizer",
    "UnshardHandle": "fsdp2",
    "broadcast": "engine.state",
    "capture": "engine.capture",
    "clip_grad_norm": "engine.clip",
    "compare": "calibration.auto",
    "compile": "graph.compile",
    "describe": "predict.describe",
    "exposed_seconds": "engine.api",
    "full_state_dict": "engine.state",
    "fully_shard": "fsdp2",
    "load": "interchange",
    "local": "engine.api",
    "materialize": "engine.state",
    "microbatches": "engine.engine",
    "plan": "calibration.search",
    "profile": "profiling.collect",
    "recompute": "predict.describe",
    "record": "engine.records",
    "register_fsdp_forward_method": "fsdp2",
    "replace_torch_fully_shard": "fsdp2",
    "report": "reporting.report",
    "save": "checkpoint",
    "search": "calibration.search",
    "shard": "calibration.auto",
    "sharded_step": "engine.grouped_step",
    "share_comm_ctx": "fsdp2",
    "simulate": "predict.simulate",
}

__all__ = [
    "CPUOffloadPolicy",
    "CheckpointError",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Plan",
    "ShardedOptimizer",
    "UnshardHandle",
    "broadcast",
    "capture",
    "clip_grad_norm",
    "compare",
    "compile",
    "describe",
    "exposed_seconds",
    "full_state_dict",
    "fully_shard",
    "load",
    "local",
    "materialize",
    "microbatches",
    "plan",
    "profile",
    "recompute",
    "record",
    "register_fsdp_forward_method",
    "replace_torch_fully_shard",
    "report",
    "save",
    "search",
    "shard",
    "sharded_step",
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
    importlib.import_module("shardwise.profiling.watch")
