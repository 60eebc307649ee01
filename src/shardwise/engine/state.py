"""A sharded model's values outside of training: whole state dicts, one rank's values for all,
memory for a model on the meta device, deep copies.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.engine.collectives import as_sent
from shardwise.engine.engine import engine_of, is_sharded
from shardwise.engine.mesh import default_device
from shardwise.engine.torch_private import (
    buffers_of,
    local_of,
    outside_transforms,
    parameters_of,
    writes_of,
)
from shardwise.engine.unit import Unit
from shardwise.planning.groups import group_by_bytes
from shardwise.planning.units import MIB

BROADCAST_BYTES = 64 * MIB


@outside_transforms
def full_state_dict(
    model: nn.Module, *, rank0_only: bool = False, device: torch.device | str | None = None
) -> dict[str, Any]:
    """The state dict with whole tensors, as the unsharded model would give it; a collective call.

    Every rank gets it, or rank 0 only (the others get an empty dict), on the model's device or on
    `device`. Gathers one unit at a time, so the peak is one unit above the result. Parameters have
    the names that the model's own state dict gives them; what is no tensor there stays as it is.
    """
    engine = engine_of(model)
    wanted = not rank0_only or dist.get_rank() == 0
    whole: dict[int, torch.Tensor | None] = {}  # by the identity of the parameter
    for unit in engine.units:
        unit.adopt_changes()
        unit.hide()
        unit.parameters.copy_tied_rows()
        for parameter, tensor in _gather_masters(unit):
            moved = tensor.to(device) if device is not None and wanted else tensor
            whole[id(parameter)] = moved if wanted else None
    state = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if id(value) in whole:
            state[name] = whole[id(value)]
        elif isinstance(value, torch.Tensor):
            value = value.detach()
            if isinstance(value, DTensor):  # a hook made it of a parameter
                value = value.full_tensor()
            state[name] = value.to(device or value.device)
        else:
            state[name] = value
    return state if wanted else {}


def _gather_masters(unit: Unit) -> Iterable[tuple[nn.Parameter, torch.Tensor]]:
    """Each parameter of the unit, and the same whole and in its own dtype."""
    parameters = unit.parameters
    layout, group = parameters.layout, parameters.mesh.shard
    if any(m.dtensor is not None for m in parameters.members) or any(r.dim for r in layout.rows):
        for visible in parameters.visible:
            tensor = cast(DTensor, visible.data).full_tensor()
            own = tensor.data_ptr() != local_of(visible.data).data_ptr()
            yield visible, tensor if own else tensor.clone()  # one rank has it whole already
        return
    device, dtype = unit.mesh.device, parameters.dtype
    gathered = torch.empty((group.size, layout.shard_numel), dtype=dtype, device=device)
    group.all_gather(gathered.view(-1), parameters.master.to(device)).wait()
    for visible, rows, start in zip(parameters.visible, layout.rows, layout.offsets, strict=True):
        block = gathered[:, start : start + rows.part].reshape(-1)
        yield visible, block[: rows.numel].clone().view(rows.shape)


def let_load_whole(model: nn.Module) -> None:
    """From now on `load_state_dict` also takes what an unsharded model gives."""
    for module in model.modules():
        if any(isinstance(p, DTensor) for p in parameters_of(module).values()):
            module.register_load_state_dict_pre_hook(_cut_to_rows)


def _cut_to_rows(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """This rank's rows in the place of whole tensors, which every rank has."""
    for name, parameter in parameters_of(module).items():
        value = state.get(prefix + name)
        whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if whole and isinstance(parameter, DTensor) and value.shape == parameter.shape:
            mesh, placements = parameter.device_mesh, parameter.placements
            state[prefix + name] = distribute_tensor(value, mesh, placements, src_data_rank=None)


@torch.no_grad()
def broadcast(model: nn.Module) -> None:
    """Give every rank rank 0's parameters and buffers; a collective call.

    Before sharding: everything. After: each shard group holds one set of rows between its ranks, so
    the first replica's rows go to the other replicas, and 0-d parameters and buffers come from rank
    0.
    """
    if not is_sharded(model):
        _broadcast_from_first([*model.parameters(), *model.buffers()])
        return
    engine = engine_of(model)
    for unit in engine.units:
        unit.adopt_changes()
        unit.parameters.forget_checksums()
        master, layout = unit.parameters.master, unit.parameters.layout
        unit.mesh.replicate.broadcast(master)
        if layout.counted_numel < layout.shard_numel:
            unit.mesh.shard.broadcast(master[layout.counted_numel :])
    _broadcast_from_first(list(model.buffers()))


def _broadcast_from_first(tensors: list[torch.Tensor]) -> None:
    tensors = [tensor.data for tensor in tensors if tensor.numel()]
    for message in cut_messages(tensors, BROADCAST_BYTES):
        group = [tensors[i] for i in message]
        flat = torch.cat([tensor.reshape(-1) for tensor in group])
        dist.broadcast(as_sent(flat), src=0)
        for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
            tensor.copy_(piece.view(tensor.shape))


def cut_messages(tensors: Sequence[torch.Tensor], nbytes: int) -> Iterator[list[int]]:
    """Numbers of tensors that travel together: of one dtype, and of about `nbytes` in all."""
    by_dtype: defaultdict[torch.dtype, list[int]] = defaultdict(list)
    for i, tensor in enumerate(tensors):
        by_dtype[tensor.dtype].append(i)
    for alike in by_dtype.values():
        yield from group_by_bytes(alike, lambda i: tensors[i].nbytes, nbytes)


@torch.no_grad()
def materialize(
    model: nn.Module, device: torch.device | str | None = None, *, reset: bool = True
) -> list[str]:
    """Give memory to what is still on the meta device, and nothing else, and initialise it.

    Each module that held such tensors is asked to `reset_parameters`, unless `reset` is False.
    Returns the names of the tensors that nobody wrote since: non-persistent buffers that only a
    constructor fills, parameters of modules without that method. Those are yours to fill. A sharded
    model takes memory for its own rows only.
    """
    if device is None:
        device = device_of(model)
    made: dict[str, torch.Tensor] = {}
    emptied: dict[int, torch.Tensor] = {}  # a tied tensor is made once
    for prefix, module in model.named_modules():
        touched = False
        own: tuple[dict[str, Any], ...] = parameters_of(module), buffers_of(module)
        for tensors in own:
            for key, tensor in list(tensors.items()):
                if tensor is None or not local_of(tensor).is_meta:
                    continue
                if id(tensor) not in emptied:
                    emptied[id(tensor)] = _empty(tensor, torch.device(device))
                tensors[key] = emptied[id(tensor)]
                made[f"{prefix}.{key}" if prefix else key] = emptied[id(tensor)]
                touched = True
        again = getattr(module, "reset_parameters", None)
        if touched and reset and callable(again):
            again()
    # Memory from `empty` that nobody has written keeps the version of its birth.
    return [name for name, tensor in made.items() if writes_of(tensor) == 0]


def _empty(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty_like(tensor, device=device)
    if not isinstance(tensor, nn.Parameter):
        return empty
    parameter = nn.Parameter(empty, requires_grad=tensor.requires_grad)
    parameter.__dict__.update(tensor.__dict__)
    return parameter


def device_of(model: nn.Module) -> torch.device:
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cpu":
            return torch.device("cpu")
    return default_device()


Copies = dict[int, nn.Module]  # by the identity of the module that was copied


def copy_module(module: nn.Module, memo: dict[int, Any]) -> tuple[nn.Module, Copies]:
    """A deep copy with this rank's rows of every parameter, sharded by nobody yet, and which module
    became which. The hooks of `module` have to be off, and its units free.
    """
    twin = copy.deepcopy(module, memo)
    pairs = zip(module.modules(), twin.modules(), strict=True)
    return twin, {id(ours): theirs for ours, theirs in pairs}


def repeat_unit(unit: Unit, copies: Copies) -> Unit:
    """The same unit over the copied modules, whose parameters are sharded already."""
    members = []
    for member in unit.parameters.members:
        places = [(copies[id(module)], key) for module, key in member.places]
        module, key = places[0]
        original = cast(nn.Parameter, parameters_of(module)[key])
        names = list(member.names)
        again = replace(member, names=names, places=places, original=original)
        members.append(replace(again, sharded=True, stays=False))
    modules = [copies[id(module)] for module in unit.modules]
    options = replace(unit.options, gather_ahead=None, gather_ahead_backward=None)
    return Unit(unit.name, modules, members, unit.mesh, options, unit.is_root)
