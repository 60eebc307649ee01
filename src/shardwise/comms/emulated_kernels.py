# mypy: disable-error-code="attr-defined,import-not-found,import-untyped,no-untyped-def"
"""GPU kernels of the emulated network: they bring the data. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["pieces", "rows"])
def deliver(
    target, source, places, pieces, rows, BLOCK: tl.constexpr, ALIGNED: tl.constexpr
):  # fmt: skip
    """Copy every piece of the source into `rows` rows of the target, one after the other: `places`
    has for each piece where its rows begin in the target, where it begins in the source, its
    elements, and how many tiles the pieces before it have. Blocks of one warp and few registers
    find room beside a matrix product's; larger ones would wait for its end.
    """
    blocks = tl.num_programs(0)
    for piece in range(pieces):
        place_of = places + 4 * piece
        to, read, row = tl.load(place_of), tl.load(place_of + 1), tl.load(place_of + 2)
        if ALIGNED:
            to, read = tl.multiple_of(to, 16), tl.multiple_of(read, 16)
            row = tl.multiple_of(row, 16)
        # The tiles of all pieces are dealt in turn, so that no block has two more than another.
        turn = (tl.program_id(0) + blocks - tl.load(place_of + 3) % blocks) % blocks
        for start in range(turn * BLOCK, row, blocks * BLOCK):
            i = start + tl.arange(0, BLOCK)
            values = tl.load(source + read + i, mask=i < row)
            place = target + to + i
            for _ in range(rows):
                tl.store(place, values, mask=i < row)
                place += row


@triton.jit(do_not_specialize=["source_size", "total", "keep_from", "keep_to"])
def carry(
    target,
    source,
    source_size,
    total,
    keep_from,
    keep_to,
    after_ns,
    moving_ns,
    CHUNK: tl.constexpr,
):
    """The data moved at an even rate by all blocks of the grid, as a communication library's kernel
    does, from `after_ns` on for `moving_ns`, by the GPU's nanosecond clock. Element i of `total` is
    read from source[i % source_size]; those in [keep_from, keep_to) are written to target, from its
    start.
    """
    chunks = tl.cdiv(total, CHUNK)
    began = globaltimer() + after_ns.to(tl.int64)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        _stay_until(began + (moving_ns * (chunk.to(tl.float32) / chunks)).to(tl.int64))
        i = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(source + i % source_size, mask=i < total)
        tl.store(target + i - keep_from, values, mask=(i >= keep_from) & (i < keep_to))
    _stay_until(began + moving_ns.to(tl.int64))


@triton.jit
def _stay_until(moment):
    now = globaltimer()
    while now < moment:
        now = globaltimer()
