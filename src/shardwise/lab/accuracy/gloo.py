"""Predicted against measured on two real gloo ranks of this machine, after `calibrate`.

The links, the host and the share that communication takes of compute come from
`shardwise calibrate`; the model's kernels are timed alone, on both ranks at once, as they train.
Figures are medians. A machine's speed drifts over minutes, so calibration, kernels and steps are
measured in rounds and a row is the medians of its rounds, which it also holds. On a machine that
other programs use, `busy` takes the quickest samples of everything instead.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.calibration.calibrate import calibrate
from shardwise.description.cluster import COLLECTIVES, Cluster
from shardwise.description.language_model import draw_tokens, make_model
from shardwise.description.preset import bench_size
from shardwise.description.workload import Workload
from shardwise.lab.accuracy.cases import Traced, describe_model
from shardwise.lab.accuracy.kernels import KernelTable, Widths
from shardwise.lab.accuracy.page import tell_prediction
from shardwise.lab.processes import ask_ranks, time_on_ranks
from shardwise.lab.rows import say
from shardwise.lab.steps.cases import MEDIUM, StepCase
from shardwise.lab.steps.engines import Precision, wrap_ours
from shardwise.predict.cost import Costs
from shardwise.predict.step import StepOptions
from shardwise.profiling.results import Row
from shardwise.profiling.timing import alternate, time_calls

if TYPE_CHECKING:
    from shardwise.lab.accuracy.run import Results

RANKS, ROUNDS = 2, 5
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
GLOO = StepCase("gloo2", MEDIUM, 4, 64, STRATEGIES, steps=40, warmup=3)
QUICK = StepCase("gloo2", bench_size(2, 64, 128, 4, 128), 1, 16, ("ddp", "zero3"), 2, warmup=3)


def run_gloo(results: Results, quick: bool, busy: bool = False) -> None:
    """Calibrate, time the kernels and the steps on two ranks, then predict each step."""
    case = QUICK if quick else GLOO
    if all(results.has(case=f"{case.name}-{name}") for name in case.strategies):
        return
    rounds = []
    for i in range(1 if quick else ROUNDS):
        say(f"gloo, round {i + 1}: calibrating this machine (two ranks)")
        cluster = calibrate("gloo2", ranks=RANKS, quick=quick, busy=busy, tell=say).cluster
        say(f"gloo, round {i + 1}: timing the model's kernels and its steps on two ranks")
        measured = ask_ranks(measure_rank, case, busy, world=RANKS)
        rounds.append(predict_rows(case, busy, cluster, measured))
    for rows in zip(*rounds, strict=True):
        results.add(join_rounds(rows))


def join_rounds(rows: Sequence[Row]) -> Row:
    """One strategy's rows: each figure's median over the rounds, and the rounds' own."""
    joined = dict(rows[0])
    for key in ("predicted_ms", "measured_ms", "measured_least_ms", "measured_spread_ms"):
        joined[key] = statistics.median(row[key] for row in rows)
    joined["breakdown_ms"] = {
        part: statistics.median(row["breakdown_ms"][part] for row in rows)
        for part in rows[0]["breakdown_ms"]
    }
    joined["rounds_ms"] = [(row["predicted_ms"], row["measured_ms"]) for row in rows]
    return joined


def measure_rank(case: StepCase, busy: bool) -> dict[str, Any]:
    """Kernel seconds, seconds of calls, and step times: what each of the ranks runs."""
    table = KernelTable(quickest=busy)
    described = _describe(case, "zero3")[1]
    dist.barrier()
    table.measure(described, _widths(case))
    # The mean of the ranks: the larger of two noisy figures, kernel by kernel, is too large.
    keys = sorted(table.seconds)
    mean = torch.tensor([table.seconds[key] for key in keys], dtype=torch.float64) / RANKS
    dist.all_reduce(mean)
    found = {
        "kernels": dict(zip(keys, mean.tolist(), strict=True)),
        "calls": {kind: _time_calls(kind, busy) for kind in COLLECTIVES},
        "steps_ms": _time_steps(case),
    }
    dist.barrier()
    return found


def _time_calls(kind: str, busy: bool) -> list[tuple[int, float]]:
    """Seconds that the call itself takes, before anything is waited for, by message size."""
    pick = min if busy else statistics.median
    return [(2**power, pick(time_calls(kind, 2**power, 12))) for power in range(12, 26, 2)]


def _time_steps(case: StepCase) -> dict[str, list[float]]:
    """Milliseconds of whole steps, each the slower rank's; the strategies step in turn."""
    tokens = draw_tokens(case.size, case.batch, case.length, "cpu")
    steps = {
        name: wrap_ours(make_model(case.size, "cpu"), name, Precision()).step_on(*tokens)
        for name in case.strategies
    }
    taken = alternate(steps, case.steps, case.warmup, time_on_ranks)
    return {name: [sample.step_ms for sample in samples] for name, samples in taken.items()}


def _widths(case: StepCase) -> Widths:
    return Widths.of(case.size, case.batch, case.length)


def _describe(case: StepCase, strategy: str) -> Traced:
    plan = sw.Plan.of(strategy, RANKS)
    return describe_model(case.size, case.batch, case.length, plan, "cpu")


def predict_rows(
    case: StepCase, busy: bool, cluster: Cluster, measured: dict[str, Any]
) -> list[Row]:
    """One row for each strategy."""
    table = KernelTable(measured["kernels"])
    rows = []
    for strategy in case.strategies:
        plan, described = _describe(case, strategy)
        calls = {kind: tuple(map(tuple, points)) for kind, points in measured["calls"].items()}
        costs = dataclasses.replace(Costs.of(cluster), call_points=calls)
        # A kernel timed alone has its dispatch in it; what is left is autograd's and the modules'.
        launch = max(0.0, cluster.host.op_s - cluster.device.kernel_s)
        costs.set_passes(table.passes(described, _widths(case), launch))
        timeline = sw.simulate(
            plan,
            described,
            cluster,
            Workload(case.length, case.batch),
            costs=costs,
            options=StepOptions(loss_inside=False),
        )
        times = measured["steps_ms"][strategy]
        rows.append(
            {
                "case": f"{case.name}-{strategy}",
                "mode": f"{strategy} {plan.replicate}x{plan.shard}, {case.size.describe()}",
                "set": "gloo",
                **tell_prediction(timeline),
                "measured_ms": min(times) if busy else statistics.median(times),
                "measured_least_ms": min(times),
                "measured_spread_ms": max(times) - min(times),
            }
        )
    return rows
