# mypy: ignore-errors
"""What runs ahead of the attention kernels: backward's lines, and fp32 factors as bf16 parts.

lines  two fp32 numbers per query: `delta`, the row sum of o * do, less the gradient of lse if it
       has one; and `lse_log2`, lse in the base that the kernels count in
parts  an fp32 number is the sum of three bf16 numbers, and of two to 16 bits. The parts of head h
       are heads PARTS * h and following of a tensor (B, PARTS * heads, length, D).
"""

import triton
import triton.language as tl

from shardwise.kernels.attention.tiles import ANY_INTEGER, LOG2E, load_line, load_rows, split


@triton.jit
def _store_lines(
    o, do_MD, lse, dlse, delta, lse_log2, o_strides, line_stride, head, m0, H, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    m = m0 + tl.arange(0, BLOCK_M)
    o_MD = load_rows(
        o, head // H, head % H, m0, M, D, o_strides, BLOCK_M, BLOCK_D, False, False, False
    )
    delta_M = tl.sum(o_MD.to(tl.float32) * do_MD.to(tl.float32), 1)
    if dlse is not None:
        delta_M -= load_line(dlse, head, m0, M, M, BLOCK_M, False)
    lse_M = load_line(lse, head, m0, M, M, BLOCK_M, False) * LOG2E
    line = head.to(tl.int64) * line_stride + m
    tl.store(delta + line, delta_M, mask=m < M)
    tl.store(lse_log2 + line, lse_M, mask=m < M)


@triton.jit
def _store_parts(
    x_MD, parts, head, m0, M, D,
    PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    high, middle, low = split(x_MD)
    m = m0 + tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    places = parts + (PARTS * head.to(tl.int64) * M + m[:, None]) * D + d[None, :]
    inside = (m[:, None] < M) & (d[None, :] < D)
    tl.store(places, high, mask=inside)
    tl.store(places + M.to(tl.int64) * D, middle, mask=inside)
    if PARTS == 3:
        tl.store(places + 2 * M.to(tl.int64) * D, low, mask=inside)


@triton.jit(do_not_specialize=ANY_INTEGER)
def lines_kernel(
    o, do, lse, dlse, delta, lse_log2, o_strides, do_strides, line_stride, H, M, D,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1)
    m0 = tl.program_id(0) * BLOCK_M
    do_MD = load_rows(
        do, head // H, head % H, m0, M, D, do_strides, BLOCK_M, BLOCK_D, False, False, False
    )
    _store_lines(
        o, do_MD, lse, dlse, delta, lse_log2, o_strides, line_stride,
        head, m0, H, M, D, BLOCK_M, BLOCK_D,
    )  # fmt: skip


@triton.jit(do_not_specialize=ANY_INTEGER)
def split_kernel(
    q, k, v, do, o, lse, dlse, q_parts, k_parts, v_parts, do_parts, delta, lse_log2,
    q_strides, k_strides, v_strides, do_strides, o_strides, line_stride, heads, H, M, N, D,
    GROUP: tl.constexpr, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """All factors of a pass, and backward's lines, in one launch; forward has no `do` and lines."""
    which = tl.program_id(2)
    head = tl.program_id(1)
    m0 = tl.program_id(0) * BLOCK_M
    b = head // H
    h = head % H
    if which == 0:
        q_MD = load_rows(q, b, h, m0, M, D, q_strides, BLOCK_M, BLOCK_D, False, False, False)
        _store_parts(q_MD, q_parts, head, m0, M, D, PARTS, BLOCK_M, BLOCK_D)
    elif which == 1:
        if do is not None:
            do_MD = load_rows(do, b, h, m0, M, D, do_strides, BLOCK_M, BLOCK_D, False, False, False)
            _store_parts(do_MD, do_parts, head, m0, M, D, PARTS, BLOCK_M, BLOCK_D)
            _store_lines(
                o, do_MD, lse, dlse, delta, lse_log2, o_strides, line_stride,
                head, m0, H, M, D, BLOCK_M, BLOCK_D,
            )  # fmt: skip
    elif head < heads // GROUP:
        b = head // (H // GROUP)
        g = head % (H // GROUP)
        if which == 2:
            k_ND = load_rows(k, b, g, m0, N, D, k_strides, BLOCK_M, BLOCK_D, False, False, False)
            _store_parts(k_ND, k_parts, head, m0, N, D, PARTS, BLOCK_M, BLOCK_D)
        else:
            v_ND = load_rows(v, b, g, m0, N, D, v_strides, BLOCK_M, BLOCK_D, False, False, False)
            _store_parts(v_ND, v_parts, head, m0, N, D, PARTS, BLOCK_M, BLOCK_D)
