# mypy: disable-error-code="import-not-found,import-untyped"
"""Kernel launches on fixed shapes: worked out once, after that only addresses change.

Triton's own launch looks at every argument to find the compiled kernel that fits, asks the driver
about every pointer, and a descriptor checks itself whenever one is made. Short kernels take less
time than that. A `Launch` goes that way once, keeps the compiled kernel, then hands it numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Pointer:
    """An argument: the call's tensor number `index`, or None where there is none."""

    index: int


class BareAddress:
    """All that a prepared launch asks of a tensor. No dataclass: a frozen one is slower to make."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class Descriptor:
    """An argument: a descriptor of tensor number `index`, made like `template`."""

    def __init__(self, index: int, template: Any) -> None:
        self.index = index
        self.kind = type(template)
        self.fields = {**vars(template), "base": None}  # a plan must not keep a tensor alive

    def of(self, base: Tensor | int | None) -> Any:
        """The descriptor of a tensor, or of what lies at an address."""
        made = object.__new__(self.kind)  # without the checks, which the template has passed
        made.__dict__.update(self.fields)
        made.base = BareAddress(base) if isinstance(base, int) else base
        return made


class Launch:
    """A kernel with its grid and arguments; `constants` are its constexprs and launch options."""

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: Sequence[Any], **constants: Any
    ) -> None:
        self.kernel, self.grid, self.constants = kernel, grid, constants
        names = list(inspect.signature(kernel.fn).parameters)[len(arguments) :]
        self.arguments = [*arguments, *(constants.pop(name) for name in names)]
        self.pointers = [(i, a.index) for i, a in enumerate(arguments) if isinstance(a, Pointer)]
        self.descriptors = [(i, a) for i, a in enumerate(arguments) if isinstance(a, Descriptor)]
        self.run: Callable[..., None] | None = None  # once compiled

    def first(self, tensors: Sequence[Tensor | None]) -> None:
        """Compile and launch. The interpreter compiles nothing, and always comes this way."""
        compiled = self.kernel[self.grid](*self._arguments_of(tensors), **self.constants)
        if compiled is not None:
            self.run = compiled[(*self.grid, 1, 1)[:3]]

    def again(self, addresses: Sequence[int | None], stream: int) -> None:
        """Launch what was compiled."""
        assert self.run is not None
        self.run(*self._arguments_of(addresses), stream=stream)

    def _arguments_of(self, tensors: Sequence[Tensor | int | None]) -> list[Any]:
        """The arguments for these tensors, or for their addresses."""
        arguments = self.arguments.copy()
        for position, index in self.pointers:
            arguments[position] = tensors[index]
        for position, descriptor in self.descriptors:
            arguments[position] = descriptor.of(tensors[descriptor.index])
        return arguments
