"""Parameters and units by name and size: what a Plan keeps, and what a description adds to.

Imports no torch: a cluster file is read without it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

# Bytes of one element.
ITEMSIZES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter: its (first) name, shape, dtype as stored, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    trainable: bool = True

    def __post_init__(self) -> None:
        if self.dtype not in ITEMSIZES:
            raise ValueError(
                f"parameter {self.name!r} has dtype {self.dtype!r}, expected one of "
                f"{', '.join(ITEMSIZES)}"
            )
        if any(n < 0 for n in self.shape):
            raise ValueError(f"parameter {self.name!r} has the shape {self.shape}")

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * ITEMSIZES[self.dtype]


@dataclass(frozen=True)
class UnitSpec:
    """One unit: the modules whose forward needs it, and its parameters. The root unit has the
    module ''. One that is `whole` is kept so by every rank, as all are in ddp.
    """

    name: str
    modules: tuple[str, ...]
    parameters: tuple[ParameterSpec, ...]
    whole: bool = field(default=False, kw_only=True)

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.parameters)

    @property
    def parameter_bytes(self) -> int:
        return sum(p.nbytes for p in self.parameters)


def places(model: nn.Module) -> Iterator[tuple[list[str], nn.Parameter]]:
    """Every distinct parameter once, with all its names (a tied parameter has several)."""
    names: dict[int, list[str]] = {}
    parameters: dict[int, nn.Parameter] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
        parameters[id(parameter)] = parameter
    for key, parameter in parameters.items():
        yield names[key], parameter
