"""The bytes of a step's collectives: of each span, and against the time that they took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from shardwise.description.parameters import ITEMSIZES
from shardwise.reporting.formats import name_collective
from shardwise.reporting.run import Run
from shardwise.timeline import Span

LEAST_BYTES = 1024  # a smaller message (the gradients' norm) has no bandwidth to speak of
_CALLS = ("transfer", "waiting")  # roles of a collective's spans

Key = tuple[str, str, str]  # collective, unit, phase


def _key_of(span: Span) -> Key:
    return name_collective(span.name), span.unit, span.phase


def measured_bytes(spans: Sequence[Span], messages: Mapping[str, Any]) -> list[int | None]:
    """Bytes of each span that is a collective (or its wait for peers), as messages.json lists them
    in order; None where it does not say.
    """
    listed: dict[Key, list[int]] = defaultdict(list)
    for entry in messages.get("messages", ()):
        key = name_collective(entry["collective"]), entry["unit"], entry["phase"]
        listed[key].append(int(entry["bytes"]))
    seen: Counter[Key] = Counter()
    found: list[int | None] = []
    for span in spans:
        sizes = listed.get(_key_of(span)) if span.role in _CALLS else None
        found.append(sizes[min(seen[_key_of(span)], len(sizes) - 1)] if sizes else None)
        seen[_key_of(span)] += span.role == "transfer"
    return found


def planned_bytes(
    spans: Sequence[Span], plan: Mapping[str, Any], micro_batches: int
) -> list[int | None]:
    """The same as the plan has them: a gather moves the unit in the compute dtype, a reduce in the
    reduce dtype, codes a byte for each element. Several calls in one micro-batch share the unit.
    """
    sizes = _unit_sizes(plan)
    calls = Counter(_key_of(span) for span in spans if span.role == "transfer")
    found: list[int | None] = []
    for span in spans:
        collective, unit, _ = key = _key_of(span)
        size = sizes.get((collective, unit)) if span.role in _CALLS else None
        times = min(calls[key], micro_batches) or 1
        found.append(None if size is None else size * times // max(1, calls[key]))
    return found


def _unit_sizes(plan: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    shard = (plan.get("mesh") or (1, 1))[1]
    found: dict[tuple[str, str], int] = {}
    for unit in plan.get("units") or ():
        gathered = reduced = 0
        for parameter in unit["parameters"]:
            numel, own = prod(parameter["shape"]), parameter["dtype"]
            coded = plan.get("gather_dtype") and len(parameter["shape"]) > 1
            size = ITEMSIZES.get(plan.get("compute_dtype") or own, 4)
            gathered += numel + numel // 64 if coded else numel * size
            if parameter.get("trainable", True):
                reduced += numel * ITEMSIZES.get(plan.get("reduce_dtype") or own, 4)
        found["all-gather", unit["name"]] = gathered
        found["reduce-scatter", unit["name"]] = reduced
        found["all-to-all", unit["name"]] = reduced
        found["all-reduce", unit["name"]] = reduced // shard
    return found


def bandwidth(run: Run) -> dict[str, Any]:
    """The run's messages, and the curves that they should follow, as bytes and seconds."""

    def large(name: str) -> list[dict[str, Any]]:
        return [
            {**entry, "collective": name_collective(entry["collective"])}
            for entry in run.messages.get(name, ())
            if entry["bytes"] >= LEAST_BYTES and entry["seconds"] > 0
        ]

    sent = large("messages")
    collectives = {message["collective"] for message in sent}
    return {
        "label": run.name,
        "cluster": run.messages.get("cluster", ""),
        "messages": sent,
        "curve": [point for point in large("curve") if point["collective"] in collectives],
    }
