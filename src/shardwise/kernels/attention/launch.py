# mypy: disable-error-code="import-not-found,import-untyped"
"""From tensors to kernel launches: results are allocated, the shapes' plan is found and run.

A plan (`plans`) is the list of launches that shapes, strides and mask ask for. It is made once per
shape and kept. Importing this needs Triton.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.attention.arguments import ALIGNMENT
from shardwise.kernels.attention.configs import Backward, Tiles
from shardwise.kernels.attention.layout import contiguous_rows, new_lse
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.attention.plans import LaunchPlan, plan_backward, plan_forward

__all__ = ["Mask", "backward", "forward"]

MOST_PLANS = 512
_plans: dict[Any, LaunchPlan] = {}


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, precision: str, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o like q, and lse, (B, H, M) in fp32; -inf for a query that sees no key.

    Inputs are (B, heads, length, D), or (B, length, D) and lse then (B, M).
    """
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    o, lse = torch.empty_like(q), new_lse(q)
    tensors = (q, k, v, o, lse, *_ids(mask))
    _run(plan_forward, tensors, 3, mask, precision, tiles)
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    mask: Mask,
    precision: str,
    tiles: Backward | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, each like its input; `dlse` is the gradient of lse, None if nothing used it."""
    q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
    o, do, lse = contiguous_rows(o), contiguous_rows(do), lse.contiguous()
    dlse = None if dlse is None else dlse.contiguous()
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    tensors = (q, k, v, o, do, lse, dlse, dq, dk, dv, *_ids(mask))
    _run(plan_backward, tensors, 7, mask, precision, tiles)
    return dq, dk, dv


def _ids(mask: Mask) -> tuple[Tensor | None, ...]:
    """Segment ids of queries and keys, and how far each reaches on the other side."""
    q_ids, k_ids = mask.q_ids, mask.k_ids
    if q_ids is None or k_ids is None:
        return (None,) * 6
    return q_ids, k_ids, *_reach(q_ids, k_ids), *_reach(k_ids, q_ids)


def _reach(ids: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Per id, its first place in `other` and the place after its last; (length, 0) if absent.

    A stable sort keeps equal ids in the order of their places, so the ends of a run of equal ids
    are the first and last place, in whatever order the segments come.
    """
    length = other.shape[-1]
    ordered, places = torch.sort(other, dim=-1, stable=True)
    left = torch.searchsorted(ordered, ids)
    right = torch.searchsorted(ordered, ids, right=True)
    absent = left == right
    first = places.gather(-1, left.clamp(max=length - 1)).masked_fill(absent, length)
    last = places.gather(-1, (right - 1).clamp(min=0)).add(1).masked_fill(absent, 0)
    return first.int(), last.int()


def _run(
    make: Callable[..., LaunchPlan],
    tensors: tuple[Tensor | None, ...],
    inputs: int,
    mask: Mask,
    precision: str,
    tiles: Tiles | Backward | None,
) -> None:
    """Find or make the plan, and run it; results are laid out like the first `inputs` tensors."""
    q, k = tensors[:2]
    assert q is not None and k is not None
    addresses = [None if x is None else x.data_ptr() for x in tensors]
    aligned = not any(address % ALIGNMENT for address in addresses[:inputs] if address)
    key = (
        make, q.shape, k.shape, *[x.stride() for x in tensors[:inputs] if x is not None],
        q.dtype, q.device, aligned, mask[:3], precision, tiles,
        addresses.count(None),  # ids are absent together, dlse alone
    )  # fmt: skip
    plan = _plans.get(key)
    with _on_device(q):
        if plan is None:
            if len(_plans) >= MOST_PLANS:  # shapes that never come back
                _plans.clear()
            plan = _plans[key] = make(tensors, mask, precision, tiles)
        plan.run(tensors, addresses)


def _on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it x's, at no cost if it is."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
