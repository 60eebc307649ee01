"""The step benchmark: one training step of shardwise against torch's engines.

Every family of cases runs in processes of its own, one per real rank, so that a process group, a
thread count or a CUDA context of one never meets another.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from functools import partial
from typing import Any

import torch

from shardwise.description.language_model import draw_tokens
from shardwise.lab.charts import draw_bars
from shardwise.lab.rows import RowFile, say
from shardwise.lab.steps import engines
from shardwise.lab.steps.cases import Family, StepCase, StepChoice, describe_case, select
from shardwise.lab.steps.engines import Wrap, Wrapped
from shardwise.lab.steps.measure import BenchmarkError, measure
from shardwise.lab.steps.models import build_model
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Side

SIDES = ("ours", "theirs")


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
    file = RowFile.of(arguments, lambda row: f"{row['case']} {row['strategy']}")
    for family in select(arguments.cases, choice).values():
        for case in file.missing(family.cases, lambda c: f"{c.name} {c.strategies[-1]}"):
            alone = dataclasses.replace(family, cases=(case,))
            answer = family.ask(compare_all, alone, arguments.quick)
            if "error" in answer:
                sys.exit(f"shardwise: {answer['error']}")
            for row in answer["rows"]:
                file.add(row)
        for case in family.cases:
            for row in file.rows:
                if row["case"] == case.name and case.through == "capture":
                    _measure_alone(file, family, case, row)
    rows = file.rows
    if arguments.plot is not None:
        arguments.plot.write_text(draw(rows), encoding="utf-8")
    if rows:
        show(rows, file.facts)
    else:
        print("nothing was measured: no case of these is left on this machine")


def _measure_alone(file: RowFile, family: Family, case: StepCase, row: Row) -> None:
    """Add bytes of each candidate in a process that has nothing else on the device."""
    found = row.setdefault("alone", {})
    for name in [name for name in _wraps(case) if name not in found]:
        if file.time_is_up():
            return
        say(f"{case.name} {row['strategy']}: {name} alone")
        found[name] = family.ask(take_memory, family, case, row["strategy"], name)
        file.write()


def take_memory(family: Family, case: StepCase, strategy: str, name: str) -> dict[str, int]:
    """The most bytes that a candidate has allocated and reserved since its process began, and what
    is reserved once its steps repeat.
    """
    tokens = draw_tokens(case.size, case.batch, case.length, family.device)
    with case.open_network():
        step = _build(_wraps(case)[name], strategy, family, case).step_on(*tokens)
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
    builds = {
        name: partial(_build, wrap, strategy, family, case) for name, wrap in _wraps(case).items()
    }
    with case.open_network() as emulation:
        measured = measure(family, case, builds, emulation)
    sides, parity = measured.sides, measured.parity.get("theirs")
    if measured.failures:
        raise BenchmarkError(
            f"{case.name} {strategy}, against {engines.PEERS[strategy]}: "
            f"{measured.failures['theirs']}"
        )
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
        "settings": describe_case(family, case, quick) | measured.settings,
    }


def _wraps(case: StepCase) -> dict[str, Wrap]:
    both = {"ours": engines.OURS[case.through], "theirs": engines.THEIRS[case.through]}
    return both | engines.BESIDE.get(case.through, {})


def _build(wrap: Wrap, strategy: str, family: Family, case: StepCase) -> Wrapped:
    model: Any = build_model(case.size, family.device)
    return wrap(model, strategy, case.precision)


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
