"""`shardwise bench bytes`: what each way to send fewer bytes does to the loss, to the bytes and, on
a GPU, to the step over a slow network.

curve   a small language model learns the built-in corpus on two gloo ranks, from several seeds,
        plain and with each lever. A lever is inside if its mean curve is no farther from the plain
        one than the plain runs' seeds are from each other.
bytes   what one rank of 8 sends in a step of the reference model, by its schedule
step    one rank of 8 emulated at 50 GB/s: torch's fully_shard, ours plain, ours with each lever
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.description.language_model import LM
from shardwise.description.preset import BENCH, Size
from shardwise.emulation.collectives import Network
from shardwise.lab.charts import draw_curves
from shardwise.lab.processes import ask_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.lab.steps.cases import MIXED, Family, StepCase, describe_case
from shardwise.lab.steps.engines import Precision, Wrapped, wrap_plan, wrap_theirs
from shardwise.lab.steps.measure import Measured, measure
from shardwise.lab.steps.models import build_model
from shardwise.planning.memory import count_sent
from shardwise.profiling.results import Row, print_table, say_where
from shardwise.profiling.timing import spread
from shardwise.trainer.data import Corpus, open_corpus

PLAIN: dict[str, Any] = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}
_SUMS: dict[str, Any] = {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}
# A host's 16-bit products take many times as long as its 32-bit ones, and would hide what a lever
# rounds: the runs that learn compute in 32.
LEARNING = {**PLAIN, "compute_dtype": "float32"}
# Beside the plain settings.
LEVERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "16-bit sums": {"reduce_dtype": "bfloat16"},  # added in 16 bits, too: the backend's own way
    "32-bit sums": _SUMS,
    "fp8 gathers": {"gather_dtype": "float8_e4m3fn"},
    "int8 gathers": {"gather_dtype": "int8"},
    "all kept": {"keep_after_forward": True},
    "sums and fp8": {**_SUMS, "gather_dtype": "float8_e4m3fn"},
    "sums, fp8, kept": {**_SUMS, "gather_dtype": "float8_e4m3fn", "keep_after_forward": True},
}
RANKS, BATCH, LENGTH, RATE = 2, 8, 64, 3e-3  # of the runs that learn
SMOOTHED = 10  # steps that a point of a curve is the mean of
BYTES_RANKS = 8
SLOW = Network(bandwidth=50e9, latency=20e-6)


def run(arguments: argparse.Namespace) -> None:
    """Row by row; the JSON is written after each."""
    quick = arguments.quick
    seeds, steps = (2, 20) if quick else (3, arguments.steps)
    file = RowFile.of(arguments, seeds=seeds, steps=steps, plain=PLAIN, learning=LEARNING)
    parts: tuple[str, ...] = arguments.parts
    for name in file.missing(LEVERS, lambda name: f"bytes/{name}") if "bytes" in parts else ():
        file.add({"key": f"bytes/{name}", "part": "bytes", "lever": name, **count_bytes(name)})
    # Ranks take seconds to start: a quick run starts them once.
    together = [list(LEVERS)] if quick else [[name] for name in LEVERS]
    for names in file.missing(together, lambda names: f"curve/{names[-1]}"):
        for name, row in learn(names, seeds, steps).items() if "curve" in parts else ():
            file.add({"key": f"curve/{name}", "part": "curve", "lever": name, **row})
    if "step" in parts and not torch.cuda.is_available():
        say("step: skipped, no CUDA device here")
    elif "step" in parts:
        for _ in file.missing(["step"], str):
            file.add({"key": "step", "part": "step", **time_steps(quick)})
    file.tell(arguments.plot, draw, show)


def count_bytes(name: str) -> Row:
    """What one rank sends in a step of the reference model."""
    with torch.device("meta"):
        model = LM(BENCH, context=1)
    plan = sw.Plan.of("zero3", BYTES_RANKS, **PLAIN | LEVERS[name])
    sent = count_sent(plan.resolve(model))
    return {"sent": dataclasses.asdict(sent), "total": sent.total, "model": BENCH.describe()}


# Curves


def learn(names: list[str], seeds: int, steps: int) -> dict[str, Row]:
    """For each lever the losses of each seed, the mean over ranks, and the bytes of a step."""
    found = ask_ranks(train_all, names, seeds, steps, world=RANKS)
    settings = f"zero3 on {RANKS} gloo ranks, {BATCH} x {LENGTH} tokens each, AdamW {RATE}"
    told = {"model": small_size().describe(), "settings": settings}
    return {name: {**row, **told} for name, row in found.items()}


def small_size() -> Size:
    return Size(64, 176, 4, 4, 4, 256)


def train_all(names: list[str], seeds: int, steps: int) -> dict[str, Row]:
    """On every rank."""
    found: dict[str, Row] = {}
    for name in names:
        curves, sent = [], 0.0
        for seed in range(seeds):
            losses, sent = train(LEVERS[name], seed, steps)
            curves.append(losses)
            end = smooth(losses)[-1][1]
            say(f"curve: {name}, seed {seed}: {losses[0]:.3f} to {end:.3f}")
        found[name] = {"curves": curves, "sent": sent}
    return found


def train(settings: dict[str, Any], seed: int, steps: int) -> tuple[list[float], float]:
    """The loss of every step, and what this rank sent in the last."""
    corpus = _corpus()
    torch.manual_seed(seed)
    model = sw.shard(LM(small_size(), LENGTH), sw.Plan.of("zero3", RANKS, **LEARNING | settings))
    optimizer = sw.local(torch.optim.AdamW(model.parameters(), lr=RATE))
    rank, tokens = dist.get_rank(), RANKS * BATCH * LENGTH
    losses = torch.zeros(steps)
    sent = 0.0
    for step in range(steps):
        where: dict[str, Any] = {"seed": seed, "step": step, "micro": 0, "rank": rank}
        pair = map(torch.from_numpy, corpus.batch(**where, batch=BATCH, seq=LENGTH))
        with sw.record() as log:
            loss = model(*pair) / tokens
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step], sent = loss.detach(), log.sent()
    dist.all_reduce(losses)
    return losses.tolist(), sent


@cache
def _corpus() -> Corpus:
    return open_corpus("", vocab=256, seed=0, token_dtype="uint16")


def smooth(losses: Sequence[float]) -> list[tuple[float, float]]:
    """Points of a curve: the means of so many steps."""
    cuts = range(0, len(losses) - SMOOTHED + 1, SMOOTHED)
    return [(at + SMOOTHED / 2, statistics.fmean(losses[at : at + SMOOTHED])) for at in cuts]


def mean_curve(row: Row) -> list[tuple[float, float]]:
    """Over the seeds."""
    each = [smooth(losses) for losses in row["curves"]]
    return [
        (points[0][0], statistics.fmean(p[1] for p in points)) for points in zip(*each, strict=True)
    ]


def compare_curve(row: Row, plain: Row) -> dict[str, Any]:
    """How far a lever's mean curve is from the plain one, and how far the plain runs' seeds are
    from each other: root mean squares over the second half, of the difference and of the seeds'
    standard deviation (in the first half a step more or less is worth more than either). With three
    seeds two means of the same runs would be 0.8 of that apart. `beyond`: the share of all points
    at which the mean is not between the lowest and the highest seed.
    """
    each = map(smooth, plain["curves"])
    spans = [[p[1] for p in points] for points in zip(*each, strict=True)]
    mine, half = [value for _, value in mean_curve(row)], len(spans) // 2
    apart = [value - statistics.fmean(span) for value, span in zip(mine, spans, strict=True)]
    beyond = [not min(span) <= value <= max(span) for value, span in zip(mine, spans, strict=True)]
    return {
        "end": mine[-1],
        "span": (min(spans[-1]), max(spans[-1])),
        "distance": _root_mean_square(apart[half:]),
        "spread": _root_mean_square([statistics.stdev(span) for span in spans[half:]]),
        "beyond": statistics.fmean(beyond),
    }


def _root_mean_square(values: Sequence[float]) -> float:
    return math.sqrt(statistics.fmean(value**2 for value in values))


# Steps


def time_steps(quick: bool) -> Row:
    """Torch's engine, ours, and ours with each lever, in turn on the device."""
    case = StepCase(
        "h200-4x2048-50GBs", BENCH, 4, 2048, ("zero3",), steps=15, warmup=3, precision=MIXED,
        network=SLOW,
    )  # fmt: skip
    family = Family((case.quick() if quick else case,), "fake", BYTES_RANKS, 1, "cuda")
    found: Row = family.ask(compare_steps, family, quick)
    return found


def compare_steps(family: Family, quick: bool) -> Row:
    (case,) = family.cases
    builds = {name: partial(_build, family, case, name) for name in LEVERS}
    builds["fully_shard"] = partial(_build_theirs, family, case, "float32")
    builds["fully_shard, 16-bit sums"] = partial(_build_theirs, family, case, "bfloat16")
    with case.open_network() as emulation:
        measured = measure(family, case, builds, emulation, isolates=True)
    rows = {name: _compare_step(measured, name) for name in builds}
    return {"case": case.name, "candidates": rows, "settings": describe_case(family, case, quick)}


def _build(family: Family, case: StepCase, name: str) -> Wrapped:
    model: Any = build_model(case.size, family.device)
    return wrap_plan(model, sw.Plan.of("zero3", family.world, **PLAIN | LEVERS[name]))


def _build_theirs(family: Family, case: StepCase, reduce: str) -> Wrapped:
    model: Any = build_model(case.size, family.device)
    return wrap_theirs(model, "zero3", Precision("bfloat16", reduce))


def _compare_step(measured: Measured, name: str) -> Row:
    """One candidate's figures, and its step over fully_shard's: below 1 is better."""
    failure = measured.failures.get(name) or measured.failures.get("fully_shard")
    if failure:
        return {"failure": failure}
    mine, theirs = measured.samples[name], measured.samples["fully_shard"]
    ratios = [a.step_ms / b.step_ms for a, b in zip(mine, theirs, strict=True)]
    return {
        **dataclasses.asdict(measured.sides[name]),
        "ratio": measured.sides[name].step_ms / measured.sides["fully_shard"].step_ms,
        "ratio_spread": spread(ratios),
        "wrap": measured.settings[name],
    }


# What people see


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    heads = ("lever", "gathers", "reduces", "GB a step", "of plain")
    counted = {row["lever"]: row for row in rows if row["part"] == "bytes"}
    lines = []
    for name, row in counted.items():
        gathers, over = row["sent"]["all_gather"], row["total"] / counted["plain"]["total"]
        figures = (gathers / 1e9, (row["total"] - gathers) / 1e9, row["total"] / 1e9, over)
        lines.append([name, *(f"{figure:.2f}" for figure in figures)])
    title = f"GB that one rank of {BYTES_RANKS} sends in a step of the reference model"
    if lines:
        print_table(title, heads, lines, {}, heads[:1], 80)
    learned = {row["lever"]: row for row in rows if row["part"] == "curve"}
    lines = []
    for name, row in learned.items() if "plain" in learned else ():
        found = compare_curve(row, learned["plain"])
        span = "{:.3f} to {:.3f}".format(*found["span"])
        inside = "inside" if found["distance"] <= found["spread"] else "outside"
        apart = f"{found['distance'] / found['spread']:.2f} {inside}"
        share, sent = f"{found['beyond']:.0%}", f"{row['sent'] / 1e3:,.0f}"
        lines.append([name, f"{found['end']:.3f}", span, apart, share, sent])
    columns = ("lever", "loss", "plain's seeds", "of spread", "beyond", "kB sent")
    title = f"loss at the end, the mean of {facts.get('seeds')} seeds, {facts.get('steps')} steps"
    if lines:
        print_table(title, columns, lines, {}, columns[:1], 80)
    for row in rows:
        if row["part"] == "step":
            _show_steps(row)
    print(say_where(facts["environment"]))


def _show_steps(row: Row) -> None:
    heads = ("candidate", "step ms", "of fully_shard", "+-", "device ms", "peak GiB")
    lines = [
        [
            name,
            f"{side['step_ms']:.1f} +-{side['step_spread_ms']:.1f}",
            f"{side['ratio']:.2f}",
            f"{side['ratio_spread']:.2f}",
            "-" if side["device_ms"] is None else f"{side['device_ms']:.1f}",
            f"{side['peak_bytes'] / 2**30:.2f}",
        ]
        for name, side in row["candidates"].items()
        if "failure" not in side
    ]
    print_table(f"one step, {row['case']}, one rank of 8", heads, lines, {}, heads[:1], 80)
    for name, side in row["candidates"].items():
        if "failure" in side:
            print(f"{name}: {side['failure']}")
    print("emulated network: values are fabricated, times are not")


def draw(rows: list[Row]) -> str:
    """The plain seeds' curves, and each lever's mean."""
    learned = {row["lever"]: row for row in rows if row["part"] == "curve"}
    curves: dict[str, list[tuple[float, float]]] = {}
    if "plain" in learned:
        for seed, losses in enumerate(learned["plain"]["curves"]):
            curves[f"plain, seed {seed}"] = smooth(losses)
    dashed = list(curves)
    for name, row in learned.items():
        if name != "plain":
            curves[f"{name}, mean"] = mean_curve(row)
    title = "Loss of a small language model, by what its ranks send"
    return draw_curves(title, curves, "step", "loss", log_x=False, log_y=False, dashed=dashed)
