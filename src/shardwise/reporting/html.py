"""A page as one HTML file that needs no network: the data, the styles and the scripts inside."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from shardwise.errors import UserError
from shardwise.reporting.compare import compose_comparison
from shardwise.reporting.compose import compose_run
from shardwise.reporting.run import Run
from shardwise.run_files import REPORT

_PAGE = Path(__file__).parent / "page"
STYLES = ("uplot.css", "page.css")
SCRIPTS = (
    "uplot.js", "core.js", "plot.js", "findings.js", "waterfall.js", "streams.js", "memory.js",
    "units.js", "wire.js", "curves.js", "main.js",
)  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A page, ready to be written."""

    data: Mapping[str, Any]

    def render(self) -> str:
        """Give the page as one self-contained document."""
        return render(self.data)

    def write(self, file: str | Path) -> Path:
        """Write the page; give its path."""
        path = Path(file)
        try:
            path.write_text(self.render(), encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        return path


def report_run(run: Run) -> Report:
    """The report of one run."""
    return Report(compose_run(run))


def report_comparison(first: Run, second: Run) -> Report:
    """The report that compares two runs."""
    return Report(compose_comparison(first, second))


def write_html(run: Run) -> Path:
    """Write the report into the run's directory; give its path."""
    assert run.directory is not None, "a run without a directory is written by Report.write"
    return report_run(run).write(run.directory / REPORT)


def render(data: Mapping[str, Any]) -> str:
    """Fill the page's template with its data."""
    return Template(_read("page.html")).substitute(
        title=escape(f"{data['title']}: shardwise report"),
        styles="\n".join(map(_read, STYLES)),
        # "</" would end the script element; in JSON the escaped form means the same.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("</", "<\\/"),
        scripts="\n".join(f"<script>{_read(name)}</script>" for name in SCRIPTS),
    )


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")
