"""Two markers that tracing leaves in a graph where a parameter is used and where its gradient ends.

`full` stands for the whole parameter, made from this rank's part; `reduced` for what becomes of its
gradient. They have shapes and no kernels: `lower.py` puts casts, collectives and waits in their
places, where the schedule says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_library = torch.library.Library("shardwise_graph", "DEF")
_library.define(
    # part: this rank's rows, padded, or what they are found by (`runtime.Shelf`). whole: the
    # parameter, if an earlier micro-batch has left it. sink: the one leaf that all gradients are
    # said to be of; None: it is the part's. held: what earlier micro-batches have added up.
    # number: the parameter's own.
    "full(Tensor part, Tensor? whole, Tensor? sink, Tensor? held, int number, int[] shape, "
    "ScalarType dtype) -> Tensor"
)
_library.define(
    "reduced(Tensor gradient, Tensor? held, int number, Tensor? sink, int[] shape, "
    "ScalarType dtype) -> Tensor"
)

FULL = torch.ops.shardwise_graph.full.default
REDUCED = torch.ops.shardwise_graph.reduced.default


@torch.library.register_fake("shardwise_graph::full", lib=_library)
def _full(
    part: Tensor, whole: Any, sink: Any, held: Any, number: int, shape: list[int], dtype: Any
) -> Tensor:
    return part.new_empty(shape, dtype=dtype)


@torch.library.register_fake("shardwise_graph::reduced", lib=_library)
def _reduced(
    gradient: Tensor, held: Any, number: int, sink: Any, shape: list[int], dtype: Any
) -> Tensor:
    return gradient.new_empty(shape, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    part, _, sink, held, ctx.number, _, _ = inputs
    target = part if sink is None else sink
    ctx.shape, ctx.dtype, ctx.sinks = list(target.shape), target.dtype, sink is not None
    ctx.holds = held is not None
    ctx.save_for_backward(*(t for t in (held, sink) if t is not None))


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    held = ctx.saved_tensors[0] if ctx.holds else None
    sink = ctx.saved_tensors[-1] if ctx.sinks else None
    result = REDUCED(gradient, held, ctx.number, sink, ctx.shape, ctx.dtype)
    part, sink = (None, result) if ctx.sinks else (result, None)
    return part, None, sink, None, None, None, None


torch.library.register_autograd(
    "shardwise_graph::full", _backward, setup_context=_remember, lib=_library
)
