"""`shardwise bench cap`: what capping runs of compute between reduce-scatters saves, for real.

One process is a rank of tensor parallelism inside a rank of data parallelism; nobody else is there.
The compiled graphs of the capped and the uncapped step run in it, so kernels and memory are real.
Collectives are answered at once: times say nothing about a network.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.description.language_model import LM, draw_tokens
from shardwise.description.preset import load_preset
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import join_fake_group
from shardwise.graph.passes.run import PassOptions
from shardwise.graph.presets import Recomputed
from shardwise.graph.tensor_parallel import TensorParallelLM
from shardwise.lab.charts import draw_bars
from shardwise.lab.processes import explain_failure, run_fresh
from shardwise.lab.rows import RowFile, say
from shardwise.profiling import footprint
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Step, timer_on

DATA, TENSOR = 16, 8
WARMUP, STEPS = 3, 7
VARIANTS: dict[str, dict[str, Any]] = {
    "uncapped": {"max_consecutive": None},
    "at most 8": {"max_consecutive": 8},
    "original order": {"restore": True},
}


@dataclasses.dataclass(frozen=True)
class CapCase:
    """A language model by its preset's name and how much of it runs here."""

    model: str
    layers: int
    batch: int
    length: int
    bucket_mib: int
    window: int
    device: str


def measure(case: CapCase, variant: str) -> dict[str, Any]:
    """Peak and time of a step, in a process of its own."""
    try:
        join_fake_group(0, DATA)
        with emulate(Network()):
            return _measure(case, variant)
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def build_step(case: CapCase, variant: str) -> Step:
    """Forward and backward of one micro-batch, compiled at the first call."""
    tensor = min(TENSOR, load_preset(case.model).kv_heads)
    group = dist.new_group(list(range(tensor)))
    size = dataclasses.replace(load_preset(case.model).size("torch"), layers=case.layers)
    with torch.device(case.device):
        model: nn.Module = TensorParallelLM(LM(size, case.length), tensor, group.group_name)
    model.layers = nn.ModuleList(map(Recomputed, model.layers))  # type: ignore[arg-type]
    plan = sw.Plan.of("zero3", DATA, compute_dtype="bfloat16", reduce_dtype="float32")
    passes = PassOptions(
        bucket_bytes=case.bucket_mib << 20, window=case.window, **VARIANTS[variant]
    )
    backend = "inductor" if case.device == "cuda" else "graph"
    sw.compile(model, plan, passes=passes, backend=backend)
    tokens = draw_tokens(size, case.batch, case.length, case.device)

    def step() -> None:
        model.zero_grad()
        (model(*tokens) / tokens[0].numel()).backward()

    return step


def _measure(case: CapCase, variant: str) -> dict[str, Any]:
    if case.device == "cpu":
        return {"peak_bytes": footprint.peak_on_cpu(lambda: build_step(case, variant))}
    step = build_step(case, variant)
    timer = timer_on("cuda")
    compiling = timer(step).step_ms
    torch.cuda.empty_cache()  # what only compiling took is not the step's
    for _ in range(WARMUP):
        step()
    taken = [timer(step).step_ms for _ in range(STEPS)]
    allocated, reserved = footprint.peaks_on_cuda(step)
    return {
        "step_ms": statistics.median(taken), "first_step_s": compiling / 1e3,
        "peak_bytes": allocated, "reserved_bytes": reserved,
    }  # fmt: skip


def run(arguments: argparse.Namespace) -> None:
    """Measure variant by variant, write the JSON after each, draw, print the table."""
    on_gpu = torch.cuda.is_available()
    case = CapCase(
        "llama8b", arguments.layers, 2, 8192, arguments.bucket_mib, arguments.window, "cuda"
    )
    if not on_gpu or arguments.quick:
        say("a small model: figures are of the path, not of the document's model")
        device = "cuda" if on_gpu else "cpu"
        case = CapCase("tiny", 2, 2, 128, 1, arguments.window, device)
    file = RowFile.of(arguments, case=dataclasses.asdict(case), data=DATA)
    for name in file.missing(
        VARIANTS, lambda name: f"{case.model}/{case.layers}/{case.window}/{name}"
    ):
        say(f"{case.model}, {case.layers} layers, recomputing, {name}")
        row: Row = {"key": f"{case.model}/{case.layers}/{case.window}/{name}", "variant": name}
        file.add(row | run_fresh(measure, case, name))
    if arguments.plot is not None:
        peaks = {row["variant"]: {"peak": _gb(row)} for row in file.rows}
        arguments.plot.write_text(draw_bars("Peak memory of a step", peaks, "GB"))
    show(file.rows, file.facts)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per order."""
    case = facts["case"]
    lines = [
        [row["variant"], row["failure"]]
        if "failure" in row
        else [
            row["variant"],
            f"{_gb(row):.4g}",
            *(f"{row[n]:.1f}" if n in row else "-" for n in ("step_ms", "first_step_s")),
        ]
        for row in rows
    ]
    heads = ["order", "peak GB", "step ms", "first step s"]
    title = f"{case['model']}, {case['layers']} layers, recomputing: capped and uncapped"
    print_table(title, heads, lines, facts["environment"], ("order",), 80)


def _gb(row: Row) -> float | None:
    return row["peak_bytes"] / 1e9 if "peak_bytes" in row else None
