"""Models of the step benchmark that are not the project's own language model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwise.description.language_model import make_model
from shardwise.description.preset import Size

CONTEXT = 1024


@dataclass(frozen=True)
class GPTSize(Size):
    """The shape of a GPT-2."""

    def describe(self) -> str:
        return (
            f"GPT-2 of {self.layers} blocks (biases, LayerNorm, GELU), d_model {self.d_model}, "
            f"{self.heads} heads, vocab {self.vocab}, tied, learned positions"
        )


@dataclass(frozen=True)
class MoESize(Size):
    """The shape of a mixture of experts: `d_ff` is one expert's."""

    experts: int = 8
    chosen: int = 2  # experts that a token is given to, on average

    def describe(self) -> str:
        return (
            f"mixture of experts, {self.layers} blocks of {self.experts} experts (biases, GELU; "
            f"each takes the tokens that score highest), d_model {self.d_model}, d_ff {self.d_ff} "
            f"each, {self.heads} heads, vocab {self.vocab}"
        )


GPT2_MEDIUM = GPTSize(1024, 4096, 24, 16, 16, 50257, tied=True, rotary=False, fused_qkv=True)
# Many small parameters: 12 blocks of 16 experts.
MOE = MoESize(1024, 1024, 12, 16, 16, 32000, rotary=False, fused_qkv=True, experts=16)


class GPTBlock(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.attention_norm = nn.LayerNorm(size.d_model)
        self.qkv = nn.Linear(size.d_model, 3 * size.d_model)
        self.out = nn.Linear(size.d_model, size.d_model)
        self.feed_forward_norm = nn.LayerNorm(size.d_model)
        self.up = nn.Linear(size.d_model, size.d_ff)
        self.down = nn.Linear(size.d_ff, size.d_model)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.feed_forward(self.feed_forward_norm(x))

    def feed_forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(functional.gelu(self.up(x), approximate="tanh"))
        return inner


class Experts(nn.Module):
    """Many small feed-forward layers. Each takes as many tokens, those that score highest with it,
    so that shapes are fixed and every expert trains in every step.
    """

    def __init__(self, size: MoESize) -> None:
        super().__init__()
        self.share = size.chosen / size.experts
        self.router = nn.Linear(size.d_model, size.experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(
                nn.Linear(size.d_model, size.d_ff),
                nn.GELU(approximate="tanh"),
                nn.Linear(size.d_ff, size.d_model),
            )
            for _ in range(size.experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        scores = self.router(tokens).softmax(dim=-1)
        count = max(1, int(len(tokens) * self.share))
        weights, chosen = scores.topk(count, dim=0)
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            mine = chosen[:, i]
            out = out.index_add(0, mine, expert(tokens[mine]) * weights[:, i, None])
        return out.view_as(x)


class MoEBlock(GPTBlock):
    """A block whose feed-forward layer is a mixture of experts."""

    def __init__(self, size: MoESize) -> None:
        super().__init__(size)
        del self.up, self.down
        self.mixture = Experts(size)

    def feed_forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixture(x)
        return mixed


class GPT(nn.Module):
    """GPT-2 as its users write it: biases, LayerNorm, learned positions, a tied output. With
    experts in its blocks, if it has the size of such.
    """

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.d_model)
        self.positions = nn.Embedding(CONTEXT, size.d_model)
        self.layers = nn.ModuleList(
            MoEBlock(size) if isinstance(size, MoESize) else GPTBlock(size)
            for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocab, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def build_model(size: Size, device: str) -> nn.Module:
    """The same weights for everybody who asks for this size on this kind of device."""
    if not isinstance(size, GPTSize | MoESize):
        return make_model(size, device)
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(size)
