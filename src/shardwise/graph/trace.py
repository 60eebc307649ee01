"""What torch.compile traces: a model, with markers in its parameters' places."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.engine.torch_private import call_hooked
from shardwise.graph.executor import GraphParameter
from shardwise.graph.ops import FULL


class Whole(nn.Module):
    """A model to be called past what hangs in its call's place."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return call_hooked(self.model, *args, **kwargs)


@dataclass(frozen=True)
class Inputs:
    """What the markers take, parameter by parameter (`ops.py`)."""

    parts: list[Tensor]
    whole: list[Tensor] | None = None
    sinks: list[Tensor] | None = None
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
        tensor = FULL(
            given.parts[number],
            None if given.whole is None else given.whole[number],
            None if given.sinks is None else given.sinks[number],
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
