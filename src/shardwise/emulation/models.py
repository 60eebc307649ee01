"""The language model that benchmarks train: no options but its shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Shape:
    """The sizes of a model."""

    layers: int
    d_model: int
    d_ff: int
    heads: int
    vocab: int
    fused_qkv: bool = False  # one projection for query, key and value instead of three
    rotary: bool = False  # queries and keys are turned by their positions
    plain_attention: bool = False  # scores and softmax as tensors instead of one fused kernel

    def __post_init__(self) -> None:
        if self.d_model % self.heads:
            raise ValueError(f"d_model {self.d_model} does not divide among {self.heads} heads")

    def describe(self) -> str:
        attention = "qkv/o" if self.fused_qkv else "q/k/v/o"
        more = ", rotary" * self.rotary + ", plain attention" * self.plain_attention
        return (
            f"LM of {self.layers} blocks ({attention}, gate/up/down, 2 RMSNorm), "
            f"d_model {self.d_model}, d_ff {self.d_ff}, {self.heads} heads, vocab {self.vocab}"
            + more
        )


LARGE = Shape(layers=16, d_model=2048, d_ff=5632, heads=16, vocab=32000, fused_qkv=True)
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Attention as one writes it first."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        place = torch.arange(q.shape[-2], device=q.device)
        s = s.masked_fill(place[:, None] < place, -math.inf)
    return torch.softmax(s, dim=-1) @ v


def make_angles(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, one per pair of a head's width."""
    pairs_P = torch.arange(0, width, 2, device=device) / width
    angles_TP = torch.outer(torch.arange(length, device=device).float(), 10_000.0**-pairs_P)
    return angles_TP.cos(), angles_TP.sin()


def rotate(x_BHTK: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) by its position's angle; keeps the dtype."""
    cos_TP, sin_TP = angles
    a_BHTP, b_BHTP = x_BHTK.chunk(2, dim=-1)
    turned = (a_BHTP * cos_TP - b_BHTP * sin_TP, b_BHTP * cos_TP + a_BHTP * sin_TP)
    return torch.cat(turned, dim=-1).to(x_BHTK.dtype)


class Block(nn.Module):
    """Causal attention and a gated feed-forward, each behind a norm and a residual."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        d, f = shape.d_model, shape.d_ff
        self.heads, self.plain_attention = shape.heads, shape.plain_attention
        widths = {"qkv": 3 * d} if shape.fused_qkv else {"q": d, "k": d, "v": d}
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(d), nn.RMSNorm(d)
        self.projections = nn.ModuleDict(
            {name: nn.Linear(d, width, bias=False) for name, width in widths.items()}
        )
        self.o = nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, f, bias=False), nn.Linear(d, f, bias=False)
        self.down = nn.Linear(f, d, bias=False)

    def forward(self, x_BTD: Tensor, angles: tuple[Tensor, Tensor] | None = None) -> Tensor:
        normed_BTD = self.attention_norm(x_BTD)
        projected = [project(normed_BTD) for project in self.projections.values()]
        if len(projected) == 1:
            projected = list(projected[0].chunk(3, dim=-1))
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in projected)
        if angles is not None:
            q, k = rotate(q, angles), rotate(k, angles)
        if self.plain_attention:
            mixed = eager(q, k, v, causal=True)
        else:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.o(mixed.transpose(1, 2).flatten(-2))
        normed_BTD = self.feed_forward_norm(x_BTD)
        return x_BTD + self.down(functional.silu(self.gate(normed_BTD)) * self.up(normed_BTD))


class LM(nn.Module):
    """Embedding, blocks, a last norm, the output projection; positions only if rotary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.rotary, self.head_width = shape.rotary, shape.d_model // shape.heads
        self.embedding = nn.Embedding(shape.vocab, shape.d_model)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.d_model)
        self.head = nn.Linear(shape.d_model, shape.vocab, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.embedding(tokens_BT)
        inputs: tuple[tuple[Tensor, Tensor], ...] = ()
        if self.rotary:
            inputs = (make_angles(tokens_BT.shape[1], self.head_width, x_BTD.device),)
        for layer in self.layers:
            x_BTD = layer(x_BTD, *inputs)
        return self.head(self.norm(x_BTD))


def compute_loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross-entropy, in fp32."""
    logits_BTV = model(tokens_BT)
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def make_model(shape: Shape, device: str) -> LM:
    """The same weights for everybody who asks for this shape on this kind of device."""
    torch.manual_seed(0)
    with torch.device(device):
        return LM(shape)
