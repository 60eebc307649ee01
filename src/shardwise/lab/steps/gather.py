"""The gather benchmark: a step's time by gather mode and tensor size.

It decides what `gather="auto"` means on gloo (`planning/strategies.py`): two real CPU ranks, blocks
of eight equal matrices under zero3, forward and backward, the modes in turn. A gather alone would
mislead: what counts is how much of it hides behind compute.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.lab.charts import draw_curves
from shardwise.lab.processes import ask_ranks, time_on_ranks
from shardwise.lab.rows import describe_run, say
from shardwise.profiling.results import Row, print_table, write_json
from shardwise.profiling.timing import alternate, spread

WORLD = 2
BLOCKS, TENSORS, BATCH = 4, 8, 64
WARMUP = 3
MODES = ("packed", "each")
WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # of square fp32 matrices: 1 KiB to 4 MiB


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print the table."""
    facts = describe_run(arguments)
    say(f"{WORLD} ranks, {arguments.rounds} rounds of each size")
    rows = measure(2, WIDTHS[::3]) if arguments.quick else measure(arguments.rounds)
    if arguments.json is not None:
        write_json(arguments.json, **facts, rows=rows)
    if arguments.plot is not None:
        curves = {
            mode: [(row["tensor_bytes"], row["median_ms"][mode]) for row in rows] for mode in MODES
        }
        title = "Forward and backward by gather mode"
        arguments.plot.write_text(draw_curves(title, curves, "bytes a tensor", "ms"))
    show(rows, facts)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per size."""
    lines = []
    for row in rows:
        figures = [f"{row['median_ms'][m]:.3f} +-{row['spread_ms'][m]:.3f}" for m in MODES]
        lines.append([f"{row['tensor_bytes']:,}", *figures, f"{row['each_over_packed']:.2f}"])
    heads = ("bytes a tensor", *(f"{mode} ms" for mode in MODES), "each / packed")
    print_table("forward and backward under zero3", heads, lines, facts["environment"], (), 80)


def measure(rounds: int, widths: Sequence[int] = WIDTHS) -> list[Row]:
    """One row for every tensor size: the median milliseconds of each mode."""
    return ask_ranks(_measure_widths, rounds, widths, world=WORLD)


def _measure_widths(rounds: int, widths: Sequence[int]) -> list[Row]:
    return [_measure_width(width, rounds) for width in widths]


def _measure_width(width: int, rounds: int) -> Row:
    x = torch.randn(BATCH, width)
    steps = {mode: partial(_step, _build(width, mode), x) for mode in MODES}
    taken = alternate(steps, rounds, WARMUP, time_on_ranks)
    times = {mode: [sample.step_ms for sample in samples] for mode, samples in taken.items()}
    medians = {mode: statistics.median(values) for mode, values in times.items()}
    return {
        "tensor_bytes": width * width * 4,
        "ranks": WORLD,
        "model": f"{BLOCKS} blocks of {TENSORS} linear layers, batch {BATCH}",
        "median_ms": medians,
        "spread_ms": {mode: spread(values) for mode, values in times.items()},
        "each_over_packed": medians["each"] / medians["packed"],
    }


def _step(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).sum().backward()


def _build(width: int, mode: str) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(TENSORS)])

    torch.manual_seed(0)
    model = nn.Sequential(*[block() for _ in range(BLOCKS)])
    return sw.shard(model, sw.Plan.of("zero3", mesh=WORLD, gather=mode))
