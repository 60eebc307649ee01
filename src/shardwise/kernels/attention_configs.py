"""Tile sizes and the like, per head width, dtype and GPU. Edit the tables from a tuning run.

`benchmarks/attention_tune.py` checks and times candidates and prints the rows that won.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut and launched."""

    block_m: int
    block_n: int
    num_warps: int = 8
    num_stages: int = 2
    tma: bool = True  # read tiles through tensor descriptors where the tensors allow it
    persistent: bool = False  # forward only: one program per multiprocessor, many tiles each
    hopper: bool = False  # the Gluon kernel; falls back to plain Triton where that cannot serve
    pingpong: bool = False  # forward with `hopper`: consumers take turns to issue products


@dataclass(frozen=True)
class Stash:
    """The workspace of the five-product backward: heads x keys x chunk, in 16-bit numbers."""

    product: Tiles  # of dq = ds k; neither block may exceed the block_n of dk and dv
    bytes: int = 1 << 30
    chunk: int = 4096  # queries; dk and dv are read and written once per chunk
    min_heads: int = 4  # with fewer, dq = ds k has too few programs to fill the GPU


@dataclass(frozen=True)
class Backward:
    dkdv: Tiles
    dq: Tiles
    stash: Stash | None = None  # None: recompute


# Keys are block_d: the head width, rounded up to a power of two. Not yet measured on a GPU: chosen
# for no spills and no serialised products in the compiler's report for sm_90.
FORWARD_16BIT = {
    16: Tiles(128, 128, 8, 3),
    32: Tiles(128, 128, 8, 3),
    64: Tiles(128, 128, 8, 3),
    128: Tiles(128, 128, 8, 2),
    256: Tiles(128, 64, 8, 2),
}
BACKWARD_16BIT = {
    16: Backward(Tiles(64, 128, 8, 2), Tiles(128, 128, 8, 2)),
    32: Backward(Tiles(64, 128, 8, 2), Tiles(128, 128, 8, 2)),
    64: Backward(Tiles(64, 128, 8, 2), Tiles(128, 128, 8, 2)),
    128: Backward(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2)),
    256: Backward(Tiles(32, 64, 8, 2), Tiles(64, 32, 4, 2)),
}

# Replace rows of the tables above on Hopper where the Gluon kernels can serve. Empty until a GPU
# has confirmed them; the candidates are in benchmarks/attention_tune.py.
FORWARD_HOPPER: dict[int, Tiles] = {}
BACKWARD_HOPPER: dict[int, Backward] = {}

FORWARD_TF32 = {
    16: Tiles(128, 64, 8, 2),
    32: Tiles(128, 64, 8, 2),
    64: Tiles(128, 64, 8, 2),
    128: Tiles(128, 64, 8, 2),
    256: Tiles(128, 32, 8, 1),
}
BACKWARD_TF32 = {
    16: Backward(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    32: Backward(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    64: Backward(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: Backward(Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    256: Backward(Tiles(32, 64, 8, 1), Tiles(64, 16, 4, 1)),
}

# fp32 without loss: an fp32 number is three bf16 numbers, and six products of those carry its 24
# bits through the tensor cores. "tf32x3" does it with three tf32 products but more registers;
# "ieee" multiplies on the ordinary units, many times slower.
FP32_PRECISION = "bf16x6"
FORWARD_FP32 = {
    16: Tiles(128, 64, 8, 2),
    32: Tiles(128, 64, 8, 2),
    64: Tiles(128, 32, 8, 2),
    128: Tiles(128, 32, 8, 2),
    256: Tiles(32, 32, 8, 1),
}
BACKWARD_FP32 = {
    16: Backward(Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    32: Backward(Tiles(32, 64, 4, 1), Tiles(64, 32, 4, 1)),
    64: Backward(Tiles(16, 64, 4, 1), Tiles(128, 32, 8, 1)),
    128: Backward(Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
    256: Backward(Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
}

HEADS_CACHE_BYTES = 32 << 20  # keys and values of the heads that run together should fit L2


def forward_tiles(bits: int, precision: str, block_d: int, hopper: bool) -> Tiles:
    """The row for a dtype of `bits`; `hopper`: the Gluon kernel can serve."""
    if bits == 16:
        chosen = FORWARD_HOPPER.get(block_d) if hopper else None
        return chosen or FORWARD_16BIT[block_d]
    return (FORWARD_TF32 if precision == "tf32" else FORWARD_FP32)[block_d]


def backward_tiles(bits: int, precision: str, block_d: int, hopper: bool) -> Backward:
    if bits == 16:
        chosen = BACKWARD_HOPPER.get(block_d) if hopper else None
        return chosen or BACKWARD_16BIT[block_d]
    return (BACKWARD_TF32 if precision == "tf32" else BACKWARD_FP32)[block_d]
