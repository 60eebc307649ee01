"""Graph-to-graph functions, one in each file; `docs/graph.md` draws what each of them does."""

from shardwise.graph.passes.bucket import bucket
from shardwise.graph.passes.cap import Interleaving, cap, restore_order, snapshot
from shardwise.graph.passes.identify import Sharding, identify
from shardwise.graph.passes.prefetch import prefetch
from shardwise.graph.passes.run import PassOptions, PassSummary, run_passes, summarize
from shardwise.graph.passes.sort import sort

__all__ = [
    "Interleaving",
    "PassOptions",
    "PassSummary",
    "Sharding",
    "bucket",
    "cap",
    "identify",
    "prefetch",
    "restore_order",
    "run_passes",
    "snapshot",
    "sort",
    "summarize",
]
