# mypy: disable-error-code="import-not-found,import-untyped"
"""Which kernels run for given shapes, in what order, on what grids and workspaces."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from shardwise.kernels.attention import configs
from shardwise.kernels.attention.arguments import (
    BACKWARD,
    FORWARD,
    IDS,
    LINES,
    STASH,
    Mask,
    Operands,
    meta,
)
from shardwise.kernels.attention.backward import (
    dkdv_kernel,
    dq_from_stash_kernel,
    dq_kernel,
    joined_kernel,
)
from shardwise.kernels.attention.calls import Plan
from shardwise.kernels.attention.configs import Backward, Stash, Tiles
from shardwise.kernels.attention.forward import forward_kernel
from shardwise.kernels.attention.operands import (
    HAS_GLUON,
    gluon_line_descriptor,
    memory,
    new_lines,
    processors,
)
from shardwise.kernels.attention.prepare import lines_kernel
from shardwise.kernels.attention.tiles import LOG2E as LOG2E_IN_KERNELS
from shardwise.kernels.launches import Launch, Tile

if HAS_GLUON:
    from shardwise.kernels.attention.backward_hopper import dkdv_hopper_kernel
    from shardwise.kernels.attention.forward_hopper import forward_hopper_kernel

LOG2E = LOG2E_IN_KERNELS.value


def plan_forward(
    tensors: tuple[Tensor | None, ...], mask: Mask, precision: str, tiles: Tiles | None
) -> Plan:
    return _Planner(FORWARD, tensors, mask, precision).forward(tiles)


def plan_backward(
    tensors: tuple[Tensor | None, ...], mask: Mask, precision: str, tiles: Backward | None
) -> Plan:
    return _Planner(BACKWARD, tensors, mask, precision).backward(tiles)


class _Planner(Operands):
    """Makes the launches of one call."""

    def forward(self, tiles: Tiles | None) -> Plan:
        tiles = tiles or configs.forward_tiles(*self.choice)
        plan = Plan()
        if self.splits(tiles):
            self.split(plan)
        plan.launches.append(self.forward_launch(tiles))
        return plan

    def forward_launch(self, tiles: Tiles) -> Launch:
        mask = self.mask
        kv_bytes = 2 * self.N * self.D * self["k"].itemsize
        together = max(configs.MIN_HEADS, configs.HEADS_CACHE_BYTES // kv_bytes * self.group)
        section = min(self.heads, together)
        programs = triton.cdiv(self.M, tiles.block_m) * self.heads
        if tiles.hopper:
            half = tiles.block_m // 2
            arguments: list[Any] = [
                self.gluon("q", half), self.gluon("k", tiles.block_n),
                self.gluon("v", tiles.block_n), self.gluon("o", half), *self.pointers("lse"),
                mask.scale * LOG2E, self.heads, self.H, self.M, self.N, section,
            ]  # fmt: skip
            return Launch(
                forward_hopper_kernel, (min(programs, processors(self.device)),), arguments,
                GROUP=self.group, CAUSAL=mask.causal, BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n, D=self.D, STAGES=tiles.num_stages, num_warps=4,
            )  # fmt: skip
        tma = tiles.tma and self.tma
        names = self.factors(tiles, "q", "k", "v", "o")
        arguments = [
            *self.rows(names, "mnnm", tiles, tma),
            *self.pointers("lse", "q_ids", "k_ids", "q_first", "q_last"),
            *self.strides(*names), mask.scale * LOG2E,
            self.heads, self.H, self.M, self.N, self.D, mask.window or 0, section,
        ]  # fmt: skip
        return Launch(
            forward_kernel, (programs,), arguments, **self.constants(tiles, tma),
            EVEN_N=self.N % tiles.block_n == 0,
        )  # fmt: skip

    def backward(self, tiles: Backward | None) -> Plan:
        tiles = tiles or configs.backward_tiles(*self.choice)
        plan = Plan()
        for name in LINES:
            self.space(plan, name, new_lines(self.B, self.H, self.M))
        if self.splits(tiles.dkdv) or self.splits(tiles.dq):
            self.split(plan)
        else:
            plan.launches.append(self.make_lines())
        stash = tiles.stash
        if (
            stash is not None
            and self.tma
            and self["q"].itemsize == 2
            and self.mask.plain
            and stash.min_heads <= self.heads
        ):
            self.with_stash(plan, tiles.dkdv, stash)
        elif tiles.joined:
            plan.launches.append(self.joined(tiles))
        else:
            plan.launches += [
                self.dkdv(tiles.dkdv, 0, self.B * self.G, 0, self.M),
                self.dq(tiles.dq),
            ]
        return plan

    def make_lines(self) -> Launch:
        arguments = [
            *self.pointers("o", "do", "lse", "dlse", "delta", "lse_log2"),
            *self.strides("o", "do"), self["delta"].stride(1), self.H, self.M, self.D,
        ]  # fmt: skip
        grid = (triton.cdiv(self.M, 64), self.heads)
        return Launch(lines_kernel, grid, arguments, BLOCK_M=64, BLOCK_D=self.block_d)

    def with_stash(self, plan: Plan, tiles: Tiles, stash: Stash) -> None:
        """dk, dv and ds chunk by chunk, for as many heads at a time as the workspace holds."""
        if max(stash.product.block_m, stash.product.block_n) > tiles.block_n:
            raise ValueError(
                f"the product of the stash has blocks of {stash.product.block_m} queries and "
                f"{stash.product.block_n} keys: more than the {tiles.block_n} keys of one ds tile"
            )
        room = min(stash.bytes, memory(self.device) // configs.STASH_SHARE)
        queries = room // (2 * self.N * self.group)  # that fit for one key/value head
        chunk = min(stash.chunk, triton.cdiv(self.M, 128) * 128, max(512, queries // 128 * 128))
        heads = max(1, min(self.B * self.G, queries // chunk))
        carried = self.N if chunk < self.M else 0
        dtype = self["q"].dtype
        sums = meta((heads, carried, self.block_d), torch.float32)
        ds = meta((heads * self.group, self.N, -(-chunk // 8) * 8), dtype)
        for name, layout in zip(STASH, (ds, sums, sums), strict=True):
            self.space(plan, name, layout)
        for head in range(0, self.B * self.G, heads):
            now = min(heads, self.B * self.G - head)
            for lo in range(0, self.M, chunk):
                hi = min(lo + chunk, self.M)
                plan.launches += [
                    self.dkdv(tiles, head, now, lo, hi, stash=True),
                    self.dq_from_stash(stash.product, head, now, lo, hi),
                ]

    def dkdv(
        self, tiles: Tiles, head: int, heads: int, lo: int, hi: int, stash: bool = False
    ) -> Launch:
        mask, tma = self.mask, tiles.tma and self.tma
        # Under a causal mask the queries before `hi` see no key from `hi` on; the last chunk must
        # still visit those keys, to write their zeros.
        keys = min(self.N, hi) if mask.causal and hi < self.M else self.N
        grid = (triton.cdiv(keys, tiles.block_n) * heads,)
        sums = self.pointers("dk_sum", "dv_sum") if stash else [None, None]
        scales = (mask.scale, mask.scale * LOG2E)
        if tiles.hopper:
            half = tiles.block_n // 2
            lines = [
                Tile(self.places[n], gluon_line_descriptor(self[n], tiles.block_m)) for n in LINES
            ]
            arguments = [
                self.gluon("q", tiles.block_m), self.gluon("k", half), self.gluon("v", half),
                self.gluon("do", tiles.block_m), *lines, self.gluon("dk", half),
                self.gluon("dv", half),
                self.gluon("ds", half, tiles.block_m) if stash else None, *sums,
                *scales, head, heads, self.H, self.M, self.N, lo, hi,
            ]  # fmt: skip
            return Launch(
                dkdv_hopper_kernel, grid, arguments,
                GROUP=self.group, CAUSAL=mask.causal, STASH=stash, BLOCK_M=tiles.block_m,
                BLOCK_N=tiles.block_n, D=self.D, STAGES=tiles.num_stages, num_warps=4,
            )  # fmt: skip
        names = self.factors(tiles, "q", "k", "v", "do")
        arguments = [
            *self.rows(names, "mnnm", tiles, tma), *self.lines(tiles, tma),
            *self.rows(("dk", "dv"), "nn", tiles, tma),
            *self.pointers("q_ids", "k_ids", "k_first", "k_last"),
            self.stash_tile(tiles) if stash else None,
            *sums, *self.strides(*names, "dk", "dv"), self["delta"].stride(1),
            *scales, head, heads, self.H, self.M, self.N, self.D, mask.window or 0, lo, hi,
        ]  # fmt: skip
        return Launch(
            dkdv_kernel, grid, arguments, **self.constants(tiles, tma), STASH=stash,
            EVEN_M=self.M % tiles.block_m == 0, EVEN_N=self.N % tiles.block_n == 0,
        )  # fmt: skip

    def dq(self, tiles: Tiles) -> Launch:
        mask, tma = self.mask, tiles.tma and self.tma
        names = self.factors(tiles, "q", "k", "v", "do", "dq")
        rows = self.rows(names, "mnnmm", tiles, tma)
        arguments = [
            *rows[:4], *self.pointers(*LINES), rows[4],
            *self.pointers("q_ids", "k_ids", "q_first", "q_last"),
            *self.strides(*names), self["delta"].stride(1),
            mask.scale, mask.scale * LOG2E, self.heads, self.H, self.M, self.N, self.D,
            mask.window or 0,
        ]  # fmt: skip
        grid = (triton.cdiv(self.M, tiles.block_m) * self.heads,)
        return Launch(
            dq_kernel, grid, arguments, **self.constants(tiles, tma),
            EVEN_N=self.N % tiles.block_n == 0,
        )  # fmt: skip

    def joined(self, tiles: Backward) -> Launch:
        """One launch of all; warps, stages, TMA and parts are as `tiles.dkdv` says."""
        dkdv, dq = tiles.dkdv, tiles.dq
        mask, tma = self.mask, dkdv.tma and self.tma
        names = self.factors(dkdv, "q", "k", "v", "do")
        arguments = [
            *self.rows(names, "mnnm", dkdv, tma), *self.lines(dkdv, tma),
            *self.rows(("dk", "dv"), "nn", dkdv, tma),
            *self.rows(names, "mnnm", dq, tma), *self.pointers(*LINES),
            *self.rows(("dq",), "m", dq, tma), *self.pointers(*IDS),
            *self.strides(*names, "dk", "dv", "dq"), self["delta"].stride(1),
            mask.scale, mask.scale * LOG2E, self.heads, self.H, self.M, self.N, self.D,
            mask.window or 0,
        ]  # fmt: skip
        programs = max(
            triton.cdiv(self.N, dkdv.block_n) * self.B * self.G,
            triton.cdiv(self.M, dq.block_m) * self.heads,
        )
        return Launch(
            joined_kernel, (tiles.joined * programs,), arguments, **self.constants(dkdv, tma),
            ROLES=tiles.joined, BLOCK_M_DQ=dq.block_m, BLOCK_N_DQ=dq.block_n,
            EVEN_M=self.M % dkdv.block_m == 0, EVEN_N=self.N % dkdv.block_n == 0,
            EVEN_N_DQ=self.N % dq.block_n == 0,
        )  # fmt: skip

    def dq_from_stash(self, tiles: Tiles, head: int, heads: int, lo: int, hi: int) -> Launch:
        queries = heads * self.group
        arguments = [
            self.stash_tile(tiles),
            *self.rows(("k", "dq"), "nm", tiles, True),
            self.mask.scale, head * self.group, queries, self.H, self.N, lo,
        ]  # fmt: skip
        grid = (triton.cdiv(hi - lo, tiles.block_m) * queries,)
        return Launch(
            dq_from_stash_kernel, grid, arguments, GROUP=self.group, CAUSAL=self.mask.causal,
            BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_D=self.block_d,
            num_warps=tiles.num_warps, num_stages=tiles.num_stages,
        )  # fmt: skip
