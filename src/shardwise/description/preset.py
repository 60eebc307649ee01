"""Models by their sizes: the presets by name, and the shape of a language model. Needs no torch."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Literal

from shardwise.checked import OneOrMore, Reader, check_bounds
from shardwise.description.workload import Workload
from shardwise.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor, nn


# The fastest kernel for the shape; torch's own fused one; scores and softmax as tensors.
AttentionKind = Literal["fastest", "torch", "plain"]
_WIDTHS = ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab")


@dataclass(frozen=True)
class Size:
    """The shape of an `LM`, and how its attention is computed."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False  # the output projection is the embedding
    rope_theta: float = 10_000.0
    rotary: bool = True  # queries and keys are turned by their positions; without, it has none
    fused_qkv: bool = False  # one projection for query, key and value instead of three
    attention: AttentionKind = "fastest"

    def __post_init__(self) -> None:
        for name in _WIDTHS:
            if getattr(self, name) < 1:
                raise UserError(f"model {name} must be at least 1, got {getattr(self, name)}")
        if self.d_model % self.heads or self.head_width % 2:
            raise UserError(
                f"d_model must be heads times an even width (rotary positions turn pairs), "
                f"got d_model {self.d_model} and {self.heads} heads"
            )
        if self.heads % self.kv_heads:
            raise UserError(
                f"heads must be a multiple of kv_heads, got {self.heads} heads and "
                f"{self.kv_heads} kv_heads"
            )
        if self.heads != self.kv_heads and (self.fused_qkv or self.attention == "plain"):
            raise UserError(
                f"fused_qkv and plain attention need as many kv_heads as heads, got {self.heads} "
                f"heads and {self.kv_heads} kv_heads"
            )

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads

    def describe(self) -> str:
        attention = "qkv/o" if self.fused_qkv else "q/k/v/o"
        more = ", rotary" * self.rotary + ", plain attention" * (self.attention == "plain")
        return (
            f"LM of {self.layers} blocks ({attention}, gate/up/down, 2 RMSNorm), "
            f"d_model {self.d_model}, d_ff {self.d_ff}, {self.heads} heads, vocab {self.vocab}"
            + more
        )


@dataclass(frozen=True)
class Preset:
    """A model's sizes. `heads`, `kv_heads`, `vocab`, `tied` and `rope_theta` are an lm's; `gated`
    and `residual` an ffn's.
    """

    name: str
    kind: Literal["lm", "ffn"]
    d_model: OneOrMore
    d_ff: OneOrMore
    layers: OneOrMore
    heads: OneOrMore = 1
    kv_heads: OneOrMore = 1
    vocab: OneOrMore = 1
    tied: bool = False
    rope_theta: float = 10_000.0
    gated: bool = True
    residual: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        check_bounds(self, f"preset {self.name}: ", UserError)
        if self.d_model % self.heads or self.heads % self.kv_heads:
            raise UserError(
                f"preset {self.name}: heads ({self.heads}) must divide d_model ({self.d_model}), "
                f"and kv_heads ({self.kv_heads}) must divide heads"
            )

    @property
    def parameter_count(self) -> int:
        """By formula; a tied matrix counts once."""
        feed_forward = (3 if self.kind == "lm" or self.gated else 2) * self.d_model * self.d_ff
        if self.kind == "ffn":
            return self.layers * feed_forward
        narrow = self.kv_heads * (self.d_model // self.heads)
        block = 2 * self.d_model**2 + 2 * self.d_model * narrow + feed_forward + 2 * self.d_model
        vocabulary = self.vocab * self.d_model * (1 if self.tied else 2)
        return vocabulary + self.layers * block + self.d_model

    def size(self, attention: AttentionKind = "fastest") -> Size:
        """The shape of the `LM` that an lm is."""
        shape = {name: getattr(self, name) for name in (*_WIDTHS, "tied", "rope_theta")}
        return Size(**shape, attention=attention)

    def build(self, context: int) -> nn.Module:
        """The model on the meta device, for sequences of up to `context` tokens."""
        import torch

        from shardwise.description.language_model import LM, FeedForwardStack

        with torch.device("meta"):
            return LM(self.size("torch"), context) if self.kind == "lm" else FeedForwardStack(self)

    def inputs(self, workload: Workload) -> tuple[Tensor, ...]:
        """One micro-batch on the meta device: tokens and targets, or the vectors themselves."""
        import torch

        shape = (workload.micro_batch, workload.sequence)
        if self.kind == "ffn":
            return (torch.empty(*shape, self.d_model, device="meta"),)
        tokens = torch.empty(shape, dtype=torch.int64, device="meta")
        return tokens, tokens.clone()


def load_preset(name: str) -> Preset:
    """The preset called `name`."""
    found = _read()
    if name not in found:
        raise UserError(f"unknown model {name!r}{nearest(name, found)}")
    return found[name]


@cache
def _read() -> dict[str, Preset]:
    file = resources.files("shardwise.description") / "presets" / "models.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {preset.name: preset for preset in Reader("preset ").read_named(Preset, tables)}


SIZES: dict[str, Size] = {
    preset.name: preset.size() for preset in _read().values() if preset.kind == "lm"
}


def size_named(name: str) -> Size:
    """Give the preset called `name`."""
    if name not in SIZES:
        raise UserError(f"unknown model size {name!r}{nearest(name, SIZES)}")
    return SIZES[name]


def parameter_count(size: Size) -> int:
    """Count the parameters of an `LM` of this size; a tied matrix counts once."""
    widths = {name: getattr(size, name) for name in _WIDTHS}
    return Preset("model", "lm", **widths, tied=size.tied).parameter_count


def bench_size(
    layers: int, d_model: int, d_ff: int, heads: int, vocab: int, fused_qkv: bool = False
) -> Size:
    """A model of the benchmarks: no positions, and torch's attention under every engine."""
    return Size(
        d_model, d_ff, layers, heads, heads, vocab,
        rotary=False, fused_qkv=fused_qkv, attention="torch",
    )  # fmt: skip


# 0.95 B parameters: `shardwise emulate --model bench`. Query, key and value in one: fewer
# parameters, which favours engines that pay for each.
BENCH = bench_size(layers=16, d_model=2048, d_ff=5632, heads=16, vocab=32000, fused_qkv=True)
