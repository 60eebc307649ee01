"""The rows of a benchmark: written after each, taken up again, stopped when the time is up."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from shardwise.errors import UserError
from shardwise.profiling.results import Row, read_json, write_json
from shardwise.profiling.timing import describe_environment

Item = TypeVar("Item")


def say(message: str) -> None:
    """Progress, beside the output proper; of ranks, the first one speaks."""
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        print(message, file=sys.stderr, flush=True)


def describe_run(arguments: argparse.Namespace, **facts: Any) -> dict[str, Any]:
    """What a file of results says of all its rows."""
    commit = getattr(arguments, "commit", None)
    return {"environment": describe_environment(commit), "command": arguments.typed, **facts}


class RowFile:
    """Rows with a file behind them, if one is named. A cut run loses only the row under way."""

    def __init__(
        self,
        path: Path | None,
        facts: dict[str, Any],
        resume: bool = False,
        budget: float | None = None,
        key_of: Callable[[Row], Any] = lambda row: row.get("key"),
    ) -> None:
        """Start empty, or with what the file has: rows of this hardware and of this kind of run."""
        self.path, self.facts, self.budget, self.key_of = path, facts, budget, key_of
        self.rows: list[Row] = read_rows(path) if resume else []
        self.began = time.monotonic()
        if self.rows and path is not None:
            before = read_json(path)
            self._check_same(path, before)
            commit = before["environment"].get("commit")
            # Rows of another commit than this run's say so themselves.
            if commit != facts["environment"].get("commit"):
                self.rows = [{"commit": commit, **row} for row in self.rows]

    @classmethod
    def of(
        cls, arguments: argparse.Namespace, key_of: Callable[[Row], Any] | None = None, **facts: Any
    ) -> RowFile:
        """As the options of a benchmark that is measured row by row say."""
        trial = {"quick": True} if arguments.quick else {}
        known = describe_run(arguments, **trial, **facts)
        more = {} if key_of is None else {"key_of": key_of}
        return cls(arguments.json, known, arguments.resume, arguments.budget, **more)

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
        return any(self.key_of(row) == key for row in self.rows)

    def missing(self, items: Iterable[Item], key: Callable[[Item], str]) -> Iterator[Item]:
        """The items that have no row, until the time is up."""
        for item in items:
            if key(item) in self:
                continue
            if self.time_is_up():
                return
            yield item

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
        key = self.key_of(row)
        self.rows = [old for old in self.rows if key is None or self.key_of(old) != key] + [row]
        self.write()

    def write(self) -> None:
        if self.path is not None:
            write_json(self.path, **({"command": ""} | self.facts), rows=self.rows)

    def tell(
        self,
        plot: Path | None,
        draw: Callable[[list[Row]], str],
        show: Callable[[list[Row], dict[str, Any]], None],
    ) -> None:
        """At a run's end: draw the picture, if one is asked for, and print the tables."""
        if plot is not None:
            plot.write_text(draw(self.rows), encoding="utf-8")
        show(self.rows, self.facts)


def _benchmark(facts: dict[str, Any]) -> str:
    """Its name, as the command that is kept has it; nothing where none is."""
    typed = str(facts.get("command", "")).split()
    return typed[2] if typed[:2] == ["shardwise", "bench"] and len(typed) > 2 else ""


def read_rows(path: Path | None) -> list[Row]:
    """The rows that a file has; none if there is no file."""
    if path is None or not path.exists():
        return []
    return read_json(path)["rows"]


def only_draw(arguments: argparse.Namespace, draw: Callable[[list[Row]], str]) -> bool:
    """Draw the rows of a GPU's file if asked to go on with it and there is no GPU here; whether it
    was so.
    """
    import torch

    path: Path | None = arguments.json
    if not arguments.resume or arguments.plot is None or torch.cuda.is_available():
        return False
    if path is None or not path.exists() or not read_json(path)["environment"].get("gpu"):
        return False
    arguments.plot.write_text(draw(read_rows(path)), encoding="utf-8")
    return True
