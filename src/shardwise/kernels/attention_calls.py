# mypy: disable-error-code="import-not-found,import-untyped"
"""One kernel launch on fixed shapes: worked out once, after that only addresses change.

Triton's own launch looks at every argument to find the compiled kernel that fits, and a descriptor
checks itself whenever one is made. Short attentions take less time than that. A `Launch` goes that
way once, keeps the compiled kernel, and then hands it addresses.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Pointer:
    """An argument: the call's tensor number `index`, or None where there is none."""

    def __init__(self, index: int) -> None:
        self.index = index


class Tile:
    """An argument: a descriptor of tensor number `index`, made like `template`."""

    def __init__(self, index: int, template: Any) -> None:
        self.index = index
        self.kind = type(template)
        self.fields = {**vars(template), "base": None}  # a plan must not keep a tensor alive

    def of(self, tensors: Sequence[Tensor | None]) -> Any:
        made = object.__new__(self.kind)  # without the checks, which the template has passed
        made.__dict__.update(self.fields)
        made.base = tensors[self.index]
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
        self.tiles = [(i, a) for i, a in enumerate(arguments) if isinstance(a, Tile)]
        self.run: Callable[..., None] | None = None

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        arguments = self.arguments.copy()
        for place, index in self.pointers:
            arguments[place] = tensors[index]
        for place, tile in self.tiles:
            arguments[place] = tile.of(tensors)
        if self.run is not None:
            self.run(*arguments)
            return
        compiled = self.kernel[self.grid](*arguments, **self.constants)
        if compiled is not None:  # the interpreter compiles nothing
            self.run = compiled[(*self.grid, 1, 1)[:3]]
