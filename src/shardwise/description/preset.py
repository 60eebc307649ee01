"""Model presets: models by their sizes, for planning without code."""

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

    def build(self, context: int) -> nn.Module:
        """The model on the meta device, for sequences of up to `context` tokens."""
        import torch

        from shardwise.description.preset_models import PresetFeedForward, PresetLM

        with torch.device("meta"):
            return PresetLM(self, context) if self.kind == "lm" else PresetFeedForward(self)

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


def known_presets() -> tuple[str, ...]:
    """Names of all presets."""
    return tuple(_read())


@cache
def _read() -> dict[str, Preset]:
    file = resources.files("shardwise.description") / "presets" / "models.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    return {preset.name: preset for preset in Reader("preset ").read_named(Preset, tables)}
