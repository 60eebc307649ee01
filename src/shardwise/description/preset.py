"""Model presets: models by their sizes, for planning without code."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal

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
    d_model: int
    d_ff: int
    layers: int
    heads: int = 1
    kv_heads: int = 1
    vocab: int = 1
    tied: bool = False
    rope_theta: float = 10_000.0
    gated: bool = True
    residual: bool = True
    source: str = ""

    def __post_init__(self) -> None:
        if self.kind not in ("lm", "ffn"):
            raise UserError(f"preset {self.name}: kind is {self.kind!r}, expected 'lm' or 'ffn'")
        for field in ("d_model", "d_ff", "layers", "heads", "kv_heads", "vocab"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"preset {self.name}: {field} is {value!r}, expected at least 1")
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

        from shardwise.description.sketches import SketchFeedForward, SketchLM

        with torch.device("meta"):
            if self.kind == "ffn":
                return SketchFeedForward(
                    self.d_model, self.d_ff, self.layers, self.gated, self.residual
                )
            return SketchLM(
                self.d_model,
                self.d_ff,
                self.layers,
                self.heads,
                self.kv_heads,
                self.vocab,
                self.tied,
                context,
            )

    def inputs(self, workload: Workload, sequences: int | None = None) -> tuple[Tensor, ...]:
        """One micro-batch on the meta device: tokens and targets, or the vectors themselves."""
        import torch

        shape = (sequences or workload.micro_batch, workload.sequence)
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
    data: dict[str, dict[str, Any]] = tomllib.loads(file.read_text(encoding="utf-8"))
    known = {field.name for field in dataclasses.fields(Preset)} - {"name"}
    for name, values in data.items():
        for key in values:
            if key not in known:
                raise UserError(f"preset {name}: unknown key {key}{nearest(key, known)}")
    return {name: Preset(name=name, **values) for name, values in data.items()}
