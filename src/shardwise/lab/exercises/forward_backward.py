"""`shardwise bench forward-backward`: forward, backward and optimizer times by model size.

Each model and precision runs in a process of its own from its very first step. Every step's times
are kept, each part ended by a synchronize; w steps of warm-up mean that the first w of them are
left out, so one sequence of steps answers for all warm-up counts.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.fresh import run_fresh
from shardwise.lab.exercises.sizes import (
    Case,
    choose_sizes,
    describe_run,
    explain_failure,
    make_optimizer,
)
from shardwise.lab.rows import Row, RowFile, say
from shardwise.trainer.model import compute_loss

PARTS = ("forward", "backward", "optimizer")


def time_steps(case: Case, steps: int) -> dict[str, Any]:
    """The ms of each part of each step, from the process's first one on."""
    try:
        if case.quick:
            torch.set_num_threads(1)
        model, tokens = case.make_model(), case.make_tokens()
        times = time_parts(case, model, tokens, make_optimizer(model), steps)
        return {"ms": times, "model": case.shape.describe()}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def time_parts(
    case: Case,
    model: nn.Module,
    tokens: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> dict[str, list[float]]:
    """The ms of each part of each step; Python's garbage collector is off meanwhile."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    gc.collect()
    gc.disable()
    try:
        for _ in range(steps):
            optimizer.zero_grad()
            moments = [_now(case)]
            with case.autocast():
                loss = compute_loss(model, *tokens)
            moments.append(_now(case))
            loss.backward()
            moments.append(_now(case))
            optimizer.step()
            moments.append(_now(case))
            for part, began, ended in zip(PARTS, moments, moments[1:], strict=False):
                times[part].append(round((ended - began) * 1e3, 4))
    finally:
        gc.enable()
    return times


def _now(case: Case) -> float:
    case.synchronize()
    return time.perf_counter()


def summarize(
    times: dict[str, list[float]], warmups: tuple[int, ...], steps: int
) -> dict[str, dict[str, dict[str, float]]]:
    """Mean and standard deviation of each part, by warm-up count."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for warmup in warmups:
        found[str(warmup)] = {}
        for part, values in times.items():
            timed = values[warmup : warmup + steps]
            deviation = statistics.stdev(timed) if len(timed) > 1 else 0.0
            found[str(warmup)][part] = {
                "mean": round(statistics.fmean(timed), 4),
                "std": round(deviation, 4),
            }
    return found


def run(
    arguments: argparse.Namespace,
    sizes: tuple[str, ...] | None,
    precisions: tuple[str, ...],
    warmups: tuple[int, ...],
    command: str,
) -> None:
    """Measure row by row, write the JSON after each, print the table."""
    steps = 2 if arguments.quick else arguments.steps
    context = 8 if arguments.quick else seed004.CONTEXT
    facts = describe_run(command, arguments.commit, arguments.quick)
    facts |= {"steps": steps, "warmups": list(warmups), "optimizer": "AdamW, fused"}
    file = RowFile(arguments.json, facts, arguments.resume, arguments.budget)
    for size, precision in itertools.product(choose_sizes(sizes, arguments.quick), precisions):
        case = Case(size, precision, arguments.attention, context, quick=arguments.quick)
        if case.key in file:
            continue
        if file.time_is_up():
            break
        say(f"{size} {precision}: {max(warmups) + steps} steps in a process of their own")
        row: Row = {"key": case.key, "size": size, "precision": precision}
        row |= {"batch": case.batch, "context": case.context, "attention": case.attention}
        row |= run_fresh(time_steps, case, max(warmups) + steps)
        if "ms" in row:
            row["by_warmup"] = summarize(row["ms"], warmups, steps)
        row["seed"] = seed004.forward_backward(size, precision)
        file.add(row)
        say(_describe(row, warmups))
    print_table(file.rows, facts)


def _describe(row: Row, warmups: tuple[int, ...]) -> str:
    if "failure" in row:
        return f"{row['size']} {row['precision']}: {row['failure']}"
    held = row["by_warmup"][str(max(warmups))]
    words = (f"{part} {held[part]['mean']:.1f} +-{held[part]['std']:.1f} ms" for part in PARTS)
    return f"{row['size']} {row['precision']}: {', '.join(words)}"


def print_table(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per model, precision and warm-up count."""
    from rich.table import Table

    from shardwise.profiling.results import print_on_console

    table = Table(title="mean ms of a step's parts (+- standard deviation)")
    for name in ("size", "precision", "warm-up", *PARTS, "the seed's forward, backward"):
        table.add_column(name, justify="left" if name in ("size", "precision") else "right")
    for row in rows:
        if "failure" in row:
            table.add_row(row["size"], row["precision"], "", row["failure"])
            continue
        for warmup, held in row["by_warmup"].items():
            cells = [f"{held[part]['mean']:.2f} +-{held[part]['std']:.2f}" for part in PARTS]
            seeds = "; ".join(
                f"{s['hardware']} {s['forward']:.0f}, {s['backward']:.0f}" for s in row["seed"]
            )
            # The seed's means are after five steps of warm-up.
            table.add_row(
                row["size"], row["precision"], warmup, *cells, seeds if warmup == "5" else ""
            )
    print_on_console(table, facts["environment"])
