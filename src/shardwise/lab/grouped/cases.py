"""What the grouped step is measured on, and what the document measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

from shardwise.description.language_model import make_model
from shardwise.description.preset import Size, bench_size

CANDIDATES = ("ddp", "rows", "flat")
SIZES = {
    "0.3b": bench_size(layers=18, d_model=1024, d_ff=2752, heads=16, vocab=32000),
    "2.7b": bench_size(layers=32, d_model=2560, d_ff=6912, heads=20, vocab=32000),
    "5.4b": bench_size(layers=66, d_model=2560, d_ff=6912, heads=20, vocab=32000),
}
# For ranks that share a host's cores: a six-hundredth of each, in messages of a sixteenth, so that
# there are still many of them.
SMALL = {
    "0.3b": bench_size(layers=7, d_model=64, d_ff=172, heads=4, vocab=1200),
    "2.7b": bench_size(layers=9, d_model=192, d_ff=512, heads=4, vocab=1400),
    "5.4b": bench_size(layers=19, d_model=192, d_ff=512, heads=4, vocab=1400),
}
SMALL_MESSAGES = 16
QUICK = bench_size(layers=4, d_model=192, d_ff=512, heads=4, vocab=1400)
ADAMW: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}

# Milliseconds of the document, on 8 B200: size, MiB of a group, then precision: ddp, sharded.
DOCUMENT = {
    ("0.3b", 16): {"fp32": (6.96, 6.94), "bf16": (5.54, 5.38)},
    ("0.3b", 32): {"fp32": (6.81, 6.90), "bf16": (5.64, 5.38)},
    ("2.7b", 16): {"fp32": (34.06, 34.63), "bf16": (24.78, 25.94)},
    ("2.7b", 32): {"fp32": (33.54, 34.79), "bf16": (24.65, 27.89)},
    ("5.4b", 16): {"fp32": (63.07, 65.23), "bf16": (45.59, 47.44)},
    ("5.4b", 32): {"fp32": (63.07, 65.27), "bf16": (45.96, 47.57)},
}
# Of a pretraining run on 8 B200: parameters, and the peak of memory in GB.
DOCUMENT_RUN = {"parameters": 3.7e9, "ddp_gb": 126.8486, "sharded_gb": 99.1149}
_OTHER = (
    "The document's milliseconds are of 8 B200 with MLX over NCCL: compare ratios within a row, "
    "not milliseconds across them."
)
_SMALL = (
    "Ours are of a six-hundredth of the parameters, in messages of a sixteenth, on ranks that "
    "share a host."
)
# Why figures cannot be compared one for one, by where they were measured.
NOTES = {
    "emulated": f"{_OTHER} Ours are of one H200 as a rank of an emulated group.",
    "torch": f"{_OTHER} {_SMALL} gloo's reduce-scatter is an all-reduce inside, so on the wire "
    "slices send 1.5 times what ddp sends.",
    "mlx": f"{_OTHER} {_SMALL} MLX's ring has no sum_scatter, so slices send 1.5 times what ddp "
    "sends.",
}


@cache
def _find_shapes(size: Size) -> list[tuple[int, ...]]:
    return [tuple(p.shape) for p in make_model(size, "meta").parameters()]


@dataclass(frozen=True)
class GroupedCase:
    """One row: a framework, a model, a size of messages, a precision."""

    framework: str
    size: str
    group_mib: int  # the document's
    precision: str
    ranks: int
    device: str
    steps: int
    quick: bool = False

    @property
    def key(self) -> str:
        parts = (self.framework, self.size, self.group_mib, self.precision, self.ranks, self.device)
        return "/".join(map(str, parts))

    @property
    def emulated(self) -> bool:
        return self.device == "cuda"

    @property
    def group_bytes(self) -> int:
        return self.group_mib * 2**20 // (1 if self.device == "cuda" else SMALL_MESSAGES)

    @property
    def item_bytes(self) -> int:
        return 4 if self.precision == "fp32" else 2

    @property
    def model(self) -> Size:
        if self.quick:
            return QUICK
        return SIZES[self.size] if self.device == "cuda" else SMALL[self.size]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return _find_shapes(self.model)

    @property
    def parameters(self) -> int:
        return sum(map(math.prod, self.shapes))

    def describe(self) -> dict[str, Any]:
        found = DOCUMENT.get((self.size, self.group_mib), {}).get(self.precision)
        told = None
        if found is not None:
            told = {"ddp_ms": found[0], "sharded_ms": found[1], "ratio": found[1] / found[0]}
        return {
            "key": self.key, "framework": self.framework, "size": self.size,
            "parameters": self.parameters, "model": self.model.describe(),
            "group_mib": self.group_mib, "group_bytes": self.group_bytes,
            "precision": self.precision, "ranks": self.ranks,
            "device": self.device, "optimizer": f"AdamW {ADAMW}", "document": told,
            "note": NOTES["emulated" if self.emulated else self.framework],
        }  # fmt: skip
