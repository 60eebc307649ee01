"""`shardwise bench ffn`: what one GPU takes for a micro-batch of the gist's feed-forward stack.

These times are all that the prediction of the gist's steps takes from a measurement
(`predicted.py`). Micro-batches of 1 and 2 sequences take turns, so that both meet
the clock that the device settles at.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable
from typing import Any

import torch

from shardwise.description.preset import Preset, load_preset
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises.models import one_thread, tell_device
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.footprint import free_device
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Side, Step, Timer, alternate, timer_on

SEQUENCE, MICRO_BATCHES, WARMUP = 4096, (1, 2), 5
QUICK_SEQUENCE = 16


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, draw the bars, print a line for each micro-batch."""
    stack, sequence = load_preset("ffn8"), SEQUENCE
    if arguments.quick:
        stack = dataclasses.replace(stack, d_model=16, d_ff=56, layers=2)
        sequence = QUICK_SEQUENCE
    tell_device()
    # Whether fp32 products may be rounded to tf32; the document's were not.
    tf32 = torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
    file = RowFile.of(arguments, steps=arguments.steps, warmup=WARMUP, tf32=tf32)
    keys = {n: f"{stack.name}/{stack.d_model}/{sequence}/{n}" for n in MICRO_BATCHES}
    if not all(key in file for key in keys.values()) and not file.time_is_up():
        facts: Row = {"model": stack.name, "sequence": sequence, "precision": "fp32"}
        say(f"{stack.name}: micro-batches of {MICRO_BATCHES} sequences of {sequence} tokens")
        with one_thread(arguments.quick):
            measured = measure(stack, sequence, arguments.steps)
        for n, found in measured.items():
            file.add({"key": keys[n], "micro_batch": n, **facts, **found})
    if arguments.plot is not None:
        bars = {_name(row): {"forward and backward": row.get("step_ms")} for row in file.rows}
        title = "A micro-batch of the feed-forward stack"
        arguments.plot.write_text(draw_bars(title, bars, "ms"), encoding="utf-8")
    show(file.rows, file.facts)


def _name(row: Row) -> str:
    return f"{row['micro_batch']} x {row['sequence']} tokens"


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    environment = facts["environment"]
    lines = []
    for row in rows:
        told = row.get("failure") or "{step_ms:.2f} +-{step_spread_ms:.2f}".format(**row)
        lines.append([_name(row), told])
    title = "forward and backward, median ms (+- interquartile range)"
    heads = ("micro-batch", "ms")
    print_table(title, heads, lines, environment, heads[:1], width=80)


def measure(stack: Preset, sequence: int, steps: int) -> dict[int, Row]:
    """Forward and backward of each micro-batch, in turn, or why there is no time of them."""
    try:
        timed = time_micro_batches(stack, sequence, steps)
    except (RuntimeError, ValueError) as error:
        return {n: {"failure": explain_failure(error)} for n in MICRO_BATCHES}
    return {
        n: {"step_ms": side.step_ms, "step_spread_ms": side.step_spread_ms}
        for n, side in timed.items()
    }


def time_micro_batches(
    stack: Preset,
    sequence: int,
    steps: int,
    sizes: Iterable[int] = MICRO_BATCHES,
    device: str = "",
    timer: Timer | None = None,
) -> dict[int, Side]:
    """In fp32 without tf32, inputs drawn anew; on a GPU where there is one, by the device's own
    clock, or as given.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda":
        free_device()
    torch.manual_seed(0)
    model = stack.build(sequence).to_empty(device=device)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)

    def make(rows: int) -> Step:
        def step() -> None:
            model.zero_grad()
            x_BTD = torch.randn(rows, sequence, stack.d_model, device=device)
            model(x_BTD).sum().backward()

        return step

    runs = {str(n): make(n) for n in sizes}
    taken = alternate(runs, steps, WARMUP, timer or timer_on(device))
    return {int(name): Side.of(samples, 0) for name, samples in taken.items()}
