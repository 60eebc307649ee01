"""`shardwise bench overlap`: data parallel with communication after, and inside, the backward pass.

One process is a rank of an emulated group. Steps are timed; then one more is recorded: moments of
the compute stream at every block's forward and backward, and the start and end of every all-reduce.
What the compute stream stood still for is exposed; the step with a free network says the same by
comparison.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.emulation.collectives import Network, emulate
from shardwise.engine.api import shard
from shardwise.engine.local_step import local
from shardwise.engine.torch_private import call_after_backward
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.fresh import run_fresh
from shardwise.lab.exercises.overlap_plot import make_picture
from shardwise.lab.exercises.sizes import CPU_SIZES, Case, describe_run, explain_failure
from shardwise.lab.rows import Row, RowFile, measured_elsewhere, read_rows, say
from shardwise.planning.plan import Plan
from shardwise.profiling.timing import Step, time_on_cuda, time_on_host
from shardwise.trainer.model import LM, OPTIMIZER, compute_loss

WARMUP, STEPS = 3, 7
Moment = torch.cuda.Event | float


class Stopwatch:
    """Marks moments of the compute stream; on a CPU, of the host."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.marks: list[tuple[str, str, Moment]] = []

    def mark(self, name: str, phase: str) -> None:
        """From now on compute is at `name`."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, phase, event))
        else:
            self.marks.append((name, phase, time.perf_counter()))

    def spans(self) -> list[list[Any]]:
        """Name, phase, start and end in ms since the first mark; the last mark ends the rest."""
        moments = [self._since_first(moment) for _, _, moment in self.marks]
        return [
            [name, phase, round(start, 4), round(end, 4)]
            for (name, phase, _), start, end in zip(
                self.marks[:-1], moments[:-1], moments[1:], strict=True
            )
        ]

    def _since_first(self, moment: Moment) -> float:
        first = self.marks[0][2]
        if isinstance(first, float) and isinstance(moment, float):
            return (moment - first) * 1e3
        assert isinstance(first, torch.cuda.Event) and isinstance(moment, torch.cuda.Event)
        return first.elapsed_time(moment)


@contextmanager
def watch(model: LM, stopwatch: Stopwatch) -> Iterator[None]:
    """Mark where forward enters each block, and where backward does."""
    names = {id(layer): f"layers.{i}" for i, layer in enumerate(model.layers)}

    def enter(module: nn.Module, inputs: Any) -> None:
        stopwatch.mark(names[id(module)], "forward")

    def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: stopwatch.mark(names[id(module)], "backward"))

    hooks: list[Any] = []
    for layer in model.layers:
        hooks.append(layer.register_forward_pre_hook(enter))
        hooks.append(layer.register_forward_hook(leave))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class Trial:
    """A model under one plan on an emulated network."""

    def __init__(self, case: Case, reduce: str, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        self.model = case.make_model()
        self.tokens = case.make_tokens()
        shard(self.model, Plan.of("ddp", mesh=ranks, reduce=reduce))
        self.optimizer = local(torch.optim.AdamW(self.model.parameters(), **OPTIMIZER))

    def step(self) -> None:
        self.optimizer.zero_grad()
        (compute_loss(self.model, *self.tokens) / self.ranks).backward()
        self.optimizer.step()

    def step_marked(self, stopwatch: Stopwatch) -> None:
        """The same with moments of compute."""
        self.optimizer.zero_grad()
        stopwatch.mark("embedding", "forward")
        with watch(self.model, stopwatch):
            loss = compute_loss(self.model, *self.tokens) / self.ranks

        def begin(_: Tensor) -> None:
            stopwatch.mark("head", "backward")
            # Called before the engine's own callback, which waits for the last collectives.
            call_after_backward(lambda: stopwatch.mark("", "waiting"))

        loss.register_hook(begin)
        loss.backward()
        stopwatch.mark("update", "optimizer")
        self.optimizer.step()
        stopwatch.mark("", "")


def measure(case: Case, reduce: str, ranks: int, network: Network) -> dict[str, Any]:
    """Time steps under the plan, then record one; in a process of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if case.quick:
        torch.set_num_threads(1)
    on_gpu = case.device == "cuda"
    try:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        with emulate(network) as emulation:
            trial = Trial(case, reduce, ranks)
            steps = 2 if case.quick else STEPS
            taken = _time(trial.step, steps, on_gpu)
            emulation.mode = "free"
            free = _time(trial.step, steps, on_gpu)
            emulation.mode = "network"
            trial.step()
            case.synchronize()
            stopwatch = Stopwatch(on_gpu)
            with emulation.measure(torch.device(case.device)) as exposure:
                trial.step_marked(stopwatch)
        messages = [
            [m.nbytes, round(m.start * 1e3, 4), round(m.end * 1e3, 4), round(m.exposed_s * 1e3, 4)]
            for m in exposure.messages
        ]
        return {
            "step_ms": round(taken, 3), "free_step_ms": round(free, 3),
            "communication_ms": round(sum(end - start for _, start, end, _ in messages), 3),
            "exposed_ms": round(exposure.exposed_s * 1e3, 3),
            "compute": stopwatch.spans(), "messages": messages,
        }  # fmt: skip
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _time(step: Step, steps: int, on_gpu: bool) -> float:
    for _ in range(WARMUP):
        step()
    timer = time_on_cuda if on_gpu else time_on_host(lambda: None)
    return statistics.median(timer(step).step_ms for _ in range(steps))


def run(arguments: argparse.Namespace, reduces: tuple[str, ...], command: str) -> None:
    """Measure plan by plan, write the JSON after each, draw the picture, print the table."""
    if arguments.resume and arguments.plot is not None and measured_elsewhere(arguments.json):
        arguments.plot.write_text(make_picture(read_rows(arguments.json)), encoding="utf-8")
        return
    size = arguments.size
    if not torch.cuda.is_available():
        say("no CUDA device here: the figures are this CPU's")
        size = size or CPU_SIZES[0]
    context = 8 if arguments.quick else seed004.CONTEXT
    case = Case(size or "xl", "fp32", "plain", context, quick=arguments.quick)
    network = Network(arguments.bandwidth * 1e9, arguments.latency * 1e-6)
    facts = describe_run(command, arguments.commit, arguments.quick)
    facts["network"] = (
        f"emulated: {arguments.bandwidth:g} GB/s per rank, {arguments.latency:g} us per collective"
    )
    file = RowFile(arguments.json, facts, arguments.resume, arguments.budget)
    for reduce in reduces:
        key = f"{case.key}/{arguments.ranks}/{facts['network']}/{reduce}"
        if key in file:
            continue
        if file.time_is_up():
            break
        say(f"{case.size} ddp {reduce}, {arguments.ranks} ranks, {facts['network']}")
        row: Row = {
            "key": key, "size": case.size, "reduce": reduce, "ranks": arguments.ranks,
            "batch": case.batch, "context": case.context, "precision": case.precision,
        }  # fmt: skip
        row |= run_fresh(measure, case, reduce, arguments.ranks, network)
        row["seed"] = seed004.DDP_STEPS.get(reduce, {}) if case.size == "xl" else {}
        file.add(row)
        say(f"{case.size} ddp {reduce}: " + row.get("failure", f"{row.get('step_ms')} ms"))
    if arguments.plot is not None:
        arguments.plot.write_text(make_picture(file.rows), encoding="utf-8")
    print_table(file.rows, facts)


def print_table(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per plan."""
    from rich.table import Table

    from shardwise.profiling.results import print_on_console

    table = Table(title=f"one step of data parallel, ms ({facts['network']})")
    for name in ("size", "reduce", "messages", "step", "free network", "communication", "exposed"):
        table.add_column(name, justify="left" if name in ("size", "reduce") else "right")
    for row in rows:
        if "failure" in row:
            table.add_row(row["size"], row["reduce"], row["failure"])
            continue
        figures = ("step_ms", "free_step_ms", "communication_ms", "exposed_ms")
        table.add_row(row["size"], row["reduce"], str(len(row["messages"])),
                      *(f"{row[name]:.1f}" for name in figures))  # fmt: skip
    print_on_console(table, facts["environment"])
