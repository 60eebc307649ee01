"""What a run logged, over its steps."""

from __future__ import annotations

from typing import Any

from shardwise.description.cluster import Cluster
from shardwise.errors import UserError
from shardwise.reporting.run import Run, typical

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
    return [_curve(logged, *curve) for curve in _CURVES] if logged else []


def _curve(runs: list[Run], name: str, title: str, kind: str, note: str) -> dict[str, Any]:
    lines = []
    for run in runs:
        values = mfu(run) if name == "mfu" else run.column(name)
        if any(value is not None for value in values):
            steps = run.column("step")
            lines.append({"label": run.name, "x": steps, "y": values, "late": typical(values)})
    if name == "mfu" and lines and peak_flops(runs[0]):
        title += f", of {peak_flops(runs[0]) / 1e12:,.3g} TFLOP/s a rank"
    return {
        "name": name,
        "title": title,
        "kind": kind,
        "lines": lines,
        "note": "" if lines else note,
        "level": runs[0].facts.get("unigram_entropy") if name == "loss" else None,
        "level_name": "single tokens' entropy",
    }


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
