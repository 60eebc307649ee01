"""How results are laid out: one rule for the kernels, the reference and torch.compile's tracing."""

from __future__ import annotations

import torch
from torch import Tensor

LINE = 4  # fp32 numbers in 16 bytes


def contiguous_rows(x: Tensor) -> Tensor:
    """x, copied only if the numbers of a row are not next to each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def new_like(x: Tensor) -> Tensor:
    """An uninitialised tensor in the layout of x, or of its copy if the kernels need one."""
    return torch.empty_like(contiguous_rows(x))


def new_lines(q: Tensor) -> Tensor:
    """An uninitialised fp32 number per query: (batch, heads, queries), or (batch, queries).

    Each head's start is 16-byte aligned, as descriptors need it.
    """
    *outer, length, _ = q.shape
    row = (length + LINE - 1) // LINE * LINE
    strides = (outer[1] * row, row, 1) if len(outer) == 2 else (row, 1)
    return torch.empty_strided((*outer, length), strides, dtype=torch.float32, device=q.device)
