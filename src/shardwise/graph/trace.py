"""What torch.compile traces: a model, with markers in its parameters' places."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.torch_private import call_hooked, parameters_of
from shardwise.graph.executor import GraphParameter
from shardwise.graph.ops import FULL

_OURS = ("given", "parameters")  # what the traced function has of the engine
# How torch writes down where a parameter hangs in the traced function's `model`.
_PLACE = re.compile(
    r"model(?P<children>(?:\._modules\['[^']*'\])*)\._parameters\['(?P<name>[^']*)'\]"
)
_CHILD = re.compile(r"'([^']*)'")


class Whole(nn.Module):
    """A model to be called past what hangs in its call's place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_hooked(self.model, *args, **kwargs)


@dataclass(frozen=True)
class Inputs:
    """What the markers take (`ops.py`), lists parameter by parameter."""

    parts: Sequence[Tensor | None]  # None: found by `place`
    place: Tensor | None = None
    whole: list[Tensor] | None = None
    sink: Tensor | None = None
    trained: Sequence[bool] = ()  # which gradients are the sink's
    held: list[Tensor | None] | None = None


def call_marked(
    model: Whole,
    parameters: Sequence[GraphParameter],
    given: Inputs,
    args: Any,
    kwargs: Any,
) -> tuple[Any, list[Tensor]]:
    """Call a model with markers for its parameters; gives the markers too."""
    full: dict[str, Tensor] = {}
    found = []
    for number, p in enumerate(parameters):
        part = given.parts[number]
        tensor = FULL(
            given.place if part is None else part,
            None if given.whole is None else given.whole[number],
            given.sink if given.sink is not None and given.trained[number] else None,
            None if given.held is None else given.held[number],
            number,
            list(p.rows.shape),
            p.compute,
        )
        found.append(tensor)
        for name in p.names:
            full[f"model.{name}"] = tensor
    return torch.func.functional_call(model, full, args, kwargs, tie_weights=False), found


def traceable(
    model: Whole, parameters: Sequence[GraphParameter], returns_whole: bool
) -> Callable[..., tuple[Any, list[Tensor]]]:
    """A function for torch.compile: the model's output and, if asked for, its whole parameters.

    Each has code of its own: torch keeps what it compiled with the code, and with it memory of the
    model, for as long as that is there.
    """

    def run(given: Inputs, args: Any, kwargs: Any) -> tuple[Any, list[Tensor]]:
        output, found = call_marked(model, parameters, given, args, kwargs)
        return output, [tensor.detach() for tensor in found] if returns_whole else []

    return FunctionType(run.__code__.replace(), run.__globals__, closure=run.__closure__)


class Guards:
    """What torch.compile looks at before each call: all that it does by itself, but for what the
    engine looks after. That is the parts and facts of parameters, which are the same as long as the
    compiled function is used, and what hangs in the parameters' places.
    """

    def __init__(self, model: Whole, hung: Sequence[tuple[dict[str, Any], str]]) -> None:
        """`hung`: where the parameters hang."""
        self._model = weakref.ref(model)  # torch keeps guards where nobody collects
        self._hung = {(id(own), key) for own, key in hung}
        self.see_places = False  # some guard looks there all the same: they must be as when traced

    def filter(self, asked: Callable[..., Any] | None) -> Callable[[Sequence[Any]], list[bool]]:
        """For torch.compile's `guard_filter_fn`; `asked` is the one that the user gave."""

        def keep(guards: Sequence[Any]) -> list[bool]:
            others = asked(guards) if asked is not None else [True] * len(guards)
            pairs = zip(others, guards, strict=True)
            return [bool(other) and not self._is_ours(guard) for other, guard in pairs]

        return keep

    def _is_ours(self, guard: Any) -> bool:
        """Whether the engine looks after what a guard's name says, in names of the function."""
        if re.split(r"\W", guard.name, maxsplit=1)[0] in _OURS:
            return True
        if "._parameters[" not in guard.name:
            return False
        place, model = _PLACE.fullmatch(guard.name), self._model()
        if place is None or model is None:  # found on another way
            self.see_places = self.see_places or guard.value is None
            return False
        holder = model.get_submodule(".".join(_CHILD.findall(place["children"])))
        return (id(parameters_of(holder)), place["name"]) in self._hung
