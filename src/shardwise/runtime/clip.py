"""Clipping by the global norm, on flat gradient buffers: one norm per unit, one small all-reduce,
one multiply.
"""

from __future__ import annotations

import torch
from torch import nn

from shardwise.runtime import guard
from shardwise.runtime.api import engine_of
from shardwise.sharding.storage import Gradients


def clip_grad_norm(
    model: nn.Module, max_norm: float, *, error_if_nonfinite: bool = False
) -> torch.Tensor:
    """Scale all gradients so that their global 2-norm is at most `max_norm`; returns the norm
    before (0-d).

    Equals `torch.nn.utils.clip_grad_norm_` in one process. Every rank gets the same norm, so all
    decide alike.
    """
    engine = engine_of(model)
    guard.check_interrupted(engine)
    live = [g for g in (unit.gradients for unit in engine.units) if g is not None and _is_live(g)]
    device = engine.mesh.device
    if live:
        norms = torch._foreach_norm([g.counted for g in live])
        squares = torch.stack([norm.float() for norm in norms]).square().sum()
    else:
        squares = torch.zeros((), device=device)
    engine.mesh.shard.all_reduce(squares).wait()
    total = squares.sqrt()
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the global gradient norm is {total.item()}, so gradients cannot be clipped; "
            "skip this step, or lower the learning rate or the loss scale"
        )
    if live:
        torch._foreach_mul_([g.flat for g in live], (max_norm / (total + 1e-6)).clamp(max=1.0))
    return total


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
