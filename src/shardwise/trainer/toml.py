"""Dataclasses from TOML-like dictionaries and back, with errors that name the key."""

import dataclasses
import json
import re
import tomllib
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from shardwise.errors import UserError, nearest

T = TypeVar("T")


class Text(str):
    """A value from the command line, whose type is decided by the key it is given to."""


def key(default: Any, help: str) -> Any:
    """Declare one key of a section: its default and what it means."""
    return dataclasses.field(default=default, metadata={"help": help})


def build_section(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass `kind` from the keys of section `where`; unknown keys are errors."""
    hints = get_type_hints(kind)
    for name in values:
        if name not in hints:
            raise UserError(f"unknown key {where}.{name}{nearest(name, hints)}")
    return kind(**{n: convert(v, hints[n], f"{where}.{n}") for n, v in values.items()})


def convert(value: Any, kind: Any, where: str) -> Any:
    """Give `value` as `kind`, or raise an error that says the expected type."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(member for member in get_args(kind) if member is not types.NoneType)
    textual = kind is str or get_origin(kind) is Literal
    if isinstance(value, Text):
        value = _unquote(value) if textual else parse_text(value)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            raise UserError(
                f"{where} = {value!r} is not a choice{nearest(str(value), get_args(kind))}"
            )
        return value
    if kind is float and type(value) is int:
        return float(value)
    # Not isinstance: True is an int to Python, and not to a reader of the configuration.
    if type(value) is not kind:
        raise UserError(
            f"{where} must be {_TYPE_NAMES[kind]}, got {_TYPE_NAMES.get(type(value), 'a value')} "
            f"{value!r}"
        )
    return value


_TYPE_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def parse_text(text: str) -> Any:
    """Read a command-line value as TOML, or as a plain string where it is not TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return str(text)


def _unquote(text: str) -> str:
    parsed = parse_text(text)
    return parsed if isinstance(parsed, str) else str(text)


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


def write_section(name: str, section: Any, extra: Mapping[str, Any]) -> str:
    """Write a dataclass as a TOML table, then the `extra` keys; None is left out."""
    lines = [f"[{name}]"]
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if value is not None and "help" in field.metadata:
            lines.append(f"{field.name} = {write_value(value)}  # {field.metadata['help']}")
    lines += [f"{write_key(key)} = {write_value(value)}" for key, value in extra.items()]
    return "\n".join(lines) + "\n"
