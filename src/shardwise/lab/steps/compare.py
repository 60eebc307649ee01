"""The step benchmark: one training step of shardwise against torch's engines.

Every family of cases runs in processes of its own, one per real rank, so that a process group, a
thread count or a CUDA context of one never meets another.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
from contextlib import nullcontext
from typing import Any

import torch

from shardwise.description.language_model import draw_tokens
from shardwise.emulation.collectives import Emulation
from shardwise.lab.charts import draw_bars
from shardwise.lab.processes import time_on_ranks
from shardwise.lab.rows import describe_run, say
from shardwise.lab.steps import engines
from shardwise.lab.steps.cases import Family, StepCase, StepChoice, describe_case, select
from shardwise.lab.steps.engines import Wrap, Wrapped
from shardwise.lab.steps.models import build_model
from shardwise.profiling import footprint, timing
from shardwise.profiling.results import Row, print_table, write_json
from shardwise.profiling.timing import Sample, Side, Step

SIDES = ("ours", "theirs")
TOLERANCE = 1e-5
PARITY_STEPS = 3
LEFT_OVER = 2**28  # bytes that may stay on the device between them without a word


class BenchmarkError(Exception):
    """A comparison that would not be worth its figures."""


RATIOS = {
    "step": "step_ms", "device": "device_ms", "cpu": "cpu_ms", "memory": "peak_bytes",
    "reserved": "reserved_bytes",
}  # fmt: skip


def compare_sides(ours: Side, theirs: Side) -> Row:
    """Both candidates' figures, and ours over the peer's: below 1 is better. None is what the
    device cannot tell.
    """
    row: Row = {}
    for name, figure in RATIOS.items():
        mine, other = getattr(ours, figure), getattr(theirs, figure)
        row[f"{name}_ratio"] = None if mine is None or other is None else mine / other
    return row | {"ours": dataclasses.asdict(ours), "theirs": dataclasses.asdict(theirs)}


def run(arguments: argparse.Namespace) -> None:
    """Run the cases, write the JSON, print the table."""
    choice = StepChoice(
        arguments.strategies, arguments.steps, arguments.quick, arguments.through, arguments.only
    )
    facts = describe_run(arguments)
    rows: list[Row] = []
    for family in select(arguments.cases, choice).values():
        answer = family.ask(compare_all, family, arguments.quick)
        if "error" in answer:
            sys.exit(f"shardwise: {answer['error']}")
        rows += answer["rows"]
        if any(case.through == "capture" for case in family.cases):
            for row in answer["rows"]:
                row["alone"] = _measure_alone(family, row)
    if arguments.json is not None:
        write_json(arguments.json, **facts, rows=rows)
    if arguments.plot is not None:
        arguments.plot.write_text(draw(rows), encoding="utf-8")
    if rows:
        show(rows, facts)
    else:
        print("nothing was measured: no case of these is left on this machine")


def _measure_alone(family: Family, row: Row) -> dict[str, dict[str, int]]:
    """Bytes of each candidate in a process that has nothing else on the device."""
    case = next(case for case in family.cases if case.name == row["case"])
    found = {}
    for name in _wraps(case):
        say(f"{case.name} {row['strategy']}: {name} alone")
        found[name] = family.ask(take_memory, family, case, row["strategy"], name)
    return found


def take_memory(family: Family, case: StepCase, strategy: str, name: str) -> dict[str, int]:
    """The most bytes that a candidate has allocated and reserved since its process began, and what
    is reserved once its steps repeat.
    """
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    with case.open_network():
        step = _build(family, case, strategy, _wraps(case)[name]).step_on(*tokens)
        for _ in range(case.warmup + 2):
            step()
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "reserved_at_the_end": torch.cuda.memory_reserved(),
        }


def compare_all(family: Family, quick: bool) -> dict[str, Any]:
    """The rows of all cases of a family, or why there are none."""
    try:
        rows = [
            _compare(family, case, strategy, quick)
            for case in family.cases
            for strategy in case.strategies
        ]
    except BenchmarkError as error:
        return {"error": str(error)}
    return {"rows": rows}


def _compare(family: Family, case: StepCase, strategy: str, quick: bool) -> Row:
    """One row; `parity` is the largest relative difference of a parameter or gradient, None where
    nothing is sent and there are no values.
    """
    say(f"{case.name} {strategy}: {case.steps} steps each, in turn")
    with case.open_network() as emulation:
        measure = _measure_on_gpu if family.device == "cuda" else _measure_on_cpu
        sides, parity, settings = measure(family, case, strategy, emulation)
    found = compare_sides(sides["ours"], sides["theirs"])
    device = found["device_ratio"]
    alone = "" if device is None else f", on the device alone {device:.2f}"
    say(
        f"{case.name} {strategy}: {sides['ours'].step_ms:.1f} ms against "
        f"{sides['theirs'].step_ms:.1f}, ratio {found['step_ratio']:.2f}{alone}"
    )
    for name in sides.keys() - set(SIDES):
        say(f"  {name}: {sides[name].step_ms:.1f} ms, device {sides[name].device_ms}")
    return {
        "case": case.name,
        "strategy": strategy,
        "peer": engines.PEERS[strategy],
        **found,
        "beside": {
            name: dataclasses.asdict(side) for name, side in sides.items() if name not in SIDES
        },
        "parity": parity,
        "settings": describe_case(family, case, quick) | settings,
    }


Measured = tuple[dict[str, Side], float | None, dict[str, Any]]


def _measure_on_cpu(
    family: Family, case: StepCase, strategy: str, emulation: Emulation | None
) -> Measured:
    """Both candidates live side by side and step in turn; memory is taken from a second pair.

    The memory step has a batch of one token, so that its peak is what the parameters cost
    (gathered, reduced, optimized) and next to nothing of activations.
    """
    candidates = {name: _build(family, case, strategy, wrap) for name, wrap in _wraps(case).items()}
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    steps = {name: candidate.step_on(*tokens) for name, candidate in candidates.items()}
    parity = _check_parity(candidates, steps, case.name, strategy) if family.real else None
    timer = time_on_ranks if family.real else timing.timer_on("cpu")
    samples = timing.alternate(steps, case.steps, case.warmup, timer)
    settings = {name: candidate.settings for name, candidate in candidates.items()}
    del candidates, steps
    one_token = draw_tokens(case.size, 1, 1, family.device)
    sides = {}
    for name, wrap in _wraps(case).items():

        def build(wrap: Wrap = wrap) -> Step:
            return _build(family, case, strategy, wrap).step_on(*one_token)

        sides[name] = Side.of(samples[name], footprint.peak_on_cpu(build))
    counted = "all CPU allocations of a step on one token (so: parameters, not activations)"
    return sides, parity, settings | {"peak_bytes": counted}


def _measure_on_gpu(
    family: Family, case: StepCase, strategy: str, emulation: Emulation | None
) -> Measured:
    """The candidates take turns on the device: build, warm up, time, free, some times each. In
    every block steps are timed with the host in them, then as many with the host ahead.
    """
    samples: dict[str, list[Sample]] = {name: [] for name in _wraps(case)}
    alone: dict[str, list[float]] = {name: [] for name in _wraps(case)}
    peaks: dict[str, list[tuple[int, int]]] = {name: [] for name in _wraps(case)}
    settings: dict[str, Any] = {
        "peak_bytes": "torch.cuda.max_memory_allocated over a step, less what was there before",
        "reserved_bytes": "torch.cuda.max_memory_reserved over a step, less what was there before",
        "device_ms": "by the device's clock, with the host a step ahead",
        "blocks": case.blocks,
    }
    collectives: dict[str, int] = {}
    first: dict[str, list[float]] = {}  # seconds of first steps, which compile
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    for _ in range(case.blocks):
        for name, wrap in _wraps(case).items():
            left = footprint.free_device()
            held = torch.cuda.memory_reserved()
            if left > LEFT_OVER:
                say(
                    f"warning: {left / 2**20:.0f} MiB stayed on the device after the last candidate"
                )
            candidate = _build(family, case, strategy, wrap)
            step = candidate.step_on(*tokens)
            if case.through == "compile":
                first.setdefault(name, []).append(round(timing.time_on_cuda(step).step_ms / 1e3, 2))
            rounds = math.ceil(case.steps / case.blocks)
            taken = timing.alternate({name: step}, rounds, case.warmup, timing.time_on_cuda)
            samples[name] += taken[name]
            if emulation is not None:
                hold = emulation.links_of(torch.device("cuda", 0)).delay
                for _ in range(rounds):
                    took, _ = timing.time_ahead(step, hold, taken[name], nullcontext())
                    alone[name].append(took)
            called = sum(emulation.calls.values()) if emulation else 0
            allocated, reserved = footprint.peaks_on_cuda(step)
            peaks[name].append((allocated - left, reserved - held))
            if emulation is not None:
                collectives[name] = sum(emulation.calls.values()) - called
            settings[name] = candidate.settings
            del candidate, step
    footprint.free_device()
    if first:
        settings["first_step_s"] = first
    calls = {name: n for name, n in collectives.items() if "captured" not in settings[name]}
    _check_emulated(case, emulation, calls)
    # Only the first block makes the libraries' workspaces; the others find them there.
    sides = {}
    for name in samples:
        allocated, reserved = (min(values) for values in zip(*peaks[name], strict=True))
        sides[name] = Side.of(
            samples[name], allocated, collectives.get(name), alone[name], reserved
        )
    return sides, None, settings


def _wraps(case: StepCase) -> dict[str, Wrap]:
    both = {"ours": engines.OURS[case.through], "theirs": engines.THEIRS[case.through]}
    return both | engines.BESIDE.get(case.through, {})


def _build(family: Family, case: StepCase, strategy: str, wrap: Wrap) -> Wrapped:
    model: Any = build_model(case.size, family.device)
    return wrap(model, strategy, case.precision)


def _check_parity(
    candidates: dict[str, Wrapped], steps: dict[str, Step], case: str, strategy: str
) -> float:
    """Train both for a few steps; an error on every rank if their parameters part."""
    for step in steps.values():
        for _ in range(PARITY_STEPS):
            step()
    worst, where = engines.largest_difference(candidates["ours"].model, candidates["theirs"].model)
    if worst > TOLERANCE:
        raise BenchmarkError(
            f"{case} {strategy}: after {PARITY_STEPS} steps from the same weights and inputs, "
            f"{where} differs from {engines.PEERS[strategy]}'s by {worst:.1e} of its largest "
            f"value (allowed {TOLERANCE:.0e}); nothing was timed"
        )
    return worst


def _check_emulated(
    case: StepCase, emulation: Emulation | None, collectives: dict[str, int]
) -> None:
    missed = [name for name, count in collectives.items() if count == 0]
    if emulation is not None and missed:
        raise BenchmarkError(
            f"{case.name}: no collective of {missed} went over the emulated network"
        )


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Times, then ratios; ratios are ours over the peer's."""
    names = ("case", "strategy")
    times, ratios, beside = [], [], []
    for row in rows:
        label = [row[name] for name in names]
        figures = [f"{row[s]['step_ms']:.1f} +-{row[s]['step_spread_ms']:.1f}" for s in SIDES]
        times.append([*label, row["peer"], *figures])
        found = [row[f"{ratio}_ratio"] for ratio in RATIOS]
        told = ["-" if ratio is None else f"{ratio:.2f}" for ratio in found]
        ratios.append([*label, *told, "-" if row["parity"] is None else f"{row['parity']:.0e}"])
        for name, side in row.get("beside", {}).items():
            over = row["ours"]["step_ms"] / side["step_ms"]
            beside.append([row["case"], name, f"{side['step_ms']:.1f}", f"{over:.2f}"])
    title = "one training step, ms: shardwise and torch"
    print_table(title, [*names, "peer", "ours", "theirs"], times, {}, (*names, "peer"), 80)
    title = "ratios: ours over theirs, below 1 is better"
    print_table(title, [*names, *RATIOS, "parity"], ratios, facts["environment"], names, 80)
    if beside:
        heads = ("case", "beside", "its ms", "ours over it")
        print_table("in the same turns", heads, beside, {}, heads[:2], 80)
    alone = [
        [row["case"], name, *(f"{bytes_ / 2**30:.2f}" for bytes_ in figures.values())]
        for row in rows
        for name, figures in row.get("alone", {}).items()
    ]
    if alone:
        columns = ("case", "alone", "allocated", "reserved", "at the end")
        print_table("GiB of a process", columns, alone, {}, columns[:2], 80)
    if any(row["settings"]["network"].startswith("emulated") for row in rows):
        print("emulated network: values are fabricated, times are not")


def draw(rows: list[Row]) -> str:
    """Steps of both sides, in bars."""
    groups = {
        f"{row['case']} {row['strategy']}": {side: row[side]["step_ms"] for side in SIDES}
        for row in rows
    }
    return draw_bars("One training step: ours and theirs", groups, "ms")
