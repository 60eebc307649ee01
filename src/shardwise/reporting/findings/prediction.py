"""The measured step against the predicted one."""

from __future__ import annotations

from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.formats import name_part, name_units, show_share, show_time
from shardwise.reporting.queries import compute_by_unit, exposed_by_unit, spans_of
from shardwise.timeline import Timeline

APART = 0.1  # of the prediction: a difference worth a sentence


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
