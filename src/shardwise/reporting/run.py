"""A run's directory, read back: whatever of its files is there, checked once."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.errors import UserError
from shardwise.run_files import (
    CHOICE,
    CONFIG,
    FACTS,
    KERNELS,
    MEMORY,
    MESSAGES,
    METRICS,
    PLAN,
    PREDICTED,
    TIMELINE,
)  # fmt: skip
from shardwise.timeline import Timeline

# What a report needs of a run's files: a key that ends in ? may be missing or null; keys that are
# not named may hold anything.
_NUMBER = (int, float)
_METRICS_ROW = {
    "step": _NUMBER, "loss?": _NUMBER, "tokens?": _NUMBER, "tokens_per_s?": _NUMBER,
    "step_s?": _NUMBER, "memory_bytes?": _NUMBER, "exposed_share?": _NUMBER, "mfu?": _NUMBER,
    "grad_norm?": _NUMBER, "skipped?": _NUMBER,
}  # fmt: skip
_MEMORY = {
    "ranks?": [
        {"rank": int, "limit_bytes?": _NUMBER, "peak_allocated?": _NUMBER, "times?": [_NUMBER],
         "reserved?": [_NUMBER], "largest?": [{}]}
    ],
}  # fmt: skip
_MESSAGES = {
    "cluster?": str,
    "messages?": [
        {"collective": str, "unit": str, "phase": str, "ranks": int, "bytes": _NUMBER,
         "seconds": _NUMBER}
    ],
    "curve?": [{"collective": str, "ranks": int, "bytes": _NUMBER, "seconds": _NUMBER}],
}  # fmt: skip
_KERNELS = {
    "ranks?": [
        {"rank": int, "rows": [{"phase": str, "group": str, "name": str, "count": int, "ns": int}]}
    ],
}
_PLAN = {
    "name?": str,
    "mesh?": [int],
    "units?": [{"name": str, "parameters": [{"shape": [int], "dtype": str}]}],
}
_FACTS = {
    "world?": int, "parameters?": _NUMBER, "flops_per_token?": _NUMBER, "peak_flops?": _NUMBER,
    "unigram_entropy?": _NUMBER, "plan_explanation?": str, "resumed_after?": [int],
}  # fmt: skip
_CHOICE = {
    "foreseen": {"step_ms": _NUMBER, "peak_bytes": _NUMBER, "basis": str, "range_ms": [_NUMBER],
                 "parts_ms": {}, "load": _NUMBER, "why": [str]},
    "taken?": {"step_ms": _NUMBER, "peak_bytes?": _NUMBER, "exposed_ms?": _NUMBER, "load": _NUMBER,
               "cores": int},
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What is known of a run; what it did not leave is empty or None."""

    name: str
    metrics: tuple[dict[str, Any], ...] = ()
    config: str = ""
    plan: Mapping[str, Any] = field(default_factory=dict)
    choice: Mapping[str, Any] = field(default_factory=dict)  # as in choice.json
    facts: Mapping[str, Any] = field(default_factory=dict)
    timeline: Timeline | None = None
    predicted: Timeline | None = None
    memory: Mapping[str, Any] = field(default_factory=dict)  # as in memory.json
    messages: Mapping[str, Any] = field(default_factory=dict)  # as in messages.json
    kernels: Mapping[str, Any] = field(default_factory=dict)  # as in kernels.json

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

    def known(self, name: str) -> list[float]:
        """The same without what is unknown."""
        return [value for value in self.column(name) if value is not None]

    @property
    def micro_batches(self) -> int:
        """Of a step, as the configuration says; 1 where it does not."""
        try:
            return int(tomllib.loads(self.config).get("run", {}).get("micro_batches", 1))
        except tomllib.TOMLDecodeError:
            return 1

    def memory_of(self, rank: int) -> Mapping[str, Any]:
        """What memory.json says of a rank."""
        ranks = self.memory.get("ranks", ())
        return next((dict(entry) for entry in ranks if entry["rank"] == rank), {})


def second_half(values: Sequence[float | None]) -> list[float]:
    """What is known of a metric in the run's second half, which leaves the warm-up out."""
    return [value for value in values[len(values) // 2 :] if value is not None]


def typical(values: Sequence[float | None]) -> float | None:
    """The median of the second half, if anything of it is known."""
    late = second_half(values)
    return median(late) if late else None


def read_run(directory: Path) -> Run:
    """Read a run, also one that is still going, was cut short, or left a timeline only."""
    if not any((directory / name).is_file() for name in (METRICS, TIMELINE)):
        raise UserError(
            f"{directory} holds no run ({METRICS} and {TIMELINE} are missing): give the directory "
            f"that `shardwise train --out` or `shardwise profile --out` wrote"
        )
    return Run(
        name=directory.resolve().name,
        metrics=tuple(_read_rows(directory / METRICS)),
        config=_read_text(directory / CONFIG),
        plan=_read_object(directory / PLAN, _PLAN),
        choice=_read_object(directory / CHOICE, _CHOICE),
        facts=_read_object(directory / FACTS, _FACTS),
        timeline=_read_timeline(directory / TIMELINE),
        predicted=_read_timeline(directory / PREDICTED),
        memory=_read_object(directory / MEMORY, _MEMORY),
        messages=_read_object(directory / MESSAGES, _MESSAGES),
        kernels=_read_object(directory / KERNELS, _KERNELS),
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
    return _parse(text, expected, str(file)) if text else {}


def _read_rows(file: Path) -> list[dict[str, Any]]:
    lines = _read_text(file).splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines.pop()  # the row that a run was writing when it was cut short
    return [_parse(line, _METRICS_ROW, f"{file}:{i}") for i, line in enumerate(lines, start=1)]


def _read_timeline(file: Path) -> Timeline | None:
    text = _read_text(file)
    try:
        return Timeline.from_json(text) if text else None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{file} is not a timeline: {error}; profile the run again") from error


def _parse(text: str, expected: Mapping[str, Any], file: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    _check(found, expected, file, "")
    return dict(found)


def _check(value: Any, expected: Any, file: str, where: str) -> None:
    """Raise an error that names the first place in `file` that is not as expected."""
    kind = type(expected) if isinstance(expected, (dict, list)) else expected
    fits = isinstance(value, kind) and not isinstance(value, bool)
    if not fits:
        shown = repr(value) if len(repr(value)) <= 40 else repr(value)[:37] + "..."
        raise _unexpected(file, f"{where or 'it'} is {shown}, expected {_KINDS[kind]}")
    if isinstance(expected, list):
        for i, item in enumerate(value):
            _check(item, expected[0], file, f"{where}[{i}]")
    elif isinstance(expected, dict):
        for name, inner in expected.items():
            key = name.removesuffix("?")
            here = f"{where}.{key}" if where else key
            if value.get(key) is not None:
                _check(value[key], inner, file, here)
            elif key == name:
                raise _unexpected(file, f"{here} is missing")


_KINDS = {
    dict: "an object", list: "a list", _NUMBER: "a number", int: "a whole number", str: "a text",
}  # fmt: skip


def _unexpected(file: str, what: str) -> UserError:
    return UserError(
        f"{file}: {what}. It is not what shardwise writes, or it was changed: remove it, or "
        "profile or train again"
    )
