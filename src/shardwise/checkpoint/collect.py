"""What one rank has to say for a checkpoint, and who writes what.

`collect` needs no process group: a rank's `Share` is its boxes and its JSON. `assign` takes every
rank's table of boxes and gives each box, cut into pieces, to one of the ranks that hold it.
"""

from __future__ import annotations

import json
import random as python_random
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from shardwise.checkpoint.manifest import (
    ITEM_BYTES,
    Box,
    CheckpointError,
    Dims,
    SavedGroup,
    SavedOptimizer,
    find_gap,
)
from shardwise.checkpoint.pieces import (
    Held,
    OpenModel,
    hold,
    name_groups,
    open_model,
    slots_of,
)
from shardwise.checkpoint.trees import Tensors, bytes_of, encode
from shardwise.engine.grouped_step import ELEMENTS
from shardwise.engine.sharded_optimizer import ShardedOptimizer

PIECE_BYTES = 16 << 20  # a piece is read and checked as a whole: small ones reshard cheaply

# Of each tensor: its key, shape, dtype, and the boxes that a rank has.
Table = list[tuple[str, Dims, str, tuple[Box, ...]]]


@dataclass(frozen=True)
class Share:
    """One rank's part of a checkpoint: tensors, and what goes into the manifest."""

    held: list[Held]
    aliases: dict[str, str]
    optimizer: SavedOptimizer | None
    modules: dict[str, Any]
    plan: dict[str, Any] | None
    extra: Any
    extra_digest: int
    random: Any

    @property
    def table(self) -> Table:
        return [(h.key, h.shape, h.dtype, tuple(part.box for part in h.parts)) for h in self.held]


def collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    extra: Mapping[str, Any] | None = None,
    random: bool = True,
    rank: int = 0,
) -> Share:
    """All that this rank would save. Tensors are views: nothing is copied."""
    opened = open_model(model)
    held: list[Held] = []
    aliases: dict[str, str] = {}
    for first, *others in opened.names.values():
        held.append(hold(f"model/{first}", opened.tensors[first]))
        aliases.update(dict.fromkeys(others, first))
    beside: Tensors = {}
    saved = None
    if optimizer is not None:
        saved = _collect_optimizer(optimizer, opened, held, beside)
    modules = {
        name: encode(value, f"model/{name}/extra_state", beside)
        for name, value in opened.states.items()
    }
    values = plain_extra(extra or {})
    tree, digest = encode(values, f"extra/{rank}", beside), _digest(values)
    states = encode(random_states(), f"random/{rank}", beside) if random else None
    held += [hold(key, tensor) for key, tensor in beside.items()]
    plan = None if opened.plan is None else json.loads(opened.plan.to_json())
    return Share(held, aliases, saved, modules, plan, tree, digest, states)


def _collect_optimizer(
    optimizer: torch.optim.Optimizer, model: OpenModel, held: list[Held], beside: Tensors
) -> SavedOptimizer:
    groups = name_groups(optimizer, model)
    values: dict[str, dict[str, Any]] = {}
    for slot in slots_of(optimizer, groups, saving=True):
        state = {} if slot.key is None else optimizer.state.get(slot.key, {})
        for name, value in state.items():
            key = f"optimizer/{slot.name}/{name}"
            if name == ELEMENTS:
                continue
            if isinstance(value, torch.Tensor):
                place = slot.place if slot.holds_like(name, value) else None
                held.append(hold(key, value, place))
            else:
                values.setdefault(slot.name, {})[name] = encode(value, key, beside)
    saved = [
        SavedGroup(
            tuple(name for name, _ in named),
            {
                key: encode(value, f"optimizer/#{number}/{key}", beside)
                for key, value in group.items()
                if key not in ("params", "param_names")
            },
        )
        for number, (group, named) in enumerate(zip(optimizer.param_groups, groups, strict=True))
    ]
    return SavedOptimizer(class_name(optimizer), tuple(saved), values)


def class_name(optimizer: torch.optim.Optimizer) -> str:
    inner = optimizer.inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    return type(inner).__name__


def is_stateful(value: Any) -> bool:
    return callable(getattr(value, "state_dict", None)) and callable(
        getattr(value, "load_state_dict", None)
    )


def plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """`extra` with the states of its objects in their places."""
    if not isinstance(extra, Mapping) or not all(isinstance(name, str) for name in extra):
        raise CheckpointError(f"extra is {extra!r:.80}, expected a dict with strings as keys")
    return {
        name: value.state_dict() if is_stateful(value) else value for name, value in extra.items()
    }


def _digest(values: dict[str, Any]) -> int:
    """One number for the JSON and the tensors of a value, whichever rank has it."""
    tensors: Tensors = {}
    crc = zlib.crc32(json.dumps(encode(values, "", tensors)).encode())
    for key, tensor in tensors.items():
        crc = zlib.crc32(bytes_of(tensor.cpu()), zlib.crc32(key.encode(), crc))
    return crc


def random_states() -> dict[str, Any]:
    """Where the random generators of this process are."""
    version, numbers, gauss = python_random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "python": {"version": version, "state": np.array(numbers, np.int64), "gauss": gauss},
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random(states: dict[str, Any]) -> None:
    kept = states["python"]
    python_random.setstate((kept["version"], tuple(kept["state"].tolist()), kept["gauss"]))
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


# Who writes what


@dataclass(frozen=True)
class Assignment:
    """Every tensor of a checkpoint, and each rank's pieces of them, in the order of its file."""

    tensors: dict[str, tuple[Dims, str]]
    pieces: list[list[tuple[str, Box]]]  # by rank


def cut_box(box: Box, item_bytes: int, most: int = PIECE_BYTES) -> Iterator[Box]:
    """Boxes of at most `most` bytes, each contiguous where the box is."""
    if box.numel * item_bytes <= most:
        yield box
        return
    dim = next(d for d, size in enumerate(box.shape) if size > 1)
    start, size = box.offset[dim], box.shape[dim]
    step = max(1, most // (box.numel // size * item_bytes))
    for at in range(0, size, step):
        offset = (*box.offset[:dim], start + at, *box.offset[dim + 1 :])
        shape = (*box.shape[:dim], min(step, size - at), *box.shape[dim + 1 :])
        yield from cut_box(Box(offset, shape), item_bytes, most)


def assign(tables: Sequence[Table]) -> Assignment:
    """Each box to one of the ranks that hold it, so that all write about as much. Errors where
    ranks have different tensors of a name, or not all of one.
    """
    tensors: dict[str, tuple[Dims, str]] = {}
    holders: defaultdict[tuple[str, Box], list[int]] = defaultdict(list)
    for rank, table in enumerate(tables):
        for key, shape, dtype, boxes in table:
            if tensors.setdefault(key, (shape, dtype)) != (shape, dtype):
                raise CheckpointError(
                    f"{key} is a {dtype} of shape {list(shape)} on rank {rank}, and a "
                    f"{tensors[key][1]} of {list(tensors[key][0])} on a rank before: ranks have to "
                    "hold parts of the same model"
                )
            for box in boxes:
                holders[key, box].append(rank)
    boxes_of: defaultdict[str, list[Box]] = defaultdict(list)
    for key, box in holders:
        boxes_of[key].append(box)
    for key, (shape, _) in tensors.items():
        problem = find_gap(shape, boxes_of[key])
        if problem:
            raise CheckpointError(f"{key} is not whole on all ranks together: {problem}")
    return Assignment(tensors, _spread(tensors, holders, len(tables)))


def _spread(
    tensors: dict[str, tuple[Dims, str]], holders: Mapping[tuple[str, Box], list[int]], world: int
) -> list[list[tuple[str, Box]]]:
    written = [0] * world
    pieces: list[list[tuple[str, Box]]] = [[] for _ in range(world)]
    shared: list[tuple[int, str, Box, list[int]]] = []
    for (key, box), ranks in holders.items():
        item = ITEM_BYTES[tensors[key][1]]
        for piece in cut_box(box, item):
            if len(ranks) > 1:
                shared.append((piece.numel * item, key, piece, ranks))
            else:
                written[ranks[0]] += piece.numel * item
                pieces[ranks[0]].append((key, piece))
    for nbytes, key, piece, ranks in sorted(shared, key=lambda each: -each[0]):
        rank = min(ranks, key=written.__getitem__)
        written[rank] += nbytes
        pieces[rank].append((key, piece))
    order = {key: i for i, key in enumerate(tensors)}
    for own in pieces:  # large items first, so that each begins at a multiple of its size
        own.sort(
            key=lambda each: (-ITEM_BYTES[tensors[each[0]][1]], order[each[0]], each[1].offset)
        )
    return pieces


def merge_optimizers(shares: Sequence[SavedOptimizer | None]) -> SavedOptimizer | None:
    """One optimizer of what ranks say of theirs: of a pipeline each has other parameters."""
    found = [share for share in shares if share is not None]
    if not found:
        return None
    first = found[0]
    for rank, other in enumerate(found):
        if (other.class_name, len(other.param_groups)) != (
            first.class_name,
            len(first.param_groups),
        ):
            raise CheckpointError(
                f"rank {rank} has an optimizer {other.class_name} of {len(other.param_groups)} "
                f"groups, rank 0 {first.class_name} of {len(first.param_groups)}"
            )
    groups = []
    for number, group in enumerate(first.param_groups):
        names = chain.from_iterable(each.param_groups[number].params for each in found)
        groups.append(SavedGroup(tuple(dict.fromkeys(names)), group.settings))
    values: dict[str, dict[str, Any]] = {}
    for each in found:
        for name, state in each.values.items():
            values.setdefault(name, {}).update(state)
    return SavedOptimizer(first.class_name, tuple(groups), values)
