"""Model sizes: the presets by name, and what a size costs in parameters. Needs no torch."""

from dataclasses import dataclass
from typing import Literal, get_args

from shardwise.description.preset import Preset, known_presets, load_preset
from shardwise.errors import UserError, nearest

CheckpointKind = Literal["none", "reentrant", "nonreentrant"]
CHECKPOINT_KINDS: tuple[str, ...] = get_args(CheckpointKind)
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


def _size_of(preset: Preset) -> Size:
    return Size(*(getattr(preset, name) for name in (*_WIDTHS, "tied", "rope_theta")))


SIZES: dict[str, Size] = {
    preset.name: _size_of(preset)
    for preset in map(load_preset, known_presets())
    if preset.kind == "lm"
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
