"""The transformer language model that presets name, the trainer trains and the benchmarks measure.

Pre-norm blocks of causal attention and a SwiGLU feed-forward; RMSNorm, rotary positions, no biases.
A benchmark may ask for fewer or other parts of it (`Size`). `FeedForwardStack` is its feed-forward
layers and nothing else.

Letters of the shape suffixes: B batch, T time (sequence), D d_model, F d_ff, V vocabulary, H query
heads, G key/value heads, K width of one head, P pairs of one head's width (K / 2).
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.description.preset import Preset, Size
from shardwise.description.recompute import run_again
from shardwise.description.workload import Recomputing
from shardwise.kernels.attention.interface import attention

IGNORED = -100  # a target with this value carries no loss
NORM_EPS = 1e-5
OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "fused": True}  # a benchmark's AdamW


def attend(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """Causal attention; each key/value head serves H / G query heads."""
    if q_BHTK.is_cuda:
        return attention(q_BHTK, k_BGTK, v_BGTK, causal=True)  # the fastest backend for the shape
    return attend_by_torch(q_BHTK, k_BGTK, v_BGTK)


def attend_by_torch(q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
    """The same by the fused kernel that torch chooses."""
    grouped = q_BHTK.shape[1] != k_BGTK.shape[1]
    return functional.scaled_dot_product_attention(
        q_BHTK, k_BGTK, v_BGTK, is_causal=True, enable_gqa=grouped
    )


def attend_plainly(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """Attention as one writes it first: all scores as a tensor."""
    s = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if causal:
        position = torch.arange(q.shape[-2], device=q.device)
        s = s.masked_fill(position[:, None] < position, -math.inf)
    return torch.softmax(s, dim=-1) @ v


def rotate(x_BHTK: Tensor, cos_TP: Tensor, sin_TP: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + K/2]) by its position's angle, in fp32; keeps the dtype."""
    a_BHTP, b_BHTP = x_BHTK.float().chunk(2, dim=-1)
    turned = (a_BHTP * cos_TP - b_BHTP * sin_TP, b_BHTP * cos_TP + a_BHTP * sin_TP)
    return torch.cat(turned, dim=-1).to(x_BHTK.dtype)


class Rope(nn.Module):
    """The rotary angles of `context` positions: one instance, shared by all blocks.

    The tables are buffers of a module of their own rather than inputs of the blocks, because a
    mixed-precision engine may cast a block's inputs, and bf16 angles confuse far positions.
    """

    cos_TP: Tensor
    sin_TP: Tensor

    def __init__(self, context: int, head_width: int, theta: float) -> None:
        super().__init__()
        self.context, self.head_width, self.theta = context, head_width, theta
        cos_TP, sin_TP = self._compute()
        self.register_buffer("cos_TP", cos_TP, persistent=False)
        self.register_buffer("sin_TP", sin_TP, persistent=False)

    def _compute(self) -> tuple[Tensor, Tensor]:
        pairs = torch.arange(0, self.head_width, 2, dtype=torch.float32) / self.head_width
        places = torch.arange(self.context, dtype=torch.float32)
        angles_TP = torch.outer(places, self.theta**-pairs)
        return angles_TP.cos(), angles_TP.sin()

    def reset_parameters(self, device: torch.device | str | None = None) -> None:
        """Compute the tables anew, on a host: of a model that was built on the meta device."""
        where = self.cos_TP.device if device is None else torch.device(device)
        with torch.device("cpu"):
            self.cos_TP, self.sin_TP = (table.to(where) for table in self._compute())

    def forward(self, x_BHTK: Tensor) -> Tensor:
        length = x_BHTK.shape[2]
        return rotate(x_BHTK, self.cos_TP[:length], self.sin_TP[:length])


class Attention(nn.Module):
    def __init__(self, size: Size, rope: Rope | None) -> None:
        super().__init__()
        self.head_width, self.kind, self.fused_qkv = size.head_width, size.attention, size.fused_qkv
        kv_width = size.kv_heads * size.head_width
        if size.fused_qkv:
            self.qkv = nn.Linear(size.d_model, 3 * size.d_model, bias=False)
        else:
            self.q = nn.Linear(size.d_model, size.d_model, bias=False)
            self.k = nn.Linear(size.d_model, kv_width, bias=False)
            self.v = nn.Linear(size.d_model, kv_width, bias=False)
        self.out = nn.Linear(size.d_model, size.d_model, bias=False)
        self.rope: nn.Module = nn.Identity() if rope is None else rope

    def forward(self, x_BTD: Tensor) -> Tensor:
        projected: Iterable[Tensor]
        if self.fused_qkv:
            projected = self.qkv(x_BTD).chunk(3, dim=-1)
        else:
            projected = (project(x_BTD) for project in (self.q, self.k, self.v))
        q_BHTK, k_BGTK, v_BGTK = (
            part.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for part in projected
        )
        mixed_BHTK = self._attend(self.rope(q_BHTK), self.rope(k_BGTK), v_BGTK)
        return self.out(mixed_BHTK.transpose(1, 2).flatten(-2))

    def _attend(self, q_BHTK: Tensor, k_BGTK: Tensor, v_BGTK: Tensor) -> Tensor:
        if self.kind == "plain":
            return attend_plainly(q_BHTK, k_BGTK, v_BGTK)
        if self.kind == "torch":
            return attend_by_torch(q_BHTK, k_BGTK, v_BGTK)
        return attend(q_BHTK, k_BGTK, v_BGTK)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)). Not gated: two matrices, nothing between them."""

    def __init__(self, d_model: int, d_ff: int, gated: bool = True) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False) if gated else None
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(self.up(x_BTD))
        return self.down(functional.silu(self.gate(x_BTD)) * self.up(x_BTD))


class Block(nn.Module):
    def __init__(self, size: Size, rope: Rope | None, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention_norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.attention = Attention(size, rope)
        self.feed_forward_norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.feed_forward = FeedForward(size.d_model, size.d_ff)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self._drop(self.attention(self.attention_norm(x_BTD)))
        return x_BTD + self._drop(self.feed_forward(self.feed_forward_norm(x_BTD)))

    def _drop(self, x_BTD: Tensor) -> Tensor:
        return functional.dropout(x_BTD, self.dropout, self.training) if self.dropout else x_BTD


class LM(nn.Module):
    """Embedding, `size.layers` blocks, a last norm and the output projection."""

    def __init__(
        self,
        size: Size,
        context: int,
        checkpoint: str = "none",
        dropout: float = 0.0,
    ) -> None:
        """Build and initialise the model for sequences of up to `context` tokens. `dropout` is the
        share of what a block's two halves add that is left out in training.
        """
        super().__init__()
        if context < 1:
            raise ValueError(f"context must be at least 1 token, got {context}")
        self.size = size
        self.context = context
        self.recomputing = Recomputing.parse(checkpoint)
        self.dropout = dropout
        rope = Rope(context, size.head_width, size.rope_theta) if size.rotary else None
        self.embedding = nn.Embedding(size.vocab, size.d_model)
        self.layers = nn.ModuleList(Block(size, rope, dropout) for _ in range(size.layers))
        places = range(size.layers)
        self.recomputed = frozenset(self.recomputing.choose(places) if self.recomputing else ())
        self.norm = nn.RMSNorm(size.d_model, eps=NORM_EPS)
        self.head = nn.Linear(size.d_model, size.vocab, bias=False)
        if size.tied:
            self.head.weight = self.embedding.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Draw the weights: unit gain for inner projections, residual outputs shrunk by depth."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for block in self.modules():
            if isinstance(block, Block):
                for residual in (block.attention.out, block.feed_forward.down):
                    residual.weight.mul_((2 * self.size.layers) ** -0.5)
        # Last, because a tied head is this tensor: small logits start the loss near ln(vocab).
        nn.init.normal_(self.head.weight, std=0.02)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def spreads(self) -> dict[str, float | None]:
        """How far each parameter is drawn from 0 by `init_weights`, by its first name; None: it is
        1 everywhere.
        """
        found: dict[str, float | None] = {}
        shrunk = (2 * self.size.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                found[name] = None
            elif name in ("embedding.weight", "head.weight"):
                found[name] = 0.02
            else:
                residual = name.endswith(("attention.out.weight", "feed_forward.down.weight"))
                found[name] = parameter.shape[1] ** -0.5 * (shrunk if residual else 1.0)
        return found

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Give the logits, or with targets the cross-entropy summed over tokens, in fp32.

        The sum, not the mean: the caller divides by the number of tokens of all ranks and
        micro-batches, so that uneven work is weighted rightly.
        """
        length = tokens_BT.shape[1]
        if length > self.context:
            raise ValueError(
                f"a sequence of {length} tokens, but the model was built for at most "
                f"{self.context}: build it with context={length}"
            )
        x_BTD = self.embedding(tokens_BT)
        for place, layer in enumerate(self.layers):
            x_BTD = self._run(place, layer, x_BTD)
        logits_BTV = self.head(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        return functional.cross_entropy(
            logits_BTV.flatten(0, 1).float(),
            targets_BT.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )

    def _run(self, place: int, layer: nn.Module, x_BTD: Tensor) -> Tensor:
        """Run one block, keeping its activations for backward or only its input."""
        if place not in self.recomputed or not torch.is_grad_enabled():
            return layer(x_BTD)
        assert self.recomputing is not None
        draws = self.dropout > 0  # nothing else draws random numbers
        made: Tensor = run_again(self.recomputing, draws, layer, x_BTD)
        return made


class FeedForwardStack(nn.Module):
    """Feed-forward layers one after the other, each added to its input or in its place."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            FeedForward(preset.d_model, preset.d_ff, preset.gated) for _ in range(preset.layers)
        )
        self.residual = preset.residual

    def forward(self, x_BTD: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTD = x_BTD + layer(x_BTD) if self.residual else layer(x_BTD)
        return x_BTD


def make_model(size: Size, device: str, context: int = 4096, checkpoint: str = "none") -> LM:
    """The same weights for everybody who asks for this size on this kind of device."""
    torch.manual_seed(0)
    with torch.device(device):
        return LM(size, context, checkpoint)


def draw_tokens(
    size: Size, batch: int, length: int, device: str | torch.device
) -> tuple[Tensor, Tensor]:
    """This rank's inputs and targets, the same for everybody who asks."""
    draw = torch.Generator().manual_seed(1 + (dist.get_rank() if dist.is_initialized() else 0))
    both = torch.randint(0, size.vocab, (2, batch, length), generator=draw).to(device)
    return both[0], both[1]


def compute_loss(model: nn.Module, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
    """The mean cross-entropy of a model that gives logits, in fp32."""
    logits_BTV = model(tokens_BT)
    return functional.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())
