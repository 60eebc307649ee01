"""Clipping by the global norm, on flat gradient buffers: one norm per unit, one small all-reduce,
one multiply.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine import checks
from shardwise.engine.engine import engine_of
from shardwise.engine.gradients import Gradients
from shardwise.engine.mesh import Mesh
from shardwise.engine.torch_private import foreach_mul_, foreach_norm, local_of


def clip_grad_norm(
    model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm
    before (0-d).

    Equals `torch.nn.utils.clip_grad_norm_` in one process. Every rank gets the same norm, so all
    decide alike.
    """
    engine = engine_of(model)
    engine.check_interrupted()
    # Modules that were added and sharded later have engines of their own.
    engines = dict.fromkeys([engine, *checks.engines_training(model.parameters())])
    units = [unit for each in engines for unit in each.units]
    live = [u.gradients for u in units if u.gradients is not None and not u.gradients.cleared]
    mesh = engine.mesh.device_mesh
    several = any(unit.mesh.device_mesh != mesh for unit in units)
    if several or any(g.has_dtensors for g in live):
        total = _norm_of_each(live, engine.mesh.device)
    else:
        total = _norm_of_all(live, engine.mesh)
    # Parameters outside the engine (ignored ones) are whole on every rank.
    outside = [
        p.grad for p in model.parameters() if p.grad is not None and not checks.engine_training(p)
    ]
    if outside:
        theirs = torch.stack([g.norm().float().to(total.device) for g in outside])
        total = torch.linalg.vector_norm(torch.cat([total.view(1), theirs]))
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


def _norm_of_all(live: list[Gradients], mesh: Mesh) -> torch.Tensor:
    """All gradients are cut over one mesh, or whole on every rank and so counted by each for
    itself: one norm per buffer, one small all-reduce.
    """
    cut = _squares([g for g in live if g.mesh.shard.size > 1], mesh.device)
    mesh.shard.all_reduce(cut).wait()
    return (cut + _squares([g for g in live if g.mesh.shard.size == 1], mesh.device)).sqrt()


def _squares(gradients: list[Gradients], device: torch.device) -> torch.Tensor:
    tensors = [tensor for g in gradients for tensor in _tensors(g, counted=True)]
    if not tensors:
        return torch.zeros((), device=device)
    norms = foreach_norm(tensors)
    return torch.stack([norm.float() for norm in norms]).square().sum().to(device)


def _norm_of_each(live: list[Gradients], device: torch.device) -> torch.Tensor:
    """Gradients on several meshes, or cut by tensor parallel too: each DTensor knows its own."""
    norms = [
        cast(DTensor, torch.linalg.vector_norm(parameter.grad)).full_tensor().float().to(device)
        for g in live
        for i, parameter in enumerate(g.visible)
        if parameter.grad is not None and i not in g.tied
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)
