"""A run's directory, read back: whatever of its files is there."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.reporting import shape
from shardwise.run_files import CONFIG, FACTS, MEMORY, MESSAGES, METRICS, PLAN, PREDICTED, TIMELINE
from shardwise.timeline import Timeline


@dataclass(frozen=True)
class Run:
    """What is known of a run; what it did not leave is empty or None."""

    name: str
    directory: Path | None = None
    metrics: tuple[dict[str, Any], ...] = ()
    config: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    predicted: Timeline | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)  # as in memory.json
    messages: Mapping[str, Any] = field(default_factory=dict)  # as in messages.json

    def __post_init__(self) -> None:
        for kind, timeline in (("measured", self.timeline), ("predicted", self.predicted)):
            if timeline is not None and not timeline.spans:
                raise UserError(f"the {kind} timeline of {self.name} has no span: profile it again")
        if not self.metrics and self.timeline is None:
            raise UserError(
                f"{self.name} has neither a logged step nor a timeline yet: wait for the run's "
                "first step"
            )

    def column(self, name: str) -> list[float | None]:
        """Give one metric of every logged step; None where it is unknown or not finite."""
        values = (row.get(name) for row in self.metrics)
        return [v if v is not None and math.isfinite(v) else None for v in values]

    @property
    def micro_batches(self) -> int:
        """Of a step, as the configuration says; 1 where it does not."""
        try:
            return int(tomllib.loads(self.config).get("run", {}).get("micro_batches", 1))
        except tomllib.TOMLDecodeError:
            return 1

    def memory_of(self, rank: int) -> Mapping[str, Any]:
        """What memory.json says of a rank."""
        for entry in self.memory.get("ranks", ()):
            if entry["rank"] == rank:
                return dict(entry)
        return {}


def read_run(directory: Path) -> Run:
    """Read a run, also one that is still going, was cut short, or left a timeline only."""
    if not any((directory / name).is_file() for name in (METRICS, TIMELINE)):
        raise UserError(
            f"{directory} holds no run ({METRICS} and {TIMELINE} are missing): give the directory "
            f"that `shardwise train --out` or `shardwise profile --out` wrote"
        )
    return Run(
        name=directory.resolve().name,
        directory=directory,
        metrics=tuple(_read_rows(directory / METRICS)),
        config=_read_text(directory / CONFIG),
        plan=_read_object(directory / PLAN, shape.PLAN),
        facts=_read_object(directory / FACTS, shape.FACTS),
        timeline=_read_timeline(directory / TIMELINE),
        predicted=_read_timeline(directory / PREDICTED),
        memory=_read_object(directory / MEMORY, shape.MEMORY),
        messages=_read_object(directory / MESSAGES, shape.MESSAGES),
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {error}") from error


def _read_object(file: Path, expected: Mapping[str, Any]) -> dict[str, Any]:
    text = _read_text(file)
    if not text:
        return {}
    found = _parse(text, str(file))
    shape.check(found, expected, str(file))
    return dict(found)


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON: {error}") from error


def _read_timeline(file: Path) -> Timeline | None:
    text = _read_text(file)
    try:
        return Timeline.from_json(text) if text else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{file} is not a timeline: {error}; profile the run again") from error


def _read_rows(file: Path) -> list[dict[str, Any]]:
    lines = _read_text(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the row that a run was writing when it was cut short
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _parse(line, f"{file}:{number}")
        shape.check(row, shape.METRICS_ROW, f"{file}:{number}")
        rows.append(row)
    return rows
