"""`shardwise bench ffn`: what one GPU takes for a micro-batch of seed 000's feed-forward stack.

These times are all that the prediction of seed 000's steps takes from a measurement
(`lab/accuracy/seeds.py`). Micro-batches of 1 and 2 sequences take turns, so that both meet
the clock that the device settles at.
"""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import torch

from shardwise.description.preset import Preset, load_preset
from shardwise.lab.exercises.sizes import describe_run, explain_failure
from shardwise.lab.rows import Row, RowFile, say
from shardwise.profiling.footprint import free_device
from shardwise.profiling.timing import Side, Step, alternate, time_on_cuda, time_on_host

SEQUENCE, MICRO_BATCHES, WARMUP = 4096, (1, 2), 5
QUICK_SEQUENCE = 16


def choose_stack(quick: bool) -> tuple[Preset, int]:
    """The stack and its sequence; of a trial run, next to nothing."""
    stack = load_preset("ffn8")
    if quick:
        return dataclasses.replace(stack, d_model=16, d_ff=56, layers=2), QUICK_SEQUENCE
    return stack, SEQUENCE


def measure(stack: Preset, sequence: int, steps: int, warmup: int) -> dict[int, Side]:
    """Forward and backward of each micro-batch, in fp32 without tf32, inputs drawn anew."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
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

    timer = time_on_cuda if device == "cuda" else time_on_host(lambda: None)
    taken = alternate({str(n): make(n) for n in MICRO_BATCHES}, steps, warmup, timer)
    return {int(name): Side.of(samples, 0) for name, samples in taken.items()}


def run(arguments: argparse.Namespace, command: str) -> None:
    """Measure, write the JSON, print a line for each micro-batch."""
    stack, sequence = choose_stack(arguments.quick)
    if not torch.cuda.is_available():
        say("no CUDA device here: the figures are this CPU's")
    facts = describe_run(command, arguments.commit, arguments.quick)
    facts |= {"steps": arguments.steps, "warmup": WARMUP, "tf32": tf32()}
    file = RowFile(arguments.json, facts, arguments.resume, arguments.budget)
    keys = {n: f"{stack.name}/{stack.d_model}/{sequence}/{n}" for n in MICRO_BATCHES}
    if not all(key in file for key in keys.values()) and not file.time_is_up():
        for row in _measure_rows(stack, sequence, arguments.steps, keys):
            file.add(row)
    for row in file.rows:
        told = row.get("failure") or "{step_ms:.1f} +-{step_spread_ms:.1f} ms".format(**row)
        print(f"{row['micro_batch']} x {row['sequence']} tokens: {told}")


def _measure_rows(stack: Preset, sequence: int, steps: int, keys: dict[int, str]) -> list[Row]:
    facts: dict[str, Any] = {"model": stack.name, "sequence": sequence, "precision": "fp32"}
    try:
        sides = measure(stack, sequence, steps, WARMUP)
    except (RuntimeError, ValueError) as error:
        failure = {"failure": explain_failure(error)}
        return [{"key": key, "micro_batch": n, **facts, **failure} for n, key in keys.items()]
    return [
        {"key": keys[n], "micro_batch": n, **facts, "step_ms": side.step_ms,
         "step_spread_ms": side.step_spread_ms}
        for n, side in sides.items()
    ]  # fmt: skip


def tf32() -> bool:
    """Whether fp32 products may be rounded to tf32; the document's were not."""
    return torch.cuda.is_available() and torch.backends.cuda.matmul.allow_tf32
