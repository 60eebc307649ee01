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


GPT2_MEDIUM = GPTSize(1024, 4096, 24, 16, 16, 50257, tied=True, rotary=False, fused_qkv=True)


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
        inner = functional.gelu(self.up(self.feed_forward_norm(x)), approximate="tanh")
        return x + self.down(inner)


class GPT(nn.Module):
    """GPT-2 as its users write it: biases, LayerNorm, learned positions, a tied output."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size.vocab, size.d_model)
        self.positions = nn.Embedding(CONTEXT, size.d_model)
        self.layers = nn.ModuleList(GPTBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.d_model)
        self.head = nn.Linear(size.d_model, size.vocab, bias=False)
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
    if not isinstance(size, GPTSize):
        return make_model(size, device)
    torch.manual_seed(0)
    with torch.device(device):
        return GPT(size)
