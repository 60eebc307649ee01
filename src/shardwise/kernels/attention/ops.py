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
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.attention.reference import tiled_backward, tiled_forward

OPTIONS = (
    "Tensor? q_ids, Tensor? k_ids, bool causal, float scale, int? window, str precision, "
    "bool triton"
)
_library = torch.library.Library("shardwise", "FRAGMENT")
_library.define(
    f"attention(Tensor q, Tensor k, Tensor v, {OPTIONS}) -> (Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.define(
    "attention_backward(Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do, "
    f"Tensor? dlse, {OPTIONS}) -> (Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)


def _read(
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    causal: bool,
    scale: float,
    window: int | None,
    precision: str,
    triton: bool,
) -> tuple[Mask, str, ModuleType | None]:
    """The `OPTIONS` of an op: the mask, the precision, and the kernels if they are to run."""
    return Mask(causal, scale, window, q_ids, k_ids), precision, _launch() if triton else None


@cache
def _launch() -> ModuleType:
    """Imported when a kernel is first wanted: it needs Triton."""
    from shardwise.kernels.attention import launch

    return launch


def _forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """o and the log-sum-exp; inputs are (batch, heads, seq, dim) or (batch, seq, dim)."""
    mask, precision, kernels = _read(*options)
    if kernels is not None:
        return kernels.forward(q, k, v, mask, precision)
    q4, k4, v4 = _with_heads(q, k, v)
    o, lse = tiled_forward(q4, k4, v4, mask)
    return new_like(q).copy_(o.reshape(q.shape)), new_lse(q).copy_(lse.reshape(q.shape[:-1]))


def _backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    dlse: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv."""
    mask, precision, kernels = _read(*options)
    if kernels is not None:
        return kernels.backward(q, k, v, o, lse, do, dlse, mask, precision)
    if q.dim() == 3:
        lse, dlse = lse.unsqueeze(1), None if dlse is None else dlse.unsqueeze(1)
    q4, k4, v4, o4, do4 = _with_heads(q, k, v, o, do)
    dq, dk, dv = tiled_backward(q4, k4, v4, o4, lse, do4, dlse, mask)
    return (
        new_like(q).copy_(dq.reshape(q.shape)),
        new_like(k).copy_(dk.reshape(k.shape)),
        new_like(v).copy_(dv.reshape(v.shape)),
    )


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
    """The op `attention`, or where it makes no difference what the op runs."""
    return (_forward if _eager(q) else attention_op)(q, *arguments)


def run_backward(q: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    return (_backward if _eager(q) else attention_backward_op)(q, *arguments)


def _eager(q: Tensor) -> bool:
    """Whether q is a plain tensor and nothing traces: then the dispatcher, which takes longer than
    a short attention, can be left out."""
    return type(q) is Tensor and not torch.compiler.is_compiling()


attention_op = torch.ops.shardwise.attention.default
attention_backward_op = torch.ops.shardwise.attention_backward.default
