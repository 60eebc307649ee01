"""Clipping by the global norm, on flat gradient buffers: one norm per unit, one small all-reduce,
one multiply.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.runtime import guard
from shardwise.runtime.api import engine_of
from shardwise.sharding.gradients import Gradients
from shardwise.sharding.mesh import Mesh


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
    live = [g for g in (unit.gradients for unit in engine.units) if g is not None and _is_live(g)]
    whole = {id(unit.gradients) for unit in engine.units if unit.mesh.shard.size == 1}
    mesh = engine.mesh.device_mesh
    several = any(unit.mesh.device_mesh != mesh for unit in engine.units)
    if several or any(g.nested for g in live):
        total = _norm_of_each(live, engine.mesh.device)
    else:
        total = _norm_of_all(live, whole, engine.mesh)
    # Parameters outside the engine (ignored ones) are whole on every rank.
    outside = [p.grad for p in model.parameters() if p.grad is not None and not guard.engine_of(p)]
    if outside:
        theirs = torch.stack([g.norm().float().to(total.device) for g in outside])
        total = torch.linalg.vector_norm(torch.cat([total.view(1), theirs]))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the global gradient norm is {total.item()}, so gradients cannot be clipped; "
            "skip this step, or lower the learning rate or the loss scale"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for flats in ([g.flat for g in live], outside):
        if flats:
            torch._foreach_mul_(flats, scale.to(flats[0].device))
    return total


def _norm_of_all(live: list[Gradients], whole: set[int], mesh: Mesh) -> torch.Tensor:
    """All gradients are cut over one mesh, or `whole` on every rank and so counted by each for
    itself: one norm per buffer, one small all-reduce.
    """
    squares = _squares([g for g in live if id(g) not in whole], mesh.device)
    mesh.shard.all_reduce(squares).wait()
    return (squares + _squares([g for g in live if id(g) in whole], mesh.device)).sqrt()


def _squares(gradients: list[Gradients], device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm([g.counted for g in gradients])
    return torch.stack([norm.float() for norm in norms]).square().sum().to(device)


def _norm_of_each(live: list[Gradients], device: torch.device) -> torch.Tensor:
    """Gradients on several meshes, or cut by tensor parallel too: each DTensor knows its own."""
    norms = [
        cast(DTensor, torch.linalg.vector_norm(parameter.grad)).full_tensor().float().to(device)
        for g in live
        for parameter in g.visible
        if parameter.grad is not None
    ]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros((), device=device)


def _is_live(gradients: Gradients) -> bool:
    """Whether the unit's buffer is what hangs on its parameters; rows of absent gradients are
    zeroed.
    """
    absent = 0
    for member, parameter, summed in zip(
        gradients.members, gradients.visible, gradients.summed, strict=True
    ):
        if parameter.grad is None:
            absent += 1
        elif parameter.grad is not summed:
            raise RuntimeError(
                f"the gradient of {member.name!r} was replaced by another tensor; "
                "sw.clip_grad_norm scales the engine's "
                "own buffers: change gradients in place, or use torch.nn.utils.clip_grad_norm_"
            )
    if absent == len(gradients.visible):
        return False
    if absent:
        gradients.adopt()
    return True
