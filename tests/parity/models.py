"""Small models with what breaks others: odd shapes, tied, frozen, unused, 0-d and integer
parameters.
"""

from __future__ import annotations

import torch
from torch import nn

VOCABULARY = 11


class Block(nn.Module):
    """A residual MLP with a norm; `inner` need not divide by anything."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class OddBlock(Block):
    """Also a 0-d gate, a frozen matrix, a parameter nobody uses, an integer one, and one of fewer
    rows than ranks.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.gate = nn.Parameter(torch.tensor(0.7))
        self.mix = nn.Parameter(torch.eye(width) + 0.1, requires_grad=False)
        self.idle = nn.Parameter(torch.ones(3, 2))
        self.steps = nn.Parameter(torch.arange(5), requires_grad=False)
        self.single = nn.Parameter(torch.ones(1, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.mix) * self.gate + self.single * self.steps[1]


class Model(nn.Module):
    """Token model: embedding, blocks, head; `odd` ties the head to the embedding and uses odd
    blocks.
    """

    block: type[Block] | None = None

    def __init__(self, odd: bool = False, width: int = 8, inner: int = 16, blocks: int = 3) -> None:
        super().__init__()
        kind = self.block or (OddBlock if odd else Block)
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(kind(width, inner) for _ in range(blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=odd)
        if odd:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(kind: str, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    if kind == "even":
        return Model()
    return Model(odd=True, width=7, inner=13)


def token_batch(step: int, index: int, length: int = 5) -> torch.Tensor:
    """The tokens of one micro-batch: a pure function of its step and its place among all
    micro-batches, which also decide its size.
    """
    generator = torch.Generator().manual_seed(1000 * step + index)
    rows = 1 + (step + index) % 3
    return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


def loss_sum(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(
        logits.float().view(-1, VOCABULARY), tokens.view(-1), reduction="sum"
    )
