# mypy: ignore-errors
"""dk and dv for Hopper, in Gluon: `dkdv_kernel` with its warps told apart.

As in `forward_hopper`, a producer warp feeds two consumers, here of 64 keys each. Per
tile of queries a consumer issues four products, and does its arithmetic while others run:

    s = k q^T   dp = v do^T      | p = exp2(s - lse)        while dp runs
    dv += p do                   | ds = p * (dp - delta)    while dv runs
    dk += ds q                   | ds goes to the stash     while dk runs

dk and dv stay in registers, 128 of the 240 that a thread has, so there is no room to keep one
tile's products running into the next tile; the other consumer fills the gap.

Takes bf16 and fp16, head widths 64 and 128, causal or not; no window and no segments.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from shardwise.kernels.attention.forward_hopper import async_load, async_store, barrier
from shardwise.kernels.attention.tiles import ANY_INTEGER


@gluon.jit
def _feed(
    q, do, lse, delta, tiles, lines, bars, b, h, head, lo, hi, count,
    BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Load the queries [lo, hi) of one head, and what belongs to them, stage by stage."""
    q_smem, do_smem = tiles
    lse_smem, delta_smem = lines
    q_full, do_full, empty = bars
    for m0 in range(lo, hi, BLOCK_M):
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
        full = q_full.index(stage)
        mbarrier.expect(full, q.block_type.nbytes + lse.block_type.nbytes)
        async_load(q, [b, h, m0, 0], full, q_smem.index(stage))
        async_load(lse, [head, m0], full, lse_smem.index(stage))
        full = do_full.index(stage)
        mbarrier.expect(full, do.block_type.nbytes + delta.block_type.nbytes)
        async_load(do, [b, h, m0, 0], full, do_smem.index(stage))
        async_load(delta, [head, m0], full, delta_smem.index(stage))
        count += 1
    return count


@gluon.jit
def _produce(
    q, k, v, do, lse, delta, k_smem, v_smem, tiles, lines, kv_full, bars,
    b, g, n0, H, lo, full_lo, hi,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr, HALF: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(kv_full, 2 * k.block_type.nbytes + 2 * v.block_type.nbytes)
    for half in gl.static_range(2):
        row = n0 + half * HALF
        async_load(k, [b, g, row, 0], kv_full, k_smem.index(half))
        async_load(v, [b, g, row, 0], kv_full, v_smem.index(half))
    count = 0
    for i in range(GROUP):
        h = g * GROUP + i
        head = b * H + h
        count = _feed(
            q, do, lse, delta, tiles, lines, bars, b, h, head, full_lo, hi, count, BLOCK_M, STAGES
        )
        if CAUSAL:
            count = _feed(
                q, do, lse, delta, tiles, lines, bars,
                b, h, head, lo, full_lo, count, BLOCK_M, STAGES,
            )  # fmt: skip


@gluon.jit
def _walk_queries(
    dk_ND, dv_ND, k_ND, v_ND, stash, ds_smem, tiles, lines, bars, stash_head, chunk_lo, n0,
    lo, hi, count, scale_log2, half: gl.constexpr, PARTIAL: gl.constexpr, STASH: gl.constexpr,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Add what the queries [lo, hi) of one head give to dk and dv."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, d_layout, 2)
    columns: gl.constexpr = gl.SliceLayout(0, s_layout)
    q_smem, do_smem = tiles
    lse_smem, delta_smem = lines
    q_full, do_full, empty = bars
    dtype: gl.constexpr = q_smem.dtype
    zeros_NM = gl.zeros([HALF, BLOCK_M], gl.float32, s_layout)
    for m0 in range(lo, hi, BLOCK_M):
        stage = count % STAGES
        phase = count // STAGES & 1
        q_MD = q_smem.index(stage)
        do_MD = do_smem.index(stage)
        mbarrier.wait(q_full.index(stage), phase)
        s_NM = warpgroup_mma(k_ND, q_MD.permute([1, 0]), zeros_NM, use_acc=False, is_async=True)
        mbarrier.wait(do_full.index(stage), phase)
        dp_NM = warpgroup_mma(v_ND, do_MD.permute([1, 0]), zeros_NM, use_acc=False, is_async=True)

        lse_M = lse_smem.index(stage).load(columns)
        s_NM = warpgroup_mma_wait(1, [s_NM])
        p_NM = gl.exp2(s_NM * scale_log2 - lse_M[None, :])
        if PARTIAL:
            m = m0 + gl.arange(0, BLOCK_M, columns)
            n = n0 + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
            p_NM = gl.where(n[:, None] <= m[None, :], p_NM, 0.0)
        p_left = gl.convert_layout(p_NM.to(dtype), left)
        dv_ND = warpgroup_mma(p_left, do_MD, dv_ND, is_async=True)

        delta_M = delta_smem.index(stage).load(columns)
        dp_NM = warpgroup_mma_wait(1, [dp_NM])
        ds_NM = (p_NM * (dp_NM - delta_M[None, :])).to(dtype)
        ds_left = gl.convert_layout(ds_NM, left)
        dk_ND = warpgroup_mma(ds_left, q_MD, dk_ND, is_async=True)

        if STASH:
            ds_tile = ds_smem.index(2 * half + (count & 1))
            ds_tile.store(ds_NM)
            fence_async_shared()
            barrier()
            async_store(stash, [stash_head, n0, m0 - chunk_lo], ds_tile)
        dv_ND, dk_ND, p_left, ds_left = warpgroup_mma_wait(0, [dv_ND, dk_ND, p_left, ds_left])
        if STASH:
            # The store before this one has left its buffer, which the next tile takes; the barrier
            # that comes with `arrive` tells the other warps.
            tma.store_wait(1)
        mbarrier.arrive(empty.index(stage))
        count += 1
    return dk_ND, dv_ND, count


@gluon.jit
def _consume(
    dk, dv, stash, dk_sum, dv_sum, k_smem, v_smem, ds_smem, tiles, lines, kv_full, bars,
    b, g, n0, place, keys_with_sums, scale, scale_log2, M, N, lo, full_lo, hi, chunk_lo, chunk_hi,
    half: gl.constexpr, GROUP: gl.constexpr, CAUSAL: gl.constexpr, STASH: gl.constexpr,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    d_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dtype: gl.constexpr = k_smem.dtype
    n0 += half * HALF
    n = n0 + gl.arange(0, HALF, gl.SliceLayout(1, d_layout))
    d = gl.arange(0, D, gl.SliceLayout(0, d_layout))
    sums = (place.to(gl.int64) * N + n)[:, None] * D + d[None, :]
    dk_ND = gl.zeros([HALF, D], gl.float32, d_layout)
    dv_ND = gl.zeros([HALF, D], gl.float32, d_layout)
    if STASH:
        dk_ND = gl.load(dk_sum + sums, mask=(n < keys_with_sums)[:, None], other=0.0)
        dv_ND = gl.load(dv_sum + sums, mask=(n < keys_with_sums)[:, None], other=0.0)
    k_ND = k_smem.index(half)
    v_ND = v_smem.index(half)
    mbarrier.wait(kv_full, 0)
    count = 0
    for i in range(GROUP):
        dk_ND, dv_ND, count = _walk_queries(
            dk_ND, dv_ND, k_ND, v_ND, stash, ds_smem, tiles, lines, bars, place * GROUP + i,
            chunk_lo, n0, full_lo, hi, count, scale_log2,
            half, False, STASH, HALF, BLOCK_M, D, STAGES,
        )  # fmt: skip
        if CAUSAL:
            dk_ND, dv_ND, count = _walk_queries(
                dk_ND, dv_ND, k_ND, v_ND, stash, ds_smem, tiles, lines, bars, place * GROUP + i,
                chunk_lo, n0, lo, full_lo, count, scale_log2,
                half, True, STASH, HALF, BLOCK_M, D, STAGES,
            )  # fmt: skip

    done = True
    if STASH:
        tma.store_wait(0)
        done = chunk_hi >= M
        if chunk_hi < M:
            gl.store(dk_sum + sums, dk_ND, mask=(n < N)[:, None])
            gl.store(dv_sum + sums, dv_ND, mask=(n < N)[:, None])
    if done:
        k_ND.store((dk_ND * scale).to(dtype))  # k and v have served; their buffers take dk and dv
        v_ND.store(dv_ND.to(dtype))
        fence_async_shared()
        barrier()
        async_store(dk, [b, g, n0, 0], k_ND)
        async_store(dv, [b, g, n0, 0], v_ND)
        tma.store_wait(0)


@gluon.jit(do_not_specialize=ANY_INTEGER)
def dkdv_hopper_kernel(
    q, k, v, do, lse, delta, dk, dv, stash, dk_sum, dv_sum,
    scale, scale_log2, head_lo, heads, H, M, N, chunk_lo, chunk_hi,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, STASH: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of one block of keys; the arguments are those of `dkdv_kernel`.

    All tensors but the sums are descriptors. Without `STASH` the chunk is all queries.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    dtype: gl.constexpr = q.dtype
    tile: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    line: gl.constexpr = gl.NVMMASharedLayout(0, 32, 1)
    place = gl.program_id(0) % heads
    head = head_lo + place
    n0 = gl.program_id(0) // heads * BLOCK_N
    b = head // (H // GROUP)
    g = head % (H // GROUP)
    lo = chunk_lo
    hi = gl.minimum(chunk_hi, M)
    full_lo = chunk_lo
    keys_with_sums = gl.where(chunk_lo > 0, N, 0)  # keys whose sums an earlier chunk has left
    if CAUSAL:
        keys_with_sums = gl.where(chunk_lo > n0, N, 0)
        lo = gl.maximum(lo, n0)
        full_lo = gl.minimum(gl.maximum(full_lo, n0 + BLOCK_N), gl.maximum(hi, lo))

    k_smem = gl.allocate_shared_memory(dtype, [2, HALF, D], tile)
    v_smem = gl.allocate_shared_memory(dtype, [2, HALF, D], tile)
    q_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile)
    do_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, D], tile)
    lse_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], line)
    delta_smem = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], line)
    ds_smem = gl.allocate_shared_memory(dtype, [4, HALF, BLOCK_M], tile)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    do_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(do_full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)  # both consumers read each tile
    fence_async_shared()

    tiles = (q_smem, do_smem)
    lines = (lse_smem, delta_smem)
    bars = (q_full, do_full, empty)
    gl.warp_specialize(
        [
            (_consume, (
                dk, dv, stash, dk_sum, dv_sum, k_smem, v_smem, ds_smem, tiles, lines, kv_full,
                bars, b, g, n0, place, keys_with_sums, scale, scale_log2, M, N, lo, full_lo, hi,
                chunk_lo, chunk_hi, 0, GROUP, CAUSAL, STASH, HALF, BLOCK_M, D, STAGES,
            )),
            (_consume, (
                dk, dv, stash, dk_sum, dv_sum, k_smem, v_smem, ds_smem, tiles, lines, kv_full,
                bars, b, g, n0, place, keys_with_sums, scale, scale_log2, M, N, lo, full_lo, hi,
                chunk_lo, chunk_hi, 1, GROUP, CAUSAL, STASH, HALF, BLOCK_M, D, STAGES,
            )),
            (_produce, (
                q, k, v, do, lse, delta, k_smem, v_smem, tiles, lines, kv_full, bars,
                b, g, n0, H, lo, full_lo, hi, GROUP, CAUSAL, BLOCK_M, HALF, STAGES,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers per thread; the first consumer gets what is left: 240
    )  # fmt: skip
