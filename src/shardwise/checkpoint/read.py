"""Reading a checkpoint's files: which there are, whether they are whole, pieces into memory.

Whatever is read is compared with the manifest first: the header of a data file, the place of each
piece in it, the checksum of each piece. Needs no process group.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Protocol

import torch

from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    MANIFEST,
    CheckpointError,
    CorruptCheckpoint,
    Manifest,
    Piece,
    SavedTensor,
    checksum,
)
from shardwise.checkpoint.pieces import Part
from shardwise.checkpoint.storage import Storage, storage_of
from shardwise.checkpoint.trees import bytes_of
from shardwise.checkpoint.write import BATCH_BYTES, JOIN_BYTES, make_header
from shardwise.run_files import CHECKPOINTS

THREADS = 4


def all_of(root: str | os.PathLike[str]) -> list[str]:
    """The folders of the committed checkpoints of a root, the newest first."""
    storage = storage_of(root)
    return [storage.join(name) for name in storage.committed()]


def newest(root: str | os.PathLike[str]) -> str | None:
    return next(iter(all_of(root)), None)


def locate(path: str | os.PathLike[str]) -> str:
    """The one checkpoint that a path means: itself, or the newest of a root."""
    storage = storage_of(path)
    parent, name = storage.split()
    if parent.has(name, MANIFEST):
        return storage.root
    found = newest(path)
    if found is None:
        inside = storage.join(CHECKPOINTS)
        hint = f": those of a run are in {inside}" if newest(inside) is not None else ""
        raise CheckpointError(f"{os.fspath(path)} has no checkpoint, and is none{hint}")
    return found


def verify(
    path: str | os.PathLike[str], progress: Callable[[int, int], None] = lambda done, total: None
) -> list[str]:
    """What is wrong with a checkpoint, after reading all of it: nothing, or one line for each
    problem. `path` is a checkpoint's folder, or a root: its newest one. `progress` is told how many
    bytes are read, and of how many.
    """
    try:
        checkpoint = Checkpoint.open(locate(path))
    except (CheckpointError, OSError) as error:
        return [str(error)]
    problems: list[str] = []
    pieces = [(s, p) for s in checkpoint.manifest.tensors.values() for p in s.pieces]
    for file in checkpoint.manifest.files:
        try:
            checkpoint.places(file)
        except CheckpointError as error:
            problems.append(str(error))
            pieces = [pair for pair in pieces if pair[1].file != file]
    done, total = 0, sum(p.box.numel * ITEM_BYTES[s.dtype] for s, p in pieces)
    for saved, piece in pieces:  # one by one: the problem of one does not hide another's
        try:
            read_all(checkpoint, [Want(saved, (), (piece,))])
        except CheckpointError as error:
            problems.append(str(error))
        done += piece.box.numel * ITEM_BYTES[saved.dtype]
        progress(done, total)
    return problems


class Origin(Protocol):
    """What a load reads from: a checkpoint, or files of another program seen as one."""

    manifest: Manifest
    digest: str  # ranks compare it: whether all see the same

    @property
    def path(self) -> str: ...

    def check_files(self) -> None:
        """Error where a file is not what the manifest says."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill every part."""


class Checkpoint:
    """A committed checkpoint that is read."""

    def __init__(self, storage: Storage, name: str, data: bytes) -> None:
        self.storage, self.name = storage, name
        self.manifest = Manifest.parse(data, storage.join(name, MANIFEST))
        self.digest = f"{zlib.crc32(data):08x}"
        self.places = cache(self._find_places)

    @classmethod
    def open(cls, path: str) -> Checkpoint:
        parent, name = storage_of(path).split()
        return cls(parent, name, parent.read_manifest(name))

    @property
    def path(self) -> str:
        return self.storage.join(self.name)

    def check_files(self) -> None:
        for file in self.manifest.files:
            self.places(file)

    def read(self, wants: Sequence[Want]) -> None:
        read_all(self, wants)

    def damaged(self, file: str, text: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.storage.join(self.name, file)} {text}")

    def _find_places(self, file: str) -> dict[str, int]:
        """Where in a data file each piece begins. The header has to be the very one that the
        manifest's pieces give.
        """
        expected = self.manifest.files[file]
        try:
            size = self.storage.size(self.name, file)
            if size != expected.bytes:
                raise self.damaged(file, f"has {size} bytes, the manifest says {expected.bytes}")
            length = int.from_bytes(self.storage.read(self.name, file, 0, 8), "little")
            if not 0 < length <= size - 8:
                raise self.damaged(file, f"says that its header has {length} bytes, of {size}")
            header = self.storage.read(self.name, file, 0, 8 + length)
        except FileNotFoundError:
            raise self.damaged(file, "is not there, though the manifest names it") from None
        except OSError as error:
            raise self.damaged(file, f"cannot be read: {error.strerror or error}") from error
        if zlib.crc32(header) != expected.crc:
            raise self.damaged(file, "has a damaged header: its checksum is another")
        return self._match(file, header, self._pieces[file], size)

    @cached_property
    def _pieces(self) -> dict[str, list[tuple[Piece, str]]]:
        """Of each data file, with their dtypes."""
        found: dict[str, list[tuple[Piece, str]]] = {file: [] for file in self.manifest.files}
        for tensor in self.manifest.tensors.values():
            for piece in tensor.pieces:
                found[piece.file].append((piece, tensor.dtype))
        return found

    def _match(
        self, file: str, header: bytes, pieces: Sequence[tuple[Piece, str]], size: int
    ) -> dict[str, int]:
        try:
            table: Any = json.loads(header[8:])
            listed = {name: entry["data_offsets"][0] for name, entry in table.items()}
            pieces = sorted(pieces, key=lambda pair: listed[pair[0].name])
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
            raise self.damaged(file, "has a header without the manifest's pieces") from None
        entries = [(piece.name, dtype, piece.box.shape) for piece, dtype in pieces]
        if make_header(entries) != header:
            raise self.damaged(file, "has a header that is not that of the manifest's pieces")
        places, at = {}, len(header)
        for piece, dtype in pieces:
            places[piece.name] = at
            at += piece.box.numel * ITEM_BYTES[dtype]
        if at != size:
            raise self.damaged(file, f"has {size} bytes, its pieces end at {at}")
        return places


@dataclass(frozen=True)
class Want:
    """Parts of a saved tensor to fill, and pieces to check whether or not they are needed."""

    saved: SavedTensor
    parts: tuple[Part, ...]
    checked: tuple[Piece, ...] = ()

    def reads(self) -> Iterator[tuple[Piece, str, list[Part]]]:
        """The pieces that have to be read, each with the parts that it goes to."""
        for piece in self.saved.pieces:
            touched = [part for part in self.parts if part.box.overlap(piece.box)]
            if touched or piece in self.checked:
                yield piece, self.saved.dtype, touched


@dataclass(frozen=True)
class Reads:
    """Pieces of one file that lie side by side, read in one call."""

    file: str
    start: int
    pieces: tuple[tuple[Piece, str, list[Part]], ...]

    def run(self, checkpoint: Checkpoint) -> None:
        sizes = [piece.box.numel * ITEM_BYTES[dtype] for piece, dtype, _ in self.pieces]
        target = self._direct_target()
        buffer = memoryview(bytearray(sum(sizes))) if target is None else target
        try:
            got = checkpoint.storage.read_into(checkpoint.name, self.file, self.start, buffer)
        except FileNotFoundError:
            raise checkpoint.damaged(self.file, "is not there any more") from None
        except OSError as error:
            text = f"cannot be read: {error.strerror or error}"
            raise checkpoint.damaged(self.file, text) from error
        if got != len(buffer):
            raise checkpoint.damaged(self.file, f"ends {len(buffer) - got} bytes early")
        at = 0
        for (piece, dtype, parts), size in zip(self.pieces, sizes, strict=True):
            data = buffer[at : at + size]
            at += size
            if checksum(data) != piece.crc:
                raise checkpoint.damaged(
                    self.file, f"is damaged: the checksum of {piece.name} is another"
                )
            if target is None and parts:
                _fill(piece, dtype, data, parts)

    def _direct_target(self) -> memoryview | None:
        """The memory of the one part that a large piece goes to, where it lies there in a row."""
        if len(self.pieces) != 1 or len(self.pieces[0][2]) != 1:
            return None
        (piece, _, (part,)) = self.pieces[0]
        if part.box.overlap(piece.box) != piece.box:
            return None
        view = part.tensor[piece.box.within(part.box)]
        if not view.is_contiguous():
            return None
        return bytes_of(view)


def _fill(piece: Piece, dtype: str, data: memoryview, parts: Iterable[Part]) -> None:
    kind = getattr(torch, dtype)
    source = torch.frombuffer(data, dtype=torch.uint8)
    if source.data_ptr() % kind.itemsize:
        source = source.clone()
    source = source.view(kind).view(piece.box.shape)
    for part in parts:
        shared = part.box.overlap(piece.box)
        assert shared is not None
        part.tensor[shared.within(part.box)].copy_(source[shared.within(piece.box)])


def plan_reads(checkpoint: Checkpoint, wants: Iterable[Want]) -> list[Reads]:
    """The wanted pieces in the order of the files, small neighbours together."""
    found = []
    for want in wants:
        for piece, dtype, parts in want.reads():
            start = checkpoint.places(piece.file)[piece.name]
            found.append((piece.file, start, piece, dtype, parts))
    found.sort(key=lambda each: each[:2])
    reads: list[Reads] = []
    group: list[tuple[Piece, str, list[Part]]] = []
    begin, end, at_file = 0, -1, ""

    def close() -> None:
        if group:
            reads.append(Reads(at_file, begin, tuple(group)))
            group.clear()

    for file, start, piece, dtype, parts in found:
        size = piece.box.numel * ITEM_BYTES[dtype]
        joins = file == at_file and start == end and end - begin + size <= BATCH_BYTES
        if not (joins and size < JOIN_BYTES and group):
            close()
            begin, at_file = start, file
        group.append((piece, dtype, parts))
        end = start + size
        if size >= JOIN_BYTES:
            close()
    close()
    return reads


def read_all(checkpoint: Checkpoint, wants: Sequence[Want]) -> None:
    """Fill every part; the first error is raised when all reads have ended."""
    reads = plan_reads(checkpoint, wants)
    if len(reads) == 1:
        reads[0].run(checkpoint)
        return
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(each.run, checkpoint) for each in reads]:
            future.result()
