"""Checkpoints of other programs, seen as one of ours: a manifest, and boxes that can be read."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shardwise.checkpoint.manifest import (
    Box,
    CorruptCheckpoint,
    Dims,
    Manifest,
    Piece,
    SavedOptimizer,
    SavedTensor,
)
from shardwise.checkpoint.pieces import Part
from shardwise.checkpoint.read import THREADS, Want
from shardwise.description.parameters import dtype_name
from shardwise.interchange.files import (
    MOST_INDEX_BYTES,
    ForeignFile,
    SafetensorsFile,
    open_beside,
)
from shardwise.interchange.pickles import load_archive


class Foreign:
    """Files of another program. There are no checksums in them: what is read is what is there."""

    kind: str

    def __init__(
        self,
        path: str,
        tensors: dict[str, SavedTensor],
        aliases: dict[str, str] | None = None,
        optimizer: SavedOptimizer | None = None,
        extra: dict[str, Any] | None = None,
        step: int = 0,
    ) -> None:
        self.path = path
        # Ranks compare it: whether all see the same names, shapes and places.
        self.digest = f"{zlib.crc32(repr((tensors, aliases, optimizer)).encode()):08x}"
        self.manifest = Manifest(
            step=step,
            world=1,
            finite=True,
            files={},
            tensors=tensors,
            aliases=aliases or {},
            optimizer=optimizer,
            extra=(extra,) if extra else (),
            extra_of=(0,) if extra else (),
        )

    def check_files(self) -> None:
        """All that there is to check was, when they were opened."""

    def read(self, wants: Sequence[Want]) -> None:
        """Fill the parts; the first error is raised when all reads have ended."""
        with ThreadPoolExecutor(THREADS) as pool:
            futures = [
                pool.submit(self._fill, part, piece, dtype)
                for want in wants
                for piece, dtype, parts in want.reads()
                for part in parts
            ]
            for future in futures:
                future.result()

    def _fill(self, part: Part, piece: Piece, dtype: str) -> None:
        shared = part.box.overlap(piece.box)
        assert shared is not None
        source = self.read_box(piece, dtype, shared)
        part.tensor[shared.within(part.box)].copy_(source)

    def read_box(self, piece: Piece, dtype: str, box: Box) -> torch.Tensor:
        """A box inside of a piece's."""
        raise NotImplementedError


def whole_piece(file: str, name: str, shape: Dims) -> tuple[Piece, ...]:
    box = Box.whole(shape)
    return (Piece(file, name, box, 0),) if box.numel else ()


class SafetensorsFiles(Foreign):
    """`model.safetensors`, or the shards that an index names. Of a box only its rows are read."""

    kind = "Hugging Face safetensors"

    def __init__(self, path: str, files: dict[str, ForeignFile], owners: dict[str, str]) -> None:
        self._files = {name: SafetensorsFile(file) for name, file in files.items()}
        tensors: dict[str, SavedTensor] = {}
        aliases: dict[str, str] = {}
        for file, opened in self._files.items():
            for name, (shape, dtype) in opened.tensors.items():
                if owners and owners.get(name) != file:
                    continue  # the index gives it to another, or leaves it out
                if f"model/{name}" in tensors:
                    opened.file.fail(f"has {name!r:.80}, as another file has")
                tensors[f"model/{name}"] = SavedTensor(shape, dtype, whole_piece(file, name, shape))
        for opened in self._files.values():
            for other, name in opened.metadata.items():  # as safetensors.torch.save_model does
                if f"model/{name}" in tensors and f"model/{other}" not in tensors:
                    aliases[other] = name
        for name, file in owners.items():
            if f"model/{name}" not in tensors:
                self._files[file].file.fail(f"has no tensor {name!r:.80}, though the index says so")
        super().__init__(path, tensors, aliases)

    def read_box(self, piece: Piece, dtype: str, box: Box) -> torch.Tensor:
        shape = piece.box.shape
        first, rows = (box.offset[0], box.shape[0]) if shape else (0, 1)
        data = self._files[piece.file].read_rows(piece.name, first, rows)
        read = Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])) if shape else box
        tensor = torch.frombuffer(data, dtype=getattr(torch, dtype)).view(read.shape)
        return tensor[box.within(read)]


class PickledFiles(Foreign):
    """`pytorch_model.bin` or any file of torch.save with tensors by name, loaded by `weights_only`
    and mapped into memory.
    """

    kind = "PyTorch pickle (weights only)"

    def __init__(self, path: str, files: dict[str, ForeignFile]) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        tensors: dict[str, SavedTensor] = {}
        for name, file in files.items():
            for key, value in _tensors_of(file).items():
                if key in self._tensors:
                    file.fail(f"has {key!r:.80}, as another file has")
                self._tensors[key] = value
                shape = tuple(value.shape)
                pieces = whole_piece(name, key, shape)
                tensors[f"model/{key}"] = SavedTensor(shape, dtype_name(value.dtype), pieces)
        super().__init__(path, tensors)

    def read_box(self, piece: Piece, dtype: str, box: Box) -> torch.Tensor:
        return self._tensors[piece.name][box.within(piece.box)]


def _tensors_of(file: ForeignFile) -> dict[str, torch.Tensor]:
    loaded = load_archive(file, file.fail)
    if isinstance(loaded, dict) and isinstance(loaded.get("state_dict"), dict):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, dict) or not loaded:
        file.fail(f"holds a {type(loaded).__name__}, expected a dict of tensors by name")
    tensors = {}
    for name, value in loaded.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            file.fail(f"holds a {type(value).__name__} under {name!r:.80}, expected a tensor")
        check_tensor(file, name, value)
        tensors[name] = value.detach()
    return tensors


def check_tensor(file: ForeignFile, name: str, value: torch.Tensor) -> None:
    """Plain memory that is all in the file: a tensor of stride 0 may be of any size."""
    if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
        file.fail(f"holds {name!r:.80} of layout {value.layout}, expected a plain tensor")
    if value.nbytes > file.size:
        file.fail(f"holds {name!r:.80} of {value.nbytes} bytes, but has {file.size} itself")


def open_indexed(folder: str, index: str, pickled: bool) -> Foreign:
    """The shards that an index names."""
    file = open_beside(folder, index, folder)
    table = file.read_json(0, file.size, MOST_INDEX_BYTES)
    owners = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(owners, dict) or not owners:
        file.fail("has no table weight_map: it is no index of shards")
    if not all(isinstance(name, str) for name in owners.values()):
        file.fail("has a weight_map whose values are not all names of files")
    files = {name: open_beside(folder, name, file.path) for name in sorted(set(owners.values()))}
    return PickledFiles(folder, files) if pickled else SafetensorsFiles(folder, files, owners)


def open_single(path: str) -> Foreign:
    """One file: its beginning says what it is."""
    file = ForeignFile(path)
    if file.size >= 4 and file.read(0, 4) == b"PK\x03\x04":
        return PickledFiles(path, {path: file})
    if path.endswith((".bin", ".pt", ".pth", ".ckpt", ".pkl")):
        raise CorruptCheckpoint(
            f"{path} is no file that torch.save of torch 1.6 or newer writes; load it with the "
            "program that wrote it, and save it anew"
        )
    return SafetensorsFiles(path, {path: file}, {})
