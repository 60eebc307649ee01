"""`shardwise bench overlap`: data parallel with communication after, and inside, the backward pass.

One process is a rank of an emulated group. Steps are timed with the network and with a free one,
with the host in them and with the host ahead (`parallel/ddp.py`); then one more is recorded, the
host ahead: moments of the compute stream at every block's forward and backward, and the start and
end of every all-reduce. What the compute stream stood still for is exposed; the step with a free
network says the same by comparison.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import shardwise as sw
from shardwise.description.language_model import LM, compute_loss
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import Taken, fake_group, step_ahead, time_step
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.models import CPU_SIZES, QUICK_CONTEXT, ModelCase, tell_device
from shardwise.lab.parallel.ddp import sum_up
from shardwise.lab.pictures import draw_overlap
from shardwise.lab.processes import explain_failure, run_fresh
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.lab.steps.engines import Wrapped, wrap_plan
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Moment, mark_moment, seconds_between

STEPS = 7


class Stopwatch:
    """Marks moments of the compute stream; on a CPU, of the host."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.marks: list[tuple[str, str, Moment]] = []

    def mark(self, name: str, phase: str) -> None:
        """From now on compute is at `name`."""
        self.marks.append((name, phase, mark_moment(self.on_gpu)))

    def spans(self) -> list[list[Any]]:
        """Name, phase, start and end in ms since the first mark; the last mark ends the rest."""
        first = self.marks[0][2]
        ms = [round(seconds_between(first, moment) * 1e3, 4) for _, _, moment in self.marks]
        return [[*self.marks[i][:2], ms[i], ms[i + 1]] for i in range(len(ms) - 1)]


@contextmanager
def watch(model: nn.Module, stopwatch: Stopwatch) -> Iterator[None]:
    """Mark where forward enters each block, where backward does, and where backward's compute has
    ended: behind the embedding's.
    """
    assert isinstance(model, LM)
    names = {id(layer): f"layers.{i}" for i, layer in enumerate(model.layers)}

    def enter(module: nn.Module, inputs: Any) -> None:
        stopwatch.mark(names[id(module)], "forward")

    def leave(module: nn.Module, inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda _: stopwatch.mark(names[id(module)], "backward"))

    def look_up(module: nn.Module, inputs: Any, output: Tensor) -> None:
        assert output.grad_fn is not None
        output.grad_fn.register_hook(lambda *_: stopwatch.mark("", "waiting"))

    with ExitStack() as hooks:
        # Ahead of the engine's hooks, which may put nodes of their own behind the output.
        hooks.enter_context(model.embedding.register_forward_hook(look_up, prepend=True))
        for layer in model.layers:
            hooks.enter_context(layer.register_forward_pre_hook(enter))
            hooks.enter_context(layer.register_forward_hook(leave))
        yield


def step_marked(trial: Wrapped, tokens: tuple[Tensor, Tensor], stopwatch: Stopwatch) -> None:
    """A whole step, with moments of compute."""
    trial.optimizer.zero_grad()
    stopwatch.mark("embedding", "forward")
    with watch(trial.model, stopwatch):
        loss = compute_loss(trial.model, *tokens) / trial.divisor
    loss.register_hook(lambda _: stopwatch.mark("head", "backward"))
    loss.backward()
    stopwatch.mark("update", "optimizer")
    trial.optimizer.step()
    stopwatch.mark("", "")


def measure(case: ModelCase, reduce: str, ranks: int, network: Network) -> dict[str, Any]:
    """Time steps under the plan, then record one; in a process of its own."""
    if case.quick:
        torch.set_num_threads(1)
    on_gpu = case.device == "cuda"
    try:
        with fake_group(0, ranks), emulate(network) as emulation:
            trial = wrap_plan(case.make_model(), sw.Plan.of("ddp", mesh=ranks, reduce=reduce))
            tokens = case.make_tokens()
            taken, device = Taken(), torch.device("cuda:0" if on_gpu else "cpu")
            rounds = 2 if case.quick else STEPS
            time_step(trial.step_on(*tokens), emulation, device, rounds, taken)
            stopwatch = Stopwatch(on_gpu)
            marked = partial(step_marked, trial, tokens, stopwatch)
            _, exposure = step_ahead(device, emulation, marked, taken.samples["network"])
        messages = [
            [m.nbytes, round(m.start * 1e3, 4), round(m.end * 1e3, 4), round(m.exposed_s * 1e3, 4)]
            for m in exposure.messages
        ]
        figures = {name: round(value, 3) for name, value in sum_up(taken).items()}
        return figures | {"compute": stopwatch.spans(), "messages": messages}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def run(arguments: argparse.Namespace) -> None:
    """Measure plan by plan, write the JSON after each, draw the picture, print the table."""
    if only_draw(arguments, draw_overlap):
        return
    tell_device()
    size = arguments.size or ("xl" if torch.cuda.is_available() else CPU_SIZES[0])
    context = QUICK_CONTEXT if arguments.quick else seed004.CONTEXT
    case = ModelCase(size, "fp32", "plain", context, quick=arguments.quick)
    network = Network(arguments.bandwidth * 1e9, arguments.latency * 1e-6)
    told = f"{arguments.bandwidth:g} GB/s per rank, {arguments.latency:g} us per collective"
    file = RowFile.of(arguments, network=f"emulated: {told}")

    def key(reduce: str) -> str:
        return f"{case.key}/{arguments.ranks}/{file.facts['network']}/{reduce}"

    for reduce in file.missing(arguments.reduce, key):
        say(f"{size} ddp {reduce}, {arguments.ranks} ranks, {file.facts['network']}")
        row: Row = {"key": key(reduce), "reduce": reduce, "ranks": arguments.ranks}
        row |= case.describe() | run_fresh(measure, case, reduce, arguments.ranks, network)
        row["seed"] = seed004.DDP_STEPS.get(reduce, {}) if size == "xl" else {}
        file.add(row)
        say(f"{size} ddp {reduce}: " + row.get("failure", f"{row.get('step_ms')} ms"))
    file.tell(arguments.plot, draw_overlap, show)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per plan."""
    lines = []
    for row in rows:
        cells = [row["size"], row["reduce"]]
        if "failure" in row:
            lines.append([*cells, row["failure"]])
            continue
        figures = ("step_ms", "free_step_ms", "host_ms", "device_ms", "free_device_ms",
                   "exposed_ms", "communication_ms")  # fmt: skip
        lines.append([*cells, *(f"{row[name]:.1f}" for name in figures)])
    left = ("size", "reduce")
    heads = (*left, "step", "free", "host", "device", "free", "exposed", "sending")
    title = f"one step of data parallel, ms\n({facts['network']})"
    print_table(title, heads, lines, facts["environment"], left, width=80)
    print(
        "step, free (network) and host (issuing it): with the host in it. Then by the\n"
        "device with the host ahead: what the network adds is what is exposed."
    )
