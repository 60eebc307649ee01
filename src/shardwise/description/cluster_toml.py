"""Cluster files: TOML in which every number stands beside its source.

    bandwidth_bytes_per_s = { value = 370e9, source = "nccl-tests issue 212: ...", spread = 0 }

`spread` is the interquartile range of a measured number. Tables of measured points are lists of
rows, with one `points_source` beside them. The dataclasses of `cluster.py` are the schema.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from shardwise.checked import Reader, dotted, keys_of, parse_toml, read_text, write_value
from shardwise.description.cluster import (
    FOLDER,
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulPoint,
    MatmulRate,
    Traffic,
    known_clusters,
)
from shardwise.errors import UserError, nearest

T = TypeVar("T")
NAMED = (MatmulRate, Traffic)  # tables by their first field
# What a row of a table of measured points holds.
COLUMNS = {
    MatmulPoint: "m, n, k, FLOP/s, spread",
    CollectivePoint: "kind, ranks, bytes, seconds, spread, inside (1)",
}


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read a packaged cluster by name, or a file by its path (which ends in .toml)."""
    text_name = str(name_or_path)
    if text_name.endswith(".toml"):
        text = read_text(name_or_path, "the cluster file")
    else:
        names = known_clusters()
        if text_name not in names:
            raise UserError(
                f"unknown cluster {text_name!r}{nearest(text_name, names)}. Or give a .toml file, "
                "such as `shardwise calibrate --out FILE.toml` writes"
            )
        text = (FOLDER / f"{text_name}.toml").read_text(encoding="utf-8")
    return parse_cluster(text, text_name)


def parse_cluster(text: str, where: str) -> Cluster:
    """Build a Cluster from TOML; unknown keys, and numbers without a source, are errors."""
    data = parse_toml(text, f"cluster {where}")
    reader = _ClusterReader(f"cluster {where}: ")
    try:
        file = reader.read(_File, data)
        return Cluster(
            file.name,
            file.device,
            file.level,
            file.host,
            file.contention.communication_share_of_compute,
            tuple(reader.sources),
        )
    except ValueError as error:
        raise UserError(f"cluster {where}: {error}") from error


@dataclass(frozen=True)
class _Contention:
    communication_share_of_compute: float


@dataclass(frozen=True)
class _File:
    """The tables of a cluster file, by their keys there."""

    name: str
    device: Device
    level: tuple[Level, ...]
    host: Host
    contention: _Contention


class _ClusterReader(Reader):
    """Takes every number from beside its source, and remembers the sources."""

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.sources: list[tuple[str, str]] = []

    def read(self, kind: type[T], table: Any, path: str = "", /, **given: Any) -> T:
        made = super().read(kind, table, path, **given)
        if getattr(made, "points", ()):
            source = table.get("points_source")
            if not source:
                self.fail(f"{path}.points have no points_source")
            self.sources.append((f"{path}.points", source))
        return made

    def keys_beside(self, kind: Any) -> tuple[str, ...]:
        return ("points_source",) if "points" in keys_of(kind) else ()

    def convert(self, value: Any, kind: Any, path: str) -> Any:
        member = (*get_args(kind), None)[0]
        if member in NAMED:
            return self.read_named(member, value, path)
        if member in COLUMNS:
            self.check_list(value, list, path)
            return tuple(self.read_row(member, row, path) for row in value)
        return super().convert(value, kind, path)

    def scalar(self, value: Any, kind: Any, path: str) -> Any:
        if kind in (int, float):
            return self.read_number(value, kind, path)
        return super().scalar(value, kind, path)

    def read_number(self, entry: Any, kind: Any, path: str) -> Any:
        """The `value` of a number's table; its source is remembered."""
        if not isinstance(entry, dict) or not {"value", "source"} <= set(entry):
            self.fail(
                f"{path} is {entry!r}, expected "
                '{ value = NUMBER, source = "where it comes from" }'
            )
        for key in entry:
            if key not in ("value", "source", "spread"):
                self.fail_unknown(None, path, key, ["value", "source", "spread"])
        value, source = super().scalar(entry["value"], float, path), entry["source"]
        if not isinstance(source, str) or not source.strip():
            self.fail(f"{path} has an empty source")
        self.sources.append((path, source))
        return kind(value)

    def read_row(self, kind: Any, row: Any, path: str) -> Any:
        hints = list(get_type_hints(kind).values())
        least = len(hints) - (kind is CollectivePoint)  # `inside` may be left out
        if not isinstance(row, list) or not least <= len(row) <= len(hints):
            self.fail(f"a row of {path} has the entries {COLUMNS[kind]}, got {row}")
        return kind(*(int(v) if t is int else v for v, t in zip(row, hints, strict=False)))


def write_cluster(cluster: Cluster, spreads: Mapping[str, float] | None = None) -> str:
    """Write a Cluster as the TOML that `load_cluster` reads. `spreads` are error bars by dotted
    key, as in `Cluster.sources`.
    """
    contention = _Contention(cluster.communication_share_of_compute)
    file = _File(cluster.name, cluster.device, cluster.levels, cluster.host, contention)
    writer = _ClusterWriter(dict(cluster.sources), dict(spreads or {}))
    return "\n".join(writer.write(file, "", "")) + "\n"


@dataclass
class _ClusterWriter:
    sources: dict[str, str]
    spreads: dict[str, float]

    def write(self, table: Any, path: str, header: str) -> Iterator[str]:
        """The lines of one table: its strings and numbers, its points, then the tables in it.
        `path` counts the entries of a list (level.0), the `header` does not.
        """
        held = {
            key: (getattr(table, field.name), field.default)
            for key, field in keys_of(table).items()
        }
        named = [dataclasses.fields(table)[0].name] if isinstance(table, NAMED) else []
        for key, (value, _) in held.items():
            if isinstance(value, str | bool) and key not in named:  # that is in the header
                yield f"{key} = {write_value(value)}"
        for key, (value, default) in held.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                name = dotted(path, key)
                if name in self.sources or value != default:
                    yield f"{key} = {self.number(name, value)}"
        for key, (value, _) in held.items():
            if isinstance(value, tuple) and value and type(value[0]) in COLUMNS:
                yield from self.points(value, dotted(path, key))
        for key, (value, _) in held.items():
            inner, title = dotted(path, key), dotted(header, key)
            if dataclasses.is_dataclass(value):
                yield from ("", f"[{title}]", *self.write(value, inner, title))
            elif isinstance(value, tuple) and value and isinstance(value[0], NAMED):
                for entry in value:
                    where = f"{inner}.{dataclasses.astuple(entry)[0]}"
                    yield from ("", f"[{where}]", *self.write(entry, where, where))
            elif isinstance(value, tuple) and key != "points":
                for i, entry in enumerate(value):
                    yield from ("", f"[[{title}]]", *self.write(entry, f"{inner}.{i}", title))

    def number(self, name: str, value: float) -> str:
        spread = f"spread = {_digits(self.spreads[name])}, " if name in self.spreads else ""
        source = write_value(self.sources.get(name, "not given"))
        return f"{{ value = {_digits(value)}, {spread}source = {source} }}"

    def points(self, points: tuple[Any, ...], name: str) -> Iterator[str]:
        yield f"points_source = {write_value(self.sources.get(name, 'not given'))}"
        yield f"points = [  # {COLUMNS[type(points[0])]}"
        for point in points:
            items = dataclasses.astuple(point)
            if isinstance(point, CollectivePoint) and point.inside == 1:
                items = items[:-1]
            yield f"    [{', '.join(map(_digits, items))}],"
        yield "]"


def _digits(value: str | float) -> str:
    """Six digits of a number are more than was measured."""
    if isinstance(value, str):
        return write_value(value)
    if isinstance(value, int) or value.is_integer():
        return str(int(value)) if abs(value) < 1e15 else f"{value:.6e}"
    return f"{value:.6g}"
