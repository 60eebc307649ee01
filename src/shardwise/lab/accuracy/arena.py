"""`shardwise bench arena`: the memory that is predicted for steps in an arena, against what models
of others really take. Each model has a process of its own, as one rank of an emulated group of 8.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.children import ChildFailed
from shardwise.description.cluster import Cluster
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import joined
from shardwise.lab.accuracy.as_user import start_training
from shardwise.lab.accuracy.user_models import BY_NAME, UserModel
from shardwise.lab.charts import draw_bars
from shardwise.lab.processes import run_fresh
from shardwise.lab.rows import RowFile, say
from shardwise.planning.memory import lay_out_arena
from shardwise.predict.sources import as_example, as_source, workload_of
from shardwise.profiling import footprint
from shardwise.profiling.results import Row, print_table

WORLD, STEPS = 8, 5  # the third step moves into the arena
AIM = 0.005  # of the measured peak


@dataclass(frozen=True)
class Case:
    name: str
    scale: str  # of the model's sizes
    device: str

    @property
    def model(self) -> UserModel:
        return BY_NAME[self.name]


@dataclass(frozen=True)
class Prediction:
    """What is known before a step has run."""

    plan: sw.Plan
    work: Workload
    peak: int
    block: int  # of the arena, as the predicted step has it
    said: int  # and as `explain` prints it


def predict(case: Case) -> Prediction:
    """As `sw.search` does for one Plan: the model by its name, on the meta device, with example
    inputs.
    """
    model, cuda = case.model, case.device == "cuda"
    text, work = model.build_text(case.scale), model.work(case.scale)
    example = as_example(None if work is not None else model.inputs_text(case.scale), text)
    if work is None:
        assert example is not None
        work = workload_of(example)
    cluster = Cluster.load("h200x8-measured" if cuda else "cpu-gloo")
    source = as_source(text, work, inputs=example, loss=model.loss, device=case.device)
    dtype = "bfloat16" if cuda else "float32"
    plan = sw.Plan.of("zero3", WORLD, memory="arena", compute_dtype=dtype, reduce_dtype="float32")
    plan, description = source.at(plan, work)
    timeline = sw.simulate(plan, description, cluster, work)
    peak = timeline.peak()
    return Prediction(
        plan, work, peak.total, max(timeline.memory[0].roles["full"]),
        lay_out_arena(plan, work.micro_batches, streams=cuda).nbytes,
    )  # fmt: skip


def measure(case: Case) -> Row:
    """The prediction first, then what it is compared with."""
    began = time.monotonic()
    said = predict(case)
    cuda = case.device == "cuda"
    found: Row = {
        "predicted_bytes": said.peak,
        "said_block_bytes": said.said,
        "predicted_block_bytes": said.block,
        "settings": f"{said.plan.title} of {WORLD}, {said.work.split}, {said.plan.compute_dtype}",
        "predicted_s": round(time.monotonic() - began, 1),
    }
    with joined(0, WORLD), emulate(Network()) as emulation:
        if cuda:
            emulation.links_of(torch.device("cuda", 0))  # the network's own memory
        left = _warm_libraries() if cuda else 0
        plan = dataclasses.replace(said.plan, units=None)
        model, step = start_training(case.model, case.scale, plan, said.work, case.device)
        if cuda:
            footprint.free_device()  # the whole model's, which is cut by now
        for _ in range(STEPS):
            step()
        if cuda:
            allocated, reserved = footprint.peaks_on_cuda(step)
            found |= {"measured_bytes": allocated - left, "reserved_bytes": reserved}
            found["difference"] = said.peak / (allocated - left) - 1
        taken = footprint.arena_bytes(model)
        found |= {"block_bytes": taken, "held_before_bytes": left}
    return found | {"seconds": round(time.monotonic() - began, 1)}


def _warm_libraries() -> int:
    """What the device holds once cuBLAS has its workspaces, of forward's thread and backward's."""
    for dtype in (torch.float32, torch.bfloat16):
        layer = nn.Linear(256, 256, device="cuda", dtype=dtype)
        layer(torch.zeros(256, 256, device="cuda", dtype=dtype)).sum().backward()
    torch.cuda.synchronize()
    del layer
    return footprint.free_device()


def run(arguments: argparse.Namespace) -> None:
    """Model by model; the JSON is written after each."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scale = "h200" if device == "cuda" and not arguments.quick else "quick"
    if device == "cpu":
        say("no CUDA device here: small models on the host, and only their blocks are compared")
    file = RowFile.of(arguments, scale=scale)
    file.rows = [row for row in file.rows if "failure" not in row]  # those are tried again
    for name in file.missing(arguments.models, str):
        say(f"{name}: predicting, then training")
        row: Row = {"key": name, "about": BY_NAME[name].about}
        try:
            row |= run_fresh(measure, Case(name, scale, device))
        except ChildFailed as error:
            say(str(error))
            row["failure"] = str(error).strip().splitlines()[-1]
        file.add(row)
        say(f"  {tell(row)}")
    file.tell(arguments.plot, draw, show)


def tell(row: Row) -> str:
    if "failure" in row:
        return str(row["failure"])
    blocks = [row[f"{kind}block_bytes"] for kind in ("said_", "predicted_", "")]
    words = f"block said {blocks[0]:,}, predicted {blocks[1]:,}, taken {blocks[2]}"
    if "measured_bytes" in row:
        peaks = (row[f"{kind}_bytes"] / 1e9 for kind in ("predicted", "measured"))
        words += "; peak {:.3f} GB for {:.3f}".format(*peaks)
    return words


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Peaks, then blocks."""
    good = [row for row in rows if "failure" not in row]
    peaks = [
        [row["key"], *(f"{row[f'{kind}_bytes'] / 1e9:.3f}" for kind in ("predicted", "measured")),
         f"{row['difference']:+.2%}", f"{row['reserved_bytes'] / 1e9:.3f}"]
        for row in good if "measured_bytes" in row
    ]  # fmt: skip
    if peaks:
        within = sum(abs(row["difference"]) <= AIM for row in good)
        heads = ["model", "predicted GB", "measured", "apart", "reserved"]
        title = f"peak of a step in an arena: {within} of {len(peaks)} within {AIM:.1%}"
        print_table(title, heads, peaks, {}, ("model",), 80)
    kinds = ("said_block_bytes", "predicted_block_bytes", "block_bytes")
    blocks = [
        [row["key"], *("left" if row[kind] is None else f"{row[kind]:,}" for kind in kinds)]
        for row in good
    ]
    equal = sum(len({row[kind] for kind in kinds}) == 1 for row in good)
    heads = ["model", "explain", "predicted", "taken"]
    title = f"bytes of the block: {equal} of {len(good)} equal"
    print_table(title, heads, blocks, facts["environment"], ("model",), 80)
    for row in rows:
        if "failure" in row:
            print(f"{row['key']}: {row['failure']}")


def draw(rows: list[Row]) -> str:
    """Predicted and measured peaks."""
    groups: dict[str, dict[str, float | None]] = {
        row["key"]: {
            kind: row[f"{kind}_bytes"] / 1e9 if f"{kind}_bytes" in row else None
            for kind in ("predicted", "measured")
        }
        for row in rows
        if "failure" not in row
    }
    return draw_bars("Peak of a step in an arena", groups, "GB")
