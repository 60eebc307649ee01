"""A run's directory: the names of its files, and reading them back."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.run_files import CONFIG, FACTS, METRICS, PLAN


@dataclass(frozen=True)
class Run:
    """What a run left in its directory."""

    directory: Path
    metrics: tuple[dict[str, Any], ...]
    config: str
    plan: dict[str, Any]
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.metrics:
            raise UserError(
                f"{self.directory / METRICS} has no step yet: wait for the run's first step"
            )

    def column(self, name: str) -> list[float | None]:
        """Give one metric of every logged step; None where it is unknown or not finite."""
        values = (row.get(name) for row in self.metrics)
        return [v if v is not None and math.isfinite(v) else None for v in values]


def read_run(directory: Path) -> Run:
    """Read a run, also one that is still going or was cut short."""
    if not (directory / METRICS).is_file():
        raise UserError(
            f"{directory} holds no run ({METRICS} is missing): give the directory that "
            f"`shardwise train --out` wrote"
        )
    return Run(
        directory=directory,
        metrics=tuple(_read_rows(directory / METRICS)),
        config=_read_text(directory / CONFIG),
        plan=_read_object(directory / PLAN),
        facts=_read_object(directory / FACTS),
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error


def _read_object(file: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(_read_text(file)))
    except ValueError as error:
        raise UserError(f"{file} is not a JSON object: {error}") from error


def _read_rows(file: Path) -> list[dict[str, Any]]:
    lines = _read_text(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the row that a run was writing when it was cut short
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(dict(json.loads(line)))
        except ValueError as error:
            raise UserError(f"{file}:{number} is not a JSON object: {error}") from error
    return rows
