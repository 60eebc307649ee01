# mypy: disable-error-code="import-not-found,import-untyped"
"""What the kernels of one attention call are given, by the names of their parameters.

A tensor goes as a pointer, or as a descriptor that the copy engine (TMA) reads. A descriptor names
the tensor's shape, its strides and one tile's shape. The copy engine needs 16-byte alignment of the
base and of all strides but the last, which must be 1; other tensors go by pointer.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from shardwise.kernels.attention import configs
from shardwise.kernels.attention.backends import capability
from shardwise.kernels.attention.configs import Tiles
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.launches import Descriptor, Launch, Pointer

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAS_GLUON = True
except ImportError:  # Gluon is experimental: a Triton without it still has all the other kernels
    HAS_GLUON = False

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run as Python, on CPU tensors
ALIGNMENT = 16  # bytes
HOPPER_WIDTHS = (64, 128)
# The order of a call's tensors. `q_first` and `q_last` bound the keys that a query's segment
# reaches, `k_first` and `k_last` the queries of a key.
IDS = ("q_ids", "k_ids", "q_first", "q_last", "k_first", "k_last")
FORWARD = ("q", "k", "v", "o", "lse", *IDS)
BACKWARD = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv", *IDS)
# Workspaces.
LINES = ("lse_log2", "delta")  # a number per query each
STASH = ("ds", "dk_sum", "dv_sum")  # the scores' gradient, and what passes from chunk to chunk
FACTORS = ("q", "k", "v", "do")
PARTS = tuple(f"{name}_parts" for name in FACTORS)  # bf16 numbers that add up to a factor in fp32
# Tensors (B, heads, length, D), by what their length counts.
OF_QUERIES = ("q", "o", "do", "dq", "q_parts", "do_parts")
OF_KEYS = ("k", "v", "dk", "dv", "k_parts", "v_parts")
PART_COUNTS = {"tf32": 2, "fp32": 3}  # bf16 parts of an fp32 factor, by precision


class Arguments:
    """The tensors of one call by name, its workspaces, and how kernels are given them."""

    def __init__(
        self, names: tuple[str, ...], tensors: Sequence[Tensor | None], mask: Mask, precision: str
    ) -> None:
        self.positions = {name: i for i, name in enumerate(names)}
        # What this call does not have is None, and so is its argument.
        self.tensors: dict[str, Tensor | None] = dict.fromkeys((*BACKWARD, *LINES, *STASH, *PARTS))
        for name, x in zip(names, tensors, strict=True):
            rows = name in OF_QUERIES or name in OF_KEYS
            self.tensors[name] = x.unsqueeze(1) if rows and x is not None and x.dim() == 3 else x
        self.workspaces: list[Tensor] = []
        q, k = self["q"], self["k"]
        B, self.H, self.M, self.D = q.shape
        _, G, self.N, _ = k.shape
        self.group = self.H // G
        self.heads, self.kv_heads = B * self.H, B * G
        # The head width as the kernels see it: a power of two, at least what a product needs.
        self.block_d = max(16, triton.next_power_of_2(self.D))
        self.mask, self.precision, self.device = mask, precision, q.device
        self.tma = all(
            tma_serves(self[name])
            for name in (*OF_QUERIES, *OF_KEYS)
            if self.tensors[name] is not None
        )
        hopper = (
            HAS_GLUON
            and not INTERPRETED
            and capability(q.device) == (9, 0)
            and q.itemsize == 2
            and self.D in HOPPER_WIDTHS
            and mask.plain
            and self.tma
        )
        blocks = triton.cdiv(self.M, configs.BLOCK) * self.heads
        # What `configs.tiles_for` chooses by.
        self.choice = ("16-bit" if q.itemsize == 2 else precision, self.block_d, hopper, blocks)

    def __getitem__(self, name: str) -> Tensor:
        x = self.tensors[name]
        assert x is not None
        return x

    def add_workspace(self, name: str, layout: Tensor) -> None:
        """A workspace laid out like `layout`, which the launches know by this name."""
        self.positions[name] = len(self.positions)
        self.tensors[name] = layout
        self.workspaces.append(layout)

    def add_parts(self) -> None:
        """Workspaces for the bf16 parts of this call's factors."""
        for name in FACTORS:
            if self.tensors[name] is not None:
                B, heads, length, D = self[name].shape
                shape = (B, PART_COUNTS[self.precision] * heads, length, D)
                self.add_workspace(name + "_parts", meta(shape, torch.bfloat16))
                self.tma = self.tma and tma_serves(self[name + "_parts"])

    def splits(self, tiles: Tiles) -> bool:
        """Whether a kernel of these tiles reads its factors as bf16 parts."""
        return tiles.split and self["q"].dtype == torch.float32

    def launch(
        self, kernel: Any, grid: tuple[int, ...], tiles: Tiles | None = None, **given: Any
    ) -> Launch:
        """A launch of `kernel` with `given`; its other parameters get what their names say.

        Without `tiles` all tensors go by pointer.
        """
        known = self._numbers(tiles) | given
        arguments = [
            known[name] if name in known else self.tensor(name, tiles)
            for name in inspect.signature(kernel.fn).parameters
        ]
        options: dict[str, int] = {}
        if tiles is not None:
            options["num_warps"] = tiles.num_warps
            if not tiles.hopper:  # in Gluon the kernel itself makes the stages
                options["num_stages"] = tiles.num_stages
        return Launch(kernel, grid, arguments, **options)

    def _numbers(self, tiles: Tiles | None) -> dict[str, Any]:
        """All but the tensors."""
        mask, delta = self.mask, self.tensors["delta"]
        numbers: dict[str, Any] = {
            "heads": self.heads,
            "H": self.H,
            "M": self.M,
            "N": self.N,
            "D": self.D,
            "window": mask.window or 0,
            "scale": mask.scale,
            "scale_log2": mask.scale * math.log2(math.e),
            "line_stride": 0 if delta is None else delta.stride(0),
            "GROUP": self.group,
            "CAUSAL": mask.causal,
            "WINDOW": mask.window is not None,
            "SEGMENTS": mask.q_ids is not None,
            "EVEN_D": self.block_d == self.D,
            "BLOCK_D": self.block_d,
        }
        if tiles is not None:
            numbers |= {
                "BLOCK_M": tiles.block_m,
                "BLOCK_N": tiles.block_n,
                "EVEN_M": self.M % tiles.block_m == 0,
                "EVEN_N": self.N % tiles.block_n == 0,
                "STAGES": tiles.num_stages,
                "TMA": tiles.tma and self.tma,
                "PRECISION": self._precision(tiles),
            }
        return numbers

    def _precision(self, tiles: Tiles) -> str:
        """How the kernel multiplies fp32; 16-bit products do not look at it."""
        if self.splits(tiles):
            return {"tf32": "two parts", "fp32": "three parts"}[self.precision]
        if self.precision == "tf32":
            return "tf32"
        return "ieee" if INTERPRETED else configs.FP32_PRECISION

    def tensor(self, name: str, tiles: Tiles | None) -> Any:
        """A tensor, as a descriptor where TMA reads it; for a name with `_strides`, its strides."""
        name, strides, _ = name.partition("_strides")
        if name in FACTORS and tiles is not None and self.splits(tiles):
            name += "_parts"
        x = self.tensors[name]
        if x is None:
            return None
        if strides:
            return x.stride()[:3]
        if tiles is not None and name == "ds":  # there is a stash only where TMA serves
            return self.descriptor(name, 1, tiles.block_n, tiles.block_m)
        if tiles is not None and tiles.tma and self.tma:
            if name in OF_QUERIES:
                return self.descriptor(name, 1, 1, tiles.block_m, self.block_d)
            if name in OF_KEYS:
                return self.descriptor(name, 1, 1, tiles.block_n, self.block_d)
            if name in LINES:
                return self.descriptor(name, 1, tiles.block_m)
        return self.pointer(name)

    def pointer(self, name: str) -> Pointer:
        return Pointer(self.positions[name])

    def descriptor(self, name: str, *block: int) -> Descriptor:
        x = self[name]
        template = TensorDescriptor(x, list(x.shape), _strides(x), list(block))
        return Descriptor(self.positions[name], template)

    def gluon_descriptor(self, name: str, *block: int) -> Descriptor:
        """A tile's rows are multiples of 128 bytes, the width over which shared memory is swizzled;
        a block of lines is not swizzled."""
        x = self[name]
        layout = NVMMASharedLayout(0 if name in LINES else 128, 8 * x.itemsize, len(block))
        template = GluonDescriptor(x, list(x.shape), _strides(x), list(block), layout)
        return Descriptor(self.positions[name], template)


def meta(shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None = None) -> Tensor:
    """The layout of a workspace, contiguous unless `strides` say otherwise."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.empty_strided(shape, strides, dtype=dtype, device="meta")


def tma_serves(x: Tensor) -> bool:
    """Whether x can be read through a descriptor."""
    if not INTERPRETED and (0, 0) < capability(x.device) < (9, 0):
        return False
    return x.data_ptr() % ALIGNMENT == 0 and all(
        size == 1 or (stride > 0 and stride * x.itemsize % ALIGNMENT == 0)
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def _strides(x: Tensor) -> list[int]:
    """x's strides; a dimension of size 1 gets a stride that no check can object to."""
    row = aligned_length(x.shape[-1], x.dtype)
    return [
        row if size == 1 else stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ] + [1]


def aligned_length(length: int, dtype: torch.dtype) -> int:
    """`length`, rounded up so that a row of it ends aligned."""
    room = ALIGNMENT // dtype.itemsize
    return int(triton.cdiv(length, room)) * room
