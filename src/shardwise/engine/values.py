"""Walking what modules take and give: tensors inside tuples, lists, dicts and dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy
import torch

_PLAIN = (
    torch.Tensor, str, bytes, int, float, complex, type(None), numpy.ndarray, numpy.generic
)  # fmt: skip


def leaves(value: Any) -> Iterator[Any]:
    """Everything in `value` that is no tuple, list, set, mapping or dataclass."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from leaves(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from leaves(getattr(value, field.name))
    else:
        yield value


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def opaque(value: Any) -> Iterator[Any]:
    """Everything in `value` that could hide a tensor from `tensors`."""
    return (leaf for leaf in leaves(value) if not isinstance(leaf, _PLAIN))


def move(value: Any, device: torch.device) -> Any:
    """`value` with every tensor on `device`; the same object if all are."""
    return transform(value, lambda t: t if t.device == device else t.to(device))


def cast(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in `dtype`; the same object if none changes."""
    return transform(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def transform(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor replaced by `change(tensor)`; containers are copied only where
    something changed.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        items = [transform(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: transform(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        return type(value)(**pairs) if dataclasses.is_dataclass(value) else type(value)(pairs)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            field.name: transform(getattr(value, field.name), change)
            for field in dataclasses.fields(value)
            if field.init
        }
        if all(fields[name] is getattr(value, name) for name in fields):
            return value
        return dataclasses.replace(value, **fields)
    return value
