"""The document's steps on its four GPUs, as the simulator says them, before anything runs."""

from __future__ import annotations

import dataclasses
from typing import Any

import shardwise as sw
from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.description.preset import load_preset
from shardwise.description.workload import Workload
from shardwise.lab.hybrid.case import plan_of
from shardwise.lab.hybrid.ffn import SEQUENCE
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe_preset
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
    """A step of the stack on a 2 x 2 mesh (or 4 ranks in one shard group) of H100."""
    plan = dataclasses.replace(plan_of(mode), **settings)
    workload = Workload.alternating(SEQUENCE, ratio, accumulate)
    if synced:
        workload = dataclasses.replace(workload, sizes=((1, ratio),))
    cluster = Cluster.load(CLUSTER)
    costs, base = Costs.of(cluster), Costs.of(cluster)
    described: dict[int, ModelDescription] = {}
    measured = []
    for size in sorted({1, ratio}):
        one = described[size] = describe_preset("ffn8", workload, plan, sequences=size)
        passes = [p for _, s in one.segments for p in (s.forward, s.backward)]
        scale = micro_batch_seconds(size) / sum(base.compute(p) for p in passes)
        measured += [(p, base.compute(p) * scale) for p in passes]
    costs.set_passes(measured)
    resolved = plan.resolve(load_preset("ffn8").build(workload.sequence))
    assert len(described[1].units) == len(resolved.require_units())
    options = StepOptions(optimizer=False)
    return sw.simulate(
        resolved, described, cluster, workload, costs=costs, engine=engine, options=options
    )


def micro_batch_seconds(size: int) -> float:
    """Measured for 1 and 2 sequences, on their line for others."""
    if size in MICRO_BATCH_S:
        return MICRO_BATCH_S[size]
    slope = MICRO_BATCH_S[2] - MICRO_BATCH_S[1]
    return MICRO_BATCH_S[2] + (size - 2) * slope
