"""A model's outline: which modules hold which parameters, without its code and without values.

A description keeps one, so that the units of a Plan are cut from it by the code that cuts the model
itself (`planning/units.py`): what fits the outline fits the model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

_CONTAINERS: dict[str, type[nn.Module]] = {
    f"nn.{kind.__name__}": kind for kind in (nn.ModuleList, nn.Sequential, nn.ModuleDict)
}


@dataclass(frozen=True)
class OutlinedModule:
    """One module: its classes, the most derived first, its own parameters and its children, each
    with its name there and its place in the Outline's tables.
    """

    classes: tuple[int, ...]
    parameters: tuple[tuple[str, int], ...]
    children: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Outline:
    """Tables: class names, (shape, dtype, trainable) of parameters, and modules, the root first.
    What is shared (a tied parameter, a module in two places, a class) stands there once.
    """

    classes: tuple[str, ...]
    parameters: tuple[tuple[tuple[int, ...], str, bool], ...]
    modules: tuple[OutlinedModule, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Outline:
        found = list(model.modules())  # each once
        kinds = {
            kind: None
            for module in found
            for kind in type(module).__mro__
            if issubclass(kind, nn.Module) and kind is not nn.Module
        }
        held = {id(p): p for module in found for p in module._parameters.values() if p is not None}
        place_of = {id(module): i for i, module in enumerate(found)}
        class_of = {kind: i for i, kind in enumerate(kinds)}
        number_of = {key: i for i, key in enumerate(held)}
        own = {kind: name for name, kind in _CONTAINERS.items()}
        return cls(
            tuple(own.get(kind, kind.__name__) for kind in kinds),
            tuple(
                (tuple(p.shape), str(p.dtype).removeprefix("torch."), p.requires_grad)
                for p in held.values()
            ),
            tuple(
                OutlinedModule(
                    tuple(class_of[kind] for kind in type(m).__mro__ if kind in class_of),
                    tuple((n, number_of[id(p)]) for n, p in m._parameters.items() if p is not None),
                    tuple((n, place_of[id(c)]) for n, c in m._modules.items() if c is not None),
                )
                for m in found
            ),
        )  # fmt: skip

    def build(self) -> nn.Module:
        """A module of that outline on the meta device. It has no forward."""
        parameters = [
            nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype), device="meta"), trainable)
            for shape, dtype, trainable in self.parameters
        ]
        kinds = {outlined.classes: self._kind(outlined.classes) for outlined in self.modules}
        modules: list[nn.Module] = []
        for outlined in self.modules:
            kind = kinds[outlined.classes]
            module = kind.__new__(kind)
            nn.Module.__init__(module)
            modules.append(module)
        for outlined, module in zip(self.modules, modules, strict=True):
            for name, place in outlined.parameters:
                module._parameters[name] = parameters[place]
            for name, place in outlined.children:
                module._modules[name] = modules[place]
        return modules[0]

    def _kind(self, classes: tuple[int, ...]) -> type[nn.Module]:
        """A class with these names among its bases; torch's own containers are themselves."""
        kind: type[nn.Module] = nn.Module
        for place in reversed(classes):
            name = self.classes[place]
            kind = _CONTAINERS.get(name) or type(name, (kind,), {})
        return kind
