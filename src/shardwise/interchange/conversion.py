"""One checkpoint on its way to another format, read tensor by tensor: never all of it in memory."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from shardwise.checkpoint.collect import cut_box
from shardwise.checkpoint.manifest import ITEM_BYTES, Box, CheckpointError, Manifest
from shardwise.checkpoint.pieces import Part
from shardwise.checkpoint.read import Origin, Want

SHARD_BYTES = 5_000_000_000  # as Hugging Face's `max_shard_size`
READ_BYTES = 64 << 20  # a piece of ours, up to 16 MiB, is read whole even for a part of it
FORMATS = ("shardwise", "dcp", "hf")

Progress = Callable[[int, int], None]  # bytes done, of how many


@dataclass(frozen=True)
class Converted:
    path: str
    tensors: int
    nbytes: int
    left_out: tuple[str, ...]  # what the target cannot hold


@dataclass(frozen=True)
class Conversion:
    """What is read, and how it is to be written."""

    origin: Origin
    target: str
    key_prefix: str | None = None  # before the model's names in the other program's files
    max_shard_bytes: int = SHARD_BYTES
    dtype: str | None = None  # of the model's floating tensors
    progress: Progress = lambda done, total: None

    @property
    def manifest(self) -> Manifest:
        return self.origin.manifest

    def read_box(self, key: str, box: Box) -> torch.Tensor:
        saved = self.manifest.tensors[key]
        tensor = torch.empty(box.shape, dtype=getattr(torch, saved.dtype))
        self.origin.read([Want(saved, (Part(box, tensor),))])
        return tensor.to(getattr(torch, self.dtype_of(key)))

    def read_whole(self, key: str) -> torch.Tensor:
        return self.read_box(key, Box.whole(self.manifest.tensors[key].shape))

    def dtype_of(self, key: str) -> str:
        saved = self.manifest.tensors[key].dtype
        floats = getattr(torch, saved).is_floating_point
        return self.dtype if self.dtype and floats and key.startswith("model/") else saved

    def nbytes_of(self, key: str) -> int:
        return Box.whole(self.manifest.tensors[key].shape).numel * ITEM_BYTES[self.dtype_of(key)]

    def cut(self, key: str) -> Iterator[Box]:
        """Boxes to read a tensor by, in the order of its memory."""
        saved = self.manifest.tensors[key]
        return cut_box(Box.whole(saved.shape), ITEM_BYTES[saved.dtype], READ_BYTES)

    def keys(self, *groups: str) -> list[str]:
        return [key for key in self.manifest.tensors if key.startswith(groups)]


@contextmanager
def new_folder(target: str) -> Iterator[str]:
    """A folder to write into, which is `target` once all is there and on the disk."""
    target = os.path.abspath(target)
    if os.path.lexists(target) and (not os.path.isdir(target) or os.listdir(target)):
        raise CheckpointError(f"{target} is there already; remove it, or name another target")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    temporary = f"{target}.writing-{secrets.token_hex(4)}"
    os.mkdir(temporary)
    try:
        yield temporary
        for name in os.listdir(temporary):
            with open(os.path.join(temporary, name), "rb") as file:
                os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def left_out(manifest: Manifest, *held: str) -> tuple[str, ...]:
    there = {
        "optimizer": manifest.optimizer is not None,
        "extra": bool(manifest.extra and any(manifest.extra)),
        "random state": bool(manifest.random),
        "extra states of modules": bool(manifest.modules),
    }
    return tuple(name for name, is_there in there.items() if is_there and name not in held)
