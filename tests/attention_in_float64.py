"""What attention is compared with, on a CPU and on a GPU: float64. Needs no pytest."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.attention.reference import plain_attention, plain_lse


def expect(tensors: list[Tensor], uses_lse: bool, **mask: Any) -> list[Tensor]:
    """o, lse, dq, dk, dv of q, k, v and do; `uses_lse`: the loss does."""
    *inputs, do = (x.double() for x in tensors)
    for x in inputs:
        x.requires_grad_()
    o = plain_attention(*inputs, **mask)
    with torch.set_grad_enabled(uses_lse):
        lse = plain_lse(*inputs[:2], **mask)
    loss = (o * do).sum()
    if uses_lse:
        loss = loss + (lse.masked_fill(lse == -math.inf, 0.0) * gradient_of(lse)).sum()
    return [o.detach(), lse.detach(), *torch.autograd.grad(loss, inputs)]


def gradient_of(lse: Tensor) -> Tensor:
    """Any numbers of the size of do's, the same for equal shapes."""
    places = torch.arange(lse.numel(), device=lse.device).reshape(lse.shape)
    return places.double().sin().to(lse.dtype)


def error(got: Tensor, wanted: Tensor) -> float:
    """Relative to the norm; where zero is wanted, the root mean square. NaN stays NaN.

    An infinity must be the same one on both sides.
    """
    infinite = wanted.isinf()
    if not torch.equal(got.double()[infinite], wanted[infinite]):
        return math.inf
    got, wanted = got.masked_fill(infinite, 0.0), wanted.masked_fill(infinite, 0.0)
    size = wanted.norm().item()
    return (got.double() - wanted).norm().item() / (size if size > 1e-9 else wanted.numel() ** 0.5)
