"""All that a page shows, as one JSON value: the page holds it, draws from it, and adds nothing.

A page has one or two sides that it draws on the same axes: a run's measured step and its predicted
one, or the measured steps of two runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from shardwise.description.cluster import Cluster
from shardwise.errors import UserError
from shardwise.reporting.findings.find import choose, find
from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.findings.run import find_in_metrics
from shardwise.reporting.run import Run
from shardwise.reporting.text import summarize
from shardwise.reporting.units import count_bytes, plan_bytes
from shardwise.reporting.view import view
from shardwise.reporting.words import name_collective
from shardwise.timeline import Timeline

LEAST_MESSAGE = 1024


def find_in(run: Run) -> list[Finding]:
    """All findings of a run: of its timeline, else of its logged steps."""
    if run.timeline is None:
        return find_in_metrics(run)
    return find(
        run.timeline, run.predicted, run.plan, memory=run.memory, messages=run.messages
    )  # fmt: skip


def compose_run(run: Run) -> dict[str, Any]:
    """The page of one run."""
    first, rest = choose(find_in(run))
    sides = []
    if run.timeline is not None:
        sides.append(side(run, run.timeline, source_of(run.timeline)))
    if run.predicted is not None:
        sides.append(side(run, run.predicted, "predicted"))
    return {
        "kind": "run",
        "title": run.name,
        "summary": summarize(run, first[0].text),
        "findings": [finding.to_dict() for finding in first],
        "more": [finding.to_dict() for finding in rest],
        "sides": sides,
        "units": unit_rows(sides),
        "wires": [wire(run)] if run.messages else [],
        "curves": curves([run]),
        "runs": [describe(run)],
    }


def source_of(timeline: Timeline) -> str:
    return timeline.labels.get("source", "measured")


def side(run: Run, timeline: Timeline, label: str) -> dict[str, Any]:
    """One timeline as the page draws it."""
    is_prediction = timeline is run.predicted
    if is_prediction:
        batches = run.micro_batches
        shown = view(timeline, lambda spans: plan_bytes(spans, run.plan, batches), lambda _: {})
    else:
        shown = view(timeline, lambda spans: count_bytes(spans, run.messages), run.memory_of)
    source = "predicted" if is_prediction else source_of(timeline)
    return {"label": label, "source": source, **shown}


def unit_rows(sides: list[dict[str, Any]]) -> list[str]:
    """The units that compute on some side, in the first side's order."""
    names = (
        unit
        for shown in sides
        for content in shown["ranks"].values()
        for unit, row in content["units"].items()
        if row["compute"]
    )
    return list(dict.fromkeys(names))


def wire(run: Run) -> dict[str, Any]:
    """Messages and the curve that they should follow, as bytes and seconds. A message of a few
    bytes (the gradients' norm) has no bandwidth to speak of.
    """
    keys = ("unit", "phase", "ranks", "bytes", "seconds", "exposed_s")
    found: dict[str, dict[str, Any]] = {}

    def place(entry: Mapping[str, Any]) -> dict[str, Any]:
        name = name_collective(entry["collective"])
        return found.setdefault(name, {"curve": {}, "messages": []})

    sent = [m for m in run.messages.get("messages", ()) if m["bytes"] >= LEAST_MESSAGE]
    drawn = {name_collective(m["collective"]) for m in sent}
    for entry in run.messages.get("curve", ()):
        if name_collective(entry["collective"]) not in drawn or entry["bytes"] < LEAST_MESSAGE:
            continue
        line = place(entry)["curve"].setdefault(str(entry["ranks"]), {"bytes": [], "seconds": []})
        line["bytes"].append(entry["bytes"])
        line["seconds"].append(entry["seconds"])
    for entry in sent:
        if entry["seconds"] > 0:
            place(entry)["messages"].append({key: entry.get(key) for key in keys})
    return {
        "label": run.name,
        "cluster": run.messages.get("cluster", ""),
        "collectives": found,
    }


# metric, title, kind of its axis, what to say where it is missing
_CURVES = (
    ("loss", "Loss, nats per token", "number", "No finite loss was logged."),
    ("tokens_per_s", "Throughput, tokens per second", "count", "Not logged."),
    ("mfu", "MFU", "share", "Needs the device's peak rate: a cluster's "
     "description that knows it, and a profiled run."),
    ("memory_bytes", "Memory of rank 0", "bytes", "Not measured on this device."),
    ("exposed_share", "Waiting for communication", "share",
     "Not measured on this device."),
)  # fmt: skip


def curves(runs: list[Run]) -> list[dict[str, Any]]:
    """Metrics over steps, one line for each run that has them."""
    logged = [run for run in runs if run.metrics]
    if not logged:
        return []
    found = []
    for name, title, kind, note in _CURVES:
        lines = []
        for run in logged:
            values = mfu(run) if name == "mfu" else run.column(name)
            if any(value is not None for value in values):
                late = [v for v in values[len(values) // 2 :] if v is not None]
                typical = median(late) if late else None
                line = {"label": run.name, "x": run.column("step"), "y": values, "late": typical}
                lines.append(line)
        if name == "mfu" and lines and peak_flops(logged[0]):
            title += f", of {peak_flops(logged[0]) / 1e12:,.3g} TFLOP/s a rank"
        entropy = logged[0].facts.get("unigram_entropy") if name == "loss" else None
        found.append(
            {"name": name, "title": title, "kind": kind, "lines": lines,
             "note": "" if lines else note, "level": entropy,
             "level_name": "single tokens' entropy"}
        )  # fmt: skip
    return found


def mfu(run: Run) -> list[float | None]:
    """Model FLOP utilization of every logged step: as logged, else 6 FLOP for each parameter and
    token over the peak of all devices.
    """
    logged = run.column("mfu")
    if any(value is not None for value in logged):
        return logged
    facts = run.facts
    flops = facts.get("flops_per_token") or 6 * (facts.get("parameters") or 0)
    peak = peak_flops(run) * (facts.get("world") or 1)
    if not flops or not peak:
        return [None] * len(logged)
    return [None if rate is None else rate * flops / peak for rate in run.column("tokens_per_s")]


def peak_flops(run: Run) -> float:
    """Of one device: as run.json has it, else by the cluster that the run was compared with; 0
    where neither is known.
    """
    logged = run.facts.get("peak_flops")
    predicted = run.predicted.labels if run.predicted is not None else {}
    name = run.messages.get("cluster") or predicted.get("cluster")
    if logged or not name:
        return float(logged or 0)
    try:
        device = Cluster.load(name).device
        return device.rate_of(run.plan.get("compute_dtype") or "float32").peak
    except (UserError, ValueError):
        return 0.0


def describe(run: Run) -> dict[str, Any]:
    """The plan in words, the configuration and the versions."""
    hidden = ("plan_explanation",)
    labels = dict(run.timeline.labels) if run.timeline is not None else {}
    facts = {
        name: value
        for name, value in {**labels, **run.facts}.items()
        if name not in hidden and value not in (None, "")
    }
    settings = {
        name: value
        for name, value in run.plan.items()
        if name not in ("units", "cut") and value is not None
    }
    return {
        "label": run.name,
        "plan": run.facts.get("plan_explanation") or "",
        "settings": settings,
        "units": len(run.plan.get("units") or ()),
        "config": run.config,
        "facts": facts,
    }
