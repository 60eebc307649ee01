"""Model sizes: the presets by name, and what a size costs in parameters. Needs no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.errors import UserError, nearest

CheckpointKind = Literal["none", "reentrant", "nonreentrant"]
CHECKPOINT_KINDS: tuple[str, ...] = get_args(CheckpointKind)


@dataclass(frozen=True)
class Size:
    """The shape of an `LM`."""

    d_model: int
    d_ff: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    tied: bool = False  # the output projection is the embedding
    rope_theta: float = 10_000.0

    def __post_init__(self) -> None:
        for name in ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab"):
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

    @property
    def head_width(self) -> int:
        return self.d_model // self.heads


def _size(d_model: int, d_ff: int, layers: int, heads: int, vocab: int = 10_000) -> Size:
    return Size(d_model, d_ff, layers, heads, kv_heads=heads, vocab=vocab)


def _llama(d_model: int, d_ff: int, layers: int, heads: int, tied: bool = False) -> Size:
    return Size(d_model, d_ff, layers, heads, 8, vocab=128_256, tied=tied, rope_theta=500_000.0)


SIZES: dict[str, Size] = {
    # 256: the byte tokenizer's vocabulary; just under a million parameters, for CPUs.
    "tiny": _size(128, 384, 4, 4, vocab=256),
    "small": _size(768, 3072, 12, 12),
    "medium": _size(1024, 4096, 24, 16),
    "large": _size(1280, 5120, 36, 20),
    "xl": _size(1600, 6400, 48, 25),
    "2.7b": _size(2560, 10240, 32, 32),
    "llama1b": _llama(2048, 8192, 16, 32, tied=True),
    "llama8b": _llama(4096, 14336, 32, 32),
    "llama70b": _llama(8192, 28672, 80, 64),
    "llama405b": _llama(16384, 53248, 126, 128),
}


def size_named(name: str) -> Size:
    """Give the preset called `name`."""
    if name not in SIZES:
        raise UserError(f"unknown model size {name!r}{nearest(name, SIZES)}")
    return SIZES[name]


def parameter_count(size: Size) -> int:
    """Count the parameters of an `LM` of this size; a tied matrix counts once."""
    attention = 2 * size.d_model**2 + 2 * size.d_model * size.kv_heads * size.head_width
    feed_forward = 3 * size.d_model * size.d_ff
    norms = 2 * size.d_model
    vocabulary = size.vocab * size.d_model * (1 if size.tied else 2)
    return vocabulary + size.layers * (attention + feed_forward + norms) + size.d_model
