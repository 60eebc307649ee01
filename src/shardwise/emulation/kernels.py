# mypy: disable-error-code="attr-defined,import-not-found,import-untyped,no-untyped-def"
"""GPU kernels of the emulated network: they bring the data. Importing this needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit(do_not_specialize=["rows"])
def deliver(target, source, jobs, rows, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):
    """Copy elements of the source into each of `rows` rows of the target. A block has one of the
    jobs: where to write in the first row, where to read, how many, and how far apart rows are.
    Blocks of one warp and few registers find room beside a matrix product's; larger ones would wait
    for its end.
    """
    job = jobs + 4 * tl.program_id(0)
    to, read, count, row = tl.load(job), tl.load(job + 1), tl.load(job + 2), tl.load(job + 3)
    if ALIGNED:
        to, read = tl.multiple_of(to, 16), tl.multiple_of(read, 16)
        count, row = tl.multiple_of(count, 16), tl.multiple_of(row, 16)
    for start in range(0, count, BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(source + read + i, mask=i < count)
        place = target + to + i
        for _ in range(rows):
            tl.store(place, values, mask=i < count)
            place += row


@triton.jit(do_not_specialize=["source_size", "total", "write_from", "write_to"])
def move_evenly(
    target,
    source,
    source_size,
    total,
    write_from,
    write_to,
    after_ns,
    moving_ns,
    CHUNK: tl.constexpr,
):
    """The data moved at an even rate by all blocks of the grid, as a communication library's kernel
    does, from `after_ns` on for `moving_ns`, by the GPU's nanosecond clock. Element i of `total` is
    read from source[i % source_size]; those in [write_from, write_to) are written to target, from
    its start. A chunk has its part of the time, and stays for what it does not need of that.
    """
    chunks = tl.cdiv(total, CHUNK)
    began = globaltimer() + after_ns.to(tl.int64)
    _stay_until(began)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        start = chunk.to(tl.int64) * CHUNK
        # One division for the chunk, then small ones: 64 bits wide they take longer than the data.
        read = (start % source_size).to(tl.uint32) + tl.arange(0, CHUNK).to(tl.uint32)
        i = start + tl.arange(0, CHUNK)
        values = tl.load(source + read % source_size.to(tl.uint32), mask=i < total)
        tl.store(target + i - write_from, values, mask=(i >= write_from) & (i < write_to))
        _stay_until(began + (moving_ns * ((chunk + 1).to(tl.float32) / chunks)).to(tl.int64))
    _stay_until(began + moving_ns.to(tl.int64))


@triton.jit
def stay(taken_ns):
    """One warp that is there for so long."""
    _stay_until(globaltimer() + taken_ns.to(tl.int64))


@triton.jit
def _stay_until(moment):
    now = globaltimer()
    while now < moment:
        now = globaltimer()
