"""Files that others wrote: opened only where they are files, read only as far as they go.

Whatever a file says of itself (names, sizes, counts) is compared with what is there before anything
is done with it. Imports no torch.
"""

from __future__ import annotations

import json
import os
import stat
from typing import Any, NoReturn

from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    MOST_DIMS,
    MOST_ELEMENTS,
    Box,
    CorruptCheckpoint,
    Dims,
    unique_keys,
)
from shardwise.checkpoint.write import DTYPES

MOST_HEADER_BYTES = 100 << 20  # what the safetensors library itself reads at most
MOST_INDEX_BYTES = 256 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFDIR: "a folder",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class ForeignFile:
    """A file to read from, with errors that name it."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            # Opening a pipe to read from would wait for somebody who writes into it.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise CorruptCheckpoint(f"cannot read {path}: {error.strerror}") from error
        state = os.fstat(self._descriptor)
        if not stat.S_ISREG(state.st_mode):
            kind = _KINDS.get(stat.S_IFMT(state.st_mode), "something else")
            os.close(self._descriptor)
            raise CorruptCheckpoint(f"{path} is {kind}, expected a file")
        self.size = state.st_size

    def __del__(self) -> None:
        if hasattr(self, "size"):
            os.close(self._descriptor)

    def read(self, start: int, size: int) -> bytearray:
        """Exactly `size` bytes."""
        if start < 0 or size < 0 or start + size > self.size:
            self.fail(f"has {self.size} bytes, {size} are asked for from {start} on")
        buffer = bytearray(size)
        view, done = memoryview(buffer), 0
        while done < size:
            try:
                got = os.preadv(self._descriptor, [view[done : done + (1 << 30)]], start + done)
            except OSError as error:
                self.fail(f"cannot be read: {error.strerror}")
            if got == 0:
                self.fail(f"ends {size - done} bytes early")
            done += got
        return buffer

    def read_json(self, start: int, size: int, most: int) -> Any:
        if size > most:
            self.fail(f"has {size} bytes of JSON, expected at most {most}")
        try:
            return json.loads(self.read(start, size).decode(), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            self.fail(f"is not JSON of a checkpoint: {error}")

    def fail(self, text: str) -> NoReturn:
        raise CorruptCheckpoint(f"{self.path} {text}")


def open_beside(folder: str, name: Any, told_by: str) -> ForeignFile:
    """A file of `folder` whose name another file told. Links may lead to files of the same folder,
    or to the `blobs` of the cache that huggingface_hub keeps.
    """
    plain = isinstance(name, str) and name not in ("", ".", "..") and "\0" not in name
    if not plain or os.path.basename(name) != name:
        raise CorruptCheckpoint(f"{told_by} names {name!r:.80}, expected a file of its own folder")
    path = os.path.join(folder, name)
    home = os.path.realpath(folder)
    homes = {home, os.path.join(os.path.dirname(os.path.dirname(home)), "blobs")}
    if os.path.islink(path) and os.path.dirname(os.path.realpath(path)) not in homes:
        raise CorruptCheckpoint(f"{path} is a link that leads out of the folder")
    return ForeignFile(path)


_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class SafetensorsFile:
    """The header of a safetensors file: of each tensor its shape, dtype and place, all checked."""

    def __init__(self, file: ForeignFile) -> None:
        self.file = file
        if file.size < 8:
            file.fail(f"has {file.size} bytes, no safetensors file has fewer than 8")
        length = int.from_bytes(file.read(0, 8), "little")
        if length > min(file.size - 8, MOST_HEADER_BYTES):
            file.fail(f"says that its header has {length} bytes, of {file.size}")
        table = file.read_json(8, length, MOST_HEADER_BYTES)
        if not isinstance(table, dict):
            file.fail("has a header that is no table")
        self.metadata = self._read_metadata(table.pop("__metadata__", {}))
        self._data = 8 + length
        self.tensors: dict[str, tuple[Dims, str]] = {}
        self._places: dict[str, int] = {}
        for name, entry in table.items():
            self._read_entry(name, entry)
        self._check_places()

    def _read_metadata(self, given: Any) -> dict[str, str]:
        if not isinstance(given, dict) or not all(isinstance(v, str) for v in given.values()):
            self.file.fail("has __metadata__ that is no table of strings")
        return given

    def _read_entry(self, name: str, entry: Any) -> None:
        if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
            self.file.fail(f"says {entry!r:.80} of {name!r:.80}, expected dtype, shape and offsets")
        kind, shape, ends = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or kind not in _DTYPES:
            self.file.fail(f"has {name!r:.80} of dtype {kind!r:.40}: {', '.join(_DTYPES)} are read")
        shape = check_dims(self.file, shape, f"the shape of {name!r:.80}")
        start, end = check_dims(self.file, ends, f"data_offsets of {name!r:.80}", 2)
        nbytes = Box.whole(shape).numel * ITEM_BYTES[_DTYPES[kind]]
        if end - start != nbytes or self._data + end > self.file.size:
            self.file.fail(
                f"has {name!r:.80} from {start} to {end}, expected {nbytes} bytes inside of it"
            )
        self.tensors[name] = shape, _DTYPES[kind]
        self._places[name] = start

    def _check_places(self) -> None:
        """Tensors follow each other without a gap: nothing is read twice, nothing hides between."""
        at = 0
        for name in sorted(self._places, key=lambda name: (self._places[name], self._end(name))):
            if self._places[name] != at:
                kind = "overlaps" if self._places[name] < at else "leaves a gap after"
                self.file.fail(f"has {name!r:.80} at {self._places[name]}, which {kind} another")
            at = self._end(name)
        if self._data + at != self.file.size:
            self.file.fail(f"has {self.file.size} bytes, its tensors end at {self._data + at}")

    def _end(self, name: str) -> int:
        shape, dtype = self.tensors[name]
        return self._places[name] + Box.whole(shape).numel * ITEM_BYTES[dtype]

    def read_rows(self, name: str, first: int, rows: int) -> bytearray:
        """The bytes of some rows; of a 0-d tensor all."""
        shape, dtype = self.tensors[name]
        row = Box.whole(shape[1:]).numel * ITEM_BYTES[dtype]
        return self.file.read(self._data + self._places[name] + first * row, rows * row)


def check_dims(file: ForeignFile, given: Any, what: str, count: int | None = None) -> Dims:
    """A list of whole numbers that a tensor can have, or `count` of them."""
    most = MOST_ELEMENTS * 16  # bytes of the largest tensor
    fits = isinstance(given, list | tuple) and len(given) <= MOST_DIMS
    if not fits or not all(type(n) is int and 0 <= n <= most for n in given):
        file.fail(f"says {given!r:.80} for {what}, expected whole numbers from 0 to {most}")
    if count is not None and len(given) != count:
        file.fail(f"says {given!r:.80} for {what}, expected {count} numbers")
    if count is None and Box((), tuple(n or 1 for n in given)).numel > MOST_ELEMENTS:
        file.fail(f"says {given!r:.80} for {what}, more than any tensor has")
    return tuple(given)
