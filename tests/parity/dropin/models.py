"""Models of the drop-in suite: one plain stack, and variations with what users write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tests.parity.dropin.common import WIDTH
from tests.parity.models import Block


class Stack(nn.Module):
    """`blocks` residual MLPs and a head; float in, float out."""

    def __init__(
        self, width: int = WIDTH, inner: int = 16, out: int = WIDTH, blocks: int = 2
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Tied(Stack):
    """The head is the first matrix of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.stem.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


class Twice(Stack):
    """Every block runs twice, in another order the second time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *reversed(self.layers)]:
            x = layer(x)
        return self.head(x)


class Branching(Stack):
    """A second head that `forward` leaves unused unless asked."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, both: bool = False) -> torch.Tensor:
        y = super().forward(x)
        return y + self.other(x) if both else y


WRAPPINGS: dict[str, Callable[..., Iterable[Any]]] = {
    "root": lambda m: [m],
    "blocks": lambda m: [*m.layers, m],
    "leaves": lambda m: [b for b in m.modules() if isinstance(b, nn.Linear | nn.LayerNorm)] + [m],
    "nested": lambda m: [m.layers[0].up, *m.layers, m.head, m],
    "list": lambda m: [[m.layers[0], m.layers[1]], m],
    "list_with_head": lambda m: [m.layers[0], [m.layers[1], m.head], m],
}


def wrap(api: Any, model: nn.Module, style: str = "blocks", **settings: Any) -> Any:
    """`fully_shard` bottom-up in one of the usual styles."""
    for part in WRAPPINGS[style](model):
        api.fully_shard(part, **settings)
    return model
