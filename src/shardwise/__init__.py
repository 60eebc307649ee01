"""shardwise: sharded data-parallel training with one small engine, planned before it runs."""

from shardwise.comms.recording import record
from shardwise.planning.plan import Plan
from shardwise.runtime.api import exposed_seconds, shard
from shardwise.runtime.clip import clip_grad_norm
from shardwise.runtime.local import local
from shardwise.runtime.microbatches import microbatches
from shardwise.runtime.sharded_optimizer import ShardedOptimizer
from shardwise.runtime.state import broadcast, full_state_dict

__all__ = [
    "Plan",
    "ShardedOptimizer",
    "broadcast",
    "clip_grad_norm",
    "exposed_seconds",
    "full_state_dict",
    "local",
    "microbatches",
    "record",
    "shard",
]
__version__ = "0.1.0"
