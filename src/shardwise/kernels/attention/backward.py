# mypy: ignore-errors
"""The backward kernels: probabilities are made again from the log-sum-exp, nothing is M x N.

With p = exp2(s - lse) and dp = do v^T, the gradient of the scores is ds = p * (dp - delta), where
`delta` is the row sum of o * do; then dv = p^T do, dk = ds^T q and dq = ds k. `lse` is in base 2
here: a kernel of `prepare` has converted it, once per row. The lse of a query that sees no key is
-inf, which makes its p +inf; but its whole row is masked, and the mask sets p to zero. There are
two ways to arrange the products, neither with atomics, so each gives the same bits every time:

recompute  `dkdv_kernel` gives one program a block of keys and walks the queries, `dq_kernel` one
           program a block of queries and walks the keys. Both make s and dp: seven products where
           the mathematics needs five. No memory but the results. `joined_kernel` is both at once.
stash      The queries go in chunks. For each chunk `dkdv_kernel` also writes ds to a workspace of
           keys x (queries of a chunk), and `dq_from_stash_kernel` multiplies it by k: five
           products. dk and dv pass from chunk to chunk in fp32. The workspace has a fixed budget,
           so memory stays linear in the sequence.

The scores of `dkdv_kernel` are transposed, s_NM: p and ds are then left operands of the products
that follow, and stay in registers.
"""

import triton
import triton.language as tl

from shardwise.kernels.attention.tiles import (
    ANY_INTEGER,
    factor,
    keys_of,
    load_factor,
    load_line,
    product,
    queries_of,
    segment_bounds,
    store_rows,
    turned,
    visible,
)


@triton.jit
def _walk_queries(
    dk_ND, dv_ND, k_ND, v_ND, ids_N, q, do, lse, delta, q_ids, stash, stash_head, chunk_lo,
    b, h, head, n0, lo, hi, M, N, D, window, scale_log2, q_strides, do_strides, line_stride,
    PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, STASH: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the queries [lo, hi) of one head give to dk, to dv, or to both."""
    for m0 in tl.range(lo, hi, BLOCK_M):
        m0 = tl.multiple_of(m0, BLOCK_M)
        q_MD = load_factor(
            q, b, h, m0, M, D, q_strides, BLOCK_M, BLOCK_D, TMA, EVEN_M, EVEN_D, PRECISION
        )
        lse_M = load_line(lse, head, m0, M, line_stride, BLOCK_M, TMA)
        s_NM = product(k_ND, turned(q_MD, PRECISION), None, PRECISION)
        p_NM = tl.exp2(s_NM * scale_log2 - lse_M[None, :])
        if PARTIAL:
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            seen = visible(m[None, :], n[:, None], N, window, CAUSAL, WINDOW)
            if SEGMENTS:
                ids_M = tl.load(q_ids + m, mask=m < M, other=0)
                seen = seen & (ids_M[None, :] == ids_N[:, None])
            p_NM = tl.where(seen, p_NM, 0.0)
        do_MD = load_factor(
            do, b, h, m0, M, D, do_strides, BLOCK_M, BLOCK_D, TMA, EVEN_M, EVEN_D, PRECISION
        )
        if DV:
            dv_ND = product(factor(p_NM, do_MD, PRECISION), do_MD, dv_ND, PRECISION)
        if DK:
            delta_M = load_line(delta, head, m0, M, line_stride, BLOCK_M, TMA)
            dp_NM = product(v_ND, turned(do_MD, PRECISION), None, PRECISION)
            ds_NM = factor(p_NM * (dp_NM - delta_M[None, :]), q_MD, PRECISION)
            dk_ND = product(ds_NM, q_MD, dk_ND, PRECISION)
            if STASH:
                stash.store([stash_head, n0, m0 - chunk_lo], ds_NM.reshape([1, BLOCK_N, BLOCK_M]))
    return dk_ND, dv_ND


@triton.jit
def _dkdv(
    place, q, k, v, do, lse, delta, dk, dv, q_ids, k_ids, first, last, stash, dk_sum, dv_sum,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, line_stride,
    scale, scale_log2, head_lo, heads, H, M, N, D, window, chunk_lo, chunk_hi,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, STASH: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk, dv or both of one block of keys, summed over the query heads that share it."""
    # Under a causal mask early keys have the most queries: they go first.
    head = head_lo + place % heads
    n0 = place // heads * BLOCK_N
    b = head // (H // GROUP)
    g = head % (H // GROUP)
    n = n0 + tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)

    lo, full_lo, full_hi, hi = queries_of(n0, M, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    ids_N = n
    if SEGMENTS:  # every tile counts as partial
        row = b.to(tl.int64) * N
        ids_N = tl.load(k_ids + row + n, mask=n < N, other=0)
        lo, hi = segment_bounds(first, last, n, row, N, M, lo, hi, BLOCK_M)
        full_lo = hi
        q_ids += b.to(tl.int64) * M

    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    sums = ((place % heads).to(tl.int64) * N + n[:, None]) * BLOCK_D + d[None, :]
    if STASH:
        # There are no sums yet if this chunk is the block's first.
        keys_with_sums = tl.where(chunk_lo > lo, N, 0)
        dk_ND = tl.load(dk_sum + sums, mask=n[:, None] < keys_with_sums, other=0.0)
        dv_ND = tl.load(dv_sum + sums, mask=n[:, None] < keys_with_sums, other=0.0)
        lo = tl.maximum(lo, chunk_lo)
        hi = tl.minimum(hi, chunk_hi)
        full_lo = tl.minimum(tl.maximum(full_lo, chunk_lo), tl.maximum(hi, lo))
        full_hi = tl.minimum(full_hi, chunk_hi)

    k_ND = load_factor(
        k, b, g, n0, N, D, k_strides, BLOCK_N, BLOCK_D, TMA, EVEN_N, EVEN_D, PRECISION
    )
    v_ND = k_ND
    if DK:
        v_ND = load_factor(
            v, b, g, n0, N, D, v_strides, BLOCK_N, BLOCK_D, TMA, EVEN_N, EVEN_D, PRECISION
        )
    for i in range(GROUP):
        h = g * GROUP + i
        q_head = b * H + h
        stash_head = place % heads * GROUP + i
        # The full tiles go first: with a masked loop ahead of them ptxas serialises every product
        # of both loops (its note C7515).
        if not SEGMENTS:
            dk_ND, dv_ND = _walk_queries(
                dk_ND, dv_ND, k_ND, v_ND, ids_N, q, do, lse, delta, q_ids,
                stash, stash_head, chunk_lo, b, h, q_head, n0, full_lo, full_hi,
                M, N, D, window, scale_log2, q_strides, do_strides, line_stride,
                False, CAUSAL, WINDOW, SEGMENTS, DK, DV, STASH, EVEN_M, EVEN_D,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip
        if CAUSAL or WINDOW or SEGMENTS:
            dk_ND, dv_ND = _walk_queries(
                dk_ND, dv_ND, k_ND, v_ND, ids_N, q, do, lse, delta, q_ids,
                stash, stash_head, chunk_lo, b, h, q_head, n0, lo, full_lo,
                M, N, D, window, scale_log2, q_strides, do_strides, line_stride,
                True, CAUSAL, WINDOW, SEGMENTS, DK, DV, STASH, EVEN_M, EVEN_D,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip
        if WINDOW and not SEGMENTS:
            dk_ND, dv_ND = _walk_queries(
                dk_ND, dv_ND, k_ND, v_ND, ids_N, q, do, lse, delta, q_ids,
                stash, stash_head, chunk_lo, b, h, q_head, n0, full_hi, hi,
                M, N, D, window, scale_log2, q_strides, do_strides, line_stride,
                True, CAUSAL, WINDOW, SEGMENTS, DK, DV, STASH, EVEN_M, EVEN_D,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip

    done = True
    if STASH:
        done = chunk_hi >= M
        if chunk_hi < M:
            tl.store(dk_sum + sums, dk_ND, mask=n[:, None] < N)
            tl.store(dv_sum + sums, dv_ND, mask=n[:, None] < N)
    if done:
        if DK:
            store_rows(dk, dk_ND * scale, b, g, n0, N, D, dk_strides, BLOCK_N, BLOCK_D, TMA)
        if DV:
            store_rows(dv, dv_ND, b, g, n0, N, D, dv_strides, BLOCK_N, BLOCK_D, TMA)


@triton.jit(do_not_specialize=ANY_INTEGER)
def dkdv_kernel(
    q, k, v, do, lse_log2, delta, dk, dv, q_ids, k_ids, k_first, k_last, ds, dk_sum, dv_sum,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, line_stride,
    scale, scale_log2, head_lo, heads, H, M, N, D, window, chunk_lo, chunk_hi,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    STASH: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv; `heads` counts key/value heads from `head_lo` on.

    With `STASH` only the queries [chunk_lo, chunk_hi) are walked: the sums come from and go to
    `dk_sum` and `dv_sum` until the last chunk, which writes dk and dv.
    """
    _dkdv(
        tl.program_id(0), q, k, v, do, lse_log2, delta, dk, dv, q_ids, k_ids, k_first, k_last,
        ds, dk_sum, dv_sum,
        q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, line_stride,
        scale, scale_log2, head_lo, heads, H, M, N, D, window, chunk_lo, chunk_hi,
        GROUP, CAUSAL, WINDOW, SEGMENTS, True, True, STASH, EVEN_M, EVEN_N, EVEN_D,
        BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
    )  # fmt: skip


@triton.jit
def _walk_keys(
    dq_MD, q_MD, do_MD, lse_M, delta_M, ids_M, k, v, k_ids, b, g, m0, lo, hi, N, D, window,
    scale_log2, k_strides, v_strides,
    PARTIAL: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the keys [lo, hi) give to dq."""
    for n0 in tl.range(lo, hi, BLOCK_N):
        n0 = tl.multiple_of(n0, BLOCK_N)
        k_ND = load_factor(
            k, b, g, n0, N, D, k_strides, BLOCK_N, BLOCK_D, TMA, not PARTIAL, EVEN_D, PRECISION
        )
        v_ND = load_factor(
            v, b, g, n0, N, D, v_strides, BLOCK_N, BLOCK_D, TMA, not PARTIAL, EVEN_D, PRECISION
        )
        s_MN = product(q_MD, turned(k_ND, PRECISION), None, PRECISION)
        dp_MN = product(do_MD, turned(v_ND, PRECISION), None, PRECISION)
        p_MN = tl.exp2(s_MN * scale_log2 - lse_M[:, None])
        if PARTIAL:
            m = m0 + tl.arange(0, BLOCK_M)
            n = n0 + tl.arange(0, BLOCK_N)
            seen = visible(m[:, None], n[None, :], N, window, CAUSAL, WINDOW)
            if SEGMENTS:
                ids_N = tl.load(k_ids + n, mask=n < N, other=0)
                seen = seen & (ids_M[:, None] == ids_N[None, :])
            p_MN = tl.where(seen, p_MN, 0.0)
        ds_MN = factor(p_MN * (dp_MN - delta_M[:, None]), k_ND, PRECISION)
        dq_MD = product(ds_MN, k_ND, dq_MD, PRECISION)
    return dq_MD


@triton.jit
def _dq(
    place, q, k, v, do, lse, delta, dq, q_ids, k_ids, first, last,
    q_strides, k_strides, v_strides, do_strides, dq_strides, line_stride,
    scale, scale_log2, heads, H, M, N, D, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of one head; `lse` and `delta` are pointers also with TMA."""
    head = place % heads
    m0 = (tl.cdiv(M, BLOCK_M) - 1 - place // heads) * BLOCK_M
    b = head // H
    h = head % H
    g = h // GROUP

    m = m0 + tl.arange(0, BLOCK_M)
    lse_M = load_line(lse, head, m0, M, line_stride, BLOCK_M, False)
    delta_M = load_line(delta, head, m0, M, line_stride, BLOCK_M, False)
    q_MD = load_factor(
        q, b, h, m0, M, D, q_strides, BLOCK_M, BLOCK_D, TMA, False, EVEN_D, PRECISION
    )
    do_MD = load_factor(
        do, b, h, m0, M, D, do_strides, BLOCK_M, BLOCK_D, TMA, False, EVEN_D, PRECISION
    )
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    ids_M = m
    lo, full_lo, full_hi, hi = keys_of(m0, N, window, CAUSAL, WINDOW, BLOCK_M, BLOCK_N)
    if SEGMENTS:
        row = b.to(tl.int64) * M
        ids_M = tl.load(q_ids + row + m, mask=m < M, other=0)
        lo, hi = segment_bounds(first, last, m, row, M, N, lo, hi, BLOCK_N)
        full_lo = hi
        k_ids += b.to(tl.int64) * N

    if WINDOW or SEGMENTS:
        dq_MD = _walk_keys(
            dq_MD, q_MD, do_MD, lse_M, delta_M, ids_M, k, v, k_ids, b, g, m0, lo, full_lo,
            N, D, window, scale_log2, k_strides, v_strides,
            True, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
    if not SEGMENTS:
        dq_MD = _walk_keys(
            dq_MD, q_MD, do_MD, lse_M, delta_M, ids_M, k, v, k_ids, b, g, m0, full_lo, full_hi,
            N, D, window, scale_log2, k_strides, v_strides,
            False, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
        )  # fmt: skip
        if CAUSAL or WINDOW or not EVEN_N:
            dq_MD = _walk_keys(
                dq_MD, q_MD, do_MD, lse_M, delta_M, ids_M, k, v, k_ids, b, g, m0, full_hi, hi,
                N, D, window, scale_log2, k_strides, v_strides,
                True, CAUSAL, WINDOW, SEGMENTS, EVEN_D, BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip
    store_rows(dq, dq_MD * scale, b, h, m0, M, D, dq_strides, BLOCK_M, BLOCK_D, TMA)


@triton.jit(do_not_specialize=ANY_INTEGER)
def dq_kernel(
    q, k, v, do, lse_log2, delta, dq, q_ids, k_ids, q_first, q_last,
    q_strides, k_strides, v_strides, do_strides, dq_strides, line_stride,
    scale, scale_log2, heads, H, M, N, D, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    _dq(
        tl.program_id(0), q, k, v, do, lse_log2, delta, dq, q_ids, k_ids, q_first, q_last,
        q_strides, k_strides, v_strides, do_strides, dq_strides, line_stride,
        scale, scale_log2, heads, H, M, N, D, window,
        GROUP, CAUSAL, WINDOW, SEGMENTS, EVEN_N, EVEN_D,
        BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
    )  # fmt: skip


@triton.jit(do_not_specialize=ANY_INTEGER)
def joined_kernel(
    q, k, v, do, lse_log2, delta, dk, dv, q_for_dq, k_for_dq, v_for_dq, do_for_dq,
    lse_log2_for_dq, delta_for_dq, dq, q_ids, k_ids, q_first, q_last, k_first, k_last,
    q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, dq_strides, line_stride,
    scale, scale_log2, heads, H, M, N, D, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SEGMENTS: tl.constexpr,
    EVEN_M: tl.constexpr, EVEN_N: tl.constexpr, EVEN_D: tl.constexpr, EVEN_N_DQ: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_M_DQ: tl.constexpr, BLOCK_N_DQ: tl.constexpr, BLOCK_D: tl.constexpr,
    ROLES: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All in one launch, whose programs take turns: dq | dk and dv, or with 3 ROLES dq | dk | dv.

    With few blocks neither kernel alone fills the GPU, and its longest block ends long after the
    others. Here the long blocks of both start together. Three roles make eight products, but each
    holds one sum: two sums in fp32 would spill a program's registers. The arguments `*_for_dq` are
    the same tensors once more: with TMA a descriptor knows the size of a tile, and dq's differ.
    """
    role = tl.program_id(0) % ROLES
    place = tl.program_id(0) // ROLES
    if role == 0:
        if place < tl.cdiv(M, BLOCK_M_DQ) * heads:
            _dq(
                place, q_for_dq, k_for_dq, v_for_dq, do_for_dq, lse_log2_for_dq, delta_for_dq, dq,
                q_ids, k_ids, q_first, q_last,
                q_strides, k_strides, v_strides, do_strides, dq_strides, line_stride,
                scale, scale_log2, heads, H, M, N, D, window,
                GROUP, CAUSAL, WINDOW, SEGMENTS, EVEN_N_DQ, EVEN_D,
                BLOCK_M_DQ, BLOCK_N_DQ, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip
    elif place < tl.cdiv(N, BLOCK_N) * (heads // GROUP):
        if role == 1:
            _dkdv(
                place, q, k, v, do, lse_log2, delta, dk, dv, q_ids, k_ids, k_first, k_last,
                None, None, None,
                q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, line_stride,
                scale, scale_log2, 0, heads // GROUP, H, M, N, D, window, 0, M,
                GROUP, CAUSAL, WINDOW, SEGMENTS, True, ROLES == 2, False, EVEN_M, EVEN_N, EVEN_D,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip
        elif ROLES == 3:
            _dkdv(
                place, q, k, v, do, lse_log2, delta, dk, dv, q_ids, k_ids, k_first, k_last,
                None, None, None,
                q_strides, k_strides, v_strides, do_strides, dk_strides, dv_strides, line_stride,
                scale, scale_log2, 0, heads // GROUP, H, M, N, D, window, 0, M,
                GROUP, CAUSAL, WINDOW, SEGMENTS, False, True, False, EVEN_M, EVEN_N, EVEN_D,
                BLOCK_M, BLOCK_N, BLOCK_D, TMA, PRECISION,
            )  # fmt: skip


@triton.jit(do_not_specialize=ANY_INTEGER)
def dq_from_stash_kernel(
    ds, k, dq, scale, head_lo, heads, H, N, chunk_lo,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """dq of one block of queries of a chunk, from the transposed ds that the stash holds.

    All three sources are descriptors; `heads` counts query heads from `head_lo` on.
    """
    place = tl.program_id(0)
    head = head_lo + place % heads
    b = head // H
    h = head % H
    column = (tl.num_programs(0) // heads - 1 - place // heads) * BLOCK_M
    m0 = chunk_lo + column
    hi = N
    if CAUSAL:
        # No tile above the diagonal was written; those on it hold zeros where masked.
        hi = tl.minimum(N, m0 + BLOCK_M)
    dq_MD = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n0 in tl.range(0, hi, BLOCK_N):
        ds_NM = ds.load([place % heads, n0, column]).reshape([BLOCK_N, BLOCK_M])
        k_ND = k.load([b, h // GROUP, n0, 0]).reshape([BLOCK_N, BLOCK_D])
        dq_MD = product(ds_NM.T, k_ND, dq_MD, "tf32")
    dq_MD = (dq_MD * scale).to(k.dtype)
    dq.store([b, h, m0, 0], dq_MD.reshape([1, 1, BLOCK_M, BLOCK_D]))
