# mypy: ignore-errors
"""The forward kernel: one program per block of queries, walking the keys it sees.

For each tile of scores the kernel keeps, per query, the running maximum `max_M`, the sum of
exponentials `sum_M` under that maximum, and the weighted sum of values `acc_MD`; a new maximum
scales the old sums down. Scores stay in base 2: `scale_log2` holds softmax scale times log2(e), so
that one multiply-add and one exp2 make a probability. Out come `o` and `lse`, the natural log of
each query's sum, which is all that backward needs to make the probabilities again.

A query that sees no key gets o = 0 and lse = -inf.
"""

import triton
import triton.language as tl

from shardwise.kernels.attention.tiles import (
    ANY_INTEGER,
    LN2,
    factor,
    keys_of,
    load_factor,
    product,
    segment_bounds,
    store_rows,
    turned,
    visible,
)


@triton.jit
def _walk(
    acc_MD, max_M, sum_M, q_MD, ids_M, k, v, k_ids, b, g, m0, lo, hi, N, D, window, scale_log2,
    k_strides, v_strides,
    PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take the keys [lo, hi) into the running sums; `PARTIAL` tiles are masked."""
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        k_ND = load_factor(
            k, b, g, n0, N, D, k_strides, BLOCK_N, BLOCK_D, TMA, not PARTIAL, EVEN_D, PRECISION
        )
        s_MN = product(q_MD, turned(k_ND, PRECISION), None, PRECISION)
        if PARTIAL:
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            seen = visible(m[:, None], n[None, :], N, window, CAUSAL, WINDOW)
            if SEGMENTS:
                ids_N = tl.load(k_ids + n, mask=n < N, other=0)
                seen = seen & (ids_M[:, None] == ids_N[None, :])
            s_MN = tl.where(seen, s_MN, float("-inf"))
        new_M = tl.maximum(max_M, tl.max(s_MN, 1) * scale_log2)
        base_M = new_M
        if WINDOW or SEGMENTS:
            # The first tiles of a query may be masked altogether, and -inf - -inf is no number.
            base_M = tl.where(new_M == float("-inf"), 0.0, new_M)
        p_MN = tl.exp2(s_MN * scale_log2 - base_M[:, None])
        decay_M = tl.exp2(max_M - base_M)
        sum_M = sum_M * decay_M + tl.sum(p_MN, 1)
        acc_MD = acc_MD * decay_M[:, None]
        v_ND = load_factor(
            v, b, g, n0, N, D, v_strides, BLOCK_N, BLOCK_D, TMA, not PARTIAL, EVEN_D, PRECISION
        )
        acc_MD = product(factor(p_MN, v_ND, PRECISION), v_ND, acc_MD, PRECISION)
        max_M = new_M
    return acc_MD, max_M, sum_M


@triton.jit(do_not_specialize=ANY_INTEGER)
def forward_kernel(
    q, k, v, o, lse, q_ids, k_ids, q_first, q_last,
    q_strides, k_strides, v_strides, o_strides,
    scale_log2, heads, H, M, N, D, window, section,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head."""
    # Heads go in sections whose keys and values fit into the L2 cache together. Within a section
    # the late blocks go first: under a causal mask they have the most keys, and work that starts
    # last should be short.
    tile = tl.program_id(0)
    blocks = tl.cdiv(M, BLOCK_M)
    start = tile // (blocks * section) * section
    width = tl.minimum(section, heads - start)
    place = tile - start * blocks
    head = start + place % width
    m0 = (blocks - 1 - place // width) * BLOCK_M
    b = head // H
    h = head % H
    g = h // GROUP

    m = m0 + tl.arange(0, BLOCK_M)
    q_MD = load_factor(
        q, b, h, m0, M, D, q_strides, BLOCK_M, BLOCK_D, TMA, False, EVEN_D, PRECISION
    )
    acc_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    max_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sum_M = tl.zeros([BLOCK_M], tl.float32)
    ids_M = m
    lo, full_lo, full_hi, hi = keys_of(m0, N, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if SEGMENTS:  # every tile counts as partial
        row = b.to(tl.int64) * M
        ids_M = tl.load(q_ids + row + m, mask=m < M, other=0)
        lo, hi = segment_bounds(q_first, q_last, m, row, M, N, lo, hi, BLOCK_N)
        full_lo = hi
        k_ids += b.to(tl.int64) * N

    if WINDOW or SEGMENTS:
        acc_MD, max_M, sum_M = _walk(
            acc_MD, max_M, sum_M, q_MD, ids_M, k, v, k_ids, b, g, m0, lo, full_lo,
            N, D, window, scale_log2, k_strides, v_strides,
            True, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
    if not SEGMENTS:
        acc_MD, max_M, sum_M = _walk(
            acc_MD, max_M, sum_M, q_MD, ids_M, k, v, k_ids, b, g, m0, full_lo, full_hi,
            N, D, window, scale_log2, k_strides, v_strides,
            False, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        if CAUSAL or WINDOW or not EVEN_N:
            acc_MD, max_M, sum_M = _walk(
                acc_MD, max_M, sum_M, q_MD, ids_M, k, v, k_ids, b, g, m0, full_hi, hi,
                N, D, window, scale_log2, k_strides, v_strides,
                True, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip

    lse_M = (max_M + tl.log2(sum_M)) * LN2
    if WINDOW or SEGMENTS:
        sum_M = tl.where(sum_M == 0.0, 1.0, sum_M)
    o_MD = acc_MD * (1.0 / sum_M)[:, None]
    store_rows(o, o_MD, b, h, m0, M, D, o_strides, BLOCK_M, BLOCK_D, TMA)
    tl.store(lse + head.to(tl.int64) * M + m, lse_M, mask=m < M)
