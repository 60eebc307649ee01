"""The measured step against the predicted one, and a run against what `--plan auto` said of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.formats import name_part, name_units, show_bytes, show_share, show_time
from shardwise.reporting.queries import compute_by_unit, exposed_by_unit, spans_of
from shardwise.reporting.run import Run
from shardwise.run_files import MISS
from shardwise.timeline import Timeline

APART = 0.1  # of the prediction: a difference worth a sentence

# What parts of a step come from, and what to do where they take longer than was said.
_CAUSES = {
    "exposed communication": (
        ("exposed_transfer", "waiting_for_peers"),
        "Look for other traffic on the links and for late ranks: the other findings say where.",
    ),
    "the host": (
        ("host_idle",),
        "Look for what else the host does: data loading, logging, other processes.",
    ),
    "compute": (
        ("compute", "contention", "copies"),
        "Look for other processes on the device and for clocks that dropped, then choose anew.",
    ),
}


def deviation(timeline: Timeline, predicted: Timeline | None) -> Finding | None:
    """The measured step is longer than the predicted one; which part and which units."""
    if predicted is None or timeline.step - predicted.step < APART * predicted.step:
        return None
    expected = predicted.breakdown().parts()
    apart = {name: took - expected[name] for name, took in timeline.breakdown().parts().items()}
    part = max(apart, key=lambda name: apart[name])
    units = _units_apart(timeline, predicted, part)
    rest = {"optimizer": "the optimizer's step", "outside units": "what is outside units"}
    where = f", most in {name_units([rest.get(u, u) for u in units])}" if units else ""
    what = (
        f"The step takes {show_time(timeline.step)} where {show_time(predicted.step)} were "
        f"predicted; {show_time(apart[part])} of the difference is {name_part(part)}{where}."
    )
    change = (
        "Calibrate the cluster's description on this machine (`shardwise calibrate`), then what "
        "still differs is the run's own."
        if part in ("compute", "copies")
        else f"The plan does not expect this much {name_part(part)}: the other findings say where."
    )
    return Finding("deviation", what, change, units=units)


def _units_apart(timeline: Timeline, predicted: Timeline, part: str) -> tuple[str, ...]:
    """The units whose difference is at least half of the largest one."""
    sides = timeline, predicted
    if part == "compute":
        mine, other = (compute_by_unit(spans_of(side, side.slowest)) for side in sides)
    elif part == "exposed_transfer":
        mine, other = (exposed_by_unit(side, side.slowest) for side in sides)
    else:
        return ()
    apart = {unit: took - other[unit] for unit, took in mine.items()}
    most = max(apart.values(), default=0)
    return tuple(unit for unit, more in apart.items() if more > max(0, 0.5 * most))


def agreement(timeline: Timeline, predicted: Timeline | None) -> Finding | None:
    """The measured step is about as long as predicted, or shorter."""
    if predicted is None:
        return None
    apart = timeline.step / predicted.step - 1
    if apart >= APART:
        return None
    near = abs(apart) < APART
    how = f"within {show_share(abs(apart))} of" if near else f"{show_share(-apart)} below"
    return Finding(
        "fact",
        f"The measured step of {show_time(timeline.step)} is {how} the predicted "
        f"{show_time(predicted.step)}.",
    )


def foreseen(run: Run) -> Finding | None:
    """What a plan that was chosen by trials took, over many steps, beside what was said of it: a
    miss with its cause, which comes first, or that all is as foreseen.
    """
    said, taken = run.choice.get("foreseen"), run.choice.get("taken")
    if not said or not taken:
        return None
    more = taken["step_ms"] - said["step_ms"]
    apart = more / said["step_ms"]
    held = taken.get("peak_bytes")
    memory = held / said["peak_bytes"] - 1 if held and said["peak_bytes"] else 0.0
    step = (
        f"a step takes {show_time(taken['step_ms'] * 1e6)} where "
        f"{show_time(said['step_ms'] * 1e6)} were said ({said['basis']})"
    )
    if max(abs(apart), abs(memory)) <= MISS:
        peak = f", its memory within {show_share(abs(memory))}" if held else ""
        return Finding(
            "good",
            f"The plan does as was said when it was chosen: {step}, within "
            f"{show_share(abs(apart))}{peak}.",
        )
    words, change = [], ""
    if abs(apart) > MISS:
        cause, change = _cause(run, said, taken)
        side = "longer" if more > 0 else "shorter"
        words.append(f"{step}, {show_share(abs(apart))} {side}: {cause}")
    if abs(memory) > MISS:
        words.append(
            f"memory peaks at {show_bytes(held)} where {show_bytes(said['peak_bytes'])} were said"
        )
        change = change or "The report's memory section says what it holds."
    what = f"The plan misses what was said when it was chosen: {'; '.join(words)}."
    return Finding("deviation", what, change, max(0, int(more * 1e6)), urgent=True)


def _cause(run: Run, said: Mapping[str, Any], taken: Mapping[str, Any]) -> tuple[str, str]:
    """What most of a miss comes from, as far as it can be told, and what to do."""
    more = taken["step_ms"] - said["step_ms"]
    apart = _parts_apart(run, said, taken)
    name = max(apart, key=lambda part: apart[part] * more)
    known = apart[name] * more > 0
    change = _CAUSES[name][1] if known and more > 0 else "Choose anew: `--plan auto --overwrite`."
    words = "nothing that was measured says why"
    if known:
        words = f"{show_time(abs(apart[name]) * 1e6)} of it {'more' if more > 0 else 'less'} {name}"
        if run.timeline is None and name == "compute":
            words += " or host (`--profile 3` tells them apart)"
    beyond = taken["load"] - max(taken["cores"], said["load"])
    if more > 0 and beyond > 1:
        words += (
            f"; other work ran beside it: {taken['load']:.1f} processes wanted "
            f"{taken['cores']} cores, {said['load']:.1f} when it was tried"
        )
    return words, change


def _parts_apart(run: Run, said: Mapping[str, Any], taken: Mapping[str, Any]) -> dict[str, float]:
    """Milliseconds that each cause takes beyond what was said; of a step without a profile only
    communication is known, and the rest is compute.
    """
    expected = {
        name: sum(said["parts_ms"].get(part, 0.0) for part in parts)
        for name, (parts, _) in _CAUSES.items()
    }
    if run.timeline is not None:
        # The profiled step in the length of the others.
        measured, factor = run.timeline.breakdown().parts(), taken["step_ms"] / run.timeline.step
        return {
            name: sum(measured[part] for part in parts) * factor - expected[name]
            for name, (parts, _) in _CAUSES.items()
        }
    more = taken["step_ms"] - said["step_ms"]
    exposed = taken.get("exposed_ms")
    waits = 0.0 if exposed is None else exposed - expected["exposed communication"]
    return {"exposed communication": waits, "compute": more - waits}
