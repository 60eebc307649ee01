# mypy: disable-error-code="import-not-found,import-untyped"
"""From tensors to kernel launches: grids, workspaces, and which kernel serves.

Importing this needs Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from shardwise.kernels import attention_configs as configs
from shardwise.kernels.attention_backward import (
    delta_kernel,
    dkdv_kernel,
    dq_from_stash_kernel,
    dq_kernel,
)
from shardwise.kernels.attention_configs import Backward, Stash, Tiles
from shardwise.kernels.attention_forward import forward_kernel
from shardwise.kernels.attention_layout import contiguous_rows, new_like, new_lines
from shardwise.kernels.attention_operands import (
    HAS_GLUON,
    INTERPRETED,
    aligned_lines,
    block_d,
    capability,
    descriptor,
    gluon_lines,
    gluon_tiles,
    lines,
    on_device,
    processors,
    reach,
    tiles_of,
    tma_serves,
)

if HAS_GLUON:
    from shardwise.kernels.attention_backward_hopper import dkdv_hopper_kernel
    from shardwise.kernels.attention_forward_hopper import forward_hopper_kernel

LOG2E = math.log2(math.e)
HOPPER_WIDTHS = (64, 128)


@dataclass(frozen=True)
class Mask:
    """Which pairs count, and how scores are scaled. Segment ids are int32 (B, M) and (B, N)."""

    causal: bool
    scale: float
    window: int | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.q_ids is None


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, precision: str, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """o like q, and the base-2 lse as (B, H, M) in fp32; inputs are (B, heads, length, D)."""
    q, k, v = (contiguous_rows(x) for x in (q, k, v))
    o = new_like(q)
    lse = new_lines(q)
    if tiles is None:
        tiles = configs.forward_tiles(
            8 * q.itemsize, precision, block_d(q), hopper_serves(q, k, v, o, mask=mask)
        )
    B, H, M, D = q.shape
    N, heads = k.shape[2], B * H
    group = H // k.shape[1]
    kv_bytes = 2 * N * D * k.itemsize
    section = max(1, min(heads, configs.HEADS_CACHE_BYTES // kv_bytes * group))
    programs = triton.cdiv(M, tiles.block_m) * heads
    with on_device(q):
        if tiles.hopper:
            half = tiles.block_m // 2
            forward_hopper_kernel[(min(programs, processors(q.device)),)](
                gluon_tiles(q, half), gluon_tiles(k, tiles.block_n),
                gluon_tiles(v, tiles.block_n), gluon_tiles(o, half),
                lse, lse.stride(1), mask.scale * LOG2E, heads, H, M, N, section,
                GROUP=group, CAUSAL=mask.causal, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
                D=D, STAGES=tiles.num_stages, PINGPONG=tiles.pingpong, num_warps=4,
            )  # fmt: skip
            return o, lse
        tma = tiles.tma and tma_serves(q, k, v, o)
        if tiles.persistent:
            programs = min(programs, processors(q.device))
        forward_kernel[(programs,)](
            *_sources((q, k, v, o), "mnnm", tiles, tma),
            lse, mask.q_ids, mask.k_ids, *reach(mask.q_ids, mask.k_ids),
            *(x.stride()[:3] for x in (q, k, v, o)), lse.stride(1),
            mask.scale * LOG2E, heads, H, M, N, D, mask.window or 0, section,
            GROUP=group, CAUSAL=mask.causal, WINDOW=mask.window is not None,
            SEGMENTS=mask.q_ids is not None, EVEN_N=N % tiles.block_n == 0,
            EVEN_D=block_d(q) == D, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=block_d(q), TMA=tma, PERSISTENT=tiles.persistent, PRECISION=_dot(precision),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
    return o, lse


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    mask: Mask,
    precision: str,
    tiles: Backward | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, each like its input."""
    q, k, v, o, do = (contiguous_rows(x) for x in (q, k, v, o, do))
    dq, dk, dv = new_like(q), new_like(k), new_like(v)
    call = _Backward(q, k, v, o, aligned_lines(lse), do, dq, dk, dv, mask, precision)
    if tiles is None:
        hopper = hopper_serves(q, k, v, do, dq, dk, dv, mask=mask)
        tiles = configs.backward_tiles(8 * q.itemsize, precision, block_d(q), hopper)
    with on_device(q):
        call.run(tiles)
    return dq, dk, dv


class _Backward:
    """One backward pass: its tensors, and the launches they go into."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        do: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        mask: Mask,
        precision: str,
    ) -> None:
        self.q, self.k, self.v, self.o, self.lse, self.do = q, k, v, o, lse, do
        self.dq, self.dk, self.dv = dq, dk, dv
        self.mask, self.precision = mask, precision
        self.delta = new_lines(q)
        self.B, self.H, self.M, self.D = q.shape
        self.N, self.G = k.shape[2], k.shape[1]
        self.group = self.H // self.G
        self.tma = tma_serves(q, k, v, do, dq, dk, dv)

    def run(self, tiles: Backward) -> None:
        delta_kernel[(triton.cdiv(self.M, 64), self.B * self.H)](
            self.o, self.do, self.delta, self.o.stride()[:3], self.do.stride()[:3],
            self.delta.stride(1), self.H, self.M, self.D, BLOCK_M=64, BLOCK_D=block_d(self.q),
        )  # fmt: skip
        stash = tiles.stash
        if (
            stash is not None
            and self.tma
            and self.q.itemsize == 2
            and self.mask.plain
            and stash.min_heads <= self.B * self.H
        ):
            self._with_stash(tiles.dkdv, stash)
            return
        self._dkdv(tiles.dkdv, 0, self.B * self.G, 0, self.M)
        self._dq(tiles.dq)

    def _with_stash(self, tiles: Tiles, stash: Stash) -> None:
        """dk, dv and ds chunk by chunk, for as many heads at a time as the workspace holds."""
        if max(stash.product.block_m, stash.product.block_n) > tiles.block_n:
            raise ValueError(
                f"the product of the stash has blocks of {stash.product.block_m} queries and "
                f"{stash.product.block_n} keys: more than the {tiles.block_n} keys of one ds tile"
            )
        queries = stash.bytes // (2 * self.N * self.group)  # that fit for one key/value head
        chunk = min(stash.chunk, triton.cdiv(self.M, 128) * 128, max(512, queries // 128 * 128))
        heads = max(1, min(self.B * self.G, queries // chunk))
        ds = self.q.new_empty(heads * self.group, self.N, -(-chunk // 8) * 8)
        carried = self.N if chunk < self.M else 0
        sums = self.q.new_empty(2, heads, carried, block_d(self.q), dtype=torch.float32)
        for head in range(0, self.B * self.G, heads):
            now = min(heads, self.B * self.G - head)
            for lo in range(0, self.M, chunk):
                hi = min(lo + chunk, self.M)
                self._dkdv(tiles, head, now, lo, hi, ds, sums)
                self._dq_from_stash(stash.product, head, now, lo, hi, ds)

    def _dkdv(
        self,
        tiles: Tiles,
        head: int,
        heads: int,
        lo: int,
        hi: int,
        ds: Tensor | None = None,
        sums: Tensor | None = None,
    ) -> None:
        mask, tma = self.mask, tiles.tma and self.tma
        # Under a causal mask the queries before `hi` see no key from `hi` on; the last chunk must
        # still visit those keys, to write their zeros.
        keys = min(self.N, hi) if mask.causal and hi < self.M else self.N
        grid = (triton.cdiv(keys, tiles.block_n) * heads,)
        dk_sum, dv_sum = (None, None) if sums is None else (sums[0], sums[1])
        if tiles.hopper:
            half = tiles.block_n // 2
            dkdv_hopper_kernel[grid](
                gluon_tiles(self.q, tiles.block_m), gluon_tiles(self.k, half),
                gluon_tiles(self.v, half), gluon_tiles(self.do, tiles.block_m),
                gluon_lines(self.lse, tiles.block_m), gluon_lines(self.delta, tiles.block_m),
                gluon_tiles(self.dk, half), gluon_tiles(self.dv, half),
                None if ds is None else gluon_tiles(ds, half, tiles.block_m), dk_sum, dv_sum,
                mask.scale, mask.scale * LOG2E, head, heads, self.H, self.M, self.N, lo, hi,
                GROUP=self.group, CAUSAL=mask.causal, STASH=ds is not None,
                BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, D=self.D, STAGES=tiles.num_stages,
                num_warps=4,
            )  # fmt: skip
            return
        tensors = (self.q, self.k, self.v, self.do, self.dk, self.dv)
        sources = _sources(tensors, "mnnmnn", tiles, tma)
        dkdv_kernel[grid](
            *sources[:4], lines(self.lse, tiles.block_m, tma),
            lines(self.delta, tiles.block_m, tma), *sources[4:],
            mask.q_ids, mask.k_ids, *reach(mask.k_ids, mask.q_ids),
            None if ds is None else descriptor(ds, [1, tiles.block_n, tiles.block_m]),
            dk_sum, dv_sum, *(x.stride()[:3] for x in tensors), self.lse.stride(1),
            mask.scale, mask.scale * LOG2E, head, heads, self.H, self.M, self.N, self.D,
            mask.window or 0, lo, hi,
            GROUP=self.group, CAUSAL=mask.causal, WINDOW=mask.window is not None,
            SEGMENTS=mask.q_ids is not None, STASH=ds is not None,
            EVEN_M=self.M % tiles.block_m == 0, EVEN_N=self.N % tiles.block_n == 0,
            EVEN_D=block_d(self.q) == self.D, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=block_d(self.q), TMA=tma, PRECISION=_dot(self.precision),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _dq(self, tiles: Tiles) -> None:
        mask, tma = self.mask, tiles.tma and self.tma
        tensors = (self.q, self.k, self.v, self.do, self.dq)
        sources = _sources(tensors, "mnnmm", tiles, tma)
        heads = self.B * self.H
        dq_kernel[(triton.cdiv(self.M, tiles.block_m) * heads,)](
            *sources[:4], self.lse, self.delta, sources[4],
            mask.q_ids, mask.k_ids, *reach(mask.q_ids, mask.k_ids),
            *(x.stride()[:3] for x in tensors), self.lse.stride(1),
            mask.scale, mask.scale * LOG2E, heads, self.H, self.M, self.N, self.D,
            mask.window or 0,
            GROUP=self.group, CAUSAL=mask.causal, WINDOW=mask.window is not None,
            SEGMENTS=mask.q_ids is not None, EVEN_N=self.N % tiles.block_n == 0,
            EVEN_D=block_d(self.q) == self.D, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n,
            BLOCK_D=block_d(self.q), TMA=tma, PRECISION=_dot(self.precision),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip

    def _dq_from_stash(
        self, tiles: Tiles, head: int, heads: int, lo: int, hi: int, ds: Tensor
    ) -> None:
        queries = heads * self.group
        dq_from_stash_kernel[(triton.cdiv(hi - lo, tiles.block_m) * queries,)](
            descriptor(ds, [1, tiles.block_n, tiles.block_m]),
            tiles_of(self.k, tiles.block_n, True), tiles_of(self.dq, tiles.block_m, True),
            self.mask.scale, head * self.group, queries, self.H, self.N, lo,
            GROUP=self.group, CAUSAL=self.mask.causal, BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n, BLOCK_D=block_d(self.q),
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip


def hopper_serves(*tensors: Tensor, mask: Mask) -> bool:
    """Whether the Gluon kernels can take these tensors."""
    q = tensors[0]
    return (
        HAS_GLUON
        and not INTERPRETED
        and capability(q.device) == 90
        and q.itemsize == 2
        and q.shape[-1] in HOPPER_WIDTHS
        and mask.plain
        and tma_serves(*tensors)
    )


def _sources(tensors: Sequence[Tensor], letters: str, tiles: Tiles, tma: bool) -> list[Any]:
    """What the kernel reads or writes each tensor through; letters: blocks of m or n rows."""
    rows = {"m": tiles.block_m, "n": tiles.block_n}
    return [tiles_of(x, rows[letter], tma) for x, letter in zip(tensors, letters, strict=True)]


def _dot(precision: str) -> str:
    """Triton's name for how fp32 products are made; 16-bit products do not look at it."""
    if precision == "tf32":
        return "tf32"
    return "ieee" if INTERPRETED else configs.FP32_PRECISION
