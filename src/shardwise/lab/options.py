"""Options of the benchmarks' commands: what argparse is told of them, and how they are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, nearest
from shardwise.hosts import bytes_per_second
from shardwise.profiling.results import check_file


@dataclass(frozen=True)
class Option:
    """An option of a command. `check` gets its flag and its value as typed, and gives the value as
    the benchmark takes it, or a UserError.
    """

    flag: str
    settings: dict[str, Any]  # argparse's
    check: Callable[[str, Any], Any] | None = None


def choose(text: str, what: str, valid: Sequence[str]) -> tuple[str, ...]:
    """The names of a list such as `a,b`, each once; an error for one that is not valid."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in valid:
            raise UserError(f"unknown {what} {name!r}{nearest(name, valid)}")
    return names


def list_names(
    flag: str,
    what: str,
    valid: Sequence[str],
    default: str | None = "all",
    help: str = "default: %(default)s",
) -> Option:
    """A list of names; by default all of them, or those of `default`."""

    def check(flag: str, text: str | None) -> tuple[str, ...] | None:
        return None if text is None else choose(text, what, valid)

    default = ",".join(valid) if default == "all" else default
    return Option(flag, {"metavar": "A,B", "default": default, "help": help}, check)


def number(
    flag: str,
    default: float | None,
    expected: str,
    holds: Callable[[float], bool],
    help: str = "default: %(default)s",
    kind: type = int,
    metavar: str = "N",
) -> Option:
    def check(flag: str, value: float | None) -> float | None:
        if value is not None and not holds(value):
            raise UserError(f"{flag} is {value}, expected {expected}")
        return value

    settings = {"type": kind, "default": default, "metavar": metavar, "help": help}
    return Option(flag, settings, check)


def count(flag: str, default: int | None, help: str = "default: %(default)s") -> Option:
    return number(flag, default, "at least 1", lambda value: value >= 1, help)


def list_counts(flag: str, default: str, least: int, help: str = "default: %(default)s") -> Option:
    def check(flag: str, text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(sorted({int(word) for word in text.split(",")}))
        except ValueError:
            raise UserError(f"{flag} is {text!r}, expected whole numbers such as 1,2,5") from None
        if numbers[0] < least:
            raise UserError(f"{flag} is {numbers[0]}, expected at least {least}")
        return numbers

    return Option(flag, {"metavar": "A,B", "default": default, "help": help}, check)


def file(flag: str, help: str) -> Option:
    def check(flag: str, path: Path | None) -> Path | None:
        check_file(flag, path)
        return path

    return Option(flag, {"type": Path, "metavar": "FILE", "help": help}, check)


def link_rate(told: str) -> Option:
    """Of the link between two hosts, in tc's words; None if it is not given."""

    def check(flag: str, rate: str | None) -> str | None:
        if rate is not None:
            bytes_per_second(rate)
        return rate

    help = f"of the link between two hosts; default: {told}"
    return Option("--rate", {"metavar": "RATE", "help": help}, check)


def flag(name: str, help: str) -> Option:
    return Option(name, {"action": "store_true", "help": help})
