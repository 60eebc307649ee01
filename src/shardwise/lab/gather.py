"""The gather benchmark: a step's time by gather mode and tensor size.

It decides what `gather="auto"` means on gloo (`planning/strategies.py`): two real CPU ranks, blocks
of eight equal matrices under zero3, forward and backward, the modes in turn. A gather alone would
mislead: what counts is how much of it hides behind compute.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.children import spawn_ranks
from shardwise.engine.api import shard
from shardwise.planning.plan import Plan
from shardwise.profiling.timing import spread

WORLD = 2
BLOCKS, TENSORS, BATCH = 4, 8, 64
WARMUP = 3
MODES = ("packed", "each")
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # of square fp32 matrices: 1 KiB to 4 MiB


def measure(rounds: int, widths: Sequence[int] = WIDTHS) -> list[dict[str, Any]]:
    """One row for every tensor size: the median milliseconds of each mode."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(_measure_on_rank, (rounds, widths, folder), WORLD)
        return json.loads((Path(folder) / "answer.json").read_text())


def _measure_on_rank(rank: int, rounds: int, widths: Sequence[int], folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    rows = [_measure_width(width, rounds) for width in widths]
    if rank == 0:
        (Path(folder) / "answer.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _measure_width(width: int, rounds: int) -> dict[str, Any]:
    models = {mode: _build(width, mode) for mode in MODES}
    x = torch.randn(BATCH, width)
    taken: dict[str, list[float]] = {mode: [] for mode in MODES}
    for i in range(rounds + WARMUP):
        for mode, model in models.items():
            dist.barrier()
            began = time.perf_counter()
            model(x).sum().backward()
            elapsed = torch.tensor(time.perf_counter() - began)
            model.zero_grad()
            dist.all_reduce(elapsed, op=dist.ReduceOp.MAX)  # the slower rank's time
            if i >= WARMUP:
                taken[mode].append(elapsed.item() * 1e3)
    medians = {mode: statistics.median(values) for mode, values in taken.items()}
    return {
        "tensor_bytes": width * width * 4,
        "ranks": WORLD,
        "model": f"{BLOCKS} blocks of {TENSORS} linear layers, batch {BATCH}",
        "median_ms": medians,
        "spread_ms": {mode: spread(values) for mode, values in taken.items()},
        "each_over_packed": medians["each"] / medians["packed"],
    }


def _build(width: int, mode: str) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(TENSORS)])

    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(BLOCKS)])
    return shard(model, Plan.of("zero3", mesh=WORLD, gather=mode))
