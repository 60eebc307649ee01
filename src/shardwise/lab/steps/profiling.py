"""What profiling costs: steps with the profiler on and off, in turn, in one run.

"On" is a step that is timed, with marks alone. What a traced step costs is measured beside: on CUDA
the second of a profile, on a CPU the last.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.description.language_model import draw_tokens, make_model
from shardwise.lab.charts import draw_bars
from shardwise.lab.rows import describe_run, say
from shardwise.lab.steps import engines
from shardwise.lab.steps.cases import Family, StepCase, StepChoice, describe_case, select
from shardwise.profiling.collect import TRACED_ON_CUDA, Profile
from shardwise.profiling.results import Row, print_table, write_json
from shardwise.profiling.timing import Step, spread, time_idle_mark

CASES = {"gloo2": ("gloo2",), "h200": ("h200-4x2048-300GBs", "h200-1x2048-300GBs")}
_ROUNDS = {"cpu": 12, "cuda": 48}
_STEPS = 3  # in a round, with and without


def run(arguments: argparse.Namespace) -> None:
    """Measure all cases that this machine can run, write the JSON, print a line for each."""
    facts = describe_run(arguments)
    rows: list[Row] = []
    chosen = select(arguments.cases, StepChoice(strategies=("zero3",), quick=arguments.quick))
    for name, family in chosen.items():
        cases = [case for case in family.cases if case.name in CASES[name]]
        rounds = 1 if arguments.quick else arguments.rounds
        rows += family.ask(_measure_all, family, cases, rounds)
    if arguments.json is not None:
        write_json(arguments.json, **facts, rows=rows)
    if arguments.plot is not None:
        groups = {row["case"]: {m: row[m]["step_ms"] for m in ("off", "on")} for row in rows}
        arguments.plot.write_text(draw_bars("Steps with the profiler off and on", groups, "ms"))
    show(rows, facts)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A line per case."""
    lines = [
        [
            row["case"], f"{row['off']['step_ms']:.1f}", f"{row['on']['step_ms']:.1f}",
            f"{row['step_ratio']:.3f}", f"{row['paired_ratio']:.3f}", f"{row['traced_ratio']:.3f}",
            f"{row['share_of_step_off']:.1e}",
        ]
        for row in rows
    ]  # fmt: skip
    heads = ("case", "off ms", "on ms", "ratio", "paired", "traced", "off: of step")
    print_table("a step with the profiler on", heads, lines, facts["environment"], heads[:1], 80)


def _measure_all(family: Family, cases: list[StepCase], rounds: int | None) -> list[Row]:
    return [_measure(family, case, rounds or _ROUNDS[family.device]) for case in cases]


def _measure(family: Family, case: StepCase, rounds: int) -> Row:
    say(f"{case.name}: {rounds} times {_STEPS} steps, off and on in turn")
    with case.open_network():
        wrapped = engines.wrap_ours(make_model(case.size, family.device), "zero3", case.precision)
        tokens = draw_tokens(case.size, case.batch, case.length, family.device)
        run = wrapped.step_on(*tokens)
        for _ in range(case.warmup):
            run()
        samples: dict[str, list[tuple[float, float]]] = {"off": [], "on": []}
        traced: list[tuple[float, float]] = []
        timer = _timer(family)
        # On CUDA a profile begins with traced steps, and the next one is not a usual one yet.
        untimed = TRACED_ON_CUDA + 1 if family.device == "cuda" else 0
        made = 0
        for i in range(rounds):
            for mode in ("off", "on") if i % 2 else ("on", "off"):
                if mode == "off":
                    samples[mode] += [timer(run) for _ in range(_STEPS)]
                    continue
                # More than are run: neither stopping nor a CPU's traced step is part of these.
                profile = Profile(wrapped.model, 100)
                profile.__enter__()
                for _ in range(untimed):
                    timer(run)
                samples[mode] += [timer(run) for _ in range(_STEPS)]
                found = profile.marks
                made = len(found.ranges) + len(found.calls) + len(found.contexts)
                profile.cancel()
                profile.close()
                if untimed:
                    took = profile.taken.durations()[TRACED_ON_CUDA - 1]
                    traced.append((took / 1e6, profile.seconds * 1e3))
        if not untimed:
            traced = [_trace(wrapped.model, run) for _ in range(rounds)]
    sides = {mode: _side(taken) for mode, taken in samples.items()}
    ratios = _paired(samples)
    nothing, steps = time_idle_mark(), _STEPS + untimed
    return {
        "case": case.name,
        "strategy": "zero3",
        **sides,
        "paired_ratio": statistics.median(ratios),
        "paired_spread": spread(ratios),
        **{
            f"{name}_ratio": sides["on"][f"{name}_ms"] / sides["off"][f"{name}_ms"]
            for name in ("step", "cpu", "least_step", "least_cpu")
        },
        **_describe_traced(traced, sides["off"]["step_ms"]),
        "marks_per_step": made // steps,
        "ns_per_mark_off": nothing,
        "share_of_step_off": nothing * (made // steps) / 1e6 / sides["off"]["step_ms"],
        "settings": describe_case(family, case, False),
    }


def _paired(samples: dict[str, list[tuple[float, float]]]) -> list[float]:
    """Steps with over steps without, of each round: what others do to a machine changes slowly."""

    def rounds(mode: str) -> list[float]:
        taken = [each[0] for each in samples[mode]]
        return [statistics.median(taken[i : i + _STEPS]) for i in range(0, len(taken), _STEPS)]

    return [on / off for on, off in zip(rounds("on"), rounds("off"), strict=True)]


def _trace(model: nn.Module, run: Step) -> tuple[float, float]:
    """Milliseconds of a traced step, and of starting, stopping and reading around it."""
    with Profile(model, 2) as profile:
        for _ in range(2):
            dist.barrier()
            run()
    start, end = profile.bounds[-1]
    return (end - start) / 1e6, profile.seconds * 1e3


def _describe_traced(taken: list[tuple[float, float]], off: float) -> dict[str, float]:
    if not taken:
        return {}
    step_ms = statistics.median(each[0] for each in taken)
    around = statistics.median(each[1] for each in taken)
    return {"traced_step_ms": step_ms, "traced_ratio": step_ms / off, "around_ms": around}


def _timer(family: Family) -> Callable[[Step], tuple[float, float]]:
    """Milliseconds of a step, and of this process's cores in it, which others do not disturb."""

    def finish() -> None:
        if family.device == "cuda":
            torch.cuda.synchronize()

    def timer(run: Step) -> tuple[float, float]:
        if family.real:
            dist.barrier()
        finish()
        began, used = perf_counter(), process_time()
        run()
        finish()
        return (perf_counter() - began) * 1e3, (process_time() - used) * 1e3

    return timer


def _side(taken: list[tuple[float, float]]) -> dict[str, float]:
    steps, cpus = [each[0] for each in taken], [each[1] for each in taken]
    return {
        "step_ms": statistics.median(steps),
        "step_spread_ms": spread(steps),
        "least_step_ms": min(steps),
        "cpu_ms": statistics.median(cpus),
        "cpu_spread_ms": spread(cpus),
        "least_cpu_ms": min(cpus),
    }
