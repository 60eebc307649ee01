"""Unit by unit: compute, exposed communication and bytes, of the sides of a report."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from shardwise.reporting.words import name_collective
from shardwise.timeline import Span, Timeline

Key = tuple[str, str, str]  # collective, unit, phase
DTYPE_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def place_of(unit: str, phase: str) -> str:
    """The unit; work of no unit is the optimizer's, or lies outside units."""
    return unit or ("optimizer" if phase == "optimizer" else "outside units")


def key_of(span: Span) -> Key:
    return name_collective(span.name), span.unit, span.phase


def count_bytes(spans: Sequence[Span], messages: Mapping[str, Any]) -> list[int | None]:
    """Bytes of each span that is a collective (or its wait for peers), as messages.json lists them
    in order; None where it does not say.
    """
    listed: dict[Key, list[int]] = defaultdict(list)
    for entry in messages.get("messages", ()):
        key = name_collective(entry["collective"]), entry["unit"], entry["phase"]
        listed[key].append(int(entry["bytes"]))
    seen: dict[Key, int] = defaultdict(int)
    found: list[int | None] = []
    for span in spans:
        values = listed.get(key_of(span)) if span.role in ("transfer", "waiting") else None
        found.append(values[min(seen[key_of(span)], len(values) - 1)] if values else None)
        seen[key_of(span)] += span.role == "transfer"
    return found


def plan_bytes(
    spans: Sequence[Span], plan: Mapping[str, Any], micro_batches: int
) -> list[int | None]:
    """The same as the plan has them: a gather moves the unit in the compute dtype, a reduce in the
    reduce dtype. Several calls in one micro-batch share the unit.
    """
    sizes = _unit_sizes(plan)
    calls: dict[Key, int] = defaultdict(int)
    for span in spans:
        calls[key_of(span)] += span.role == "transfer"
    found: list[int | None] = []
    for span in spans:
        collective, unit, _ = key = key_of(span)
        if span.role not in ("transfer", "waiting") or (collective, unit) not in sizes:
            found.append(None)
            continue
        times = min(calls[key], micro_batches) or 1
        found.append(sizes[collective, unit] * times // max(1, calls[key]))
    return found


def _unit_sizes(plan: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    shard = (plan.get("mesh") or (1, 1))[1]
    found: dict[tuple[str, str], int] = {}
    for unit in plan.get("units") or ():
        gathered = reduced = 0
        for parameter in unit["parameters"]:
            numel = 1
            for size in parameter["shape"]:
                numel *= size
            own = parameter["dtype"]
            gathered += numel * DTYPE_BYTES.get(plan.get("compute_dtype") or own, 4)
            if parameter.get("trainable", True):
                reduced += numel * DTYPE_BYTES.get(plan.get("reduce_dtype") or own, 4)
        found["all-gather", unit["name"]] = gathered
        found["reduce-scatter", unit["name"]] = reduced
        found["all-reduce", unit["name"]] = reduced // shard
    return found


def per_unit(
    timeline: Timeline, rank: int, spans: Sequence[Span], sizes: Sequence[int | None]
) -> dict[str, dict[str, int | None]]:
    """Nanoseconds of compute and of exposed transfer, and bytes of its collectives, by unit in the
    order in which they first run; what has no unit has rows of its own, so that the rows add up.
    `sizes` are the bytes of `spans`.
    """
    rows: dict[str, dict[str, int]] = defaultdict(lambda: {"compute": 0, "exposed": 0})
    moved: dict[str, int | None] = {}
    for span, size in zip(spans, sizes, strict=True):
        if span.role not in ("compute", "transfer"):
            continue
        place = place_of(span.unit, span.phase)
        row = rows[place]
        if span.role == "compute":
            row["compute"] += span.duration
        else:
            before = moved.get(place, 0)
            moved[place] = None if size is None or before is None else before + size
    for (unit, phase), nanoseconds in timeline.exposed(rank).items():
        rows[place_of(unit, phase)]["exposed"] += nanoseconds
    return {unit: {**row, "bytes": moved.get(unit)} for unit, row in rows.items()}
