"""`sw.report`, and the page that it makes: all that a page shows is one JSON value, which the page
holds, draws from, and adds nothing to.

A page has one or two sides that it draws on the same axes: a run's measured step and its predicted
one, or the measured steps of two runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from shardwise.checked import write_text
from shardwise.errors import UserError
from shardwise.reporting.findings import Finding, choose, find_in
from shardwise.reporting.findings.differences import compare, name_apart
from shardwise.reporting.messages import bandwidth
from shardwise.reporting.metrics import curves
from shardwise.reporting.run import Run
from shardwise.reporting.side import draw_kernels, draw_side, source_of
from shardwise.reporting.summary import describe, summarize
from shardwise.timeline import Timeline

_PAGE = Path(__file__).parent / "page"
_STYLES = ("uplot.css", "page.css")
_SCRIPTS = (
    "uplot.js", "core.js", "plot.js", "findings.js", "waterfall.js", "streams.js", "memory.js",
    "units.js", "kernels.js", "wire.js", "curves.js", "main.js",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A page, ready to be written."""

    data: Mapping[str, Any]

    def render(self) -> str:
        """Give the page as one HTML document that needs no network: data, styles and scripts."""
        data = json.dumps(self.data, separators=(",", ":"), allow_nan=False)
        return Template(_read("page.html")).substitute(
            title=escape(f"{self.data['title']}: shardwise report"),
            styles="\n".join(map(_read, _STYLES)),
            # "</" would end the script element; in JSON the escaped form means the same.
            data=data.replace("</", "<\\/"),
            scripts="\n".join(f"<script>{_read(name)}</script>" for name in _SCRIPTS),
        )

    def write(self, file: str | Path) -> Path:
        """Write the page; give its path."""
        path = Path(file)
        write_text(path, self.render())
        return path


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def report(plan: Any, measured: Any, *, predicted: Timeline | None = None) -> Report:
    """Put a Plan and a measured step side by side; `.write("report.html")` writes the page.

    `measured` is a Timeline, or what `sw.profile` gives (it has one as `.timeline`, and `.memory`,
    `.messages` and `.kernels`). `predicted` is what `sw.simulate` gives. `plan` may be None.
    """
    timeline = measured if isinstance(measured, Timeline) else getattr(measured, "timeline", None)
    if not isinstance(timeline, Timeline):
        raise UserError(
            f"a report needs a Timeline or an object with one as `.timeline`, got "
            f"{type(measured).__name__}; `with sw.profile(model, steps=3) as measured` makes one"
        )
    memory, messages, kernels = (() if timeline is measured else getattr(measured, name, ())
                                 for name in ("memory", "messages", "kernels"))  # fmt: skip
    return report_run(
        Run(
            name=timeline.labels.get("title") or (plan.title if plan is not None else "step"),
            plan={} if plan is None else json.loads(plan.to_json()),
            facts={} if plan is None else {"plan_explanation": plan.explain()},
            timeline=timeline,
            predicted=predicted,
            memory={"ranks": list(memory)},
            messages={"messages": [vars(message) for message in messages]},
            kernels={"ranks": list(kernels)},
        )
    )


def report_run(run: Run) -> Report:
    """The report of one run."""
    first, rest = choose(find_in(run))
    sides = []
    if run.timeline is not None:
        sides.append(draw_side(run, run.timeline, source_of(run.timeline)))
    if run.predicted is not None:
        sides.append(draw_side(run, run.predicted, "predicted"))
    summary = summarize(run, first[0].text)
    return _compose("run", run.name, summary, first, rest, sides, [run])


def report_comparison(first: Run, second: Run) -> Report:
    """The report that compares two runs."""
    runs = name_apart(first, second)
    title = " and ".join(run.name for run in runs)
    found, rest = compare(*runs)
    sides = [draw_side(r, r.timeline, r.name) for r in runs if r.timeline is not None]
    return _compose("comparison", title, [], found, rest, sides, runs)


def _compose(
    kind: str,
    title: str,
    summary: list[str],
    findings: Iterable[Finding],
    more: Iterable[Finding],
    sides: list[dict[str, Any]],
    runs: Sequence[Run],
) -> Report:
    computing = (  # on some side, in the first side's order
        unit
        for side in sides
        for rank in side["ranks"].values()
        for unit, row in rank["units"].items()
        if row["compute"]
    )
    return Report(
        {
            "kind": kind,
            "title": title,
            "summary": summary,
            "findings": [finding.to_dict() for finding in findings],
            "more": [finding.to_dict() for finding in more],
            "sides": sides,
            "units": list(dict.fromkeys(computing)),
            "kernels": [draw_kernels(run) for run in runs if run.kernels.get("ranks")],
            "wires": [bandwidth(run) for run in runs if run.messages],
            "curves": curves(list(runs)),
            "runs": [describe(run) for run in runs],
        }
    )
