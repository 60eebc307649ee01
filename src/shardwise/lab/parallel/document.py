"""What the assignment says of several ranks: table 8 and its data-parallel and sharding runs.

Times are seconds. It gives one mean of each, without a spread.
"""

from __future__ import annotations

from typing import Any

# An all-reduce on 8 V100s, of so many MB (1e6 bytes of fp32) over so many processes.
NCCL_ALL_REDUCE = {
    2: {1: 0.364509, 10: 0.372378, 100: 0.393590, 1000: 0.424514},
    4: {1: 0.578839, 10: 0.589919, 100: 0.613600, 1000: 0.675741},
    6: {1: 0.701945, 10: 0.703578, 100: 0.718957, 1000: 0.846845},
}
GLOO_ALL_REDUCE = {2: {1000: 1.468517}, 4: {1000: 2.125806}, 6: {1000: 2.668937}}
# XL on two H100s, a context and a total batch of 32 each. `beside` is its own step with one
# all-reduce per tensor in the same exercise: that took 0.846, 0.776 and 0.86 in three of them, so
# figures of different exercises do not compare.
DDP: dict[str, dict[str, Any]] = {
    "naive": {"step_s": 0.846, "communication_s": 0.0681},
    "flat": {"step_s": 0.898, "communication_s": 0.0967, "beside_s": 0.846},
    "overlap": {"step_s": 0.796, "beside_s": 0.776},
    "bucketed 1 MB": {"step_s": 0.973, "beside_s": 0.86},
    "bucketed 10 MB": {"step_s": 0.8596, "beside_s": 0.86},
    "bucketed 100 MB": {"step_s": 0.874, "beside_s": 0.86},
    "bucketed 1000 MB": {"failure": "out of memory", "beside_s": 0.86},
}
# XL on two GPUs, fp32: seconds of a step, and GB at its peak.
OPTIMIZER_SHARDING = {
    "whole": {"step_s": 0.261, "peak_gb": 55.0},
    "sharded": {"step_s": 0.249, "peak_gb": 42.0},
}


def all_reduce(backend: str, ranks: int, megabytes: int) -> dict[str, Any]:
    """What table 8 says of this case; empty if nothing."""
    table = NCCL_ALL_REDUCE if backend == "nccl" else GLOO_ALL_REDUCE
    seconds = table.get(ranks, {}).get(megabytes)
    return {} if seconds is None else {"seconds": seconds, "hardware": "8 V100"}
