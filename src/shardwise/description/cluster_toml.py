"""Cluster files: TOML in which every number stands beside its source.

    bandwidth_bytes_per_s = { value = 370e9, source = "nccl-tests issue 212: ...", spread = 0 }

`spread` is the interquartile range of a measured number. Tables of measured points are lists of
rows, with one `points_source` beside them.
"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from shardwise.description.cluster import (
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulPoint,
    MatmulRate,
    Protocol,
)
from shardwise.errors import UserError, nearest


def packaged_names() -> tuple[str, ...]:
    """Names of the cluster files in this package."""
    folder = resources.files("shardwise.description") / "clusters"
    return tuple(sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml")))


def load_cluster(name_or_path: str | Path) -> Cluster:
    """Read a packaged cluster by name, or a file by its path (which ends in .toml)."""
    text_name = str(name_or_path)
    if text_name.endswith(".toml"):
        try:
            text = Path(name_or_path).read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"cannot read the cluster file {text_name}: {error.strerror}"
            ) from error
        except UnicodeDecodeError as error:
            raise UserError(f"the cluster file {text_name} is not text: {error}") from error
    else:
        names = packaged_names()
        if text_name not in names:
            raise UserError(
                f"unknown cluster {text_name!r}{nearest(text_name, names)}. Or give a .toml file, "
                "such as `shardwise calibrate --out FILE.toml` writes"
            )
        folder = resources.files("shardwise.description") / "clusters"
        text = (folder / f"{text_name}.toml").read_text(encoding="utf-8")
    return parse_cluster(text, text_name)


def parse_cluster(text: str, where: str) -> Cluster:
    """Build a Cluster from TOML; unknown keys, and numbers without a source, are errors."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"cluster {where} is not TOML: {error}") from error
    reader = _Reader(where)
    try:
        return reader.cluster(data)
    except ValueError as error:
        raise UserError(f"cluster {where}: {error}") from error


class _Reader:
    """Reads tables, remembers the sources, and names the key of whatever is wrong."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.sources: list[tuple[str, str]] = []

    def cluster(self, data: Mapping[str, Any]) -> Cluster:
        self.check_keys(data, "", ("name", "device", "level", "host", "contention"))
        device = self.device(self.table(data, "device", ""))
        levels = tuple(
            self.level(level, f"level.{i}")
            for i, level in enumerate(self.tables(data, "level", ""))
        )
        host = self.host(self.table(data, "host", ""))
        contention = self.table(data, "contention", "")
        share_key = "communication_share_of_compute"
        self.check_keys(contention, "contention", (share_key,))
        return Cluster(
            name=self.text(data, "name", ""),
            device=device,
            levels=levels,
            host=host,
            communication_share_of_compute=self.number(contention, share_key, "contention"),
            sources=tuple(self.sources),
        )

    def device(self, data: Mapping[str, Any]) -> Device:
        numbers = (
            "memory_bytes",
            "bandwidth_bytes_per_s",
            "bandwidth_fraction",
            "kernel_s",
            "attention_fraction",
        )
        self.check_keys(data, "device", ("name", "matmul", *numbers))
        rates = self.table(data, "matmul", "device")
        return Device(
            name=self.text(data, "name", "device"),
            matmul=tuple(self.rate(dtype, rates[dtype]) for dtype in rates),
            **{key: self.number(data, key, "device") for key in numbers},
        )

    def rate(self, dtype: str, data: Any) -> MatmulRate:
        where = f"device.matmul.{dtype}"
        if not isinstance(data, Mapping):
            raise UserError(f"cluster {self.where}: {where} must be a table, got {data!r}")
        self.check_keys(data, where, ("peak", "fraction", "points", "points_source"))
        rows = self.rows(data, where, width=5)
        return MatmulRate(
            dtype=dtype,
            peak=self.number(data, "peak", where),
            fraction=self.number(data, "fraction", where),
            points=tuple(MatmulPoint(int(m), int(n), int(k), *rest) for m, n, k, *rest in rows),
        )

    def level(self, data: Mapping[str, Any], where: str) -> Level:
        self.check_keys(
            data,
            where,
            ("name", "ranks", "bandwidth_bytes_per_s", "protocol", "points", "points_source"),
        )
        protocols = tuple(
            self.protocol(entry, f"{where}.protocol.{i}")
            for i, entry in enumerate(self.tables(data, "protocol", where))
        )
        ranks = self.number(data, "ranks", where) if "ranks" in data else None
        rows = self.rows(data, where, width=5)
        return Level(
            name=self.text(data, "name", where),
            ranks=None if ranks is None else int(ranks),
            bandwidth_bytes_per_s=self.number(data, "bandwidth_bytes_per_s", where),
            protocols=protocols,
            points=tuple(
                CollectivePoint(kind, int(ranks), int(size), *rest)
                for kind, ranks, size, *rest in rows
            ),
        )

    def protocol(self, data: Mapping[str, Any], where: str) -> Protocol:
        optional = {"share": 1.0, "limit_bytes_per_s": math.inf}
        self.check_keys(data, where, ("name", "start_s", "step_s", *optional))
        return Protocol(
            name=self.text(data, "name", where),
            start_s=self.number(data, "start_s", where),
            step_s=self.number(data, "step_s", where),
            **{
                key: self.number(data, key, where) if key in data else default
                for key, default in optional.items()
            },
        )

    def host(self, data: Mapping[str, Any]) -> Host:
        numbers = ("op_s", "unit_s", "collective_s")
        self.check_keys(data, "host", ("communicates", "cast_s", *numbers))
        communicates = data.get("communicates", False)
        if not isinstance(communicates, bool):
            raise UserError(
                f"cluster {self.where}: host.communicates must be true or false, got "
                f"{communicates!r}"
            )
        return Host(
            communicates=communicates,
            cast_s=self.number(data, "cast_s", "host") if "cast_s" in data else None,
            **{key: self.number(data, key, "host") for key in numbers},
        )

    def check_keys(self, data: Mapping[str, Any], where: str, known: Iterable[str]) -> None:
        names = tuple(known)
        for key in data:
            if key not in names:
                raise UserError(
                    f"cluster {self.where}: unknown key {_dotted(where, key)}{nearest(key, names)}"
                )

    def table(self, data: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
        value = self.need(data, key, where)
        if not isinstance(value, Mapping):
            raise UserError(f"cluster {self.where}: {_dotted(where, key)} must be a table")
        return value

    def tables(self, data: Mapping[str, Any], key: str, where: str) -> list[Mapping[str, Any]]:
        value = self.need(data, key, where)
        if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
            raise UserError(
                f"cluster {self.where}: {_dotted(where, key)} must be written [[{key}]], once for "
                "each"
            )
        return value

    def text(self, data: Mapping[str, Any], key: str, where: str) -> str:
        value = self.need(data, key, where)
        if not isinstance(value, str):
            raise UserError(
                f"cluster {self.where}: {_dotted(where, key)} must be a string, got {value!r}"
            )
        return value

    def number(self, data: Mapping[str, Any], key: str, where: str) -> float:
        """The `value` of a number's table; its source is remembered."""
        entry, name = self.need(data, key, where), _dotted(where, key)
        if not isinstance(entry, Mapping) or not {"value", "source"} <= set(entry):
            raise UserError(
                f"cluster {self.where}: {name} is {entry!r}, expected "
                '{ value = NUMBER, source = "where it comes from" }'
            )
        self.check_keys(entry, name, ("value", "source", "spread"))
        value, source = entry["value"], entry["source"]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"cluster {self.where}: {name} must be a number, got {value!r}")
        if not isinstance(source, str) or not source.strip():
            raise UserError(f"cluster {self.where}: {name} has an empty source")
        self.sources.append((name, source))
        return float(value)

    def rows(self, data: Mapping[str, Any], where: str, width: int) -> list[list[Any]]:
        rows = data.get("points", [])
        if rows and not data.get("points_source"):
            raise UserError(f"cluster {self.where}: {where}.points have no points_source")
        for row in rows:
            if not isinstance(row, list) or len(row) != width:
                raise UserError(
                    f"cluster {self.where}: a row of {where}.points has {width} entries, got {row}"
                )
        if rows:
            self.sources.append((f"{where}.points", data["points_source"]))
        return rows

    def need(self, data: Mapping[str, Any], key: str, where: str) -> Any:
        if key not in data:
            raise UserError(f"cluster {self.where}: {_dotted(where, key)} is missing")
        return data[key]


def _dotted(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def write_cluster(cluster: Cluster, spreads: Mapping[str, float] | None = None) -> str:
    """Write a Cluster as the TOML that `load_cluster` reads. `spreads` are error bars by dotted
    key, as in `Cluster.sources`.
    """
    sources, bars = dict(cluster.sources), dict(spreads or {})

    def number(where: str, key: str, value: float) -> str:
        name = _dotted(where, key)
        parts = [f"value = {_write(value)}"]
        if name in bars:
            parts.append(f"spread = {_write(bars[name])}")
        parts.append(f"source = {json.dumps(sources.get(name, 'not given'))}")
        return f"{key} = {{ {', '.join(parts)} }}"

    device, host = cluster.device, cluster.host
    lines = [f"name = {json.dumps(cluster.name)}", "", "[device]"]
    lines.append(f"name = {json.dumps(device.name)}")
    for key in (
        "memory_bytes",
        "bandwidth_bytes_per_s",
        "bandwidth_fraction",
        "kernel_s",
        "attention_fraction",
    ):
        lines.append(number("device", key, getattr(device, key)))
    for rate in device.matmul:
        where = f"device.matmul.{rate.dtype}"
        lines += ["", f"[{where}]", number(where, "peak", rate.peak)]
        lines.append(number(where, "fraction", rate.fraction))
        rows = [(p.m, p.n, p.k, p.flops_per_s, p.spread) for p in rate.points]
        lines += _write_rows(rows, sources.get(f"{where}.points"), "m, n, k, FLOP/s, spread")
    for i, level in enumerate(cluster.levels):
        where = f"level.{i}"
        lines += ["", "[[level]]", f"name = {json.dumps(level.name)}"]
        if level.ranks is not None:
            lines.append(number(where, "ranks", level.ranks))
        lines.append(number(where, "bandwidth_bytes_per_s", level.bandwidth_bytes_per_s))
        points = [(p.kind, p.ranks, p.nbytes, p.seconds, p.spread) for p in level.points]
        lines += _write_rows(
            points, sources.get(f"{where}.points"), "kind, ranks, bytes, seconds, spread"
        )
        for j, protocol in enumerate(level.protocols):
            inner = f"{where}.protocol.{j}"
            lines += ["", "[[level.protocol]]", f"name = {json.dumps(protocol.name)}"]
            lines.append(number(inner, "start_s", protocol.start_s))
            lines.append(number(inner, "step_s", protocol.step_s))
            if protocol.share != 1:
                lines.append(number(inner, "share", protocol.share))
            if math.isfinite(protocol.limit_bytes_per_s):
                lines.append(number(inner, "limit_bytes_per_s", protocol.limit_bytes_per_s))
    lines += ["", "[host]", f"communicates = {'true' if host.communicates else 'false'}"]
    lines += [number("host", key, getattr(host, key)) for key in ("op_s", "unit_s", "collective_s")]
    if host.cast_s is not None:
        lines.append(number("host", "cast_s", host.cast_s))
    share = "communication_share_of_compute"
    lines += ["", "[contention]", number("contention", share, getattr(cluster, share))]
    return "\n".join(lines) + "\n"


def _write_rows(rows: list[tuple[Any, ...]], source: str | None, columns: str) -> list[str]:
    if not rows:
        return []
    lines = [f"points_source = {json.dumps(source or 'not given')}", f"points = [  # {columns}"]
    lines += [f"    [{', '.join(_write(item) for item in row)}]," for row in rows]
    return [*lines, "]"]


def _write(value: Any) -> str:
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int) or float(value).is_integer():
        return str(int(value)) if abs(value) < 1e15 else f"{value:.6e}"
    return f"{value:.6g}"
