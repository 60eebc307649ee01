"""Modules that are shapes only: what a preset names, built on the meta device to be traced.

`PresetLM` has the parameters, names and operators of the trainer's language model, so that a Plan
made from a preset runs there (a test holds the two together). `PresetFeedForward` is a stack of
feed-forward layers and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from shardwise.description.preset import Preset

NORM_EPS = 1e-5


class _Positions(nn.Module):
    """Rotary positions: two tables, and the turn itself in fp32."""

    cos: Tensor
    sin: Tensor

    def __init__(self, context: int, head_width: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(context, head_width // 2), persistent=False)
        self.register_buffer("sin", torch.empty(context, head_width // 2), persistent=False)

    def forward(self, heads: Tensor) -> Tensor:
        cos, sin = self.cos[: heads.shape[2]], self.sin[: heads.shape[2]]
        first, second = heads.float().chunk(2, dim=-1)
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(turned, dim=-1).to(heads.dtype)


class _Attention(nn.Module):
    def __init__(self, size: Preset, rope: _Positions) -> None:
        super().__init__()
        self.head_width = size.d_model // size.heads
        narrow = size.kv_heads * self.head_width
        self.q = nn.Linear(size.d_model, size.d_model, bias=False)
        self.k = nn.Linear(size.d_model, narrow, bias=False)
        self.v = nn.Linear(size.d_model, narrow, bias=False)
        self.out = nn.Linear(size.d_model, size.d_model, bias=False)
        self.rope = rope

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(
            self.rope(q), self.rope(k), v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
        )
        return self.out(mixed.transpose(1, 2).flatten(-2))


class _FeedForward(nn.Module):
    """Gated: three matrices and a SiLU. Plain: two matrices, nothing between them."""

    def __init__(self, size: Preset) -> None:
        super().__init__()
        gated = size.kind == "lm" or size.gated
        self.gate = nn.Linear(size.d_model, size.d_ff, bias=False) if gated else None
        self.up = nn.Linear(size.d_model, size.d_ff, bias=False)
        self.down = nn.Linear(size.d_ff, size.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.up(x))
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class _PresetBlock(nn.Module):
    def __init__(self, size: Preset, rope: _Positions) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.attention = _Attention(size, rope)
        self.feed_forward_norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.feed_forward = _FeedForward(size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class PresetLM(nn.Module):
    """Embedding, blocks, a last norm, the output projection; gives the summed cross-entropy."""

    def __init__(self, size: Preset, context: int) -> None:
        super().__init__()
        rope = _Positions(context, size.d_model // size.heads)
        self.embedding = nn.Embedding(size.vocab, size.d_model)
        self.layers = nn.ModuleList(_PresetBlock(size, rope) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.head = nn.Linear(size.d_model, size.vocab, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))  # stays alive beside its fp32 copy, as in the trainer
        return functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"
        )


class PresetFeedForward(nn.Module):
    """Feed-forward layers one after the other, each added to its input or in its place."""

    def __init__(self, size: Preset) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_FeedForward(size) for _ in range(size.layers))
        self.residual = size.residual

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.residual else layer(x)
        return x
