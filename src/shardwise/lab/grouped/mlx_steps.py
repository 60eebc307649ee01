"""The candidates in MLX, on real ranks of its ring."""

from __future__ import annotations

import warnings
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import torch
import torch.distributed as dist

import shardwise.mlx as swm
from shardwise.lab.grouped.cases import ADAMW, CANDIDATES, GroupedCase
from shardwise.lab.grouped.ring import join_ring
from shardwise.lab.grouped.torch_steps import TOLERANCE
from shardwise.lab.processes import time_on_ranks
from shardwise.planning.groups import lay_out_messages
from shardwise.profiling import timing
from shardwise.profiling.timing import Side, Step, version_of

DTYPES = {"fp32": mx.float32, "bf16": mx.bfloat16}


class Arrays(nn.Module):
    """A model that is nothing but its parameters."""

    def __init__(self, case: GroupedCase) -> None:
        super().__init__()
        keys = mx.random.split(mx.random.key(0), len(case.shapes))
        self.arrays = [
            mx.random.normal(shape, dtype=DTYPES[case.precision], key=key)
            for shape, key in zip(case.shapes, keys, strict=True)
        ]


def build(case: GroupedCase, candidate: str, group: mx.distributed.Group) -> tuple[Arrays, Step]:
    """Parameters, and the step of a candidate on them with gradients of this rank's own."""
    model = Arrays(case)
    optimizer = optim.AdamW(ADAMW["lr"], weight_decay=ADAMW["weight_decay"], bias_correction=True)
    keys = mx.random.split(mx.random.key(1 + group.rank()), len(case.shapes))
    drawn = [
        mx.random.normal(array.shape, dtype=array.dtype, key=key)
        for array, key in zip(model.arrays, keys, strict=True)
    ]
    gradients: dict[str, Any] = {"arrays": drawn}
    mx.eval(model.parameters(), gradients)

    def step() -> None:
        if candidate == "ddp":
            averaged = nn.average_gradients(gradients, group, all_reduce_size=case.group_bytes)
            optimizer.update(model, averaged)
        else:
            swm.sharded_step(
                model, gradients, optimizer,
                group_bytes=case.group_bytes, layout=candidate, group=group,
            )  # fmt: skip
        mx.eval(model.parameters(), optimizer.state)

    return model, step


def measure(case: GroupedCase) -> dict[str, Any]:
    """A row's figures, on every rank of the group."""
    warnings.filterwarnings("ignore", message="MLX says")  # the row says it
    group = join_ring()
    built = {name: build(case, name, group) for name in CANDIDATES}
    for _, step in built.values():
        for _ in range(2):
            step()
    parity = _compare([model for model, _ in built.values()])
    if parity > TOLERANCE[case.precision]:
        return {"failure": f"candidates differ by {parity:.1e}; nothing was timed"}
    steps = {name: step for name, (_, step) in built.items()}
    samples = timing.alternate(steps, case.steps, 0, time_on_ranks)
    del built, steps
    sides = {name: Side.of(samples[name], _measure_peak(case, name, group)) for name in CANDIDATES}
    found = {
        name: {
            "step_ms": side.step_ms, "spread_ms": side.step_spread_ms,
            "peak_bytes": side.peak_bytes,
        }
        for name, side in sides.items()
    }  # fmt: skip
    sent = {name: _derive_sent(case, name, group) for name in CANDIDATES[1:]}
    return {
        "candidates": found, "parity": parity, "network": "MLX ring",
        "sent_over_all_reduce": sent, "mlx": version_of("mlx"),
    }  # fmt: skip


def _derive_sent(case: GroupedCase, layout: str, group: mx.distributed.Group) -> float:
    """Bytes of a step over those of an all-reduce of all gradients. A scatter sends as much as a
    gather; without one it is an all-reduce, twice that.
    """
    kinds, sizes = [case.precision] * len(case.shapes), [case.item_bytes] * len(case.shapes)
    messages = lay_out_messages(case.shapes, kinds, sizes, case.ranks, case.group_bytes, layout)
    elements = sum(message.numel for _, message in messages)
    passes = 2 if swm.has_sum_scatter(group) else 3
    return passes * elements / (2 * case.parameters)


def _measure_peak(case: GroupedCase, name: str, group: mx.distributed.Group) -> int:
    """The most bytes that MLX holds at one time of a step, above what was there before."""
    mx.clear_cache()
    before = mx.get_active_memory()
    _, step = build(case, name, group)
    step()
    mx.reset_peak_memory()
    step()
    return mx.get_peak_memory() - before


def _compare(models: list[Arrays]) -> float:
    worst = 0.0
    for other in models[1:]:
        for a, b in zip(models[0].arrays, other.arrays, strict=True):
            gap = (a.astype(mx.float32) - b.astype(mx.float32)).abs().max()
            worst = max(worst, float(gap / a.abs().max()))
    everybody = torch.tensor(worst)
    dist.all_reduce(everybody, op=dist.ReduceOp.MAX)
    return float(everybody)
