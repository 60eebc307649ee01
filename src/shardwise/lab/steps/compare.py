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

from shardwise.children import ChildFailed
from shardwise.description.language_model import draw_tokens
from shardwise.emulation.run import joined
from shardwise.lab.charts import draw_bars
from shardwise.lab.processes import run_fresh
from shardwise.lab.rows import RowFile, say
from shardwise.lab.steps import engines
from shardwise.lab.steps.cases import Family, StepCase, StepChoice, describe_case, select
from shardwise.lab.steps.engines import Wrap, Wrapped
from shardwise.lab.steps.measure import BenchmarkError, insist_on_static_steps, measure
from shardwise.lab.steps.models import build_model
from shardwise.profiling import footprint
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import Side

SIDES = ("ours", "theirs")
GROWING = "theirs, segments that grow"  # torch's engine with the allocator as a Plan sets it


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
    file.rows = [row for row in file.rows if "failure" not in row]  # those are tried again
    for family in select(arguments.cases, choice).values():
        for case in file.missing(family.cases, lambda c: f"{c.name} {c.strategies[-1]}"):
            for row in _ask(family, case, arguments.quick):
                file.add(row)
                if case.captures and "failure" not in row:
                    _measure_alone(file, family, case, row)
        for case in family.cases:  # those that an earlier run had no time for
            for row in file.rows:
                if row["case"] == case.name and case.captures and "failure" not in row:
                    _measure_alone(file, family, case, row)
    rows = file.rows
    if arguments.plot is not None:
        arguments.plot.write_text(draw(rows), encoding="utf-8")
    if rows:
        show(rows, file.facts)
    else:
        print("nothing was measured: no case of these is left on this machine")


def _ask(family: Family, case: StepCase, quick: bool) -> list[Row]:
    """The rows of one case. Of captured steps one whose process ended has a row that says so, and
    the others are measured.
    """
    alone = dataclasses.replace(family, cases=(case,))
    try:
        answer = family.ask(compare_all, alone, quick)
    except ChildFailed as error:
        if not case.captures:
            raise
        lines = str(error).strip().splitlines()
        answer = {"error": f"its process ended: {lines[-1] if lines else 'no word'}"}
    if "error" not in answer:
        rows: list[Row] = answer["rows"]
        return rows
    if not case.captures:
        sys.exit(f"shardwise: {answer['error']}")
    say(f"{case.name}: {answer['error']}")
    return [{"case": case.name, "strategy": s, "failure": answer["error"]} for s in case.strategies]


def _measure_alone(file: RowFile, family: Family, case: StepCase, row: Row) -> None:
    """Add bytes of each candidate in a process that has nothing else on the device."""
    found = row.setdefault("alone", {})
    for name in [n for n in (*_wraps(case), GROWING) if "allocated" not in found.get(n, {})]:
        if name in row.get("failures", {}):
            continue
        if file.time_is_up():
            return
        say(f"{case.name} {row['strategy']}: {name} alone")
        try:
            found[name] = run_fresh(take_memory, family, case, row["strategy"], name)
        except ChildFailed as error:
            found[name] = {"failure": str(error).strip().splitlines()[-1]}
        if "failure" in found[name]:
            say(f"  {found[name]['failure']}")
        file.write()


def take_memory(family: Family, case: StepCase, strategy: str, name: str) -> dict[str, int]:
    """The most bytes that a candidate has allocated and reserved since its process, which is a new
    one, began, and what is reserved once its steps repeat.
    """
    if name == GROWING:
        footprint.let_segments_grow()
    wrap = _wraps(case)["theirs" if name == GROWING else name]
    with joined(0, family.world), case.open_network(), insist_on_static_steps():
        tokens = draw_tokens(case.size, case.batch, case.length, family.device)
        step = _build(wrap, strategy, family, case).step_on(*tokens)
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
        measured = measure(family, case, builds, emulation, isolates=case.captures)
    sides, parity = measured.sides, measured.parity.get("theirs")
    for side in SIDES:
        if side in measured.failures:
            raise BenchmarkError(
                f"{case.name} {strategy}, against {engines.PEERS[strategy]}: {side}: "
                f"{measured.failures[side]}"
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
        "failures": measured.failures,
        "parity": parity,
        "settings": describe_case(family, case, quick) | measured.settings,
    }


def _wraps(case: StepCase) -> dict[str, Wrap]:
    kind = case.candidates
    both = {"ours": engines.OURS[kind], "theirs": engines.THEIRS[kind]}
    return both | engines.BESIDE.get(kind, {})


def _build(wrap: Wrap, strategy: str, family: Family, case: StepCase) -> Wrapped:
    model: Any = build_model(case.size, family.device)
    return wrap(model, strategy, case.precision)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Times, then ratios; ratios are ours over the peer's."""
    names = ("case", "strategy")
    times, ratios, beside = [], [], []
    failed = [row for row in rows if "failure" in row]
    rows = [row for row in rows if "failure" not in row]
    for row in rows:
        label = [row[name] for name in names]
        figures = [f"{row[s]['step_ms']:.1f} +-{row[s]['step_spread_ms']:.1f}" for s in SIDES]
        times.append([*label, row["peer"], *figures])
        found = [row[f"{ratio}_ratio"] for ratio in RATIOS]
        told = ["-" if ratio is None else f"{ratio:.2f}" for ratio in found]
        ratios.append([*label, *told, "-" if row["parity"] is None else f"{row['parity']:.0e}"])
        for name, side in row.get("beside", {}).items():
            beside.append([row["case"], name, *_tell_side(side, row["ours"])])
        if row.get("beside"):
            beside.append([row["case"], "ours", *_tell_side(row["ours"], row["ours"])])
    title = "one training step, ms: shardwise and torch"
    print_table(title, [*names, "peer", "ours", "theirs"], times, {}, (*names, "peer"), 80)
    title = "ratios: ours over theirs, below 1 is better"
    print_table(title, [*names, *RATIOS, "parity"], ratios, facts["environment"], names, 80)
    if beside:
        heads = ("case", "beside", "its ms", "device", "host", "ours over it")
        print_table("in the same turns", heads, beside, {}, heads[:2], 80)
    alone = [
        [row["case"], name, *(f"{bytes_ / 2**30:.2f}" for bytes_ in figures.values())]
        for row in rows
        for name, figures in row.get("alone", {}).items()
        if "failure" not in figures
    ]
    if alone:
        columns = ("case", "alone", "allocated", "reserved", "at the end")
        print_table("GiB of a process", columns, alone, {}, columns[:2], 80)
    if any(row["settings"]["network"].startswith("emulated") for row in rows):
        print("emulated network: values are fabricated, times are not")
    for row in rows:
        for name, why in row.get("failures", {}).items():
            print(f"{row['case']}: {name}: {why}")
    for row in failed:
        print(f"{row['case']} {row['strategy']}: {row['failure']}")


def _tell_side(side: Row, ours: Row) -> list[str]:
    times = [side["step_ms"], side["device_ms"], side["cpu_ms"]]
    told = ["-" if ms is None else f"{ms:.1f}" for ms in times]
    return [*told, f"{ours['step_ms'] / side['step_ms']:.2f}"]


def draw(rows: list[Row]) -> str:
    """Steps of both sides, in bars."""
    groups = {
        f"{row['case']} {row['strategy']}": {side: row[side]["step_ms"] for side in SIDES}
        for row in rows
        if "failure" not in row
    }
    return draw_bars("One training step: ours and theirs", groups, "ms")
