"""Which boxes of which tensors this rank holds, of the model and of the optimizer.

A *place* says where a rank's part of a parameter is in the whole: a DTensor's shards, the rows that
a ShardedOptimizer steps, the elements that `sharded_step` does. What an optimizer keeps for every
element of a parameter has the parameter's place. Saving cuts a tensor into the boxes of its place,
loading makes one of the same place and fills its boxes, whoever wrote them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from shardwise.checkpoint.manifest import ITEM_BYTES, Box, CheckpointError, Dims
from shardwise.description.parameters import dtype_name
from shardwise.engine.engine import ENGINE_KEY, Engine
from shardwise.engine.grouped_step import ELEMENTS
from shardwise.engine.local_step import is_number
from shardwise.engine.mesh import MeshPlacement
from shardwise.engine.sharded_optimizer import ShardedOptimizer
from shardwise.engine.torch_private import is_wrapper, local_indices, local_of

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch.compile and checkpointing
_EXTRA_STATE = "_extra_state"  # what torch's state dicts call `get_extra_state`


@dataclass(frozen=True)
class Part:
    """A box that this rank holds, and the view of its memory."""

    box: Box
    tensor: torch.Tensor


@dataclass(frozen=True)
class Held:
    """What this rank holds of one tensor."""

    key: str
    shape: Dims
    dtype: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Place:
    """Where a rank's part of a tensor of `shape` is: its local shape, and each box with the slices
    of the local tensor that it is. `flat`: the slices are of the local tensor's elements in a row.
    """

    shape: Dims
    local_shape: Dims
    cuts: tuple[tuple[Box, tuple[slice, ...]], ...]
    flat: bool = False

    def parts(self, local: torch.Tensor) -> tuple[Part, ...]:
        """The boxes as views of a local tensor."""
        if self.flat:
            local = local.reshape(-1)
        return tuple(Part(box, local[index].view(box.shape)) for box, index in self.cuts)


def place_of(tensor: torch.Tensor) -> Place:
    """Of a DTensor its shards here; any other tensor is whole."""
    shape = tuple(tensor.shape)
    if not isinstance(tensor, DTensor):
        return _make_place(shape, shape, [[(0, 0, size)] for size in shape])
    local = tuple(local_of(tensor).shape)
    indices = local_indices(tensor)
    if indices is None:  # not of this mesh
        return Place(shape, local, ())
    if tuple(map(len, indices)) != local:
        raise CheckpointError(
            f"a DTensor of shape {shape} placed {tensor.placements} has a local tensor of shape "
            f"{local}, expected {tuple(map(len, indices))}"
        )
    return _make_place(shape, local, [_runs(each) for each in indices])


def _runs(indices: range | list[int]) -> list[tuple[int, int, int]]:
    """Neighbours among the indices: where in the local tensor, where in the whole, how many."""
    if isinstance(indices, range):
        return [(0, indices.start, len(indices))]
    breaks = [i + 1 for i, (a, b) in enumerate(pairwise(indices)) if b != a + 1]
    bounds = pairwise([0, *breaks, len(indices)])
    return [(start, indices[start], end - start) for start, end in bounds if end > start]


def _make_place(shape: Dims, local: Dims, runs: Sequence[list[tuple[int, int, int]]]) -> Place:
    cuts = []
    for combined in product(*runs):
        box = Box(tuple(r[1] for r in combined), tuple(r[2] for r in combined))
        if box.numel:
            cuts.append((box, tuple(slice(r[0], r[0] + r[2]) for r in combined)))
    return Place(shape, local, tuple(cuts))


def place_of_rows(shape: Dims, rows: slice) -> Place:
    if not shape:
        return _make_place(shape, shape, [])
    local = (rows.stop - rows.start, *shape[1:])
    runs = [(0, rows.start, local[0])], *([(0, 0, size)] for size in shape[1:])
    return _make_place(shape, local, runs)


def place_of_elements(shape: Dims, start: int, stop: int) -> Place:
    cuts, at = [], 0
    for box in boxes_of_range(shape, start, stop):
        cuts.append((box, (slice(at, at + box.numel),)))
        at += box.numel
    return Place(shape, (stop - start,), tuple(cuts), flat=True)


def boxes_of_range(shape: Dims, start: int, stop: int) -> Iterator[Box]:
    """The elements from `start` to `stop` of a contiguous tensor as boxes, in order."""
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # inside of one row
        yield from _in_row(shape, last, start - last * row, stop - last * row)
        return
    yield from _in_row(shape, first - 1, start - (first - 1) * row, row)
    if last > first:
        yield Box((first, *([0] * (len(shape) - 1))), (last - first, *shape[1:]))
    yield from _in_row(shape, last, 0, stop - last * row)


def _in_row(shape: Dims, row: int, start: int, stop: int) -> Iterator[Box]:
    if start == math.prod(shape[1:]):  # the row before is not touched
        return
    for box in boxes_of_range(shape[1:], start, stop):
        yield Box((row, *box.offset), (1, *box.shape))


# The model


@dataclass(frozen=True)
class OpenModel:
    """A model's tensors by name, as users see them, and what its modules keep beside."""

    module: nn.Module
    tensors: dict[str, torch.Tensor]  # parameters and persistent buffers
    states: dict[str, Any]  # of `get_extra_state`, by module
    plan: Any

    @property
    def names(self) -> dict[int, list[str]]:
        """All names of each tensor, by its identity: tied parameters have several."""
        names: dict[int, list[str]] = {}
        for name, tensor in self.tensors.items():
            names.setdefault(id(tensor), []).append(name)
        return names


def open_model(model: nn.Module) -> OpenModel:
    """Let the sharded parameters be in their places, and find all that a state dict has."""
    while isinstance(model, DistributedDataParallel):
        model = model.module
    plan = None
    for module in model.modules():
        engine = module.__dict__.get(ENGINE_KEY)
        if isinstance(engine, Engine):
            plan = plan or engine.plan
            for unit in engine.units:
                unit.adopt_changes()
                unit.hide()
    tensors: dict[str, torch.Tensor] = {}
    states: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():  # torch's hooks do the same
        clean = clean_name(name)
        if name.rpartition(".")[2] == _EXTRA_STATE:
            states[clean.removesuffix(_EXTRA_STATE).removesuffix(".")] = value
        elif isinstance(value, torch.Tensor):
            tensors[clean] = value
    return OpenModel(model, tensors, states, plan)


def clean_name(name: str) -> str:
    """A name without the modules that only wrap another."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def check_kind(name: str, tensor: torch.Tensor) -> None:
    """Error for tensors that are no plain memory."""
    local = local_of(tensor)
    if is_wrapper(local) or local.layout != torch.strided or local.is_quantized:
        raise CheckpointError(
            f"{name} is a {type(local).__name__} of layout {local.layout}, which a checkpoint does "
            "not hold; take it apart into plain tensors"
        )
    if dtype_name(tensor.dtype) not in ITEM_BYTES:
        raise CheckpointError(f"{name} is of {tensor.dtype}, which a checkpoint does not hold")


def hold(key: str, tensor: torch.Tensor, place: Place | None = None) -> Held:
    """What this rank holds of a tensor, at its own place or another's."""
    check_kind(key, tensor)
    if local_of(tensor).is_meta:
        raise CheckpointError(f"{key} is on the meta device: it has no values to save")
    place = place or place_of(tensor)
    parts = place.parts(local_of(tensor).detach())
    return Held(key, place.shape, dtype_name(tensor.dtype), parts)


# The optimizer


@dataclass(frozen=True)
class Slot:
    """One parameter of an optimizer on this rank: where its state is kept, for which elements."""

    name: str
    parameter: torch.Tensor
    key: torch.Tensor | None  # in `optimizer.state`; None where this rank keeps none
    place: Place

    def is_like(self, state: str, shape: Sequence[int]) -> bool:
        """A state of this whole shape has an element for each of the parameter's."""
        return tuple(shape) == self.place.shape and not is_number(state, self.parameter)

    def holds_like(self, state: str, value: torch.Tensor) -> bool:
        """The same of what this rank has of a state."""
        local = tuple(local_of(value).shape)
        return not is_number(state, value) and local == self.place.local_shape

    def wrap(self, local: torch.Tensor) -> torch.Tensor:
        """State of the parameter's place as the optimizer expects it."""
        if isinstance(self.parameter, DTensor):
            return MeshPlacement.of(self.parameter).wrap(local)
        return local


def name_groups(
    optimizer: torch.optim.Optimizer, model: OpenModel
) -> list[list[tuple[str, torch.Tensor]]]:
    """Each parameter group's parameters with their (first) names."""
    names = model.names
    groups = []
    for number, group in enumerate(optimizer.param_groups):
        named = []
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in names:
                raise CheckpointError(
                    f"parameter {i} of the optimizer's group {number}, of shape "
                    f"{tuple(parameter.shape)}, is none of the model's: make the optimizer from "
                    "model.parameters(), after sharding"
                )
            named.append((names[id(parameter)][0], parameter))
        groups.append(named)
    return groups


def slots_of(
    optimizer: torch.optim.Optimizer, groups: list[list[tuple[str, torch.Tensor]]], saving: bool
) -> list[Slot]:
    """Where this rank keeps the state of each parameter. A state that `sharded_step` has cut is
    saved as cut; it is loaded whole, and cut by the next step.
    """
    named = [pair for group in groups for pair in group]
    if isinstance(optimizer, ShardedOptimizer):
        return [_sharded_slot(optimizer, i, name) for i, (name, _) in enumerate(named)]
    slots = []
    for name, parameter in named:
        state: Any = optimizer.state.get(parameter, {}) if saving else {}
        if ELEMENTS in state:
            start, stop, _ = state[ELEMENTS]
            place = place_of_elements(tuple(parameter.shape), start, stop)
            local = next((tuple(v.shape) for k, v in state.items() if not is_number(k, v)), None)
            place = Place(place.shape, local or place.local_shape, place.cuts, flat=True)
        else:
            place = place_of(parameter)
        slots.append(Slot(name, parameter, parameter, place))
    return slots


def _sharded_slot(optimizer: ShardedOptimizer, index: int, name: str) -> Slot:
    parameter, rows, piece = optimizer.share_of(index)
    shape = tuple(parameter.shape)
    if rows is None:
        return Slot(name, parameter, None, Place(shape, (), ()))
    return Slot(name, parameter, piece, place_of_rows(shape, rows))
