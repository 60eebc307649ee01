"""Attention: `attention(q, k, v, causal=...)`, and `FlashAttention.apply` underneath.

`attention` checks its inputs, asks `backends` which backend is fastest for them, and calls that
(the first call of a shape on a GPU times them: `measured`). The Triton backend is `FlashAttention`
around the custom ops of `ops`: torch.compile sees one node, and autograd keeps q, k, v, o and the
log-sum-exp, nothing of size queries x keys. `attention(..., return_lse=True)` returns `(o, lse)`.
"""

from __future__ import annotations

import math
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from shardwise.kernels.attention import backends
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.attention.ops import run_backward, run_forward

PRECISIONS = ("fp32", "tf32")
PLAIN = (Tensor, torch.nn.Parameter)

SegmentIds = Tensor | tuple[Tensor, Tensor]


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: SegmentIds | None = None,
    precision: str | None = None,
    backend: str | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: SegmentIds | None = None,
    precision: str | None = None,
    backend: str | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: SegmentIds | None = None,
    precision: str | None = None,
    backend: str | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale * q k^T) v over the visible pairs.

    q is (batch, heads, queries, dim) and k, v are (batch, key/value heads, keys, dim), where each
    key/value head serves heads / key/value heads query heads; or all are (batch, seq, dim).

    causal       query m sees the keys n <= m, counted from the first of each (as torch does: with
                 unequal lengths the mask is aligned top-left)
    scale        default 1 / sqrt(dim)
    window       query m sees the keys less than `window` away: with `causal` the last `window`
                 keys, its own included
    segment_ids  integers (batch, seq), or a pair for queries and keys: equal ids see each other
    precision    for fp32 inputs: "fp32", or "tf32" for faster products of 10 bits; default: what
                 torch.backends.cuda.matmul.allow_tf32 says
    backend      force one of `backends.BACKENDS`; default: the fastest for this shape
    return_lse   return (o, lse): lse is the natural log of each query's sum of exp(score), in fp32,
                 (batch, heads, queries), or (batch, queries) for inputs without heads, and can be
                 differentiated. The backends "triton" and "reference" have it

    A query that sees no key gives zeros and the lse -inf, and gets a zero gradient.
    """
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    check(q, k, v)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 key, got {window}")
    precision = precision or default_precision(q.dtype)
    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}: use one of {PRECISIONS}")
    q_ids, k_ids = split_ids(segment_ids, q, k)
    if 0 in q.shape or 0 in k.shape:
        o = q * 0  # no query, or no key to see; stays in the graph
        return (o, o.sum(-1, dtype=torch.float32) - math.inf) if return_lse else o
    if window is not None and window >= max(q.shape[-2], k.shape[-2]):
        window = None  # it holds every pair
    request = backends.Request.of(q, k, v, causal, window, q_ids is not None, precision, return_lse)
    chosen = backends.choose(request, backend, plain=type(q) in PLAIN)
    mask = Mask(causal, scale, window, q_ids, k_ids)
    if chosen in ("triton", "reference"):
        return FlashAttention.apply(q, k, v, *mask, precision, chosen == "triton", return_lse)
    if q.dim() == 3:
        q, k, v = (x.unsqueeze(1) for x in (q, k, v))
        return backends.run_torch(chosen, q, k, v, mask).squeeze(1)
    return backends.run_torch(chosen, q, k, v, mask)


class FlashAttention(torch.autograd.Function):
    """The kernels without the choice of a backend: `FlashAttention.apply(q, k, v, is_causal)`.

    Runs Triton where it can and the tiles in plain torch elsewhere. Saves q, k, v, o and the
    natural log-sum-exp, which is (batch, queries) for (batch, seq, dim) inputs. Returns o, or with
    `return_lse` both.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        is_causal: bool = False,
        scale: float | None = None,
        window: int | None = None,
        q_ids: Tensor | None = None,
        k_ids: Tensor | None = None,
        precision: str | None = None,
        triton: bool | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        check(q, k, v)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        precision = precision or default_precision(q.dtype)
        if triton is None:
            triton = backends.triton_refusal(q.device, q.dtype) is None
        ctx.options = (is_causal, scale, window, precision, triton)
        o, lse = run_forward(q, k, v, q_ids, k_ids, *ctx.options)
        ctx.save_for_backward(q, k, v, o, lse, *(() if q_ids is None else (q_ids, k_ids)))
        return (o, lse) if return_lse else o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, dlse: Tensor | None = None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, *ids = ctx.saved_tensors
        grads = run_backward(q, k, v, o, lse, do, dlse, *(ids or (None, None)), *ctx.options)
        return (*grads, *[None] * 8)


def default_precision(dtype: torch.dtype) -> str:
    """What torch's own products of this dtype use."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return "tf32" if tf32 else "fp32"


def check(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError, naming the tensor, unless the three fit together."""
    problem = None
    if q.dim() not in (3, 4) or k.dim() != q.dim() or v.dim() != q.dim():
        problem = "attention takes (batch, heads, seq, dim) or (batch, seq, dim) for all three"
    elif k.shape != v.shape:
        problem = "k and v must have the same shape"
    elif q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        problem = "q and k must have the same batch and head width"
    elif q.dim() == 4 and (k.shape[1] == 0 or q.shape[1] % k.shape[1] != 0):
        problem = "the query heads must be a multiple of the key/value heads"
    if problem is not None:
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        raise ValueError(f"{problem}, got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.is_floating_point():
        raise ValueError(f"attention takes floating-point tensors, got {q.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(
            f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}"
        )


def split_ids(
    segment_ids: SegmentIds | None, q: Tensor, k: Tensor
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Checked int32 ids of the queries and of the keys."""
    if segment_ids is None:
        return None, None
    pair = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    for ids, x, name in zip(pair, (q, k), ("queries", "keys"), strict=True):
        expected = (x.shape[0], x.shape[-2])
        if tuple(ids.shape) != expected:
            raise ValueError(
                f"segment ids of the {name} must be (batch, seq) = {expected}, "
                f"got {tuple(ids.shape)}"
            )
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"segment ids must be integers, got {ids.dtype}")
        if ids.device != q.device:
            raise ValueError(f"segment ids are on {ids.device}, q is on {q.device}")
    return pair[0].int().contiguous(), pair[1].int().contiguous()
