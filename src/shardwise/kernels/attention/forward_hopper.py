# mypy: ignore-errors

"""The forward kernel for Hopper, in Gluon: the same algorithm with its warps told apart.

Plain Triton runs loads, products and softmax of a block in lockstep, so the tensor cores wait while
exponentials are taken. Here three groups of warps share a block of 128 queries:

    producer     1 warp    asks the copy engine for tiles of q, k and v, a few ahead
    consumer 0   4 warps   queries   0 ..  63
    consumer 1   4 warps   queries  64 .. 127

A consumer keeps two products in flight: while p v of one tile runs, the softmax of the next tile is
taken from the scores that q k^T has just delivered. The consumers take turns to issue products, so
that one's softmax falls into the other's products.

Tiles of k go from the last to the first: with equal block sizes only the last one, on the diagonal
or at the ragged end, needs a mask, and each query sees a key of it, so no sum is ever empty.

Barriers come in pairs: `full` is signalled by the copy engine, `empty` by each consumer. The nth
use of a ring of S stages has stage n % S and phase n // S & 1.

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

from shardwise.kernels.attention.tiles import ANY_INTEGER, LN2

# Triton 3.9 renamed these three, and keeps two of the old names only to refuse them.
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _place(tile, heads, H, M, section, BLOCK_M: gl.constexpr):
    """Batch, head and first query of a tile: late queries first, in sections of heads."""
    blocks = gl.cdiv(M, BLOCK_M)
    start = tile // (blocks * section) * section
    width = gl.minimum(section, heads - start)
    place = tile - start * blocks
    head = start + place % width
    return head // H, head % H, (blocks - 1 - place // width) * BLOCK_M


@gluon.jit
def _rounds(tiles):
    """How many tiles this program takes."""
    programs = gl.num_programs(0)
    whole = tiles // programs
    return whole + (_tile(whole) < tiles).to(gl.int32)


@gluon.jit
def _tile(round):
    """This program's tile in a round; every second round deals backwards.

    Tiles come longest first, so a program that got the longest of one round gets the shortest of
    the next, and all end together.
    """
    i = gl.program_id(0)
    programs = gl.num_programs(0)
    return round * programs + gl.where(round % 2 == 0, i, programs - 1 - i)


@gluon.jit
def _count(m0, N, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """How many tiles of keys the queries [m0, m0 + BLOCK_M) see."""
    hi = N
    if CAUSAL:
        hi = gl.minimum(N, m0 + BLOCK_M)
    return gl.cdiv(hi, BLOCK_N)


@gluon.jit
def _produce(
    q, k, v, smem, q_bars, k_bars, v_bars, tiles, heads, H, M, N, section,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_smem, k_smem, v_smem, _ = smem
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    count = 0
    for round in range(_rounds(tiles)):
        b, h, m0 = _place(_tile(round), heads, H, M, section, BLOCK_M)
        for half in gl.static_range(2):
            mbarrier.wait(q_empty.index(half), (round & 1) ^ 1)
            mbarrier.expect(q_full.index(half), q.block_type.nbytes)
            async_load(
                q, [b, h, m0 + half * (BLOCK_M // 2), 0], q_full.index(half), q_smem.index(half)
            )
        blocks = _count(m0, N, CAUSAL, BLOCK_M, BLOCK_N)
        for i in range(blocks):
            n0 = (blocks - 1 - i) * BLOCK_N
            stage = count % STAGES
            phase = (count // STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), phase)
            mbarrier.expect(k_full.index(stage), k.block_type.nbytes)
            async_load(k, [b, h // GROUP, n0, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase)
            mbarrier.expect(v_full.index(stage), v.block_type.nbytes)
            async_load(v, [b, h // GROUP, n0, 0], v_full.index(stage), v_smem.index(stage))
            count += 1


@gluon.jit
def _consume(
    o, lse, smem, q_bars, k_bars, v_bars, turn, tiles, heads, H, M, N, section,
    scale_log2, half: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BLOCK_M // 2
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    q_smem, k_smem, v_smem, o_smem = smem
    q_full, q_empty = q_bars
    k_full, k_empty = k_bars
    v_full, v_empty = v_bars
    dtype: gl.constexpr = q_smem.dtype
    q_MD = q_smem.index(half)
    o_tile = o_smem.index(half)
    zeros_MN = gl.zeros([HALF, BLOCK_N], gl.float32, s_layout)
    count = 0
    turns = 0
    for round in range(_rounds(tiles)):
        b, h, m0 = _place(_tile(round), heads, H, M, section, BLOCK_M)
        blocks = _count(m0, N, CAUSAL, BLOCK_M, BLOCK_N)
        m0 += half * HALF

        # The last tile of keys: the only masked one. Its products are not yet overlapped.
        stage = count % STAGES
        mbarrier.wait(q_full.index(half), round & 1)
        mbarrier.wait(k_full.index(stage), count // STAGES & 1)
        s_MN = warpgroup_mma(
            q_MD, k_smem.index(stage).permute([1, 0]), zeros_MN, use_acc=False, is_async=True
        )
        s_MN = warpgroup_mma_wait(0, [s_MN])
        mbarrier.arrive(k_empty.index(stage))
        m = m0 + gl.arange(0, HALF, gl.SliceLayout(1, s_layout))
        n = (blocks - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, s_layout))
        seen = (n < N)[None, :]
        if CAUSAL:
            seen = seen & (n[None, :] <= m[:, None])
        s_MN = gl.where(seen, s_MN, float("-inf"))
        max_M = gl.max(s_MN, 1) * scale_log2
        p_MN = gl.exp2(s_MN * scale_log2 - max_M[:, None])
        sum_M = gl.sum(p_MN, 1)
        p_left = gl.convert_layout(p_MN.to(dtype), left)
        acc_MD = gl.zeros([HALF, D], gl.float32, o_layout)

        for _ in range(1, blocks):
            v_stage = stage
            v_phase = count // STAGES & 1
            count += 1
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            mbarrier.wait(turn.index(half), turns & 1)
            turns += 1
            s_MN = warpgroup_mma(
                q_MD, k_smem.index(stage).permute([1, 0]), zeros_MN, use_acc=False, is_async=True
            )
            mbarrier.wait(v_full.index(v_stage), v_phase)
            acc_MD = warpgroup_mma(p_left, v_smem.index(v_stage), acc_MD, is_async=True)
            mbarrier.arrive(turn.index(1 - half))
            s_MN = warpgroup_mma_wait(1, [s_MN])
            mbarrier.arrive(k_empty.index(stage))
            new_M = gl.maximum(max_M, gl.max(s_MN, 1) * scale_log2)
            p_MN = gl.exp2(s_MN * scale_log2 - new_M[:, None])
            decay_M = gl.exp2(max_M - new_M)
            sum_M = sum_M * decay_M + gl.sum(p_MN, 1)
            max_M = new_M
            p_next = gl.convert_layout(p_MN.to(dtype), left)
            # Else ptxas moves the wait below up to here, and the softmax no longer runs beside the
            # product: a sleep that is never taken (no sum is this NaN) makes the wait follow it.
            sum_M = gl.inline_asm_elementwise(
                "{ .reg .pred never; setp.eq.b32 never, $1, 0x7fc00001;"
                " @never nanosleep.u32 1; mov.b32 $0, $1; }",
                "=r,r",
                [sum_M],
                dtype=gl.float32,
                is_pure=False,
                pack=1,
            )
            acc_MD, p_left = warpgroup_mma_wait(0, [acc_MD, p_left])
            mbarrier.arrive(v_empty.index(v_stage))
            acc_MD = acc_MD * gl.convert_layout(decay_M, rows)[:, None]
            p_left = p_next

        mbarrier.arrive(q_empty.index(half))
        mbarrier.wait(v_full.index(stage), count // STAGES & 1)
        acc_MD = warpgroup_mma(p_left, v_smem.index(stage), acc_MD, is_async=True)
        acc_MD, p_left = warpgroup_mma_wait(0, [acc_MD, p_left])
        mbarrier.arrive(v_empty.index(stage))
        count += 1

        head = (b * H + h).to(gl.int64)
        lse_M = (max_M + gl.log2(sum_M)) * LN2
        gl.store(lse + head * M + m, lse_M, mask=m < M)
        o_MD = acc_MD * gl.convert_layout(1.0 / sum_M, rows)[:, None]
        tma.store_wait(0)  # the tile before may still be leaving the buffer
        barrier()
        o_tile.store(o_MD.to(dtype))
        fence_async_shared()
        barrier()
        async_store(o, [b, h, m0, 0], o_tile)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=ANY_INTEGER)
def forward_hopper_kernel(
    q, k, v, o, lse, scale_log2, heads, H, M, N, section,
    GROUP: gl.constexpr, CAUSAL: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """A persistent grid: each program takes one block of queries per round.

    `q`, `k`, `v`, `o` are descriptors of (1, 1, rows, D) blocks: half a BLOCK_M for q and o, a
    BLOCK_N for k and v.
    """
    HALF: gl.constexpr = BLOCK_M // 2
    dtype: gl.constexpr = q.dtype
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [2, HALF, D], layout)
    o_smem = gl.allocate_shared_memory(dtype, [2, HALF, D], layout)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], layout)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
        mbarrier.init(turn.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both consumers read each tile
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    mbarrier.arrive(turn.index(0))  # consumer 0 goes first

    tiles = gl.cdiv(M, BLOCK_M) * heads
    smem = (q_smem, k_smem, v_smem, o_smem)
    q_bars = (q_full, q_empty)
    k_bars = (k_full, k_empty)
    v_bars = (v_full, v_empty)
    gl.warp_specialize(
        [
            (_consume, (
                o, lse, smem, q_bars, k_bars, v_bars, turn, tiles, heads, H, M, N, section,
                scale_log2, 0, CAUSAL, BLOCK_M, BLOCK_N, D, STAGES,
            )),
            (_consume, (
                o, lse, smem, q_bars, k_bars, v_bars, turn, tiles, heads, H, M, N, section,
                scale_log2, 1, CAUSAL, BLOCK_M, BLOCK_N, D, STAGES,
            )),
            (_produce, (
                q, k, v, smem, q_bars, k_bars, v_bars, tiles, heads, H, M, N, section,
                GROUP, CAUSAL, BLOCK_M, BLOCK_N, STAGES,
            )),
        ],
        [4, 1],  # warps of the second consumer and of the producer
        [240, 24],  # and their registers per thread; the first consumer gets what is left: 240
    )  # fmt: skip
