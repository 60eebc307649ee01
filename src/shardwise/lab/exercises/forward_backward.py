"""`shardwise bench forward-backward`: forward, backward and optimizer times by model size.

Every step's times are written, each part ended by a synchronize, so one sequence of steps answers
for all warm-up counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.description.language_model import compute_loss
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.models import QUICK_CONTEXT, ModelCase, choose_cases, make_optimizer
from shardwise.lab.processes import explain_failure, run_fresh
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import no_garbage_collection

PARTS = ("forward", "backward", "optimizer")


def time_steps(case: ModelCase, steps: int) -> dict[str, Any]:
    """The ms of each part of each step, from the process's first one on."""
    try:
        if case.quick:
            torch.set_num_threads(1)
        model, tokens = case.make_model(), case.make_tokens()
        times = time_parts(case, model, tokens, make_optimizer(model), steps)
        return {"ms": times, "model": case.model_size.describe()}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def time_parts(
    case: ModelCase,
    model: nn.Module,
    tokens: tuple[Tensor, Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int,
) -> dict[str, list[float]]:
    """The ms of each part of each step."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with no_garbage_collection():
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
    return times


def _now(case: ModelCase) -> float:
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


def run(arguments: argparse.Namespace) -> None:
    """Measure row by row, write the JSON after each, print the table."""
    warmups, quick = arguments.warmup, arguments.quick
    steps = 2 if quick else arguments.steps
    context = QUICK_CONTEXT if quick else seed004.CONTEXT
    file = RowFile.of(arguments, steps=steps, warmups=list(warmups), optimizer="AdamW, fused")
    for case in file.missing(choose_cases(arguments, context), lambda case: case.key):
        name = f"{case.size} {case.precision}"
        say(f"{name}: {max(warmups) + steps} steps in a process of their own")
        row: Row = {"key": case.key, **case.describe()}
        row |= run_fresh(time_steps, case, max(warmups) + steps)
        if "ms" in row:
            row["by_warmup"] = summarize(row["ms"], warmups, steps)
        row["seed"] = seed004.forward_backward(case.size, case.precision)
        file.add(row)
        say(f"{name}: {row.get('failure') or _tell(row['by_warmup'][str(max(warmups))], ' ms')}")
    file.tell(arguments.plot, draw, show)


def draw(rows: list[Row]) -> str:
    """The parts of each model's step after the longest warm-up, and the document's."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if "failure" in row:
            continue
        held = list(row["by_warmup"].values())[-1]
        bars: dict[str, float | None] = {part: held[part]["mean"] for part in PARTS}
        for document in row["seed"]:
            for part in PARTS[:2]:
                bars[f"document's {document['hardware']}, {part}"] = document[part]
        groups[f"{row['size']} {row['precision']}"] = bars
    return draw_bars("A step's parts", groups, "ms")


def _tell(parts: dict[str, dict[str, float]], unit: str) -> str:
    return ", ".join(f"{p} {parts[p]['mean']:.1f} +-{parts[p]['std']:.1f}{unit}" for p in PARTS)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per model, precision and warm-up count; then the document's means beside ours."""
    environment = facts["environment"]
    lines, documents = [], []
    for row in rows:
        name = [row["size"], row["precision"]]
        if "failure" in row:
            lines.append([*name, "", row["failure"]])
            continue
        for warmup, held in row["by_warmup"].items():
            cells = [f"{held[part]['mean']:.2f} +-{held[part]['std']:.2f}" for part in PARTS]
            lines.append([*name, warmup, *cells])
        last = list(row["by_warmup"].values())[-1]
        for found in row["seed"]:
            cells = [f"{last[p]['mean']:.2f} / {found[p]:.0f}" for p in PARTS[:2]]
            documents.append([*name, *cells, f"{found['hardware']}, table {found['table']}"])
    left = ("size", "precision")
    heads = (*left, "warm-up", *PARTS)
    title = "mean ms of a step's parts (+- standard deviation)"
    print_table(title, heads, lines, environment, left, width=80)
    if documents:
        # The document's means are after five steps of warm-up.
        title = "ms after the longest warm-up: ours / the document's"
        print_table(title, (*left, *PARTS[:2], "its GPU"), documents, {}, left, width=80)
