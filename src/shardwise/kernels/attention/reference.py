"""Attention in plain torch: the definition, and the tiled algorithm that the kernels run.

`plain_attention` is the definition: scores, mask, softmax, sum; it holds M x N numbers. The tiled
pair below gives the same results holding one tile at a time, and is the place to learn how:

forward   Per block of queries, walk the keys. Keep the largest score so far, the sum of exp(score -
          largest), and the sum of exp(score - largest) * v. When a larger score turns up, both sums
          shrink by exp(old - new). At the end o is the quotient of the sums, and lse = largest +
          log(sum) says in one number what the softmax divided by.
backward  p = exp(score - lse) is one tile's softmax again, without its neighbours. From
          o = p v follow dv = p^T do and dp = do v^T; the softmax turns dp into
          ds = p * (dp - delta), where delta = sum(p * dp) over a row = sum(o * do), so it too needs
          no neighbour; and score = scale * q k^T gives dq = scale * ds k, dk = scale * ds^T q.
          The gradient of lse itself is p, so a loss that uses lse adds p * dlse to ds: dlse is
          taken off delta.

Letters of the shape suffixes: B batch, G key/value heads, R query heads per key/value head, M
queries, N keys, D width of one head. exp and log are natural, here and in every lse that is handed
out; inside, the kernels work in base 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.attention.mask import Mask, visible_pairs


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The definition, on (batch, heads, seq, dim), in the dtype of the inputs; differentiable."""
    s, seen = _scores(q, k, causal, scale, window, segment_ids)
    p = torch.softmax(s, dim=-1).masked_fill(~seen, 0.0)
    return (p @ v.unsqueeze(2)).flatten(1, 2)


def plain_lse(q: Tensor, k: Tensor, **mask: Any) -> Tensor:
    """The log of the sum that `plain_attention` divides by, (batch, heads, queries).

    `mask` is what `plain_attention` takes.
    """
    s, seen = _scores(q, k, **mask)
    return torch.logsumexp(s, dim=-1).masked_fill(~seen.any(-1), -math.inf).flatten(1, 2)


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, block: int = 128
) -> tuple[Tensor, Tensor]:
    """o like q, and lse as (batch, heads, queries) in fp32 (fp64 for fp64 inputs).

    A query that sees nothing has lse = log(0) = -inf.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_BGRMD = _group(q, k).to(wide)
    k_BGRND, v_BGRND = k.unsqueeze(2).to(wide), v.unsqueeze(2).to(wide)
    o_BGRMD = torch.empty_like(q_BGRMD)
    lse_BGRM = q_BGRMD.new_empty(q_BGRMD.shape[:-1])
    for m in torch.arange(q.shape[2], device=q.device).split(block):
        rows = q_BGRMD[..., m, :]
        largest = rows.new_full(rows.shape[:-1], -math.inf)
        total = rows.new_zeros(rows.shape[:-1])
        acc = torch.zeros_like(rows)
        for n in torch.arange(k.shape[2], device=q.device).split(block):
            seen = visible_pairs(m, n, mask)
            if not seen.any():
                continue
            s = (rows @ k_BGRND[..., n, :].transpose(-1, -2)) * mask.scale
            s = s.masked_fill(~seen, -math.inf)
            now = torch.maximum(largest, s.amax(-1))
            # Where all is masked so far, `now` is -inf; subtracting 0 instead keeps exp(-inf) = 0.
            base = now.masked_fill(now == -math.inf, 0.0)
            p = torch.exp(s - base[..., None])
            shrink = torch.exp(largest - base)
            total = total * shrink + p.sum(-1)
            acc = acc * shrink[..., None] + p @ v_BGRND[..., n, :]
            largest = now
        o_BGRMD[..., m, :] = acc / total.masked_fill(total == 0, 1.0)[..., None]
        lse_BGRM[..., m] = largest + total.log()
    return o_BGRMD.flatten(1, 2).to(q.dtype), lse_BGRM.flatten(1, 2)


def tiled_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    mask: Mask,
    block: int = 128,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_BGRMD, o_BGRMD, do_BGRMD = (_group(x, k).to(wide) for x in (q, o, do))
    k_BGRND, v_BGRND = k.unsqueeze(2).to(wide), v.unsqueeze(2).to(wide)
    lse_BGRM = lse.unflatten(1, (k.shape[1], -1)).to(wide)
    delta_BGRM = (o_BGRMD * do_BGRMD).sum(-1)
    if dlse is not None:
        delta_BGRM -= dlse.unflatten(1, (k.shape[1], -1))
    dq_BGRMD = torch.zeros_like(q_BGRMD)
    dk_BGRND, dv_BGRND = torch.zeros_like(k_BGRND), torch.zeros_like(v_BGRND)
    for n in torch.arange(k.shape[2], device=q.device).split(block):
        k_tile, v_tile = k_BGRND[..., n, :], v_BGRND[..., n, :]
        dk, dv = torch.zeros_like(k_tile), torch.zeros_like(v_tile)
        for m in torch.arange(q.shape[2], device=q.device).split(block):
            seen = visible_pairs(m, n, mask)
            if not seen.any():
                continue
            q_tile, do_tile = q_BGRMD[..., m, :], do_BGRMD[..., m, :]
            s = (q_tile @ k_tile.transpose(-1, -2)) * mask.scale
            # lse is -inf where a query sees nothing: all of its row is masked.
            p = torch.exp(s - lse_BGRM[..., m, None]).masked_fill(~seen, 0.0)
            dp = do_tile @ v_tile.transpose(-1, -2)
            ds = p * (dp - delta_BGRM[..., m, None])
            # The query heads of a group share k and v: their gradients add up.
            dv += (p.transpose(-1, -2) @ do_tile).sum(2, keepdim=True)
            dk += (ds.transpose(-1, -2) @ q_tile).sum(2, keepdim=True) * mask.scale
            dq_BGRMD[..., m, :] += (ds @ k_tile) * mask.scale
        dk_BGRND[..., n, :], dv_BGRND[..., n, :] = dk, dv
    dq = dq_BGRMD.flatten(1, 2).to(q.dtype)
    return dq, dk_BGRND.squeeze(2).to(k.dtype), dv_BGRND.squeeze(2).to(v.dtype)


def _scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    segment_ids: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """All scores, (B, G, R, M, N), and which of them count."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    mask = Mask(causal, scale, window, *(segment_ids or (None, None)))
    m = torch.arange(q.shape[2], device=q.device)
    n = torch.arange(k.shape[2], device=q.device)
    seen = visible_pairs(m, n, mask)
    s = (_group(q, k) @ k.unsqueeze(2).transpose(-1, -2)) * scale
    # A query that sees nothing would be 0 / 0: it gets any finite softmax, and then none of it.
    return s.masked_fill(~seen, torch.finfo(s.dtype).min), seen


def _group(x: Tensor, k: Tensor) -> Tensor:
    """(B, G * R, M, D) as (B, G, R, M, D)."""
    return x.unflatten(1, (k.shape[1], -1))
