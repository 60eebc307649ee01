"""docs/accuracy.md and its plot, from the results of `shardwise bench accuracy`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.lab.accuracy.rows import error_of, summarize

Row = dict[str, Any]

_HEAD = """\
# How well the planner predicts

Written by `shardwise bench accuracy`; do not edit. Predictions of seeds (the documents that
[exercises.md](exercises.md) names) use nothing of the figures they are compared with: one GPU's
micro-batch times, cluster constants with their sources (`src/shardwise/description/clusters`), and
the models' sizes.

**`shardwise plan`** predicts from a cluster file. The first two lines below say how well it does so
with the packaged `h200x8-measured`, for the 17 configurations that were measured on an H200:
device, copies and host are the file's, only the link is the run's emulated one. `shardwise bench
accuracy --cases shipped --beside benchmarks/results/accuracy-h200.json` prints them. One figure of
the file comes from that run: a cast takes 0.148 of the host's time for a unit, on which ddp's two
rows rest. All 17 are language models of this project. An outside audit measured other models (GPT-2
medium with tied weights, a mixture of experts, other shapes of language models) before casts had a
figure of their own: predicted steps were 29, 25, 32, 5, 9 and 0 % short, 17 % on average. Expect
that for a model of your own, not what follows.

**Replayed kernels** are a harness, not what a plan is made from: they show what the simulator adds
to the kernels' own times. These predictions use copies and a host that were timed alone in the same
run, and the kernels of the described model: they are replayed in the step's order without the
engine, amid as many copies and pauses as the step is predicted to have, for a second until the
GPU's clock has settled under its power limit and for another in which they are timed. Steps are
timed likewise, and are means over a second. The collectives there are emulated (they take a
modelled time); `held-out` configurations were fixed before the model was corrected with the `build`
ones. Two gloo ranks are calibrated, predicted and measured in rounds, since a shared machine's
speed drifts; their rows are medians over the rounds. Rows marked *order* claim their order only:
the document gives no shape or batch.
"""


def write_docs(path: Path, results: dict[str, Any], *others: dict[str, Any]) -> None:
    """Write the page, and the plot beside it, from results of one or several machines."""
    everything = (results, *others)
    rows: list[Row] = [row for each in everything for row in each["rows"]]
    plot = path.with_name("accuracy.svg")
    plot.write_text(draw_plot(rows), encoding="utf-8")
    lines = [_HEAD, *[f"- {line}" for line in summarize(rows)], ""]
    lines += [f"![predicted against measured step time]({plot.name})", ""]
    shipped = [row for row in rows if row.get("set") == "shipped"]
    lines += _table("`shardwise plan` from a packaged cluster file", shipped)
    lines += _table("Seeds", [row for row in rows if "seed" in row])
    lines += _table("Two real ranks over gloo", [r for r in rows if r.get("set") == "gloo"])
    for group in ("held-out", "build"):
        members = [row for row in rows if row.get("set") == group]
        lines += _table(f"Kernels replayed on one GPU, emulated network, {group}", members)
    lines += _sweep(results.get("sweep", []))
    lines += _delayed(results.get("delayed", []))
    for each in everything:
        environment = each["environment"]
        place = environment.get("gpu") or environment.get("cpu")
        # What is simulated from a packaged file depends on no machine; a test holds it.
        kept = [row for row in each["rows"] if row.get("set") != "shipped"]
        what = " and ".join(dict.fromkeys(map(_part_of, kept)))
        version = f"torch {environment['torch']}, commit {environment['commit']}"
        lines += [f"{what}: {place}, {version}.", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _part_of(row: Row) -> str:
    if "seed" in row:
        return "Seeds (simulated)"
    return "Two gloo ranks" if row.get("set") == "gloo" else "One GPU"


def _table(title: str, rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    lines = [
        f"## {title}",
        "",
        "| case | mode | predicted | actual | error | predicted peak | actual peak | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        label = row.get("case") or f"seed {row['seed']}"
        cells = [label, row["mode"], *_cells(row, "ms"), *_cells(row, "bytes")]
        lines.append(f"| {' | '.join(cells)} |")
    notes = dict.fromkeys(row["note"] for row in rows if "note" in row)
    return [*lines, "", *[line for note in notes for line in (note, "")]]


def _cells(row: Row, what: str) -> list[str]:
    error, predicted = error_of(row, what), row.get(f"predicted_{what}")
    ordered = row.get("compared") == "order"
    if predicted is None or (error is None and not ordered):
        return ["", "", ""]
    actual = row.get(f"measured_{what}") or row.get(f"reported_{what}")
    unit, scale = ("ms", 1.0) if what == "ms" else ("GB", 1e9)
    digits = 1 if what == "ms" else 2
    told = "not stated" if actual is None else f"{actual / scale:.{digits}f} {unit}"
    return [f"{predicted / scale:.{digits}f} {unit}", told, "order" if ordered else f"{error:+.1%}"]


def _sweep(sweep: Sequence[Row]) -> list[str]:
    """Seed 000: by how much delaying the all-reduce speeds a step up."""
    if not sweep:
        return []
    ratios = sorted({row["ratio"] for row in sweep})
    lines = [
        "## Where delaying the all-reduce pays",
        "",
        "Seed 000's model: HSDP's step over that of HSDP with the all-reduce delayed to the last "
        "micro-batch, by micro-batches and by the ratio of their sizes. Above 1 it pays.",
        "",
        "| accumulate | " + " | ".join(f"ratio {ratio}" for ratio in ratios) + " |",
        "|---" * (len(ratios) + 1) + "|",
    ]
    for accumulate in sorted({row["accumulate"] for row in sweep}):
        found = {r["ratio"]: r["speedup"] for r in sweep if r["accumulate"] == accumulate}
        lines.append(f"| {accumulate} | " + " | ".join(f"{found[r]:.3f}" for r in ratios) + " |")
    return [*lines, ""]


def _delayed(told: Sequence[str]) -> list[str]:
    if not told:
        return []
    return [
        "The delayed step of the document's own work, two micro-batches of ratio 2, by engine:",
        "",
        "```text",
        *told,
        "```",
        "",
    ]


# The plot: predicted over actual on logarithmic axes, with the 5 % band.
_SIDE, _MARGIN = 460, 56
_COLORS = {
    "shipped": "#bc5090",
    "seed": "#7a5195",
    "gloo": "#ef8354",
    "build": "#8d99ae",
    "held-out": "#2a6f97",
}


def draw_plot(rows: Sequence[Row]) -> str:
    """An SVG of step times: every point on the diagonal is a perfect prediction."""
    points: list[tuple[float, float, str, str]] = [
        (
            float(row.get("measured_ms") or row["reported_ms"]),
            float(row["predicted_ms"]),
            "seed" if "seed" in row else row.get("set", ""),
            row["mode"],
        )
        for row in rows
        if error_of(row, "ms") is not None and row.get("compared") != "order"
    ]
    values = [value for actual, predicted, _, _ in points for value in (actual, predicted)]
    low = 10 ** math.floor(math.log10(min(values, default=1.0)))
    high = 10 ** math.ceil(math.log10(max(values, default=10.0)) + 1e-9)

    def place(value: float) -> float:
        span = math.log10(high) - math.log10(low)
        return (math.log10(value) - math.log10(low)) / span * (_SIDE - 2 * _MARGIN)

    def x(value: float) -> str:
        return f"{_MARGIN + place(value):.1f}"

    def y(value: float) -> str:
        return f"{_SIDE - _MARGIN - place(value):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_SIDE} {_SIDE}" '
        'font-family="sans-serif" font-size="11" role="img">',
        "<title>Predicted against measured step time</title>",
        f'<rect width="{_SIDE}" height="{_SIDE}" fill="#ffffff"/>',
        f'<polygon points="{x(low)},{y(low * 1.05)} {x(high / 1.05)},{y(high)} '
        f"{x(high)},{y(high)} {x(high)},{y(high / 1.05)} {x(low * 1.05)},{y(low)} "
        f'{x(low)},{y(low)}" fill="#e9eef2"/>',
        f'<line x1="{x(low)}" y1="{y(low)}" x2="{x(high)}" y2="{y(high)}" stroke="#999"/>',
    ]
    tick = low
    while tick <= high * 1.001:
        parts += [
            f'<text x="{x(tick)}" y="{_SIDE - _MARGIN + 18}" text-anchor="middle">{tick:g}</text>',
            f'<text x="{_MARGIN - 8}" y="{y(tick)}" text-anchor="end">{tick:g}</text>',
        ]
        tick *= 10
    middle = _SIDE / 2
    parts += [
        f'<text x="{middle}" y="{_SIDE - 12}" text-anchor="middle">measured or reported, ms</text>',
        f'<text x="14" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 14 {middle})">predicted, ms</text>',
    ]
    for actual, predicted, group, mode in points:
        color = _COLORS.get(group, "#333")
        parts.append(
            f'<circle cx="{x(actual)}" cy="{y(predicted)}" r="4" fill="{color}" '
            f'fill-opacity="0.8"><title>{_escape(mode)}: {predicted:.1f} against {actual:.1f} ms'
            "</title></circle>"
        )
    for i, (group, color) in enumerate(_COLORS.items()):
        at = _MARGIN + 8 + 16 * i
        parts += [
            f'<circle cx="{_MARGIN + 12}" cy="{at}" r="4" fill="{color}"/>',
            f'<text x="{_MARGIN + 22}" y="{at + 4}">{group}</text>',
        ]
    return "\n".join([*parts, "</svg>", ""])


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
