"""Whole tensors from a sharded model, and one rank's values for all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.api import engine_of, is_sharded
from shardwise.engine.unit import Unit
from shardwise.planning.buckets import group_by_bytes
from shardwise.planning.units import MIB

BROADCAST_BYTES = 64 * MIB


def full_state_dict(
    model: nn.Module, *, rank0_only: bool = False, device: torch.device | str | None = None
) -> dict[str, torch.Tensor]:
    """The state dict with whole tensors, as the unsharded model would give it; a collective call.

    Every rank gets it, or rank 0 only (the others get an empty dict), on the model's device or on
    `device`. Gathers one unit at a time, so the peak is one unit above the result.
    """
    engine = engine_of(model)
    wanted = not rank0_only or dist.get_rank() == 0
    whole: dict[str, torch.Tensor] = {}
    for unit in engine.units:
        unit.follow()
        unit.hide()
        unit.parameters.copy_echoes()
        for names, tensor in _gather_masters(unit):
            if wanted:
                moved = tensor.to(device) if device is not None else tensor
                whole.update(dict.fromkeys(names, moved))
    if not wanted:
        return {}
    state = model.state_dict()
    return {
        name: whole[name] if name in whole else value.detach().to(device or value.device)
        for name, value in state.items()
    }


def _gather_masters(unit: Unit) -> Iterable[tuple[list[str], torch.Tensor]]:
    """Each parameter of the unit, whole and in its own dtype, with all its names."""
    parameters = unit.parameters
    layout, group = parameters.layout, parameters.mesh.shard
    if any(m.nested is not None for m in parameters.members) or any(r.dim for r in layout.rows):
        for member, visible in zip(parameters.members, parameters.visible, strict=True):
            yield member.names, cast(DTensor, visible.data).full_tensor()
        return
    device, dtype = unit.mesh.device, parameters.dtype
    gathered = torch.empty((group.size, layout.shard_numel), dtype=dtype, device=device)
    group.all_gather(gathered.view(-1), parameters.master.to(device)).wait()
    for member, rows, start in zip(parameters.members, layout.rows, layout.offsets, strict=True):
        block = gathered[:, start : start + rows.part].reshape(-1)
        yield member.names, block[: rows.numel].clone().view(rows.shape)


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
        unit.follow()
        unit.parameters.forget_checksums()
        master, layout = unit.parameters.master, unit.parameters.layout
        unit.mesh.replicate.broadcast(master)
        if layout.counted_numel < layout.shard_numel:
            unit.mesh.shard.broadcast(master[layout.counted_numel :])
    _broadcast_from_first(list(model.buffers()))


def _broadcast_from_first(tensors: list[torch.Tensor]) -> None:
    """Broadcast in messages of one dtype and about BROADCAST_BYTES."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_dtype.setdefault(tensor.dtype, []).append(tensor.data)
    for same in by_dtype.values():
        for group in group_by_bytes(same, lambda t: t.numel() * t.element_size(), BROADCAST_BYTES):
            flat = torch.cat([tensor.reshape(-1) for tensor in group])
            dist.broadcast(flat, src=0)
            for tensor, piece in zip(group, flat.split([t.numel() for t in group]), strict=True):
                tensor.copy_(piece.view(tensor.shape))
