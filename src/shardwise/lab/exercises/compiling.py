"""`shardwise bench compile`: torch.compile against eager, of whole models and of attention.

A model is compiled in a process of its own, whose first compiled forward and backward are timed
apart; those processes may work at the same time. Then, one process after the other, steps of the
same weights are timed eager and compiled.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from dataclasses import asdict
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.description.language_model import LM, compute_loss
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.forward_backward import PARTS, summarize, time_parts
from shardwise.lab.exercises.models import (
    QUICK_CONTEXT,
    ModelCase,
    choose_cases,
    make_optimizer,
    one_thread,
)
from shardwise.lab.processes import Fresh, explain_failure
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table

WARMUP = 5
TOLERANCE = {"fp32": 1e-4, "bf16": 1e-2}  # of the loss, relative
ATTENTION_BACKENDS = ("plain", "compiled")
SIDES = ("compiled", "eager")


def compile_model(model: LM, scope: str, backend: str) -> LM:
    """Compile the model in place, as one or block by block."""
    for module in [model] if scope == "whole" else model.layers:
        module.compile(backend=backend, dynamic=False)
    return model


def work(pipe: Connection, case: ModelCase, scope: str, steps: int, threads: int) -> None:
    """The body of a model's process: compile, wait for the turn, time, answer."""
    try:
        _limit_threads(case, threads)
        tokens = case.make_tokens()
        model = case.make_model()
        with torch.no_grad(), case.autocast():
            expected = compute_loss(model, *tokens).item()
        # The same weights, compiled; the eager model is made again when its turn comes.
        backend = "aot_eager" if case.quick else "inductor"
        compiled = compile_model(model, scope, backend)
        first = _time_first(case, compiled, tokens)
        gap = abs(first["loss"] - expected) / abs(expected)
        row: Row = {"first_call_s": first["seconds"], "backend": backend, "loss_gap": gap}
        pipe.send("ready")
        pipe.recv()
        if gap > TOLERANCE[case.precision]:
            row["failure"] = f"the compiled loss differs by {gap:.1e}: not timed"
        else:
            row["compiled"] = _time(case, compiled, tokens, steps)
            del model, compiled
            gc.collect()
            torch.compiler.reset()
            row["eager"] = _time(case, case.make_model(), tokens, steps)
        pipe.send(row)
    except Exception as error:  # whatever a compiler may raise is this row's result
        pipe.send({"failure": explain_failure(error)})


def _limit_threads(case: ModelCase, threads: int) -> None:
    """Share the cores among the processes that compile."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(threads)
    # A cache left by another run would hide what compiling takes.
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"
    if case.quick:
        torch.set_num_threads(1)


def _time_first(
    case: ModelCase, model: nn.Module, tokens: tuple[Tensor, Tensor]
) -> dict[str, float]:
    case.synchronize()
    began = time.perf_counter()
    with case.autocast():
        loss = compute_loss(model, *tokens)
    loss.backward()
    case.synchronize()
    seconds = time.perf_counter() - began
    model.zero_grad()
    return {"seconds": round(seconds, 3), "loss": loss.item()}


def _time(case: ModelCase, model: nn.Module, tokens: tuple[Tensor, Tensor], steps: int) -> Row:
    """Mean and deviation of each part."""
    times = time_parts(case, model, tokens, make_optimizer(model), WARMUP + steps)
    return summarize(times, (WARMUP,), steps)[str(WARMUP)]


class Worker(Fresh):
    """A model's process, seen from outside."""

    def finish(self, answer: Any) -> Row:
        """Give it its turn if it is ready for it, and take what it measured."""
        if answer == "ready":
            self.pipe.send("go")
            answer = self.receive()
        self.process.join()
        return answer


def run(arguments: argparse.Namespace) -> None:
    """Measure row by row, write the JSON after each, print the table."""
    quick, steps = arguments.quick, 2 if arguments.quick else arguments.steps
    file = RowFile.of(
        arguments, steps=steps, warmup=WARMUP, jobs=arguments.jobs,
        optimizer="AdamW, fused, not compiled",
    )  # fmt: skip
    if "attention" in arguments.parts:
        with one_thread(quick):
            run_attention(file, quick)
    if "model" in arguments.parts:
        context = QUICK_CONTEXT if quick else seed004.CONTEXT
        cases = choose_cases(arguments, context)
        # Blocks first: they are quick to compile.
        todo = [(case, scope) for scope in sorted(arguments.scopes) for case in cases]
        # A trial is about every path; what compiling takes is not to be quoted of it.
        run_models(file, todo, steps, max(arguments.jobs, len(todo)) if quick else arguments.jobs)
    file.tell(arguments.plot, draw, show)


def run_models(file: RowFile, todo: list[tuple[ModelCase, str]], steps: int, jobs: int) -> None:
    """`jobs` models compile at once; then their steps are timed in turn."""
    todo = [(case, scope) for case, scope in todo if f"{case.key}/{scope}" not in file]
    threads = max(1, (os.cpu_count() or 1) // jobs)
    for first in range(0, len(todo), jobs):
        if file.time_is_up():
            return
        batch = todo[first : first + jobs]
        say("compiling " + ", ".join(f"{case.size} {scope}" for case, scope in batch))
        workers = [Worker(work, case, scope, steps, threads) for case, scope in batch]
        answers = [worker.receive(file.time_left()) for worker in workers]
        started = list(zip(batch, workers, answers, strict=True))
        for (case, scope), worker, answer in started:
            if answer is None:
                say(f"{case.size} {scope}: not compiled when the time was up")
                worker.stop()
        for (case, scope), worker, answer in started:
            if answer is not None:
                row: Row = {"key": f"{case.key}/{scope}", "part": "model", "scope": scope}
                row |= case.describe()
                row["seed"] = seed004.compiled(case.size, case.precision)
                row |= worker.finish(answer)
                file.add(row)
                say(_describe(row))


def run_attention(file: RowFile, quick: bool) -> None:
    """Tables 4 and 5: the rows of `bench attention` that compare compiled with eager."""
    from shardwise.lab.attention.sweeps import Bench, make_cases

    bench: Bench | None = None
    cases = [c for c in make_cases(("tables45",), quick) if c.backend in ATTENTION_BACKENDS]
    for case in file.missing(cases, lambda case: f"attention/{case.key}"):
        bench = bench or Bench(quick, ceilings=False)
        row = {"key": f"attention/{case.key}", "part": "attention", **asdict(bench.measure(case))}
        file.add(row)
        told = row["failure"] or ", ".join(f"{part} {row['ms'][part]:.3f} ms" for part in PARTS[:2])
        say(f"attention {case.backend} {case.dim} {case.seq}: {told}")


def _describe(row: Row) -> str:
    name = f"{row['size']} {row['precision']} {row['scope']}: "
    if "failure" in row:
        return name + row["failure"]
    return name + (
        f"first call {row['first_call_s']:.1f} s, then {_sum_up(row['compiled'])} ms against eager "
        f"{_sum_up(row['eager'])}"
    )


def _sum_up(side: Row) -> str:
    return " + ".join(f"{side[part]['mean']:.1f}" for part in PARTS)


def draw(rows: list[Row]) -> str:
    """A whole step of each model, and attention's both passes, compiled and eager."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in rows:
        if row.get("failure"):
            continue
        if row["part"] == "model":
            sides = {side: sum(p["mean"] for p in row[side].values()) for side in SIDES}
            groups[f"{row['size']} {row['precision']}, {row['scope']}"] = {**sides}
        else:
            case = row["case"]
            side = SIDES[case["backend"] == "plain"]
            at = f"attention {case['dim']} x {case['seq']:,}"
            groups.setdefault(at, {})[side] = row["ms"]["forward"] + row["ms"]["backward"]
    return draw_bars("Compiled against eager: steps of models, passes of attention", groups, "ms")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per model, scope and part; a line per shape of attention and pass."""
    environment = facts["environment"]
    models, shapes, eager = [], [], {}
    for row in rows:
        if row["part"] == "attention":
            at = row["case"]["dim"], row["case"]["seq"]
            if row["case"]["backend"] == "plain":
                eager[at] = row
            elif not row["failure"] and not eager[at]["failure"]:
                for part in PARTS[:2]:
                    pair = (row["ms"][part], eager[at]["ms"][part])
                    seeds = tuple(side["seed"].get(part) for side in (row, eager[at]))
                    shapes.append([*map(str, at), part, *_cells(pair, seeds, 3)])
            continue
        name = [row["size"], row["precision"], row["scope"]]
        if "failure" in row:
            models.append([*name, "", row["failure"]])
            continue
        for part in PARTS:
            pair = tuple(row[side][part]["mean"] for side in SIDES)
            seeds = tuple(row["seed"].get(f"{side}_{part}") for side in SIDES)
            models.append([*name, part, *_cells(pair, seeds, 2)])
        models.append([*name, "first call, s", f"{row['first_call_s']:.1f}", "", ""])
    for title, left, lines in (
        ("a step's parts, mean ms", ("size", "dtype", "scope", "part"), models),
        ("attention, median ms", ("width", "tokens", "pass"), shapes),
    ):
        if lines:
            heads = (*left, *SIDES, "document's")
            print_table(title, heads, lines, environment, left, width=80)


def _cells(pair: tuple[float, ...], seeds: tuple[float | None, ...], digits: int) -> list[str]:
    """Compiled, eager, and the document's pair if it has one."""
    known = [f"{value:.{digits}f}" for value in seeds if value is not None]
    return [*(f"{value:.{digits}f}" for value in pair), " / ".join(known)]
