"""`shardwise bench grouped-step`: a replicated model's update, by averaged gradients and in slices.

Only what follows backward is timed, with gradients that are there already: averaging and the
optimizer, or the grouped step.
"""

from __future__ import annotations

import argparse
import textwrap
from importlib.util import find_spec
from typing import Any

import torch

from shardwise.emulation.collectives import Network
from shardwise.lab.charts import draw_bars
from shardwise.lab.grouped import torch_steps
from shardwise.lab.grouped.cases import CANDIDATES, DOCUMENT_RUN, GroupedCase
from shardwise.lab.processes import ask_ranks, explain_failure
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.profiling.results import Row, print_table


def run(arguments: argparse.Namespace) -> None:
    """Measure size by size, write the JSON after each, draw the picture, print the tables."""
    if only_draw(arguments, draw):
        return
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        say("no CUDA device: real gloo ranks, models of a six-hundredth of the size")
    network = Network(arguments.bandwidth * 1e9, arguments.latency * 1e-6)
    file = RowFile.of(arguments, document_run=DOCUMENT_RUN)
    cases = select_cases(arguments, device)
    for size, emulated in dict.fromkeys((case.size, case.emulated) for case in cases):
        these = [case for case in cases if (case.size, case.emulated) == (size, emulated)]
        these = list(file.missing(these, lambda case: case.key))
        if not these:
            continue
        say(f"{size}: {len(these)} rows, {', '.join(CANDIDATES)} in turn")
        answers = ask_ranks(
            measure_all, these, network,
            world=these[0].ranks, processes=1 if emulated else None,
            backend="fake" if emulated else "gloo",
        )  # fmt: skip
        for case, answer in zip(these, answers, strict=True):
            file.add(case.describe() | answer)
    file.tell(arguments.plot, draw, show)


def select_cases(arguments: argparse.Namespace, device: str) -> list[GroupedCase]:
    """As the options say; a trial has the first of each list."""
    frameworks = arguments.frameworks
    if "mlx" in frameworks and find_spec("mlx") is None:
        say("mlx: skipped, it is not installed here (pip install 'shardwise[mlx]')")
        frameworks = tuple(name for name in frameworks if name != "mlx")
    quick = arguments.quick
    return [
        GroupedCase(
            framework, size, group, precision,
            arguments.ranks or (8 if device == "cuda" and framework == "torch" else 2),
            device if framework == "torch" else "cpu",
            2 if quick else arguments.steps, quick,
        )
        for framework in frameworks
        for size in (arguments.sizes[:1] if quick else arguments.sizes)
        for precision in (arguments.precision[:1] if quick else arguments.precision)
        for group in (arguments.groups[:1] if quick else arguments.groups)
    ]  # fmt: skip


def measure_all(cases: list[GroupedCase], network: Network) -> list[dict[str, Any]]:
    """A row's figures for each case, on every rank."""
    return [_measure(case, network) for case in cases]


def _measure(case: GroupedCase, network: Network) -> dict[str, Any]:
    say(f"  {case.key}")
    if case.framework == "mlx":
        from shardwise.lab.grouped import mlx_steps

        return mlx_steps.measure(case)
    try:
        return torch_steps.measure(case, network)
    except torch.OutOfMemoryError as error:
        return {"failure": explain_failure(error)}


def draw(rows: list[Row]) -> str:
    groups = {
        f"{row['framework']} {_name(row)}": {
            name: side["step_ms"] for name, side in row["candidates"].items()
        }
        for row in rows
        if "candidates" in row
    }
    return draw_bars("what follows backward on a replicated model", groups, "ms")


def _name(row: Row) -> str:
    return f"{row['size']} {row['group_mib']} MiB {row['precision']}"


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Times, then what the document found, then memory.

    `sent` is the bytes of `rows` over an all-reduce's, `expected` the moments of AdamW that the
    other ranks keep.
    """
    environment = facts["environment"]
    for row in rows:
        if "failure" in row:
            print(f"{row['key']}: {row['failure']}")
    found = [row for row in rows if "candidates" in row]
    for framework in dict.fromkeys(row["framework"] for row in found):
        these = [row for row in found if row["framework"] == framework]
        _print_framework(framework, these, environment)
    for note in dict.fromkeys(row["note"] for row in found):
        print(textwrap.fill(note, 80))


def _print_framework(framework: str, rows: list[Row], environment: dict[str, Any]) -> None:
    heads, left = ["size", "M", "MiB", "dtype"], ("size", "dtype")
    times, alone, ratios, memory = [], [], [], []
    for row in rows:
        sides = row["candidates"]
        facts = [row["size"], f"{row['parameters'] / 1e6:.0f}"]
        facts += [f"{row['group_bytes'] / 2**20:g}", row["precision"]]
        step = {name: sides[name]["step_ms"] for name in CANDIDATES}
        peak = {name: sides[name]["peak_bytes"] / 1e6 for name in CANDIDATES}
        times.append(
            [*facts, *(f"{step[n]:.1f} +-{sides[n]['spread_ms']:.1f}" for n in CANDIDATES)]
        )
        if sides["ddp"].get("device_ms") is not None:
            alone.append([*facts, *(f"{sides[name]['device_ms']:.1f}" for name in CANDIDATES)])
        told = row["document"]
        ratios.append(
            [
                *facts,
                *(f"{step[name] / step['ddp']:.2f}" for name in CANDIDATES[1:]),
                f"{row['sent_over_all_reduce']['rows']:.2f}",
                *(
                    ("-", "-", "-")
                    if told is None
                    else (f"{told['ddp_ms']}", f"{told['sharded_ms']}", f"{told['ratio']:.2f}")
                ),
            ]
        )
        saved = row["parameters"] * 2 * (4 if row["precision"] == "fp32" else 2) / 1e6
        saved *= (row["ranks"] - 1) / row["ranks"]
        memory.append(
            [
                *facts,
                *(f"{peak[name]:.0f}" for name in CANDIDATES),
                f"{peak['ddp'] - peak['rows']:.0f}",
                f"{saved:.0f}",
            ]
        )
    where = f"{framework}, {rows[0]['ranks']} ranks, {rows[0]['network'].split(',')[0]}"
    print_table(f"step ms ({where})", [*heads, *CANDIDATES], times, {}, left, 80)
    if alone:
        title = "on the device alone, ms (the host a step ahead)"
        print_table(title, [*heads, *CANDIDATES], alone, {}, left, 80)
    print_table(
        "over ddp, and the document's ms",
        [*heads, "rows", "flat", "sent", "its ddp", "sharded", "ratio"], ratios, {}, left, 80,
    )  # fmt: skip
    saved = DOCUMENT_RUN["ddp_gb"] - DOCUMENT_RUN["sharded_gb"]
    print_table(
        f"peak MB (document: {saved:.1f} GB saved of 3.7 B parameters on 8 ranks)",
        [*heads, *CANDIDATES, "saved", "expected"], memory, environment, left, 80,
    )  # fmt: skip
