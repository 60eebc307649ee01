# mypy: disable-error-code="import-not-found,import-untyped"
"""What the kernels of one attention call are given: tensors by name, workspaces, descriptors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from shardwise.kernels.attention import configs
from shardwise.kernels.attention.calls import Plan
from shardwise.kernels.attention.configs import Tiles
from shardwise.kernels.attention.operands import (
    HAS_GLUON,
    INTERPRETED,
    block_d,
    capability,
    descriptor,
    gluon_descriptor,
    line_descriptor,
    tma_serves,
)
from shardwise.kernels.attention.prepare import split_kernel
from shardwise.kernels.launches import Launch, Pointer, Tile

HOPPER_WIDTHS = (64, 128)
# The order of a call's tensors. `q_first` and `q_last` bound the keys that a query's segment
# reaches, `k_first` and `k_last` the queries of a key.
IDS = ("q_ids", "k_ids", "q_first", "q_last", "k_first", "k_last")
FORWARD = ("q", "k", "v", "o", "lse", *IDS)
BACKWARD = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv", *IDS)
ROWS = ("q", "k", "v", "o", "do", "dq", "dk", "dv")
LINES = ("lse_log2", "delta")  # workspaces of backward
STASH = ("ds", "dk_sum", "dv_sum")
FACTORS = ("q", "k", "v", "do")
PARTS = {"tf32": 2, "fp32": 3}  # bf16 parts of an fp32 factor, by precision
WORDS = {2: "two parts", 3: "three parts"}  # the kernels' names for them


class Mask(NamedTuple):
    """Which pairs count, and how scores are scaled. Segment ids are int32 (B, M) and (B, N)."""

    causal: bool
    scale: float
    window: int | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.q_ids is None


class Operands:
    """The tensors of one call by name, its workspaces, and how kernels are given them."""

    def __init__(
        self, names: tuple[str, ...], tensors: Sequence[Tensor | None], mask: Mask, precision: str
    ) -> None:
        self.places = {name: i for i, name in enumerate(names)}
        self.tensors = {
            name: x.unsqueeze(1) if name in ROWS and x is not None and x.dim() == 3 else x
            for name, x in zip(names, tensors, strict=True)
        }
        q, k = self["q"], self["k"]
        self.B, self.H, self.M, self.D = q.shape
        self.N, self.G = k.shape[2], k.shape[1]
        self.group = self.H // self.G
        self.heads = self.B * self.H
        self.block_d = block_d(q)
        self.mask, self.device = mask, q.device
        self.precision = precision
        self.tma = tma_serves(*(self[n] for n in ROWS if n in self.tensors))
        self.hopper = (
            HAS_GLUON
            and not INTERPRETED
            and capability(q.device) == 90
            and q.itemsize == 2
            and self.D in HOPPER_WIDTHS
            and mask.plain
            and self.tma
        )
        blocks = triton.cdiv(self.M, configs.BLOCK) * self.heads
        self.choice = (8 * q.itemsize, precision, self.block_d, self.hopper, blocks)

    def __getitem__(self, name: str) -> Tensor:
        x = self.tensors[name]
        assert x is not None
        return x

    def space(self, plan: Plan, name: str, layout: Tensor) -> None:
        """A workspace that the launches know by this name."""
        self.places[name] = len(self.places)
        self.tensors[name] = layout
        plan.add_space(layout)

    def splits(self, tiles: Tiles) -> bool:
        return tiles.split and self["q"].dtype == torch.float32

    def split(self, plan: Plan) -> None:
        """bf16 parts of the fp32 factors and, in backward, the lines."""
        parts = PARTS[self.precision]
        names = [n for n in FACTORS if n in self.tensors]
        for name in names:
            B, H, M, D = self[name].shape
            self.space(plan, name + "_parts", meta((B, parts * H, M, D), torch.bfloat16))
            self.tma = self.tma and tma_serves(self[name + "_parts"])
        if "do" in self.tensors:
            arguments = [
                *self.pointers(*FACTORS, "o", "lse", "dlse"),
                *self.pointers(*(n + "_parts" for n in FACTORS), "delta", "lse_log2"),
                *self.strides(*FACTORS, "o"), self["delta"].stride(1),
            ]  # fmt: skip
        else:
            arguments = [
                *self.pointers(*names), *[None] * 4, *self.pointers(*(n + "_parts" for n in names)),
                *[None] * 3, *self.strides(*names), None, None, 0,
            ]  # fmt: skip
        arguments += [self.heads, self.H, self.M, self.N, self.D]
        grid = (triton.cdiv(max(self.M, self.N), 32), self.heads, 4)
        constants = {"GROUP": self.group, "PARTS": parts, "BLOCK_M": 32, "BLOCK_D": self.block_d}
        plan.launches.append(Launch(split_kernel, grid, arguments, **constants))

    def factors(self, tiles: Tiles, *names: str) -> list[str]:
        """What a kernel reads for these inputs: themselves, or their parts."""
        return [f"{n}_parts" if self.splits(tiles) and n in FACTORS else n for n in names]

    def dot(self, tiles: Tiles) -> str:
        """How the kernel multiplies fp32; 16-bit products do not look at it."""
        if self.splits(tiles):
            return WORDS[PARTS[self.precision]]
        if self.precision == "tf32":
            return "tf32"
        return "ieee" if INTERPRETED else configs.FP32_PRECISION

    def pointers(self, *names: str) -> list[Pointer | None]:
        return [
            None if n in self.tensors and self.tensors[n] is None else Pointer(self.places[n])
            for n in names
        ]

    def strides(self, *names: str) -> list[tuple[int, ...]]:
        return [self[n].stride()[:3] for n in names]

    def rows(
        self, names: Sequence[str], letters: str, tiles: Tiles, tma: bool
    ) -> list[Pointer | Tile]:
        """What the kernel reads or writes each tensor through; letters: blocks of m or n rows."""
        sizes = {"m": tiles.block_m, "n": tiles.block_n}
        made: list[Pointer | Tile] = []
        for n, letter in zip(names, letters, strict=True):
            if tma:
                block = [1, 1, sizes[letter], self.block_d]
                made.append(Tile(self.places[n], descriptor(self[n], block)))
            else:
                made.append(Pointer(self.places[n]))
        return made

    def lines(self, tiles: Tiles, tma: bool) -> list[Pointer | Tile]:
        """lse_log2 and delta, a block of queries at a time."""
        return [
            Tile(self.places[n], line_descriptor(self[n], tiles.block_m))
            if tma
            else Pointer(self.places[n])
            for n in LINES
        ]

    def gluon(self, name: str, *block: int) -> Tile:
        return Tile(self.places[name], gluon_descriptor(self[name], *block))

    def stash_tile(self, tiles: Tiles) -> Tile:
        return Tile(self.places["ds"], descriptor(self["ds"], [1, tiles.block_n, tiles.block_m]))

    def constants(self, tiles: Tiles, tma: bool) -> dict[str, Any]:
        """What all plain kernels are compiled for."""
        return {
            "GROUP": self.group,
            "CAUSAL": self.mask.causal,
            "WINDOW": self.mask.window is not None,
            "SEGMENTS": self.mask.q_ids is not None,
            "EVEN_D": self.block_d == self.D,
            "BLOCK_M": tiles.block_m,
            "BLOCK_N": tiles.block_n,
            "BLOCK_D": self.block_d,
            "TMA": tma,
            "PRECISION": self.dot(tiles),
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }


def meta(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")
