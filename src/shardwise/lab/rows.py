"""The rows of a long benchmark: written after each, taken up again, stopped when the time is up."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.profiling.results import read_json

Row = dict[str, Any]


class RowFile:
    """Rows with a file behind them, if one is named. A cut run loses only the row under way."""

    def __init__(
        self,
        path: Path | None,
        facts: dict[str, Any],
        resume: bool = False,
        budget: float | None = None,
    ) -> None:
        """Start empty, or with what the file has: rows of this hardware and of this kind of run."""
        self.path, self.facts, self.budget = path, facts, budget
        self.rows: list[Row] = read_rows(path) if resume else []
        self.began = time.monotonic()
        if self.rows and path is not None:
            before = read_json(path)
            self._check_same(path, before)
            self._sign(before["environment"].get("commit"))

    def _sign(self, commit: str | None) -> None:
        """Rows of another commit than this run's say so themselves."""
        if commit != self.facts["environment"].get("commit"):
            self.rows = [{"commit": commit, **row} for row in self.rows]

    def _check_same(self, path: Path, before: dict[str, Any]) -> None:
        for name, get in (
            ("device", lambda facts: facts["environment"].get("gpu") or "CPU"),
            ("quick", lambda facts: facts.get("quick", False)),
            ("benchmark", _benchmark),
        ):
            old, new = get(before), get(self.facts)
            if old != new and "" not in (old, new):
                raise UserError(
                    f"--resume {path}: its rows have {name} {old}, this run has {new}; figures of "
                    "the two do not belong in one file: name another one"
                )

    def __contains__(self, key: str) -> bool:
        """Whether there is a row of this key."""
        return any(row.get("key") == key for row in self.rows)

    def time_left(self) -> float | None:
        """Seconds of the budget that are left, if there is one."""
        if self.budget is None:
            return None
        return max(0.0, self.began + self.budget - time.monotonic())

    def time_is_up(self) -> bool:
        """Whether the budget is spent; says so."""
        left = self.time_left()
        if left is None or left > 0:
            return False
        say("the time is up; --resume continues")
        return True

    def add(self, row: Row) -> None:
        """Keep a row in place of one of the same key, and write the file."""
        key = row.get("key")
        self.rows = [old for old in self.rows if key is None or old.get("key") != key] + [row]
        if self.path is None:
            return
        head = json.dumps(self.facts, indent=1).removesuffix("\n}")
        rows = ",\n".join(json.dumps(row) for row in self.rows)
        whole = self.path.with_name(self.path.name + ".part")
        whole.write_text(f'{head},\n "rows": [\n{rows}\n ]\n}}\n')
        whole.replace(self.path)


def _benchmark(facts: dict[str, Any]) -> str:
    """Its name, as the command that is kept has it; nothing where none is."""
    words = str(facts.get("command", "")).split()
    return words[2] if words[:2] == ["shardwise", "bench"] and len(words) > 2 else ""


def read_rows(path: Path | None) -> list[Row]:
    """The rows that a file has; none if there is no file."""
    if path is None or not path.exists():
        return []
    return read_json(path)["rows"]


def measured_elsewhere(path: Path | None) -> bool:
    """Whether a file's rows are a GPU's, and there is none here: they can only be shown."""
    import torch

    if path is None or not path.exists() or torch.cuda.is_available():
        return False
    return bool(read_json(path)["environment"].get("gpu"))


def say(message: str) -> None:
    """Progress, beside the output proper."""
    print(message, file=sys.stderr, flush=True)
