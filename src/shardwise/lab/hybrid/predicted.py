"""A step of the stack as the simulator says it, before anything runs: the document's on its four
GPUs, or any on a cluster that was calibrated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import shardwise as sw
from shardwise.description.cluster import Cluster
from shardwise.description.preset import Preset, load_preset
from shardwise.description.workload import Workload
from shardwise.lab.hybrid.case import plan_of
from shardwise.lab.hybrid.ffn import SEQUENCE
from shardwise.predict.cost import Costs
from shardwise.predict.describe import TracedModel
from shardwise.predict.step import StepOptions
from shardwise.timeline import Timeline

# One H200 alone, a micro-batch of 1 and of 2 sequences (`shardwise bench ffn`).
MICRO_BATCH_S = {1: 0.6601, 2: 1.3175}  # benchmarks/results/ffn-h200.json
CLUSTER = "h100x8"


def predict(
    mode: str,
    accumulate: int = 2,
    ratio: int = 2,
    engine: str = "fsdp2",
    synced: bool = False,
    **settings: Any,
) -> Timeline:
    """The document's step on a 2 x 2 mesh (or 4 ranks in one shard group) of H100."""
    plan = dataclasses.replace(plan_of(mode), **settings)
    workload = Workload.alternating(SEQUENCE, ratio, accumulate)
    if synced:
        workload = dataclasses.replace(workload, sizes=((1, ratio),))
    costs = Costs.of(Cluster.load(CLUSTER))
    return predict_step(load_preset("ffn8"), plan, workload, costs, micro_batch_seconds, engine)


def predict_step(
    stack: Preset,
    plan: sw.Plan,
    workload: Workload,
    costs: Costs,
    seconds_of: Callable[[int], float],
    engine: str,
) -> Timeline:
    """A step whose micro-batches take what was measured of them, all their kernels in proportion.
    `costs` are of the cluster, and are told so.
    """
    base, traced = Costs.of(costs.cluster), _traced(stack, workload.sequence)
    described, measured = {}, []
    for size in sorted({size for row in workload.sizes or () for size in row}):
        alone = dataclasses.replace(workload, micro_batch=size, sizes=None)
        resolved, one = traced.at(plan, alone)
        described[size] = one
        passes = [p for _, s in one.segments for p in (s.forward, s.backward)]
        scale = seconds_of(size) / sum(base.compute(p) for p in passes)
        measured += [(p, base.compute(p) * scale) for p in passes]
    costs.set_passes(measured)
    return sw.simulate(
        resolved, described, costs.cluster, workload, costs=costs, engine=engine,
        options=StepOptions(optimizer=False),
    )  # fmt: skip


@lru_cache(maxsize=4)
def _traced(stack: Preset, sequence: int) -> TracedModel:
    return TracedModel(stack.build(sequence), stack.name, stack.inputs)


def micro_batch_seconds(size: int) -> float:
    """Measured for 1 and 2 sequences, on their line for others."""
    if size in MICRO_BATCH_S:
        return MICRO_BATCH_S[size]
    slope = MICRO_BATCH_S[2] - MICRO_BATCH_S[1]
    return MICRO_BATCH_S[2] + (size - 2) * slope
