"""Two runs in one page, and their differences in words."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardwise.errors import UserError
from shardwise.reporting.compose import curves, describe, find_in, side, unit_rows, wire
from shardwise.reporting.findings.finding import SHOWN, Finding
from shardwise.reporting.run import Run
from shardwise.reporting.words import PARTS, join, name_units, show_bytes, show_share, show_time
from shardwise.run_files import TRACED, UNTRACED
from shardwise.timeline import Timeline


def compose_comparison(first: Run, second: Run) -> dict[str, Any]:
    """The page of two runs."""
    first, second = mark_traced(*tell_apart(first, second))
    differences = compare(first, second)
    sides = [
        side(run, run.timeline, run.name) for run in (first, second) if run.timeline is not None
    ]
    shown = differences[:SHOWN]
    return {
        "kind": "comparison",
        "title": f"{first.name} and {second.name}",
        "summary": [],
        "findings": [finding.to_dict() for finding in shown],
        "more": [
            finding.to_dict() for finding in (*differences[SHOWN:], *_own(first), *_own(second))
        ],
        "sides": sides,
        "units": unit_rows(sides),
        "wires": [wire(run) for run in (first, second) if run.messages],
        "curves": curves([first, second]),
        "runs": [describe(first), describe(second)],
    }


def tell_apart(first: Run, second: Run) -> tuple[Run, Run]:
    """The same runs under names that differ: their engines, their titles, their directories, else A
    and B.
    """
    runs = (first, second)
    labels = [run.timeline.labels if run.timeline else {} for run in runs]
    choices = [
        [of_run.get("engine", "") for of_run in labels],
        [of_run.get("title", "") for of_run in labels],
        [run.name for run in runs],
    ]
    names = next(
        (pair for pair in choices if all(pair) and pair[0] != pair[1]),
        [f"{first.name} (A)", f"{second.name} (B)"],
    )
    return _renamed(first, names[0]), _renamed(second, names[1])


def _renamed(run: Run, name: str) -> Run:
    return replace(run, name=name)


def mark_traced(first: Run, second: Run) -> tuple[Run, Run]:
    """The same runs; if only one shows a traced step, its name says so wherever it stands."""
    if not differ_in_timing(first.timeline, second.timeline):
        return first, second
    a, b = (
        _renamed(run, f"{run.name} (traced)") if timing_of(run.timeline) == TRACED else run
        for run in (first, second)
    )
    return a, b


def timing_of(timeline: Timeline | None) -> str:
    """Whether the step that is shown was traced while it was timed; "" where nobody says, as in a
    simulation. Profiles before the label `timing` tell by what a traced step took beside.
    """
    labels = timeline.labels if timeline is not None else {}
    if "timing" in labels or "step_ms" not in labels:
        return labels.get("timing", "")
    note = labels.get("note", "")
    apart = "traced_ms" in labels or note.startswith("the profile ended before")
    return UNTRACED if apart and not note.startswith("the traced step is shown") else TRACED


def differ_in_timing(a: Timeline | None, b: Timeline | None) -> bool:
    return {timing_of(a), timing_of(b)} == {TRACED, UNTRACED}


def compare(first: Run, second: Run) -> list[Finding]:
    """What differs between two measured steps, the largest difference first; at least three."""
    a, b = first.timeline, second.timeline
    if a is None or b is None:
        return _compare_metrics(first, second)
    if differ_in_timing(a, b):
        found = _explain_timing(first, second, a, b)
    else:
        found = [_step(first.name, second.name, a.step, b.step)]
        mine, other = a.breakdown().parts(), b.breakdown().parts()
        apart = {name: other[name] - mine[name] for name in mine}
        named = sorted(apart, key=lambda name: (-abs(apart[name]), -mine[name]))
        for name in named[:2]:
            found.append(_part(first, second, name, mine[name], other[name]))
    if a.memory and b.memory:
        peaks = a.peak(), b.peak()
        roles = {
            role: peaks[1].by_role.get(role, 0) - peaks[0].by_role.get(role, 0)
            for role in {*peaks[0].by_role, *peaks[1].by_role}
        }
        role = max(roles, key=lambda r: abs(roles[r]), default="")
        most = f"; most of it {role} ({_signed_bytes(roles[role])})" if role and roles[role] else ""
        found.append(
            Finding(
                "memory",
                f"Memory peaks at {show_bytes(peaks[0].total)} in {first.name} and "
                f"{show_bytes(peaks[1].total)} in {second.name} "
                f"({_signed_bytes(peaks[1].total - peaks[0].total)}){most}.",
            )
        )
    return found


def _explain_timing(first: Run, second: Run, a: Timeline, b: Timeline) -> list[Finding]:
    """Steps of two kinds are not compared; what both took while they were traced is, if known."""
    traced, other = (first, second) if timing_of(a) == TRACED else (second, first)
    found = [
        Finding(
            "step",
            f"The step of {traced.name} was timed while it was traced, which makes it longer, that "
            f"of {other.name} was not: their times do not compare.",
            "Profile both again with the same number of steps, at least two (on CUDA three).",
        )
    ]
    took = [float(t.labels.get("traced_ms", t.labels["step_ms"])) * 1e6 for t in (a, b)]
    if all("traced_ms" in t.labels or timing_of(t) == TRACED for t in (a, b)):
        what = f"While they are traced, a step takes {show_time(took[0])} in {first.name} and "
        found.append(Finding("fact", f"{what}{show_time(took[1])} in {second.name}."))
    return found


def _step(first: str, second: str, a: int, b: int) -> Finding:
    if abs(b - a) < 0.005 * a:
        return Finding("step", f"Both steps take {show_time(a)}.")
    faster, slower, low, high = (second, first, b, a) if b < a else (first, second, a, b)
    return Finding(
        "step",
        f"{faster} is {show_share(1 - low / high)} faster: its step takes {show_time(low)}, that "
        f"of {slower} {show_time(high)}.",
        cost_ns=high - low,
    )


def _part(first: Run, second: Run, name: str, mine: int, other: int) -> Finding:
    verb = "take" if name == "copies" else "takes"
    what = (
        f"{PARTS[name].capitalize()} {verb} {show_time(mine)} in {first.name} and "
        f"{show_time(other)} in {second.name}"
    )
    if mine == other:
        return Finding(name, f"{PARTS[name].capitalize()} {verb} {show_time(mine)} in both.")
    units: tuple[str, ...] = ()
    if name in ("exposed_transfer", "waiting_for_peers"):
        assert first.timeline is not None and second.timeline is not None
        read = "exposed" if name == "exposed_transfer" else "waiting"
        maps = [getattr(run.timeline, read)() for run in (first, second)]
        keys = {*maps[0], *maps[1]}
        apart = {key: maps[1].get(key, 0) - maps[0].get(key, 0) for key in keys}
        sign = 1 if other > mine else -1
        large = sorted(apart, key=lambda key: -sign * apart[key])[:3]
        large = [key for key in large if sign * apart[key] > 0.1 * abs(other - mine)]
        if large:
            units = tuple(dict.fromkeys(unit for unit, _ in large))
            phases = join(sorted({phase for _, phase in large}))
            what += f"; most of the difference is at {name_units(sorted(units))} in {phases}"
    return Finding(name, f"{what}.", cost_ns=abs(other - mine), units=units)


def _compare_metrics(first: Run, second: Run) -> list[Finding]:
    for run in (first, second):
        if not run.metrics:
            raise UserError(
                f"{first.name} and {second.name} have nothing in common to compare: one has only a "
                "timeline, the other only logged steps; profile both"
            )
    found = []
    for name, word, show in (
        ("step_s", "A step", lambda v: show_time(v * 1e9)),
        ("loss", "The loss at the end", lambda v: f"{v:.3f}"),
        ("memory_bytes", "Memory of rank 0", show_bytes),
    ):
        values = [[v for v in run.column(name) if v is not None] for run in (first, second)]
        if not all(values):
            found.append(Finding("fact", f"{word} is not known of both."))
            continue
        a, b = ((v[-1] if name == "loss" else sorted(v)[len(v) // 2]) for v in values)
        verb = "is" if name != "step_s" else "takes"
        what = f"{word} {verb} {show(a)} in {first.name} and {show(b)} in {second.name}."
        found.append(Finding("fact", what))
    return found


def _own(run: Run) -> list[Finding]:
    """The first finding of a run by itself, under its name."""
    found = find_in(run)[0]
    return [replace(found, what=f"{run.name}: {found.what}")]


def _signed_bytes(count: int) -> str:
    return f"{'+' if count > 0 else '−' if count < 0 else ''}{show_bytes(abs(count))}"  # noqa: RUF001
