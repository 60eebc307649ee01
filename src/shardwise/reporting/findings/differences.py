"""What differs between two runs, in words."""

from __future__ import annotations

from dataclasses import replace

from shardwise.errors import UserError
from shardwise.reporting.findings import find_in
from shardwise.reporting.findings.finding import SHOWN, Finding
from shardwise.reporting.formats import (
    join,
    name_part,
    name_units,
    show_bytes,
    show_share,
    show_time,
)
from shardwise.reporting.run import Run
from shardwise.run_files import TRACED, UNTRACED
from shardwise.timeline import Timeline


def name_apart(first: Run, second: Run) -> tuple[Run, Run]:
    """The same runs under names that differ: their engines, their titles, their directories, else A
    and B. If only one shows a traced step, its name says so wherever it stands.
    """
    runs = first, second
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
    if _differ_in_timing(first.timeline, second.timeline):
        for i, run in enumerate(runs):
            names[i] += " (traced)" if _timing_of(run.timeline) == TRACED else ""
    return replace(first, name=names[0]), replace(second, name=names[1])


def _timing_of(timeline: Timeline | None) -> str:
    """Whether the step that is shown was traced while it was timed; "" where nobody says, as in a
    simulation. Profiles before the label `timing` tell by what a traced step took beside.
    """
    labels = timeline.labels if timeline is not None else {}
    if "timing" in labels or "step_ms" not in labels:
        return labels.get("timing", "")
    note = labels.get("note", "")
    apart = "traced_ms" in labels or note.startswith("the profile ended before")
    return UNTRACED if apart and not note.startswith("the traced step is shown") else TRACED


def _differ_in_timing(a: Timeline | None, b: Timeline | None) -> bool:
    return {_timing_of(a), _timing_of(b)} == {TRACED, UNTRACED}


def compare(first: Run, second: Run) -> tuple[list[Finding], list[Finding]]:
    """What differs between two runs, the largest difference first, to open with; then the rest,
    and what each run's own first finding is.
    """
    found = _compare_steps(first, second) or _compare_metrics(first, second)
    own = [(run, find_in(run)[0]) for run in (first, second)]
    named = [replace(finding, what=f"{run.name}: {finding.what}") for run, finding in own]
    return found[:SHOWN], [*found[SHOWN:], *named]


def _compare_steps(first: Run, second: Run) -> list[Finding]:
    """Two measured steps: at least three differences; none if one of them has none."""
    a, b = first.timeline, second.timeline
    if a is None or b is None:
        return []
    names = first.name, second.name
    if _differ_in_timing(a, b):
        found = _explain_timing(names, a, b)
    else:
        mine, other = a.breakdown().parts(), b.breakdown().parts()
        apart = sorted(mine, key=lambda part: (-abs(other[part] - mine[part]), -mine[part]))
        found = [_step(names, a, b), *(_part(names, a, b, part) for part in apart[:2])]
    return [*found, _memory(names, a, b)] if a.memory and b.memory else found


def _explain_timing(names: tuple[str, str], a: Timeline, b: Timeline) -> list[Finding]:
    """Steps of two kinds are not compared; what both took while they were traced is, if known."""
    traced, other = names if _timing_of(a) == TRACED else reversed(names)
    found = [
        Finding(
            "step",
            f"The step of {traced} was timed while it was traced, which makes it longer, that "
            f"of {other} was not: their times do not compare.",
            "Profile both again with the same number of steps, at least two (on CUDA three).",
        )
    ]
    took = [float(t.labels.get("traced_ms", t.labels["step_ms"])) * 1e6 for t in (a, b)]
    if all("traced_ms" in t.labels or _timing_of(t) == TRACED for t in (a, b)):
        what = f"While they are traced, a step takes {show_time(took[0])} in {names[0]} and "
        found.append(Finding("fact", f"{what}{show_time(took[1])} in {names[1]}."))
    return found


def _step(names: tuple[str, str], a: Timeline, b: Timeline) -> Finding:
    if abs(b.step - a.step) < 0.005 * a.step:
        return Finding("step", f"Both steps take {show_time(a.step)}.")
    (low, faster), (high, slower) = sorted(zip((a.step, b.step), names, strict=True))
    return Finding(
        "step",
        f"{faster} is {show_share(1 - low / high)} faster: its step takes {show_time(low)}, that "
        f"of {slower} {show_time(high)}.",
        cost_ns=high - low,
    )


def _part(names: tuple[str, str], a: Timeline, b: Timeline, part: str) -> Finding:
    mine, other = (getattr(timeline.breakdown(), part) for timeline in (a, b))
    begin = f"{name_part(part).capitalize()} {'take' if part == 'copies' else 'takes'}"
    if mine == other:
        return Finding(part, f"{begin} {show_time(mine)} in both.")
    what = f"{begin} {show_time(mine)} in {names[0]} and {show_time(other)} in {names[1]}"
    units: tuple[str, ...] = ()
    if part in ("exposed_transfer", "waiting_for_peers"):
        before, after = (
            t.exposed() if part == "exposed_transfer" else t.waiting() for t in (a, b)
        )  # fmt: skip
        sign = 1 if other > mine else -1
        more = {
            key: sign * (after.get(key, 0) - before.get(key, 0))
            for key in sorted({*before, *after})
        }
        large = sorted(more, key=lambda key: -more[key])[:3]
        large = [key for key in large if more[key] > 0.1 * abs(other - mine)]
        if large:
            units = tuple(dict.fromkeys(unit for unit, _ in large))
            phases = join(sorted({phase for _, phase in large}))
            what += f"; most of the difference is at {name_units(sorted(units))} in {phases}"
    return Finding(part, f"{what}.", cost_ns=abs(other - mine), units=units)


def _memory(names: tuple[str, str], a: Timeline, b: Timeline) -> Finding:
    mine, other = a.peak(), b.peak()
    roles = {
        role: other.by_role.get(role, 0) - mine.by_role.get(role, 0)
        for role in {**mine.by_role, **other.by_role}
    }
    role = max(roles, key=lambda r: abs(roles[r]), default="")
    most = f"; most of it {role} ({_signed_bytes(roles[role])})" if role and roles[role] else ""
    return Finding(
        "memory",
        f"Memory peaks at {show_bytes(mine.total)} in {names[0]} and {show_bytes(other.total)} in "
        f"{names[1]} ({_signed_bytes(other.total - mine.total)}){most}.",
    )


def _compare_metrics(first: Run, second: Run) -> list[Finding]:
    """Two runs by what they logged, as one of them or both have no measured step."""
    if not (first.metrics and second.metrics):
        raise UserError(
            f"{first.name} and {second.name} have nothing in common to compare: one has only a "
            "timeline, the other only logged steps; profile both"
        )
    found = []
    for name, begin, show in (
        ("step_s", "A step takes", lambda v: show_time(v * 1e9)),
        ("loss", "The loss at the end is", lambda v: f"{v:.3f}"),
        ("memory_bytes", "Memory of rank 0 is", show_bytes),
    ):
        known = [run.known(name) for run in (first, second)]
        if all(known):
            a, b = ((v[-1] if name == "loss" else sorted(v)[len(v) // 2]) for v in known)
            what = f"{begin} {show(a)} in {first.name} and {show(b)} in {second.name}."
        else:
            what = f"{begin.rpartition(' ')[0]} is not known of both."
        found.append(Finding("fact", what))
    return found


def _signed_bytes(count: int) -> str:
    return f"{'+' if count > 0 else '−' if count < 0 else ''}{show_bytes(abs(count))}"  # noqa: RUF001
