"""Any checkpoint by its path: ours, a Hugging Face folder or file, a DCP folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwise import checkpoint
from shardwise.checkpoint.manifest import MANIFEST, CheckpointError
from shardwise.checkpoint.read import Checkpoint, Origin, locate
from shardwise.interchange.dcp_read import METADATA, DistributedCheckpoint
from shardwise.interchange.foreign import Foreign, open_indexed, open_single

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED, _PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"


def find_foreign(path: str, key_prefix: str | None = None) -> Callable[[], Foreign] | None:
    """How to open what another program wrote; None where the path is nothing of that kind."""
    if "://" in path or not os.path.lexists(path):
        return None
    if os.path.isdir(path):
        return _find_in_folder(path, key_prefix)
    folder, name = os.path.split(os.path.abspath(path))
    if name.endswith(".index.json"):
        return lambda: open_indexed(folder, name, pickled=".bin." in name)
    if name == METADATA:
        return lambda: DistributedCheckpoint(folder, key_prefix)
    return lambda: open_single(path)


def _find_in_folder(path: str, key_prefix: str | None) -> Callable[[], Foreign] | None:
    names = set(os.listdir(path))
    if MANIFEST in names:
        return None
    if METADATA in names:
        return lambda: DistributedCheckpoint(path, key_prefix)
    for index, pickled in ((INDEX, False), (_PICKLED_INDEX, True)):
        if index in names:
            return partial(open_indexed, path, index, pickled)
    files = sorted(name for name in names if name.endswith(".safetensors"))
    single = next((name for name in (SINGLE, *files, _PICKLED) if name in names), None)
    if single is None:
        return None
    if single not in (SINGLE, _PICKLED) and len(files) > 1:
        raise CheckpointError(
            f"{path} has {len(files)} safetensors files and no {INDEX} that says which belong "
            "together; name one of them"
        )
    return partial(open_single, os.path.join(path, single))


def open_origin(path: str, key_prefix: str | None = None) -> Origin:
    """Whatever checkpoint is there."""
    opener = find_foreign(path, key_prefix)
    return Checkpoint.open(locate(path)) if opener is None else opener()


def _locate(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    return text if find_foreign(text) is not None else locate(text)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    strict: bool = True,
    random: bool = True,
) -> checkpoint.Loaded:
    """Load a checkpoint into model and optimizer, whatever they are sharded like now; a collective
    call.

    `path` is one checkpoint's folder, or that of many: its newest; or a Hugging Face folder or
    file, or one that `torch.distributed.checkpoint.save` wrote. Objects in `extra` get their state
    by `load_state_dict`. All is read, compared and checked first: an error leaves everything as it
    was. `strict=False` allows tensors that only one side has, and casts floating dtypes. A
    parameter on the meta device gets memory for this rank's rows.
    """
    return checkpoint.load(
        path,
        model,
        optimizer,
        extra=extra,
        strict=strict,
        random=random,
        locate=_locate,
        open_origin=open_origin,
    )
