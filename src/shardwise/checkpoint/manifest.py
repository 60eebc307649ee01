"""The manifest of a checkpoint: which tensors it has, which box of each is where, and the rest as
JSON.

A manifest that was read is right in itself: every name, number and box in it has been checked, so
nobody checks again. Reading executes nothing and follows no path out of the folder. Imports no
torch.

    {"format": "shardwise", "version": 1, "crc": "9f3c01aa", "serial": 3,
    "step": 20, "world": 2, ...
     "files": {"rank-00000.safetensors": {"bytes": 1096, "crc": 2774431}},
     "tensors": {"model/fc.weight": {"shape": [5, 3], "dtype": "float32", "pieces": [
       {"file": "rank-00000.safetensors", "name": "model/fc.weight@0,0", "offset": [0, 0],
        "shape": [3, 3], "crc": 40412}, ...]}}, ...}

The first line's `crc` is that of the whole text with eight zeros in its place. A file's is that of
its safetensors header; the pieces, each with its own (`checksum`), are the rest of the file.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

import numpy as np

from shardwise.errors import UserError

MANIFEST = "manifest.json"
FORMAT, VERSION = "shardwise", 1
GROUPS = ("model", "optimizer", "extra", "random")  # what a tensor's key begins with
# Far above what anybody has; below what breaks arithmetic or memory.
MOST_MANIFEST_BYTES = 1 << 30
MOST_DIMS, MOST_ELEMENTS, MOST_RANKS = 64, 1 << 48, 1 << 20

ITEM_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4,
    "uint64": 8, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

_HEAD = re.compile(
    r'\{"format": "shardwise", "version": (\d{1,9}), "crc": "([0-9a-f]{8})", "serial": (\d{1,18}),'
)
_FILE = re.compile(r"rank-\d{5,7}\.safetensors")
_UNSEALED = "00000000"


class CheckpointError(UserError):
    """A checkpoint cannot be saved or loaded; the same text on every rank."""


class CorruptCheckpoint(CheckpointError):
    """What is on the disk is not what was saved."""


Dims = tuple[int, ...]


@dataclass(frozen=True)
class Box:
    """A part of a tensor: where it begins in each dim, and how far it goes."""

    offset: Dims
    shape: Dims

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @classmethod
    def whole(cls, shape: Iterable[int]) -> Box:
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)

    def overlap(self, other: Box) -> Box | None:
        """What both have; None where that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = map(min, self.ends, other.ends)
        shape = tuple(end - start for start, end in zip(offset, ends, strict=True))
        return Box(offset, shape) if all(size > 0 for size in shape) else None

    @property
    def ends(self) -> Dims:
        return tuple(start + size for start, size in zip(self.offset, self.shape, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """The same part as an index into a tensor that holds `outer`."""
        return tuple(
            slice(start - first, start - first + size)
            for start, first, size in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass(frozen=True)
class Piece:
    """One box of a tensor in a data file, under `name`."""

    file: str
    name: str
    box: Box
    crc: int

    def to_json(self) -> dict[str, Any]:
        place = {"offset": list(self.box.offset), "shape": list(self.box.shape)}
        return {"file": self.file, "name": self.name, **place, "crc": self.crc}


@dataclass(frozen=True)
class SavedTensor:
    """A whole tensor: its pieces are disjoint, and together all of it."""

    shape: Dims
    dtype: str
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class DataFile:
    bytes: int
    crc: int  # of the header


@dataclass(frozen=True)
class SavedGroup:
    """A parameter group of the optimizer: names of parameters, and settings as encoded JSON."""

    params: tuple[str, ...]
    settings: dict[str, Any]


@dataclass(frozen=True)
class SavedOptimizer:
    class_name: str
    param_groups: tuple[SavedGroup, ...]
    values: dict[str, dict[str, Any]]  # by parameter and state: what is no tensor, as encoded JSON

    def to_json(self) -> dict[str, Any]:
        groups = [{"params": list(g.params), "settings": g.settings} for g in self.param_groups]
        return {"class": self.class_name, "param_groups": groups, "values": self.values}


@dataclass(frozen=True)
class Manifest:
    """All of a checkpoint but its data."""

    step: int
    world: int
    finite: bool  # no infinite or undefined number in model and optimizer
    files: dict[str, DataFile]
    tensors: dict[str, SavedTensor]  # by "model/FQN", "optimizer/FQN/STATE", "extra/...", ...
    plan: dict[str, Any] | None = None
    aliases: dict[str, str] = field(default_factory=dict)  # other names of tied parameters
    optimizer: SavedOptimizer | None = None
    # What ranks gave as `extra`, encoded, each once; and which of these each rank gave.
    extra: tuple[Any, ...] = ()
    extra_of: tuple[int, ...] = ()
    random: tuple[Any, ...] = ()  # of each rank, encoded
    modules: dict[str, Any] = field(default_factory=dict)  # `get_extra_state` of modules, encoded
    versions: dict[str, str] = field(default_factory=dict)  # of torch and shardwise
    serial: int = 0  # above that of every checkpoint that was there: the highest is the newest

    def to_text(self) -> str:
        body = {
            "step": self.step,
            "world": self.world,
            "finite": self.finite,
            "versions": self.versions,
            "plan": self.plan,
            "aliases": self.aliases,
            "optimizer": None if self.optimizer is None else self.optimizer.to_json(),
            "extra": list(self.extra),
            "extra_of": list(self.extra_of),
            "random": list(self.random),
            "modules": self.modules,
            "files": {name: asdict(each) for name, each in self.files.items()},
            "tensors": {
                key: {
                    "shape": list(each.shape),
                    "dtype": each.dtype,
                    "pieces": [piece.to_json() for piece in each.pieces],
                }
                for key, each in self.tensors.items()
            },
        }
        return seal(body, self.serial)

    @classmethod
    def read(cls, path: str) -> Manifest:
        """Of a checkpoint's folder, local or a URL."""
        from shardwise.checkpoint.storage import storage_of

        parent, name = storage_of(path).split()
        return cls.parse(parent.read_manifest(name), parent.join(name, MANIFEST))

    @classmethod
    def parse(cls, data: bytes, where: str = MANIFEST) -> Manifest:
        return _Reader(where).read(data)


_WIDTH = 1024  # words in a row of the table that `checksum` takes data for


def checksum(data: Any) -> int:
    """Of a piece: the CRC-32 of the sums of its rows and columns, laid out as a table of 64-bit
    words, and of the bytes after the table's end. Any changed word changes the sum of its row,
    exchanged rows change their order. It takes a quarter of the time of a CRC-32 of everything.
    """
    end = len(data) // (8 * _WIDTH) * (8 * _WIDTH)
    crc = 0
    if end:
        table = np.frombuffer(data, np.dtype("<u8"), end // 8).reshape(-1, _WIDTH)
        crc = zlib.crc32(table.sum(0).tobytes(), zlib.crc32(table.sum(1).tobytes()))
    return zlib.crc32(memoryview(data)[end:], crc)


def seal(body: dict[str, Any], serial: int = 0, version: int = VERSION) -> str:
    """The text of a manifest: the head that says what it is and its checksum, then the body."""
    rest = json.dumps(body, separators=(",", ":"), allow_nan=False, ensure_ascii=True)[1:]
    head = f'{{"format": "{FORMAT}", "version": {version}, "crc": "%s", "serial": {serial},\n'
    unsealed = head % _UNSEALED + rest
    return head % f"{zlib.crc32(unsealed.encode()):08x}" + rest


def serial_in(head: bytes) -> int | None:
    """The serial that a manifest's first bytes say; None where they are damaged."""
    found = _HEAD.match(head.decode("ascii", "replace"))
    return None if found is None else int(found[3])


class _Reader:
    """Reads one manifest; every error names it and the key."""

    def __init__(self, where: str) -> None:
        self.where = where

    def read(self, data: bytes) -> Manifest:
        head = _HEAD.match(data[:200].decode("ascii", "replace"))
        if head is None:
            self.fail("is no manifest of a shardwise checkpoint, or its first line is damaged")
        version = int(head[1])
        start, end = head.span(2)
        sealed = zlib.crc32(data[:start] + _UNSEALED.encode() + data[end:])
        # A newer version may say its checksum differently: ask for the version first.
        if version != VERSION:
            self.refuse(
                f"has format version {version}, this shardwise reads version {VERSION}; "
                "read it with the shardwise that wrote it"
            )
        if sealed != int(head[2], 16):
            self.fail(f"has checksum {sealed:08x}, its first line says {head[2]}: it is damaged")
        try:
            table = json.loads(data, parse_constant=self._no_constant)
        except (ValueError, RecursionError) as error:
            self.fail(f"is not JSON: {error}")
        return self._manifest(self._table(table, "manifest"))

    def _manifest(self, table: dict[str, Any]) -> Manifest:
        known = {
            "format", "version", "crc", "serial", "step", "world", "finite", "versions", "plan",
            "aliases", "optimizer", "extra", "extra_of", "random", "modules", "files", "tensors",
        }  # fmt: skip
        for key in known ^ table.keys():
            self.fail(f"has no key {key!r}" if key in known else f"has an unknown key {key!r}")
        world = self._whole(table["world"], "world", 1, MOST_RANKS)
        files = {
            self._file_name(name): self._file(each, f"files.{name}")
            for name, each in self._table(table["files"], "files").items()
        }
        tensors = {
            self._key(key): self._tensor(each, f"tensors.{key}", files)
            for key, each in self._table(table["tensors"], "tensors").items()
        }
        self._check_sizes(files, tensors)
        aliases = self._strings(table["aliases"], "aliases")
        for name, other in aliases.items():
            if f"model/{other}" not in tensors or f"model/{name}" in tensors:
                self.fail(f"aliases.{name} is {other!r}, expected another name of a saved tensor")
        extra = tuple(self._list(table["extra"], "extra"))
        extra_of = self._dims(table["extra_of"], "extra_of", MOST_RANKS)
        if len(extra_of) not in (0, world) or any(i >= len(extra) for i in extra_of):
            self.fail(f"extra_of is {list(extra_of)!r:.80}, expected one of extra for each rank")
        random = tuple(self._list(table["random"], "random"))
        if len(random) not in (0, world):
            self.fail(f"random has {len(random)} entries, expected none or one for each rank")
        plan = table["plan"]
        return Manifest(
            step=self._whole(table["step"], "step", 0),
            world=world,
            finite=self._bool(table["finite"], "finite"),
            files=files,
            tensors=tensors,
            plan=None if plan is None else self._table(plan, "plan"),
            aliases=aliases,
            optimizer=self._optimizer(table["optimizer"]),
            extra=extra,
            extra_of=extra_of,
            random=random,
            modules=self._table(table["modules"], "modules"),
            versions=self._strings(table["versions"], "versions"),
            serial=self._whole(table["serial"], "serial", 0),
        )

    def _optimizer(self, given: Any) -> SavedOptimizer | None:
        if given is None:
            return None
        table = self._table(given, "optimizer", ("class", "param_groups", "values"))
        groups = []
        for i, each in enumerate(self._list(table["param_groups"], "optimizer.param_groups")):
            path = f"optimizer.param_groups.{i}"
            group = self._table(each, path, ("params", "settings"))
            params = self._list(group["params"], f"{path}.params")
            names = tuple(self._string(name, f"{path}.params") for name in params)
            settings = self._table(group["settings"], f"{path}.settings")
            groups.append(SavedGroup(names, settings))
        values = {
            name: self._table(each, f"optimizer.values.{name}")
            for name, each in self._table(table["values"], "optimizer.values").items()
        }
        class_name = self._string(table["class"], "optimizer.class")
        return SavedOptimizer(class_name, tuple(groups), values)

    def _file(self, given: Any, path: str) -> DataFile:
        table = self._table(given, path, ("bytes", "crc"))
        size = self._whole(table["bytes"], f"{path}.bytes", 8, MOST_ELEMENTS * 16)
        return DataFile(size, self._whole(table["crc"], f"{path}.crc", 0, (1 << 32) - 1))

    def _tensor(self, given: Any, path: str, files: dict[str, DataFile]) -> SavedTensor:
        table = self._table(given, path, ("shape", "dtype", "pieces"))
        shape = self._dims(table["shape"], f"{path}.shape")
        dtype = self._string(table["dtype"], f"{path}.dtype")
        if dtype not in ITEM_BYTES:
            self.fail(f"{path}.dtype is {dtype!r:.80}, expected one of {', '.join(ITEM_BYTES)}")
        pieces = []
        for i, each in enumerate(self._list(table["pieces"], f"{path}.pieces")):
            piece = self._piece(each, f"{path}.pieces.{i}", files)
            box = piece.box
            inside = len(box.offset) == len(box.shape) == len(shape) and all(
                size > 0 and start + size <= length
                for start, size, length in zip(box.offset, box.shape, shape, strict=True)
            )
            if not inside:
                self.fail(f"{path}.pieces.{i} is {box}, expected a part of shape {list(shape)}")
            pieces.append(piece)
        problem = find_gap(shape, [piece.box for piece in pieces])
        if problem:
            self.fail(f"{path}: {problem}")
        return SavedTensor(shape, dtype, tuple(pieces))

    def _piece(self, given: Any, path: str, files: dict[str, DataFile]) -> Piece:
        table = self._table(given, path, ("file", "name", "offset", "shape", "crc"))
        file = self._string(table["file"], f"{path}.file")
        if file not in files:
            self.fail(f"{path}.file is {file!r:.80}, which is not among the files")
        box = Box(
            self._dims(table["offset"], f"{path}.offset"),
            self._dims(table["shape"], f"{path}.shape"),
        )
        name = self._string(table["name"], f"{path}.name")
        return Piece(file, name, box, self._whole(table["crc"], f"{path}.crc", 0, (1 << 32) - 1))

    def _check_sizes(self, files: dict[str, DataFile], tensors: dict[str, SavedTensor]) -> None:
        """No file has less than its pieces take, and no piece two owners."""
        taken = dict.fromkeys(files, 8)
        named: set[tuple[str, str]] = set()
        for key, tensor in tensors.items():
            for piece in tensor.pieces:
                taken[piece.file] += piece.box.numel * ITEM_BYTES[tensor.dtype]
                if (piece.file, piece.name) in named:
                    self.fail(f"tensors.{key}: piece {piece.name!r:.80} is used twice")
                named.add((piece.file, piece.name))
        for name, needed in taken.items():
            if needed > files[name].bytes:
                self.fail(f"files.{name} has {files[name].bytes} bytes, its pieces take {needed}")

    def _file_name(self, name: str) -> str:
        if not _FILE.fullmatch(name):
            self.fail(f"files: {name!r:.80} is no name of a data file (rank-00000.safetensors)")
        return name

    def _key(self, key: str) -> str:
        if key.partition("/")[0] not in GROUPS or "/" not in key:
            self.fail(f"tensors: {key!r:.80} is no key; keys begin with {', '.join(GROUPS)}")
        return key

    # What JSON may hold

    def _table(self, given: Any, path: str, keys: Sequence[str] = ()) -> dict[str, Any]:
        if not isinstance(given, dict):
            self._wrong(given, path, "a table")
        if keys and given.keys() != set(keys):
            self.fail(f"{path} has the keys {sorted(given)!r:.200}, expected {sorted(keys)}")
        return given

    def _list(self, given: Any, path: str) -> list[Any]:
        if not isinstance(given, list):
            self._wrong(given, path, "a list")
        return given

    def _string(self, given: Any, path: str) -> str:
        if not isinstance(given, str):
            self._wrong(given, path, "a string")
        return given

    def _strings(self, given: Any, path: str) -> dict[str, str]:
        table = self._table(given, path)
        return {key: self._string(value, f"{path}.{key}") for key, value in table.items()}

    def _bool(self, given: Any, path: str) -> bool:
        if not isinstance(given, bool):
            self._wrong(given, path, "true or false")
        return given

    def _whole(self, given: Any, path: str, least: int, most: int = 1 << 62) -> int:
        if type(given) is not int or not least <= given <= most:
            self._wrong(given, path, f"a whole number from {least} to {most}")
        return given

    def _dims(self, given: Any, path: str, most: int = MOST_DIMS) -> Dims:
        dims = self._list(given, path)
        if len(dims) > most:
            self.fail(f"{path} has {len(dims)} numbers, expected at most {most}")
        sizes = tuple(self._whole(size, path, 0, MOST_ELEMENTS) for size in dims)
        if most == MOST_DIMS and math.prod(size or 1 for size in sizes) > MOST_ELEMENTS:
            self.fail(f"{path} is {list(sizes)!r:.80}, more than any tensor has")
        return sizes

    def _no_constant(self, name: str) -> NoReturn:
        raise ValueError(f"{name} is no number of JSON")

    def _wrong(self, given: Any, path: str, expected: str) -> NoReturn:
        self.fail(f"{path} is {given!r:.80}, expected {expected}")

    def fail(self, text: str) -> NoReturn:
        raise CorruptCheckpoint(f"checkpoint {self.where}: {text}")

    def refuse(self, text: str) -> NoReturn:
        raise CheckpointError(f"checkpoint {self.where}: {text}")


def find_gap(shape: Dims, boxes: Sequence[Box]) -> str | None:
    """Why boxes inside of `shape` do not make it up, each element once; None if they do."""
    covered, wanted = sum(box.numel for box in boxes), math.prod(shape)
    if covered != wanted:
        return f"the pieces have {covered} elements, shape {list(shape)} has {wanted}"
    if len(boxes) < 2:
        return None
    # Sorted along the dim that is cut most, only neighbours can overlap, or few after them.
    dim = max(range(len(shape)), key=lambda d: len({box.offset[d] for box in boxes}))
    ordered = sorted(boxes, key=lambda box: box.offset[dim])
    open_boxes: list[Box] = []
    for box in ordered:
        open_boxes = [other for other in open_boxes if other.ends[dim] > box.offset[dim]]
        for other in open_boxes:
            if box.overlap(other):
                return f"pieces overlap: {other} and {box}"
        open_boxes.append(box)
    return None
