"""Tile sizes and the like, per head width, dtype and GPU. Edit the tables from a tuning run.

`benchmarks/attention_tune.py` checks and times candidates and prints the rows that won.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar


@dataclass(frozen=True)
class Tiles:
    """How one kernel is cut and launched."""

    block_m: int
    block_n: int
    num_warps: int = 4  # of one role, with `hopper`
    num_stages: int = 2
    tma: bool = True  # read tiles through tensor descriptors where the tensors allow it
    split: bool = False  # fp32: a kernel makes bf16 parts of the factors beforehand
    hopper: bool = False  # the Gluon kernel, where it can serve


@dataclass(frozen=True)
class Stash:
    """The workspace of the five-product backward: heads x keys x chunk, in 16-bit numbers."""

    product: Tiles  # of dq = ds k; neither block may exceed the block_n of dk and dv
    bytes: int = 2 << 30
    chunk: int = 8192  # queries; dk and dv are read and written once per chunk
    min_heads: int = 4  # with fewer, dq = ds k has too few programs to fill the GPU


@dataclass(frozen=True)
class Backward:
    dkdv: Tiles
    dq: Tiles
    stash: Stash | None = None  # None: recompute
    joined: int = 0  # without a stash, one launch: of 2 roles (dq | dk, dv) or 3 (dq | dk | dv)


Chosen = TypeVar("Chosen", Tiles, Backward)

# The tables go by dtype ("16-bit", or the precision of fp32) and size ("many" blocks of queries,
# "few", "fewest"; "hopper" replaces "many" where the Gluon kernels can serve), then by block_d: the
# head width, rounded up to a power of two. Chosen on an H200 with Triton 3.6 from runs like
# benchmarks/attention_tune.py; rows of width 32 and 256 from the compiler's report alone, and tf32
# of widths below 128 in step with fp32.
#
# Few blocks take smaller tiles, which give more programs, and pointers, which are passed faster
# than descriptors are made.
#
# fp32 on the tensor cores: an fp32 number is three bf16 numbers, and six products of those carry
# its 24 bits; two parts and three products carry 16 bits, more than tf32's 10, in less time than
# one tf32 product (whose factors may not be transposed). With `split` the parts are made once,
# beforehand. Width 256 has no room for them: its kernels multiply tf32, and fp32 by Triton's
# "bf16x6", which makes the parts in registers ("ieee" would use the ordinary units).
FP32_PRECISION = "bf16x6"
Tables = dict[tuple[str, str], dict[int, Chosen]]
SPLIT_WIDTHS = (16, 32, 64, 128)

FORWARD: Tables[Tiles] = {
    ("16-bit", "many"): {
        16: Tiles(64, 64, 4, 3, tma=False),
        32: Tiles(64, 64, 4, 3, tma=False),
        64: Tiles(64, 128, 4, 2),
        128: Tiles(128, 64, 8, 3, tma=False),
        256: Tiles(128, 64, 8, 2),
    },
    ("16-bit", "hopper"): {
        64: Tiles(128, 128, num_stages=3, hopper=True),
        128: Tiles(128, 128, num_stages=2, hopper=True),
    },
    ("16-bit", "few"): {
        **dict.fromkeys((16, 32, 64, 128), Tiles(64, 64, 4, 3, tma=False)),
        256: Tiles(64, 32, 4, 2, tma=False),
    },
    ("tf32", "many"): {
        **dict.fromkeys((16, 32, 64), Tiles(64, 64, 4, 2, tma=False, split=True)),
        128: Tiles(128, 64, 8, 2, tma=False, split=True),
        256: Tiles(128, 32, 8, 1, tma=False),
    },
    ("tf32", "few"): dict.fromkeys(SPLIT_WIDTHS, Tiles(64, 64, 4, 2, tma=False, split=True)),
    ("fp32", "many"): {
        16: Tiles(64, 64, 4, 3, tma=False, split=True),
        32: Tiles(64, 64, 4, 3, tma=False, split=True),
        64: Tiles(64, 64, 4, 2, tma=False, split=True),
        128: Tiles(128, 32, 8, 2, tma=False, split=True),
        256: Tiles(32, 32, 8, 1),
    },
    ("fp32", "few"): {128: Tiles(32, 64, 4, 2, tma=False, split=True)},
    ("fp32", "fewest"): dict.fromkeys(SPLIT_WIDTHS, Tiles(16, 64, 4, 2, tma=False, split=True)),
}

_SMALL_16BIT = Tiles(64, 64, 4, 2, tma=False)
_SQUARE_PARTS = Tiles(64, 64, 4, 2, split=True)
_SMALLEST_FP32 = Tiles(32, 32, 4, 2, tma=False, split=True)
BACKWARD: Tables[Backward] = {
    ("16-bit", "many"): {
        16: Backward(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3, tma=False)),
        32: Backward(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3, tma=False)),
        64: Backward(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3)),
        128: Backward(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
        256: Backward(Tiles(32, 64, 8, 2), Tiles(64, 32, 4, 2)),
    },
    ("16-bit", "hopper"): {
        64: Backward(Tiles(64, 128, num_stages=3, hopper=True), Tiles(128, 64, 8, 3)),
        128: Backward(
            Tiles(64, 128, num_stages=2, hopper=True),
            Tiles(64, 64, 4, 2),
            Stash(Tiles(128, 64, 4, 4)),
        ),
    },
    ("16-bit", "few"): {
        **dict.fromkeys((16, 32, 64, 128), Backward(_SMALL_16BIT, _SMALL_16BIT, joined=2)),
        256: Backward(Tiles(32, 64, 8, 2, tma=False), Tiles(64, 32, 4, 2, tma=False)),
    },
    ("tf32", "many"): {
        **dict.fromkeys((16, 32, 64), Backward(_SQUARE_PARTS, _SQUARE_PARTS, joined=2)),
        128: Backward(Tiles(32, 128, 8, 2, split=True), Tiles(128, 32, 8, 2, split=True), joined=2),
        256: Backward(Tiles(32, 64, 8, 1, tma=False), Tiles(64, 16, 4, 1, tma=False)),
    },
    ("tf32", "few"): dict.fromkeys(SPLIT_WIDTHS, Backward(_SQUARE_PARTS, _SQUARE_PARTS, joined=3)),
    ("fp32", "many"): {
        16: Backward(_SQUARE_PARTS, _SQUARE_PARTS, joined=2),
        32: Backward(_SQUARE_PARTS, _SQUARE_PARTS, joined=2),
        64: Backward(Tiles(32, 64, 4, 2, split=True), Tiles(64, 32, 4, 2, split=True)),
        128: Backward(Tiles(32, 64, 4, 2, split=True), Tiles(64, 32, 4, 2, split=True), joined=3),
        256: Backward(Tiles(32, 64, 8, 1), Tiles(64, 32, 8, 1)),
    },
    ("fp32", "few"): {64: Backward(_SQUARE_PARTS, _SQUARE_PARTS, joined=2)},
    ("fp32", "fewest"): dict.fromkeys(
        SPLIT_WIDTHS, Backward(_SMALLEST_FP32, _SMALLEST_FP32, joined=3)
    ),
}

BLOCK = 128  # queries by which the size of a problem is counted
FEW = 64  # at most so many blocks
FEWEST = 16

STASH_SHARE = 32  # the stash takes at most this part of the GPU's memory
# Heads that run at the same time: enough for all programs to end together, few enough that some of
# them read the same keys; more if all these heads' keys and values fit into the L2 cache.
MIN_HEADS = 64
HEADS_CACHE_BYTES = 32 << 20


def tiles_for(
    tables: Tables[Chosen], dtype: str, block_d: int, hopper: bool, blocks: int
) -> Chosen:
    """The row for so many `blocks` of queries; `hopper`: Gluon can serve."""
    sizes = {"fewest": blocks <= FEWEST, "few": blocks <= FEW, "hopper": hopper, "many": True}
    for size, fits in sizes.items():
        row = tables.get((dtype, size), {}).get(block_d) if fits else None
        if row is not None:
            return row
    raise ValueError(f"no tiles for {dtype} heads of width {block_d}")
