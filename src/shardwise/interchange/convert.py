"""From one format of checkpoints to another, tensor by tensor: never all of it in memory.

Whatever is written goes to a temporary folder beside the target first, and appears under its name
when it is whole.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.checkpoint.collect import cut_box
from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    Box,
    CheckpointError,
    DataFile,
    SavedTensor,
)
from shardwise.checkpoint.read import Origin
from shardwise.checkpoint.saving import begin
from shardwise.checkpoint.storage import storage_of
from shardwise.checkpoint.trees import bytes_of
from shardwise.checkpoint.write import DTYPES, Source, write_part
from shardwise.interchange.conversion import (
    FORMATS,
    SHARD_BYTES,
    Conversion,
    Converted,
    Progress,
    left_out,
    new_folder,
)
from shardwise.interchange.dcp_write import to_dcp
from shardwise.interchange.origins import INDEX, SINGLE, open_origin


def convert(
    source: str,
    target: str,
    to: str,
    *,
    key_prefix: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
    dtype: str | None = None,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Read whatever checkpoint is at `source`, and write it to `target` as one `to` of FORMATS.

    `key_prefix` stands before the model's names in the other program's files: taken off where those
    are read, put before where they are written.
    """
    if to not in FORMATS:
        raise CheckpointError(f"to is {to!r}, expected one of {', '.join(FORMATS)}")
    if dtype is not None and not getattr(torch, str(dtype), torch.int8).is_floating_point:
        raise CheckpointError(f"dtype is {dtype!r}, expected a floating dtype")
    if max_shard_bytes < 1:
        raise CheckpointError(f"max_shard_bytes is {max_shard_bytes}, expected at least 1")
    opened = open_origin(source, key_prefix)
    opened.check_files()
    foreign = opened.manifest.serial == 0
    if foreign and key_prefix:
        _take_off(opened, key_prefix)
    job = Conversion(
        opened, target, None if foreign and to == "shardwise" else key_prefix,
        max_shard_bytes, dtype, progress,
    )  # fmt: skip
    if not job.keys("model/"):
        raise CheckpointError(f"{source} has no tensors of a model")
    try:
        return {"shardwise": _to_shardwise, "dcp": to_dcp, "hf": _to_hf}[to](job)
    except OSError as error:
        place = error.filename or target
        raise CheckpointError(f"cannot write {place}: {error.strerror or error}") from error


def _take_off(origin: Origin, prefix: str) -> None:
    """Model names without the prefix; DCP's have lost it already."""
    manifest = origin.manifest
    long = f"model/{prefix}"
    if not any(key.startswith(long) for key in manifest.tensors):
        return

    def short(name: str) -> str:
        return name.removeprefix(prefix)

    tensors = {
        f"model/{key.removeprefix(long)}" if key.startswith(long) else key: saved
        for key, saved in manifest.tensors.items()
    }
    if len(tensors) < len(manifest.tensors):
        raise CheckpointError(f"without {prefix!r} two tensors have one name; leave it as it is")
    aliases = {short(name): short(other) for name, other in manifest.aliases.items()}
    origin.manifest = replace(manifest, tensors=tensors, aliases=aliases)


# Hugging Face


def _to_hf(job: Conversion) -> Converted:
    keys = job.keys("model/")
    prefix = job.key_prefix or ""
    for key in keys:
        if job.dtype_of(key) not in DTYPES:
            raise CheckpointError(f"{key} is of {job.dtype_of(key)}, which safetensors has not")
    shards: list[list[str]] = [[]]
    size = 0
    for key in keys:
        if shards[-1] and size + job.nbytes_of(key) > job.max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += job.nbytes_of(key)
    total, done = sum(map(job.nbytes_of, keys)), 0
    owners: dict[str, str] = {}
    with new_folder(job.target) as folder:
        for number, shard in enumerate(shards, 1):
            file = SINGLE
            if len(shards) > 1:
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            names = {key: prefix + key.removeprefix("model/") for key in shard}
            owners.update(dict.fromkeys(names.values(), file))
            with open(os.path.join(folder, file), "wb") as stream:
                stream.write(_header(job, names, prefix))
                for key in shard:
                    for box in job.cut(key):
                        stream.write(bytes_of(job.read_box(key, box)))
                    done += job.nbytes_of(key)
                    job.progress(done, total)
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": owners}
            with open(os.path.join(folder, INDEX), "w", encoding="utf-8") as text:
                json.dump(index, text, indent=2)
    return Converted(os.path.abspath(job.target), len(keys), total, left_out(job.manifest))


def _header(job: Conversion, names: dict[str, str], prefix: str) -> bytes:
    """Of one shard. Other names of tied tensors are told as `safetensors.torch.save_model` does."""
    tied = {prefix + other: prefix + name for other, name in job.manifest.aliases.items()}
    metadata = {"format": "pt"} | {o: n for o, n in tied.items() if n in names.values()}
    table: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for key, name in names.items():
        end = at + job.nbytes_of(key)
        shape = list(job.manifest.tensors[key].shape)
        table[name] = {
            "dtype": DTYPES[job.dtype_of(key)],
            "shape": shape,
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


# Ours


@dataclass(frozen=True)
class _Lazy(Source):
    """Read when it is its turn."""

    job: Conversion

    def read(self) -> torch.Tensor:
        return self.job.read_box(self.key, self.box)


def _to_shardwise(job: Conversion) -> Converted:
    manifest = job.manifest
    sources = [
        _Lazy(key, job.dtype_of(key), box, job)
        for key, saved in manifest.tensors.items()
        for box in cut_box(Box.whole(saved.shape), ITEM_BYTES[job.dtype_of(key)])
        if box.numel
    ]
    sources.sort(key=lambda each: -ITEM_BYTES[each.dtype])  # each at a multiple of its size
    total, done = sum(each.nbytes for each in sources), 0

    def progress(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        job.progress(done, total)

    storage = storage_of(job.target)
    begun = begin(storage, manifest.step)
    try:
        written = write_part(storage, begun.temporary, 0, sources, progress)
        pieces: dict[str, list[Any]] = {key: [] for key in manifest.tensors}
        for key, piece in written.pieces:
            pieces[key].append(piece)
        files: dict[str, DataFile] = {}
        if written.file is not None and written.data is not None:
            files[written.file] = written.data
        tensors = {
            key: SavedTensor(saved.shape, job.dtype_of(key), tuple(pieces[key]))
            for key, saved in manifest.tensors.items()
        }
        made = replace(
            manifest,
            tensors=tensors,
            files=files,
            finite=written.finite,
            serial=begun.serial,
            versions={
                "torch": torch.__version__,
                "shardwise": sys.modules["shardwise"].__version__,
            },
        )
        name = storage.commit(begun.temporary, begun.name, made.to_text().encode())
    except BaseException:
        storage.abandon(begun.temporary)
        raise
    storage.point(name)
    return Converted(storage.join(name), len(tensors), total, ())
