"""Clipping by the global norm, on flat gradient buffers: one norm per unit, one small all-reduce,
one multiply.
"""

from __future__ import annotations

from math import inf
from typing import cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine import checks
from shardwise.engine.engine import engine_of
from shardwise.engine.gradients import Gradients
from shardwise.engine.mesh import Mesh
from shardwise.engine.torch_private import foreach_mul_, foreach_norm, local_of


def clip_grad_norm(
    model: nn.Module,
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Scale all gradients so that their global norm is at most `max_norm`; returns the norm before
    (0-d). `norm_type` is its order: 2, 1, any above 0, or infinity for the largest element.

    Equals `torch.nn.utils.clip_grad_norm_` in one process. Every rank gets the same norm, so all
    decide alike, and one may have no rows of some parameter.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(
            f"clip_grad_norm: norm_type is {norm_type}, expected a number above 0, or infinity"
        )
    engine = engine_of(model)
    engine.check_interrupted()
    # Modules that were added and sharded later have engines of their own.
    engines = dict.fromkeys([engine, *checks.engines_training(model.parameters())])
    units = [unit for each in engines for unit in each.units]
    live = [u.gradients for u in units if u.gradients is not None and not u.gradients.cleared]
    mesh = engine.mesh.device_mesh
    several = any(unit.mesh.device_mesh != mesh for unit in units)
    if several or any(g.has_dtensors for g in live):
        total = _norm_of_each(live, engine.mesh.device, order)
    else:
        total = _norm_of_all(live, engine.mesh, order)
    # Parameters outside the engine (ignored ones) are whole on every rank.
    outside = [
        p.grad for p in model.parameters() if p.grad is not None and not checks.engine_training(p)
    ]
    if outside:
        total = _total([total.view(1), _norms(outside, order, total.device)], order)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the global gradient norm is {total.item()}, so gradients cannot be clipped; "
            "skip this step, or lower the learning rate or the loss scale"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for tensors in ([tensor for g in live for tensor in _tensors(g)], outside):
        if tensors:
            foreach_mul_(tensors, scale.to(tensors[0].device))
    return total


def _tensors(gradients: Gradients, counted: bool = False) -> list[torch.Tensor]:
    """All gradients of a unit on this rank: its one buffer, or one by one where some are missing or
    were replaced. `counted`: those that this rank counts for all; what every rank holds whole (0-d
    parameters) the first one does.
    """
    first = gradients.mesh.shard.rank == 0 or not counted
    layout = gradients.layout
    if gradients.complete:
        assert gradients.flat is not None
        return [gradients.flat if first else gradients.flat[: layout.counted_numel]]
    return [
        local_of(parameter.grad)
        for i, (parameter, rows) in enumerate(zip(gradients.visible, layout.rows, strict=True))
        if parameter.grad is not None and i not in gradients.tied
        if first or not rows.replicated
    ]


def _norm_of_all(live: list[Gradients], mesh: Mesh, order: float) -> torch.Tensor:
    """All gradients are cut over one mesh, or whole on every rank and so counted by each for
    itself: one norm per buffer, one small all-reduce.
    """
    cut = _norms_of([g for g in live if g.mesh.shard.size > 1], mesh.device, order)
    whole = _norms_of([g for g in live if g.mesh.shard.size == 1], mesh.device, order)
    if order == inf:
        # Only sums travel: each rank has a place of its own.
        largest = cut.new_zeros(mesh.shard.size)
        largest[mesh.shard.rank] = _total([cut], order)
        mesh.shard.all_reduce(largest).wait()
        return _total([largest, whole], order)
    summed = _powers(cut, order)
    mesh.shard.all_reduce(summed).wait()
    summed += _powers(whole, order)
    return summed.sqrt() if order == 2 else summed.pow(1 / order)


def _powers(norms: torch.Tensor, order: float) -> torch.Tensor:
    return (norms.square() if order == 2 else norms.pow(order)).sum()


def _total(norms: list[torch.Tensor], order: float) -> torch.Tensor:
    """The norm of all that has these norms."""
    joined = torch.cat(norms)
    return torch.linalg.vector_norm(joined, order) if len(joined) else joined.sum()


def _norms_of(gradients: list[Gradients], device: torch.device, order: float) -> torch.Tensor:
    return _norms([t for g in gradients for t in _tensors(g, counted=True)], order, device)


def _norms(tensors: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """Of each tensor that has elements: a rank may have no rows of some, which have no largest."""
    some = [tensor for tensor in tensors if tensor.numel()]
    if not some:
        return torch.zeros(0, device=device)
    return torch.stack([norm.float().to(device) for norm in foreach_norm(some, order)])


def _norm_of_each(live: list[Gradients], device: torch.device, order: float) -> torch.Tensor:
    """Gradients on several meshes, or cut by tensor parallel too: each DTensor knows its own."""
    found = [
        cast(DTensor, parameter.grad)
        for g in live
        for i, parameter in enumerate(g.visible)
        if parameter.grad is not None and i not in g.tied
    ]
    if order == inf:
        return _largest_of_each(found, device)
    norms = [torch.linalg.vector_norm(grad, order) for grad in found]
    whole = [cast(DTensor, norm).full_tensor().float().to(device) for norm in norms]
    return _total([torch.stack(whole)] if whole else [torch.zeros(0, device=device)], order)


def _largest_of_each(gradients: list[DTensor], device: torch.device) -> torch.Tensor:
    """torch asks every rank for the largest of its rows, also one that has none."""
    meshes = dict.fromkeys(grad.device_mesh for grad in gradients)
    largest = torch.zeros(len(meshes), device=device)
    for at, mesh in enumerate(meshes):
        mine = [local_of(grad) for grad in gradients if grad.device_mesh == mesh]
        here = _total([_norms(mine, inf, device)], inf)
        for dim in range(mesh.ndim):
            dist.all_reduce(here, dist.ReduceOp.MAX, mesh.get_group(dim))
        largest[at] = here
    return _total([largest], inf)
