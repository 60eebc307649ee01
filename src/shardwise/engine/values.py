"""Tensors in what modules take and return: tuples, lists, sets, mappings and dataclasses."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import numpy
import torch

# What holds no tensor that `leaves` would not find.
PLAIN = (
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


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in `value`."""
    return (leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor))


def cast_to(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in `dtype`; the same object if none changes."""
    return transform(value, lambda t: t.to(dtype) if t.is_floating_point() else t)


def transform(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor that `tensors_in` finds replaced by `change(tensor)`, in its order;
    containers are copied only where something changed, with all else that they hold.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple | set):
        items = [transform(item, change) for item in value]
        if all(a is b for a, b in zip(items, value, strict=True)):
            return value
        if isinstance(value, list):
            twin: Any = copy.copy(value)
            twin[:] = items
            return twin
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        pairs = {key: transform(item, change) for key, item in value.items()}
        if all(pairs[key] is value[key] for key in pairs):
            return value
        if not isinstance(value, MutableMapping):
            return type(value)(pairs)  # type: ignore[call-arg]
        twin = copy.copy(value)  # a class may take other arguments, as defaultdict does
        for key, item in pairs.items():
            twin[key] = item
        return twin
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        changed = {name: transform(getattr(value, name), change) for name in names}
        if all(changed[name] is getattr(value, name) for name in names):
            return value
        twin = copy.copy(value)
        for name, item in changed.items():
            object.__setattr__(twin, name, item)  # a frozen one too
        return twin
    return value
