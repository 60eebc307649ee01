# mypy: disable-error-code="attr-defined,import-not-found,import-untyped,no-untyped-def"
"""GPU kernels of the emulated network. They take wall time (the GPU's nanosecond clock), so no
change of the GPU's own clock rate alters it. Importing this needs Triton.

`loads` holds, for each link, the sum of the shares that moving transfers use, in 1/1024; `uses`
what this one uses. Progress is counted in 1/16 ns.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

WHOLE = 1024  # a whole link


@triton.jit
def _slowdown(loads, uses, LINKS: tl.constexpr):
    """How much longer than alone a nanosecond's progress takes now, at least 1."""
    most = 1024
    for link in tl.static_range(LINKS):
        load = tl.load(loads + link, volatile=True)
        most = tl.where(tl.load(uses + link) > 0, tl.maximum(most, load), most)
    return most.to(tl.float32) / 1024


@triton.jit
def _join(loads, uses, sign: tl.constexpr, LINKS: tl.constexpr):
    for link in tl.static_range(LINKS):
        use = tl.load(uses + link)
        if use > 0:
            tl.atomic_add(loads + link, sign * use)


@triton.jit
def _pause(left):
    """Sleep for a part of what is left (1/16 ns), so that the warp takes nothing from its
    neighbours on the multiprocessor; a sleep may last twice as long as asked.
    """
    nanoseconds = tl.minimum(left // 64, 1000).to(tl.int32)
    tl.inline_asm_elementwise(
        "nanosleep.u32 $1; mov.u32 $0, $1;", "=r,r", [nanoseconds], tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _wait(nanoseconds):
    """Until so long after now; gives the moment."""
    end = globaltimer() + nanoseconds
    left = nanoseconds
    while left > 0:
        _pause(left * 16)
        left = end - globaltimer()
    return end


@triton.jit
def _take_time(loads, uses, fixed_ns, moving_ns, LINKS: tl.constexpr):
    """The time of one transfer. No step of the loop needs two threads to agree on the time."""
    last = _wait(fixed_ns.to(tl.int64))
    left = moving_ns.to(tl.int64) * 16
    if left > 0:
        _join(loads, uses, 1, LINKS)
        while left > 0:
            _pause(left)
            slow = _slowdown(loads, uses, LINKS)
            now = globaltimer()
            left -= ((now - last).to(tl.float32) * 16 / slow).to(tl.int64)
            last = now
        _join(loads, uses, -1, LINKS)


@triton.jit
def hold(loads, uses, fixed_ns, moving_ns, LINKS: tl.constexpr):
    """Only the time of a transfer."""
    _take_time(loads, uses, fixed_ns, moving_ns, LINKS)


@triton.jit
def note(began):
    """The moment, for a `hold_until`."""
    tl.store(began, globaltimer())


@triton.jit
def hold_until(began, nanoseconds):
    """Until so long after the moment that `note` or `deliver` wrote."""
    left = tl.load(began) + nanoseconds.to(tl.int64) - globaltimer()
    _wait(left)


@triton.jit(do_not_specialize=["pieces", "rows"])
def deliver(
    target,
    source,
    places,
    pieces,
    rows,
    loads,
    uses,
    began,
    fixed_ns,
    moving_ns,
    BLOCK: tl.constexpr,
    LINKS: tl.constexpr,
    NOTES: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """The first block takes the transfer's time, or notes the moment for a `hold_until`. The others
    meanwhile copy every piece of the source into `rows` rows of the target, one after the other:
    `places` has for each piece where its rows begin in the target, where it begins in the source,
    and its elements. Blocks of one warp and few registers find room beside a matrix product's;
    larger ones would wait for its end.
    """
    block = tl.program_id(0)
    if block == 0:
        if NOTES:
            tl.store(began, globaltimer())
        else:
            _take_time(loads, uses, fixed_ns, moving_ns, LINKS)
    else:
        step = (tl.num_programs(0) - 1) * BLOCK
        for piece in range(pieces):
            to, read = tl.load(places + 3 * piece), tl.load(places + 3 * piece + 1)
            row = tl.load(places + 3 * piece + 2)
            if ALIGNED:
                to, read = tl.multiple_of(to, 16), tl.multiple_of(read, 16)
                row = tl.multiple_of(row, 16)
            for start in range((block - 1) * BLOCK, row, step):
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
    loads,
    uses,
    fixed_ns,
    moving_ns,
    CHUNK: tl.constexpr,
    LINKS: tl.constexpr,
):
    """The same time, with the data moved meanwhile at an even rate by all blocks of the grid, as a
    communication library's kernel does. Element i of `total` is read from source[i % source_size];
    those in [keep_from, keep_to) are written to target, from its start.
    """
    block, blocks = tl.program_id(0), tl.num_programs(0)
    chunks = tl.cdiv(total, CHUNK)
    last = _wait(fixed_ns.to(tl.int64))
    all_time = moving_ns.to(tl.int64) * 16
    if block == 0:
        _join(loads, uses, 1, LINKS)
    done = all_time * 0
    for chunk in range(block, chunks, blocks):
        due = (all_time.to(tl.float32) * (chunk.to(tl.float32) / chunks)).to(tl.int64)
        while done < due:
            slow = _slowdown(loads, uses, LINKS)
            now = globaltimer()
            done += ((now - last).to(tl.float32) * 16 / slow).to(tl.int64)
            last = now
        i = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
        values = tl.load(source + i % source_size, mask=i < total)
        tl.store(target + i - keep_from, values, mask=(i >= keep_from) & (i < keep_to))
    while done < all_time:
        slow = _slowdown(loads, uses, LINKS)
        now = globaltimer()
        done += ((now - last).to(tl.float32) * 16 / slow).to(tl.int64)
        last = now
    if block == 0:
        _join(loads, uses, -1, LINKS)
