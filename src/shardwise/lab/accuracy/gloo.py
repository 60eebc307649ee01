"""Predicted against measured on two real gloo ranks of this machine, after `calibrate`.

The links, the host and the share that communication takes of compute come from
`shardwise calibrate`; the model's kernels are timed alone, on both ranks at once, as they train.
Figures are medians. A machine's speed drifts over minutes, so calibration, kernels and steps are
measured in rounds and a row is the medians of its rounds, which it also holds. On a machine that
other programs use, `busy` takes the quickest samples of everything instead.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from shardwise.calibration.device import calibrate
from shardwise.children import spawn_ranks
from shardwise.description.cluster import Cluster
from shardwise.description.workload import Workload
from shardwise.engine.api import shard
from shardwise.engine.collectives import Group
from shardwise.engine.local_step import local
from shardwise.lab.accuracy.kernels import KernelTable, Sizes
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe
from shardwise.predict.simulate import simulate
from shardwise.predict.step import StepOptions
from shardwise.profiling.timing import Step
from shardwise.trainer.model import OPTIMIZER, compute_loss, make_model
from shardwise.trainer.sizes import Size, bench_size

if TYPE_CHECKING:
    from shardwise.lab.accuracy.rows import Results

RANKS = 2
STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
SHAPE = bench_size(layers=6, d_model=256, d_ff=1024, heads=4, vocab=256)
BATCH, LENGTH = 4, 64
STEPS, WARMUP = 40, 3
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class GlooTask:
    """What the two ranks run."""

    shape: Size = SHAPE
    batch: int = BATCH
    length: int = LENGTH
    steps: int = STEPS
    strategies: tuple[str, ...] = STRATEGIES
    busy: bool = False

    def plan(self, strategy: str) -> Plan:
        return Plan.of(strategy, RANKS)

    def sizes(self) -> Sizes:
        return Sizes(self.batch * self.length, self.shape.d_model, self.shape.vocab)


QUICK = GlooTask(bench_size(2, 64, 128, 4, 128), 1, 16, steps=2, strategies=("ddp", "zero3"))


def run_gloo(results: Results, quick: bool, busy: bool = False) -> None:
    """Calibrate, time the kernels and the steps on two ranks, then predict each step."""
    from shardwise.lab.accuracy.rows import say

    task = QUICK if quick else GlooTask()
    if all(results.has(case=f"gloo2-{name}") for name in task.strategies):
        return
    task = dataclasses.replace(task, busy=busy)
    rounds = []
    for i in range(1 if quick else ROUNDS):
        say(f"gloo, round {i + 1}: calibrating this machine (two ranks)")
        cluster = calibrate("gloo2", ranks=RANKS, quick=quick, busy=busy, tell=say).cluster
        say(f"gloo, round {i + 1}: timing the model's kernels and its steps on two ranks")
        rounds.append(predict_rows(task, cluster, measure_ranks(task)))
    results.add([join_rounds(rows) for rows in zip(*rounds, strict=True)])


def join_rounds(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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


def measure_ranks(task: GlooTask) -> dict[str, Any]:
    """Kernel seconds, copy rates and step times, from two fresh processes."""
    with tempfile.TemporaryDirectory() as folder:
        spawn_ranks(_measure_rank, (task, folder), RANKS)
        return json.loads((Path(folder) / "answer.json").read_text())


def _measure_rank(rank: int, task: GlooTask, folder: str) -> None:
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    store = dist.FileStore(str(Path(folder) / "store"), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    table = KernelTable("cpu", quickest=task.busy)
    described = _describe(task, "zero3")[1]
    dist.barrier()
    table.measure(described, task.sizes())
    # The mean of the ranks: the larger of two noisy figures, kernel by kernel, is too large.
    keys = sorted(table.seconds)
    mean = torch.tensor([table.seconds[key] for key in keys], dtype=torch.float64) / RANKS
    dist.all_reduce(mean)
    calls = {
        kind: _time_calls(kind, task) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    steps = _time_steps(task)
    if rank == 0:
        kernels = dict(zip(keys, mean.tolist(), strict=True))
        answer = {"kernels": kernels, "steps_ms": steps, "calls": calls}
        (Path(folder) / "answer.json").write_text(json.dumps(answer))
    dist.barrier()
    dist.destroy_process_group()


def _time_calls(kind: str, task: GlooTask) -> list[tuple[int, float]]:
    """Seconds that the call itself takes, before anything is waited for, by message size."""
    group = Group("shard", dist.group.WORLD, RANKS, dist.get_rank(), None)
    found = []
    for power in range(12, 26, 2):
        whole = torch.ones(2**power // 4)
        part = torch.ones(whole.numel() // RANKS)
        samples = []
        for _ in range(12):
            dist.barrier()
            began = time.perf_counter()
            if kind == "all_gather":
                handle = group.all_gather(whole, part)
            elif kind == "reduce_scatter":
                handle = group.reduce_scatter(part, whole)
            else:
                handle = group.all_reduce(whole)
            samples.append(time.perf_counter() - began)
            handle.wait()
        found.append((2**power, min(samples) if task.busy else statistics.median(samples)))
    return found


def _time_steps(task: GlooTask) -> dict[str, list[float]]:
    """Milliseconds of whole steps, each the slower rank's; the strategies step in turn."""
    steps = {name: _step_of(task, name) for name in task.strategies}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(WARMUP + task.steps):
        for name, step in steps.items():
            dist.barrier()
            began = time.perf_counter()
            step()
            took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            if i >= WARMUP:
                times[name].append(took.item() * 1e3)
    return times


def _step_of(task: GlooTask, strategy: str) -> Step:
    model = make_model(task.shape, "cpu")
    shard(model, task.plan(strategy))
    optimizer = local(torch.optim.AdamW(model.parameters(), **OPTIMIZER))
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    shape = (2, task.batch, task.length)
    tokens, targets = torch.randint(0, task.shape.vocab, shape, generator=draw)

    def step() -> None:
        optimizer.zero_grad()
        (compute_loss(model, tokens, targets) / RANKS).backward()
        optimizer.step()

    return step


def _describe(task: GlooTask, strategy: str) -> tuple[Plan, Any]:
    with torch.device("meta"):
        model = make_model(task.shape, "meta")
    plan = task.plan(strategy).resolve(model)
    tokens = torch.empty((task.batch, task.length), dtype=torch.int64, device="meta")
    inputs = (tokens, tokens.clone())
    return plan, describe(model, inputs, plan, loss=compute_loss, device="cpu")


def predict_rows(
    task: GlooTask, cluster: Cluster, measured: dict[str, Any]
) -> list[dict[str, Any]]:
    """One row for each strategy."""
    table = KernelTable("cpu", measured["kernels"])
    rows = []
    for strategy in task.strategies:
        plan, described = _describe(task, strategy)
        calls = {kind: tuple(map(tuple, points)) for kind, points in measured["calls"].items()}
        costs = dataclasses.replace(Costs.of(cluster), call_points=calls)
        # A kernel timed alone has its dispatch in it; what is left is autograd's and the modules'.
        launch = max(0.0, cluster.host.op_s - cluster.device.kernel_s)
        costs.set_passes(table.passes(described, task.sizes(), launch))
        timeline = simulate(
            plan,
            described,
            cluster,
            Workload(task.length, task.batch),
            costs=costs,
            options=StepOptions(loss_inside=False),
        )
        times = measured["steps_ms"][strategy]
        rows.append(
            {
                "case": f"gloo2-{strategy}",
                "mode": f"{strategy} {plan.replicate}x{plan.shard}, {task.shape.describe()}",
                "set": "gloo",
                "predicted_ms": timeline.step_ms,
                "measured_ms": min(times) if task.busy else statistics.median(times),
                "measured_least_ms": min(times),
                "measured_spread_ms": max(times) - min(times),
                "breakdown_ms": {k: v / 1e6 for k, v in timeline.breakdown().parts().items()},
            }
        )
    return rows
