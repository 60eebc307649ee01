"""`shardwise bench growth`: how the time of the engine, the planner and the report grows with the
blocks of a model and the ranks of a world.

One process is rank 0 of a world that is not there: collectives return at once and move nothing, so
that what is timed is the host's own work. (torch's fake backend copies for every rank, call by
call: 15 ms for a gather among 4,096.) Nothing waits, so the process's time on the processor is the
host's time, and neighbours count for less. Values mean nothing, so there is no parity to check.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work

from shardwise.description.cluster_toml import load_cluster
from shardwise.description.language_model import LM, make_model
from shardwise.description.preset import bench_size
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import in_place_of_torch
from shardwise.lab.charts import draw_curves
from shardwise.lab.processes import ask_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.lab.steps.cases import OWN
from shardwise.lab.steps.engines import Wrapped, wrap_dropin, wrap_ours, wrap_theirs
from shardwise.planning.plan import Plan
from shardwise.predict.search import search
from shardwise.predict.simulate import simulate
from shardwise.predict.sources import as_source
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Sample, Step, alternate, spread
from shardwise.reporting.report import report
from shardwise.trainer.group import memory_in_use

# A Plan; torch's program with the import changed; torch's own.
WAYS = {"plan": wrap_ours, "drop-in": wrap_dropin, "torch": wrap_theirs}
BLOCKS, WORLDS = (8, 32, 128, 512), (8, 64, 512, 4096)
FIXED = 32  # blocks while the world grows; ranks while the blocks grow are the smallest world
QUICK_BLOCKS, QUICK_WORLDS = (2, 4), (8, 128)
WIDTH, TOKENS = 64, 16
CPU = torch.device("cpu")


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, draw the picture, print the tables."""
    quick = arguments.quick
    blocks, worlds = (QUICK_BLOCKS, QUICK_WORLDS) if quick else (BLOCKS, WORLDS)
    fixed = blocks[0] if quick else FIXED
    rounds = 2 if quick else arguments.steps
    file = RowFile.of(arguments, steps=rounds, width=WIDTH)
    largest = (blocks[-1], worlds[-1])
    shapes = dict.fromkeys(
        [*((count, worlds[0]) for count in blocks), *((fixed, world) for world in worlds), largest]
    )
    measures: dict[str, Any] = {
        f"step {count}x{world}": partial(_ask, measure_steps, count, world, rounds)
        for count, world in shapes
    }
    for way in WAYS:
        measures[f"start {way}"] = partial(_ask, measure_start, *largest, way)
    for name, measure in (("planner", measure_planner), ("report", measure_report)):
        for count, world in ((fixed, worlds[0]), largest):
            measures[f"{name} {count}x{world}"] = partial(measure, count, world)
    for key in file.missing(measures, key=str):
        say(key)
        file.add({"key": key, "kind": key.split()[0], **measures[key]()})
    file.tell(arguments.plot, draw, show)


def _ask(function: Any, blocks: int, world: int, *more: Any) -> Any:
    """In a fresh process that is rank 0 of `world`."""
    return ask_ranks(function, blocks, world, *more, world=world, processes=1, backend="fake")


class _Done(Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class Nothing:
    """Collectives that move nothing."""

    def __init__(self) -> None:
        self._done = _Done()

    def _call(self, *_: Any, async_op: bool = False, **__: Any) -> Work | None:
        return self._done if async_op else None

    all_gather = reduce_scatter = all_to_all = all_reduce = _call

    def all_gather_grouped(self, *_: Any) -> Work:
        return self._done


@contextmanager
def nothing_sent() -> Iterator[None]:
    """Both engines call collectives that move nothing."""
    with in_place_of_torch(Nothing()):
        yield


def _build(blocks: int, device: str = "cpu") -> LM:
    return make_model(
        bench_size(layers=blocks, d_model=WIDTH, d_ff=4 * WIDTH, heads=4, vocab=256), device
    )


def _wrap(way: str, blocks: int) -> Wrapped:
    return WAYS[way](_build(blocks), "zero3", OWN)


def measure_steps(blocks: int, world: int, rounds: int) -> Row:
    """Host milliseconds of a training step of each way, in turn."""
    tokens = torch.randint(0, 256, (1, TOKENS))
    with nothing_sent():
        steps = {way: _wrap(way, blocks).step_on(tokens, tokens) for way in WAYS}
        samples = alternate(steps, rounds, 2, _time)
    row: Row = {"blocks": blocks, "world": world}
    for way, found in samples.items():
        times = [sample.step_ms for sample in found]
        row[way] = {"step_ms": statistics.median(times), "step_spread_ms": spread(times)}
    return row


def _time(step: Step) -> Sample:
    began = time.process_time()
    step()
    took = (time.process_time() - began) * 1e3
    return Sample(took, took)


def measure_start(blocks: int, world: int, way: str) -> Row:
    """Seconds and memory of sharding the model, and of the first step, in a process of its own."""
    tokens = torch.randint(0, 256, (1, TOKENS))
    with nothing_sent():
        _wrap(way, 1).step_on(tokens, tokens)()  # what torch imports and makes once
        model = _build(blocks)
        resident, began = memory_in_use(CPU), time.process_time()
        wrapped = WAYS[way](model, "zero3", OWN)
        sharded, after = time.process_time() - began, memory_in_use(CPU)
        began = time.process_time()
        wrapped.step_on(tokens, tokens)()
        first = time.process_time() - began
    return {
        "way": way,
        "blocks": blocks,
        "world": world,
        "shard_s": sharded,
        "first_step_s": first,
        "shard_bytes": after - resident,
        "step_bytes": memory_in_use(CPU) - resident,
    }


def measure_planner(blocks: int, world: int) -> Row:
    """Seconds of a whole search."""
    model = _build(blocks, "meta")
    began = time.process_time()
    found = search(model, load_cluster("h100x8"), Workload(TOKENS, 1), world=world)
    took = time.process_time() - began
    return {"blocks": blocks, "world": world, "seconds": took, "tried": found.tried}


def measure_report(blocks: int, world: int) -> Row:
    """Seconds of a page about a predicted step, from the Timeline to the HTML."""
    workload, cluster = Workload(TOKENS, 1), load_cluster("h100x8")
    source = as_source(_build(blocks, "meta"), workload)
    plan, description = source.at(Plan.of("zero3", world), workload)
    timeline = simulate(plan, description, cluster, workload)
    began = time.process_time()
    page = report(plan, timeline, predicted=timeline).render()
    took = time.process_time() - began
    return {"blocks": blocks, "world": world, "seconds": took, "page_bytes": len(page)}


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Steps for each block, then starts, then the planner and the report."""
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in KINDS}
    lines = []
    for row in sorted(of["step"], key=lambda row: (row["world"], row["blocks"])):
        figures = [
            f"{row[way]['step_ms'] / row['blocks']:.2f} "
            f"+-{row[way]['step_spread_ms'] / row['blocks']:.1f}"
            for way in WAYS
        ]
        ratios = [f"{row[way]['step_ms'] / row['torch']['step_ms']:.2f}" for way in WAYS]
        lines.append([str(row["blocks"]), str(row["world"]), *figures, *ratios[:2]])
    heads = ["blocks", "ranks", *WAYS, "p/t", "d/t"]
    title = "host ms of a step for each block, and ratios to torch's"
    print_table(title, heads, lines, facts["environment"], (), 80)
    for way in WAYS:
        print(_tell_growth(of["step"], way))
    if of["start"]:
        lines = [
            [row["way"], f"{row['shard_s']:.2f}", f"{row['first_step_s']:.2f}",
             f"{row['shard_bytes'] / 2**20:.0f}", f"{row['step_bytes'] / 2**20:.0f}"]
            for row in of["start"]
        ]  # fmt: skip
        heads = ["way", "shard s", "first step s", "MiB by then", "MiB after it"]
        blocks, world = of["start"][0]["blocks"], of["start"][0]["world"]
        print_table(f"start-up, {blocks} blocks on {world} ranks", heads, lines, {}, heads[:1], 80)
    lines = [
        [row["kind"], str(row["blocks"]), str(row["world"]), f"{row['seconds']:.2f}"]
        for row in (*of["planner"], *of["report"])
    ]
    if lines:
        heads = ["what", "blocks", "ranks", "seconds"]
        print_table("the planner and the report", heads, lines, {}, heads[:1], 80)


KINDS = ("step", "start", "planner", "report")


def _tell_growth(rows: list[Row], way: str) -> str:
    """How a block's time in the largest world and model compares with that in the smallest."""

    def per_block(row: Row) -> float:
        return float(row[way]["step_ms"] / row["blocks"])

    least = min((row["world"] for row in rows), default=0)
    by_blocks = sorted((r["blocks"], per_block(r)) for r in rows if r["world"] == least)
    worlds: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        worlds.setdefault(row["blocks"], []).append((row["world"], per_block(row)))
    by_world: list[tuple[int, float]] = []
    for found in worlds.values():
        if len(found) > len(by_world):
            by_world = sorted(found)
    if len(by_blocks) < 2 or len(by_world) < 2:
        return f"{way}: too few rows to tell how it grows"
    return (
        f"{way}: a block of {by_blocks[-1][0]} takes {by_blocks[-1][1] / by_blocks[0][1]:.2f} of "
        f"one of {by_blocks[0][0]}; on {by_world[-1][0]} ranks "
        f"{by_world[-1][1] / by_world[0][1]:.2f} of that on {by_world[0][0]}"
    )


def draw(rows: list[Row]) -> str:
    """A block's host time by the number of blocks and of ranks."""
    steps = [row for row in rows if row["kind"] == "step"]
    least = min((row["world"] for row in steps), default=0)
    curves: dict[str, list[tuple[float, float]]] = {}
    for way in WAYS:
        blocks = curves.setdefault(f"{way}, by blocks", [])
        worlds = curves.setdefault(f"{way}, by ranks", [])
        counts = [row["blocks"] for row in steps]
        for row in steps:
            point = row[way]["step_ms"] / row["blocks"]
            if row["world"] == least:
                blocks.append((row["blocks"], point))
            if row["blocks"] == max(counts, key=counts.count):
                worlds.append((row["world"], point))
    dashed = [name for name in curves if name.endswith("by blocks")]
    title = "Host time of a block in a step"
    return draw_curves(title, curves, "blocks, or ranks", "ms", dashed=dashed)
