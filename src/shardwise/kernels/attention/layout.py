"""How results are laid out: one rule for the kernels, the reference and torch.compile's tracing."""

from __future__ import annotations

import torch
from torch import Tensor


def contiguous_rows(x: Tensor) -> Tensor:
    """x, copied only if the numbers of a row are not next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def new_like(x: Tensor) -> Tensor:
    """An uninitialised tensor in the layout of x, or of its copy if the kernels need one."""
    return torch.empty_like(contiguous_rows(x))


def new_lse(q: Tensor) -> Tensor:
    """An uninitialised fp32 number per query: (batch, heads, queries), or (batch, queries)."""
    return q.new_empty(q.shape[:-1], dtype=torch.float32)
