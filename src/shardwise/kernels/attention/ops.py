"""The custom ops `shardwise::attention` and `shardwise::attention_backward`.

torch.compile takes each as one node, and knows its results' shapes without running it. Registered
through the plain library interface: a call costs a third of what `torch.library.custom_op` adds.
Eager calls leave the dispatcher out altogether (`run_forward`, `run_backward`).
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels.attention.layout import new_like, new_lse
from shardwise.kernels.attention.reference import tiled_backward, tiled_forward

MASK = (
    "Tensor? q_ids, Tensor? k_ids, bool causal, float scale, int? window, str precision, "
    "bool triton"
)
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {MASK}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, "
    f"Tensor? dlse, {MASK}) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    precision: str,
    triton: bool,
) -> tuple[Tensor, Tensor]:
    """o and the log-sum-exp; inputs are (batch, heads, seq, dim) or (batch, seq, dim)."""
    if triton:
        launch = _launch()
        return launch.forward(q, k, v, launch.Mask(causal, scale, window, q_ids, k_ids), precision)
    o, lse = tiled_forward(
        *_with_heads(q, k, v),
        causal=causal, scale=scale, window=window, q_ids=q_ids, k_ids=k_ids,
    )  # fmt: skip
    o, lse = o.reshape(q.shape), lse.reshape(q.shape[:-1])
    return new_like(q).copy_(o), new_lse(q).copy_(lse)


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    precision: str,
    triton: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    if triton:
        launch = _launch()
        mask = launch.Mask(causal, scale, window, q_ids, k_ids)
        return launch.backward(q, k, v, o, lse, do, dlse, mask, precision)
    if q.dim() == 3:
        lse, dlse = lse.unsqueeze(1), None if dlse is None else dlse.unsqueeze(1)
    q4, k4, v4, o4, do4 = _with_heads(q, k, v, o, do)
    grads = tiled_backward(
        q4, k4, v4, o4, lse, do4, dlse, causal=causal, scale=scale, window=window,
        q_ids=q_ids, k_ids=k_ids,
    )  # fmt: skip
    dq, dk, dv = (
        new_like(x).copy_(g.reshape(x.shape)) for x, g in zip((q, k, v), grads, strict=True)
    )
    return dq, dk, dv


@cache
def _launch() -> ModuleType:
    """Imported when a kernel is first wanted: it needs Triton."""
    from shardwise.kernels.attention import launch

    return launch


def _with_heads(*tensors: Tensor) -> list[Tensor]:
    return [x.unsqueeze(1) if x.dim() == 3 else x for x in tensors]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, q_ids, k_ids, *options = inputs
    ctx.save_for_backward(q, k, v, *output, q_ids, k_ids)
    ctx.options = options


def _differentiate(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    *saved, q_ids, k_ids = ctx.saved_tensors
    grads = attention_backward_op(*saved, do, dlse, q_ids, k_ids, *ctx.options)
    return (*grads, *[None] * 7)


_library.impl("attention", _forward, "CompositeExplicitAutograd")
_library.impl("attention_backward", _backward, "CompositeExplicitAutograd")
torch.library.register_fake(
    "shardwise::attention", lambda q, *_: (new_like(q), new_lse(q)), lib=_library
)
torch.library.register_fake(
    "shardwise::attention_backward",
    lambda q, k, v, *_: (new_like(q), new_like(k), new_like(v)),
    lib=_library,
)
torch.library.register_autograd(
    "shardwise::attention", _differentiate, setup_context=_save, lib=_library
)


def run_forward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """The op `attention`; where nothing looks on, what it runs, without the dispatcher."""
    return (_forward if _alone(q) else attention_op)(q, *arguments)


def run_backward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (_backward if _alone(q) else attention_backward_op)(q, *arguments)


def _alone(q: Tensor) -> bool:
    """A plain tensor, not being traced: going through the dispatcher would take longer than a
    short attention, and nobody would see it."""
    return type(q) is Tensor and not torch.compiler.is_compiling()


attention_op = torch.ops.shardwise.attention.default
attention_backward_op = torch.ops.shardwise.attention_backward.default
