"""torch's distributed checkpoints (DCP), written so that `torch.distributed.checkpoint.load` reads
them: one data file, item after item, and the metadata last.
"""

from __future__ import annotations

import io
import os
import pickle
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from shardwise.checkpoint.manifest import Box, SavedOptimizer
from shardwise.checkpoint.trees import decode, keys_in
from shardwise.description.parameters import dtype_name
from shardwise.engine import torch_private
from shardwise.interchange.conversion import Conversion, Converted, left_out, new_folder
from shardwise.interchange.dcp_read import METADATA

_MODEL, _OPTIMIZER = "model.", "optim"  # what names begin with, as in torch's examples


class _Writer:
    """The one data file of a DCP checkpoint, item after item, and what its metadata says."""

    FILE = "__0_0.distcp"

    def __init__(self, folder: str, stream: io.BufferedWriter) -> None:
        self._folder, self._stream = folder, stream
        self._entries: dict[str, Any] = {}
        self._places: dict[Any, Any] = {}
        self._paths: dict[str, tuple[Any, ...]] = {}

    def add_tensor(self, path: tuple[Any, ...], shape: tuple[int, ...], dtype: str) -> str:
        key = self._key(path)
        self._entries[key] = TensorStorageMetadata(
            TensorProperties(getattr(torch, dtype)), torch.Size(shape), []
        )
        return key

    def add_chunk(self, key: str, box: Box, tensor: torch.Tensor) -> None:
        self._entries[key].chunks.append(
            ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))
        )
        self._write(MetadataIndex(key, box.offset), tensor)

    def add_value(self, path: tuple[Any, ...], value: Any) -> None:
        key = self._key(path)
        self._entries[key] = BytesStorageMetadata()
        self._write(MetadataIndex(key, None), value)

    def _key(self, path: tuple[Any, ...]) -> str:
        key = ".".join(map(str, path))
        self._paths[key] = path
        return key

    def _write(self, index: Any, value: Any) -> None:
        start = self._stream.tell()
        item = io.BytesIO()  # torch's zip places records by where its stream begins
        torch.save(value, item)
        self._stream.write(item.getbuffer())
        length = self._stream.tell() - start
        self._places[index] = torch_private.dcp_place(self.FILE, start, length)

    def finish(self) -> None:
        found = Metadata(self._entries, self._paths, self._places)
        with open(os.path.join(self._folder, METADATA), "wb") as file:
            pickle.dump(found, file)


def to_dcp(job: Conversion) -> Converted:
    """As `dcp.save({"model": ..., "optim": get_optimizer_state_dict(...), "step": ...})` writes it;
    other names of tied tensors are tensors there, and groups are told in both of torch's forms.
    """
    manifest = job.manifest
    prefix = _MODEL if job.key_prefix is None else job.key_prefix
    model = tuple(prefix.removesuffix(".").split(".")) if prefix.removesuffix(".") else ()
    paths: list[tuple[str, tuple[Any, ...]]] = []
    for key in job.keys("model/"):
        paths.append((key, (*model, key.removeprefix("model/"))))
    for other, name in manifest.aliases.items():
        paths.append((f"model/{name}", (*model, other)))
    inside = set(_keys_of_settings(manifest.optimizer))
    for key in job.keys("optimizer/"):
        name, _, state = key.removeprefix("optimizer/").rpartition("/")
        if key not in inside:
            paths.append((key, (_OPTIMIZER, "state", name, state)))
    total, done = sum(job.nbytes_of(key) for key, _ in paths), 0
    with new_folder(job.target) as folder:
        with open(os.path.join(folder, _Writer.FILE), "wb") as stream:
            writer = _Writer(folder, stream)
            for key, path in paths:
                shape = manifest.tensors[key].shape
                name = writer.add_tensor(path, shape, job.dtype_of(key))
                for box in job.cut(key):
                    writer.add_chunk(name, box, job.read_box(key, box))
                done += job.nbytes_of(key)
                job.progress(done, total)
            if manifest.optimizer is not None:
                _add_settings(job, writer, manifest.optimizer)
            writer.add_value(("step",), manifest.step)
        writer.finish()
    beside = left_out(manifest, "optimizer")
    return Converted(os.path.abspath(job.target), len(paths), total, beside)


def _keys_of_settings(saved: SavedOptimizer | None) -> list[str]:
    return [] if saved is None else keys_in(saved.to_json())


def _add_settings(job: Conversion, writer: _Writer, saved: SavedOptimizer) -> None:
    """Parameter groups and what states hold beside tensors."""
    root = _OPTIMIZER

    def plain(value: Any) -> Any:
        return decode(value, job.read_whole)

    def add(path: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            key = writer.add_tensor(path, tuple(value.shape), dtype_name(value.dtype))
            writer.add_chunk(key, Box.whole(value.shape), value)
        else:
            writer.add_value(path, value)

    for number, group in enumerate(saved.param_groups):
        writer.add_value((root, "param_groups", number, "params"), list(group.params))
        for setting, value in group.settings.items():
            add((root, "param_groups", number, setting), plain(value))
            for name in group.params:
                add((root, f"param_groups.{name}.{setting}"), plain(value))
    for name, values in saved.values.items():
        for state, value in values.items():
            add((root, "state", name, state), plain(value))
