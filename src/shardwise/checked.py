"""Dataclasses from the tables of a TOML or JSON file, with errors that name the file and the key.

    @dataclass(frozen=True)
    class Link:
        name: str
        share: Annotated[float, Bound("a share in (0, 1]", lambda n: 0 < n <= 1)] = 1.0

        def __post_init__(self) -> None:
            check_bounds(self)

    Reader("cluster mine.toml: ").read(Link, {"name": "nvlink", "shar": 1}, "level.0")
    UserError: cluster mine.toml: unknown key level.0.shar: did you mean 'share'? Valid: name, share

The dataclass is the schema: a field that has no default and cannot be None must be in the file, its
type says how it is written there, and its bound holds for values made in code too. A field with
`compare=False` is no part of the value, so none of the file. Written here rather than taken from a
library because machines with GPUs often install nothing: torch, numpy and rich have to do. Imports
no torch: `--help` must be quick.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import stat
import tomllib
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NoReturn,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from shardwise.errors import UserError, nearest

T = TypeVar("T")

_MOST_TEXT_BYTES = 4 << 20  # the largest that this project writes has thousands
_MOST_DOTS = 1000


@dataclass(frozen=True)
class Bound:
    """What a field may hold: in words, after "expected" or "must be", and as a test."""

    expected: str
    holds: Callable[[Any], bool]


def finite(least: float) -> Bound:
    """A number, neither infinite nor NaN."""
    return Bound(f"a number >= {least}", lambda n: math.isfinite(n) and n >= least)


def whole(least: int) -> Bound:
    """An int; True is none."""
    return Bound(f"a whole number >= {least}", lambda n: type(n) is int and n >= least)


def at_least(least: float) -> Bound:
    return Bound(f"at least {least}", lambda n: n >= least)


ABOVE_0 = Bound("above 0", lambda n: n > 0)
Count = Annotated[int, finite(1)]
OneOrMore = Annotated[int, at_least(1)]  # as Count, in the words of configurations
Natural = Annotated[int, finite(0)]
NotNegative = Annotated[float, finite(0)]
Share = Annotated[float, Bound("a share in (0, 1]", lambda n: 0 < n <= 1)]


def out_of_bounds(owner: object) -> Iterator[tuple[str, Any, str]]:
    """The fields of a dataclass that are outside of their bounds: name, value, what is expected.
    None is inside of any.
    """
    kind: Any = type(owner)
    for name, bound in _bounds_of(kind):
        value = getattr(owner, name)
        if value is not None and not bound.holds(value):
            yield name, value, bound.expected


def out_of_bound(kind: Any, name: str, value: Any) -> str | None:
    """What is expected of a field of the dataclass `kind`; None if `value` is inside of it."""
    bounds = (bound for field, bound in _bounds_of(kind) if field == name and value is not None)
    return next((bound.expected for bound in bounds if not bound.holds(value)), None)


def check_bounds(owner: object, where: str = "", error: type[Exception] = ValueError) -> None:
    """Raise for the first field of a dataclass that is outside of its bound."""
    for name, value, expected in out_of_bounds(owner):
        raise error(f"{where}{name} is {value!r}, expected {expected}")


@cache
def _bounds_of(kind: type) -> tuple[tuple[str, Bound], ...]:
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (name, extra)
        for name, hint in hints.items()
        for part in (hint, *get_args(hint))  # Annotated[int, ...] | None has it in a part
        for extra in getattr(part, "__metadata__", ())
        if isinstance(extra, Bound)
    )


def keys_of(kind: Any) -> dict[str, dataclasses.Field[Any]]:
    """The keys of a dataclass in a file, each with its field. `metadata={"key": ...}` is for a key
    that is not the field's name.
    """
    fields = (field for field in dataclasses.fields(kind) if field.compare)
    return {field.metadata.get("key", field.name): field for field in fields}


_TYPE_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def type_name(value: Any) -> str:
    """A value's type, for people."""
    return _TYPE_NAMES.get(type(value), "a value")


class Reader:
    """Reads one file. `where` begins every message."""

    def __init__(self, where: str = "") -> None:
        self.where = where

    def read(self, kind: type[T], table: Any, path: str = "", /, **given: Any) -> T:
        """The dataclass `kind` from a table, and from `given`, which the file says elsewhere."""
        self.check_keys(kind, table, path, given)
        hints = get_type_hints(kind)
        for key, field in keys_of(kind).items():
            if key in table:
                given[field.name] = self.convert(table[key], hints[field.name], dotted(path, key))
            elif field.name not in given and not _has_default(field):
                given[field.name] = None
        return kind(**given)

    def read_named(self, kind: type[T], table: Any, path: str = "") -> tuple[T, ...]:
        """One `kind` for each entry of a table, whose key is the first field."""
        first = dataclasses.fields(kind)[0].name  # type: ignore[arg-type]
        self.check_table(table, kind, path)
        return tuple(
            self.read(kind, entry, dotted(path, name), **{first: name})
            for name, entry in table.items()
        )

    def check_keys(self, kind: Any, table: Any, path: str, given: Iterable[str] = ()) -> None:
        """`table` must have what `kind` needs and is not `given`, and nothing that it has not."""
        self.check_table(table, kind, path)
        fields = {key: f for key, f in keys_of(kind).items() if f.name not in given}
        known = [*fields, *self.keys_beside(kind)]
        for key in table:
            if key not in known:
                self.fail_unknown(kind, path, key, known)
        hints = get_type_hints(kind)
        missing = [
            key
            for key, field in fields.items()
            if key not in table and not _has_default(field) and not _may_be_none(hints[field.name])
        ]
        if missing:
            self.fail_missing(kind, path, missing, table)

    def convert(self, value: Any, kind: Any, path: str) -> Any:
        """`value` as the type `kind` of a field."""
        origin = get_origin(kind)
        if origin in (Union, types.UnionType):
            if value is None and _may_be_none(kind):
                return None
            kind = next(member for member in get_args(kind) if member is not types.NoneType)
            return self.convert(value, kind, path)
        if origin is tuple:
            member = get_args(kind)[0]
            self.check_list(value, member, path)
            return tuple(self.convert(v, member, f"{path}.{i}") for i, v in enumerate(value))
        if dataclasses.is_dataclass(kind):
            return self.read(kind, value, path)  # type: ignore[arg-type]
        return self.scalar(value, kind, path)

    def scalar(self, value: Any, kind: Any, path: str) -> Any:
        """A number, a string, true or false, or one of a few strings."""
        if get_origin(kind) is Literal:
            choices = get_args(kind)
            if value not in choices:
                self.fail(f"{path} = {value!r} is not a choice{nearest(str(value), choices)}")
            return value
        if kind is float and type(value) is int:
            return float(value)
        # Not isinstance: True is an int to Python, and not to a reader of the file.
        if type(value) is not kind:
            self.fail(f"{path} must be {_TYPE_NAMES[kind]}, got {self.show(value)}")
        return value

    # What files differ in: their words, and keys that are no field.

    def keys_beside(self, kind: Any) -> tuple[str, ...]:
        """Keys that may stand in the table of `kind` and are none of its fields."""
        return ()

    def show(self, value: Any) -> str:
        return repr(value)

    def check_table(self, value: Any, kind: Any, path: str) -> None:
        if not isinstance(value, dict):
            self.fail(f"{path} must be a table, got {self.show(value)}")

    def check_list(self, value: Any, member: Any, path: str) -> None:
        tables = dataclasses.is_dataclass(member)
        if not isinstance(value, list) or (tables and not all(isinstance(v, dict) for v in value)):
            key = path.rpartition(".")[2]
            self.fail(
                f"{path} must be {f'written [[{key}]], once for each' if tables else 'a list'}"
            )

    def fail_unknown(self, kind: Any, path: str, key: str, known: list[str]) -> NoReturn:
        self.fail(f"unknown key {dotted(path, key)}{nearest(key, known)}")

    def fail_missing(self, kind: Any, path: str, missing: list[str], table: Any) -> NoReturn:
        self.fail(f"{dotted(path, missing[0])} is missing")

    def fail(self, text: str) -> NoReturn:
        raise UserError(self.where + text)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return not (field.default is field.default_factory is dataclasses.MISSING)


def _may_be_none(kind: Any) -> bool:
    return types.NoneType in get_args(kind)


def dotted(path: str, key: str) -> str:
    """The path of a key in the table at `path`; "" is the file itself."""
    return f"{path}.{key}" if path else key


def read_text(path: str | Path, what: str) -> str:
    """The text of a file that the user names; `what` it is begins the message."""
    try:
        # Opening a pipe to read from would wait for somebody who writes into it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"cannot read {what} {path}: it is no file")
            data = file.read(_MOST_TEXT_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {what} {path}: {error.strerror}") from error
    if len(data) > _MOST_TEXT_BYTES:
        raise UserError(f"{what} {path} has more than {_MOST_TEXT_BYTES} bytes: it is none")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{what} {path} is not text: {error}") from error


def write_text(path: Path, text: str) -> None:
    """Write a file that the user has named."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text; `where` it is from begins the message."""
    # tomllib takes minutes for one key of ten thousand dots.
    if any(part.count(".") > _MOST_DOTS for line in text.split("\n") for part in line.split("=")):
        raise UserError(f"{where} is not valid TOML: keys are nested too deep")
    try:
        return tomllib.loads(text)
    except ValueError as error:  # also for numbers of too many digits
        raise UserError(f"{where} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{where} is not valid TOML: values are nested too deep") from error


def write_value(value: Any) -> str:
    """Write one TOML value."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            # A TOML string is a JSON string, but for DEL, which JSON leaves bare.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return f"[{', '.join(write_value(item) for item in value)}]"
    raise UserError(f"{value!r} cannot be written to a configuration file")


def write_key(name: str) -> str:
    """Write a TOML key, quoted where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else write_value(name)
