"""A run as one HTML file that needs no network: curves, plan, configuration."""

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from shardwise.errors import UserError
from shardwise.reporting.run import Run
from shardwise.reporting.text import summarize
from shardwise.run_files import REPORT

# metric, title, d3 format of the axis, factor from the metric to the axis
_CURVES = (
    ("loss", "Loss, nats per token", ".2f", 1.0),
    ("tokens_per_s", "Throughput, tokens/s", ",.3~s", 1.0),
    ("memory_bytes", "Memory of rank 0, MiB", ",.0f", 1 / 2**20),
    ("exposed_share", "Communication exposed, share of the step", ".0%", 1.0),
)


def write_html(run: Run) -> Path:
    """Write the report into the run's directory; give its path."""
    file = run.directory / REPORT
    file.write_text(render_html(run), encoding="utf-8")
    return file


def render_html(run: Run) -> str:
    """Give the report as one self-contained document."""
    template = (Path(__file__).parent / "template.html").read_text(encoding="utf-8")
    return Template(template).substitute(
        title=escape(f"shardwise run {run.directory.resolve().name}"),
        summary=escape(summarize(run)),
        plan=escape(run.facts.get("plan_explanation") or "This run recorded no explanation."),
        config=escape(run.config),
        facts="".join(
            f"<tr><th>{escape(name)}</th><td>{escape(_shown(value))}</td></tr>"
            for name, value in run.facts.items()
            if name != "plan_explanation" and value is not None
        ),
        # "</" would end the script element; in JSON the escaped form means the same.
        curves=json.dumps(_curves(run)).replace("</", "<\\/"),
        plotly=_plotly_source(),
    )


def _shown(value: Any) -> str:
    match value:
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.4g}"
    return str(value)


def _curves(run: Run) -> list[dict[str, Any]]:
    steps = run.column("step")
    curves = []
    for name, title, tick, factor in _CURVES:
        values = [None if value is None else value * factor for value in run.column(name)]
        known = any(value is not None for value in values)
        curves.append({"name": name, "title": title, "tick": tick, "x": steps, "y": values})
        curves[-1]["note"] = "" if known else "Not measured on this device."
        if name == "loss" and run.facts.get("unigram_entropy") is not None:
            curves[-1]["line"] = run.facts["unigram_entropy"]
            curves[-1]["line_name"] = "single tokens' entropy"
    return curves


def _plotly_source() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise UserError(
            "the HTML report draws with plotly, which is not installed: "
            "pip install 'shardwise[report]'"
        ) from error
    return str(get_plotlyjs())
