"""Results of operators on the meta device, remembered.

A model repeats its blocks, so an operator gets the same arguments many times, and running it (in
Python, for most operators on the meta device) is what a trace spends its time on. Only operators
that give new tensors are remembered: no views, nothing in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwise.description.model import KernelFact
from shardwise.description.tracing.op_costs import cost_of
from shardwise.description.tracing.torch_private import (
    grouped_products,
    pytree,
    schema_of,
    storage_id,
)

aten = torch.ops.aten

_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class KnownResults:
    """Runs operators; gives the result and the kernel behind it."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Callable[[], Any], KernelFact | None]] = {}
        self._pure: dict[Any, bool] = {}

    def run(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, KernelFact | None]:
        key = self._key(op, args, kwargs)
        if key is not None and key in self._known:
            make, kernel = self._known[key]
            return make(), kernel
        out = _run(op, args, kwargs)
        kernel = cost_of(op, args, kwargs, out)
        if key is not None and not _shares(out, args):
            make_again = _maker(out)
            if make_again is not None:
                self._known[key] = (make_again, kernel)
        return out, kernel

    def _key(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op not in self._pure:
            schema = schema_of(op)
            aliased = [*schema.arguments, *schema.returns]
            self._pure[op] = all(a.alias_info is None for a in aliased)
        if not self._pure[op]:
            return None
        try:
            key = (op, _freeze(args), tuple((k, _freeze(v)) for k, v in kwargs.items()))
            hash(key)
        except TypeError:
            return None
        return key


def _run(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operator itself, but for what the meta device does otherwise than those with values: it
    refuses grouped products in another dtype than bfloat16, and lays every convolved image plainly.
    """
    if op in grouped_products and len(args) > 1:
        a, b = args[:2]
        if a.is_meta and a.dtype == b.dtype != torch.bfloat16:
            return _group(a, b, args[2] if len(args) > 2 else kwargs.get("offs"))
    out = op(*args, **kwargs)
    if op is aten.convolution.default:
        return _arranged(out, args[:2])
    if op is aten.convolution_backward.default:
        return tuple(_arranged(each, args[1:3]) for each in out)
    return out


def _arranged(image: Tensor | None, read: tuple[Tensor, ...]) -> Tensor | None:
    """With its channels last, if those of the image or the weight that were read come last."""
    if image is None or image.dim() != 4 or not image.is_meta:
        return image
    last = torch.channels_last
    if any(t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in read):
        return torch.empty_like(image, memory_format=last)
    return image


def _group(a: Tensor, b: Tensor, ends: Tensor | None) -> Tensor:
    """What a grouped product of two tensors gives; `ends` are those of the groups of rows."""
    if a.dim() == b.dim() == 2:
        assert ends is not None
        return a.new_empty(ends.shape[0], a.shape[0], b.shape[1])
    if a.dim() == b.dim():
        return a.new_empty(a.shape[0], a.shape[1], b.shape[2])
    return a.new_empty(a.shape[-2], b.shape[-1])


def _freeze(value: Any) -> Any:
    """What the result depends on."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            raise TypeError("a tensor with values")
        return (tuple(value.shape), value.stride(), value.dtype)
    if isinstance(value, tuple | list):
        return (type(value).__name__, *[_freeze(item) for item in value])
    return (type(value).__name__, value)  # 1, 1.0 and True are equal keys, and differ here


def _shares(out: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result lies in an argument's memory: `unsafe_chunk`'s do, which does not say so."""
    given = {storage_id(t.untyped_storage()) for t in pytree.tree_leaves(args) if _has_memory(t)}
    made = (t for t in pytree.tree_leaves(out) if _has_memory(t))
    return any(storage_id(t.untyped_storage()) in given for t in made)


def _has_memory(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided


def _maker(out: Any) -> Callable[[], Any] | None:
    """A function that makes results like `out`, or None where it holds more than meta tensors."""
    leaves, spec = pytree.tree_flatten(out)
    shapes: list[_Shape | None] = []
    for leaf in leaves:
        if leaf is None:
            shapes.append(None)
        elif isinstance(leaf, Tensor) and leaf.is_meta:
            shapes.append((tuple(leaf.shape), leaf.stride(), leaf.dtype))
        else:
            return None

    def make_one(shape: _Shape | None) -> Tensor | None:
        if shape is None:
            return None
        return torch.empty_strided(shape[0], shape[1], dtype=shape[2], device="meta")

    if len(shapes) == 1 and isinstance(out, Tensor):
        return lambda: make_one(shapes[0])
    return lambda: pytree.tree_unflatten([make_one(shape) for shape in shapes], spec)
