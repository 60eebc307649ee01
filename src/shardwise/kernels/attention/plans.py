# mypy: disable-error-code="import-not-found,import-untyped"
"""Which kernels run for given shapes, in what order, on what grids and workspaces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from shardwise.kernels.attention import configs
from shardwise.kernels.attention.arguments import (
    BACKWARD,
    FACTORS,
    FORWARD,
    HAS_GLUON,
    LINES,
    PART_COUNTS,
    STASH,
    Arguments,
    aligned_length,
    meta,
)
from shardwise.kernels.attention.backward import (
    dkdv_kernel,
    dq_from_stash_kernel,
    dq_kernel,
    joined_kernel,
)
from shardwise.kernels.attention.configs import Backward, Stash, Tiles
from shardwise.kernels.attention.forward import forward_kernel
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.attention.prepare import lines_kernel, split_kernel
from shardwise.kernels.launches import Launch

if HAS_GLUON:
    from shardwise.kernels.attention.backward_hopper import dkdv_hopper_kernel
    from shardwise.kernels.attention.forward_hopper import forward_hopper_kernel

WORKSPACE_ALIGNMENT = 256  # bytes


class LaunchPlan:
    """Launches in order, and the workspaces they share, which follow the call's tensors."""

    def __init__(self, launches: list[Launch], workspaces: list[Tensor]) -> None:
        self.launches = launches
        self.workspaces = workspaces  # on the meta device: their layout
        self.offsets: list[int] = []  # in one allocation
        self.bytes = 0
        self.ready = False  # all launches are compiled
        for layout in workspaces:
            self.offsets.append(self.bytes)
            blocks = triton.cdiv(layout.untyped_storage().nbytes(), WORKSPACE_ALIGNMENT)
            self.bytes += blocks * WORKSPACE_ALIGNMENT

    def run(self, tensors: Sequence[Tensor | None], addresses: list[int | None]) -> None:
        """`addresses` are those of `tensors`, in order."""
        q = tensors[0]
        assert q is not None
        space = q.new_empty(self.bytes, dtype=torch.uint8) if self.bytes else None
        if not self.ready:
            self._run_first(tensors, space)
            return
        if space is not None:
            start = space.data_ptr()
            addresses += [start + offset for offset in self.offsets]
        stream = triton.runtime.driver.active.get_current_stream(q.device.index)
        for launch in self.launches:
            launch.again(addresses, stream)

    def _run_first(self, tensors: Sequence[Tensor | None], space: Tensor | None) -> None:
        made = []
        for layout, offset in zip(self.workspaces, self.offsets, strict=True):
            assert space is not None
            part = space[offset : offset + layout.untyped_storage().nbytes()].view(layout.dtype)
            made.append(part.as_strided(layout.shape, layout.stride()))
        for launch in self.launches:
            launch.first((*tensors, *made))
        self.ready = all(launch.run is not None for launch in self.launches)


def plan_forward(
    tensors: Sequence[Tensor | None], mask: Mask, precision: str, tiles: Tiles | None
) -> LaunchPlan:
    call = Arguments(FORWARD, tensors, mask, precision)
    tiles = tiles or configs.tiles_for(configs.FORWARD, *call.choice)
    # o and lse are results here, nothing for `split_kernel` to read.
    absent = {"o": None, "lse": None, "o_strides": None}
    launches = [_split(call, **absent)] if call.splits(tiles) else []
    launches.append(_forward(call, tiles))
    return LaunchPlan(launches, call.workspaces)


def plan_backward(
    tensors: Sequence[Tensor | None], mask: Mask, precision: str, tiles: Backward | None
) -> LaunchPlan:
    call = Arguments(BACKWARD, tensors, mask, precision)
    tiles = tiles or configs.tiles_for(configs.BACKWARD, *call.choice)
    stash = tiles.stash
    for name in LINES:
        row = aligned_length(call.M, torch.float32)
        call.add_workspace(name, meta((call.heads, call.M), torch.float32, (row, 1)))
    if call.splits(tiles.dkdv) or call.splits(tiles.dq):
        launches = [_split(call)]
    else:
        blocks = triton.cdiv(call.M, 64)
        launches = [call.launch(lines_kernel, (blocks, call.heads), BLOCK_M=64)]
    if (
        stash is not None
        and call.tma
        and call["q"].itemsize == 2
        and mask.plain
        and stash.min_heads <= call.heads
    ):
        launches += _with_stash(call, tiles.dkdv, stash)
    elif tiles.joined:
        launches.append(_joined(call, tiles))
    else:
        launches.append(_dkdv(call, tiles.dkdv, 0, call.kv_heads, 0, call.M))
        programs = triton.cdiv(call.M, tiles.dq.block_m) * call.heads
        pointers = {name: call.pointer(name) for name in LINES}
        launches.append(call.launch(dq_kernel, (programs,), tiles.dq, **pointers))
    return LaunchPlan(launches, call.workspaces)


def _split(call: Arguments, **given: Any) -> Launch:
    """bf16 parts of the fp32 factors and, in backward, the lines."""
    call.add_parts()
    grid = (triton.cdiv(max(call.M, call.N), 32), call.heads, len(FACTORS))
    parts = PART_COUNTS[call.precision]
    return call.launch(split_kernel, grid, PARTS=parts, BLOCK_M=32, **given)


def _forward(call: Arguments, tiles: Tiles) -> Launch:
    kv_bytes = 2 * call.N * call.D * call["k"].itemsize
    together = max(configs.MIN_HEADS, configs.HEADS_CACHE_BYTES // kv_bytes * call.group)
    section = min(call.heads, together)
    programs = triton.cdiv(call.M, tiles.block_m) * call.heads
    if not tiles.hopper:
        return call.launch(forward_kernel, (programs,), tiles, section=section)
    half = tiles.block_m // 2
    rows = _gluon_rows(call, q=half, k=tiles.block_n, v=tiles.block_n, o=half)
    _, processors = _memory_and_processors(call.device)
    grid = min(programs, processors)
    return call.launch(forward_hopper_kernel, (grid,), tiles, section=section, **rows)


def _dkdv(
    call: Arguments, tiles: Tiles, head: int, heads: int, lo: int, hi: int, stash: bool = False
) -> Launch:
    """dk and dv of `heads` key/value heads from `head` on, by the queries [lo, hi)."""
    # Under a causal mask the queries before `hi` see no key from `hi` on; the last chunk must
    # still visit those keys, to write their zeros.
    keys = min(call.N, hi) if call.mask.causal and hi < call.M else call.N
    grid = (triton.cdiv(keys, tiles.block_n) * heads,)
    given: dict[str, Any] = {
        "head_lo": head, "heads": heads, "chunk_lo": lo, "chunk_hi": hi, "STASH": stash
    }  # fmt: skip
    if not tiles.hopper:
        return call.launch(dkdv_kernel, grid, tiles, **given)
    half, queries = tiles.block_n // 2, tiles.block_m
    given |= _gluon_rows(call, q=queries, k=half, v=half, do=queries, dk=half, dv=half)
    given["lse"], given["delta"] = (call.gluon_descriptor(name, 1, queries) for name in LINES)
    given["stash"] = call.gluon_descriptor("ds", 1, half, queries) if stash else None
    return call.launch(dkdv_hopper_kernel, grid, tiles, **given)


def _gluon_rows(call: Arguments, **rows: int) -> dict[str, Any]:
    """Descriptors of so many rows each."""
    return {name: call.gluon_descriptor(name, 1, 1, n, call.D) for name, n in rows.items()}


def _joined(call: Arguments, tiles: Backward) -> Launch:
    """One launch of all; warps, stages, TMA and parts are as `tiles.dkdv` says."""
    dkdv = tiles.dkdv
    dq = replace(tiles.dq, tma=dkdv.tma, split=dkdv.split)
    programs = max(
        triton.cdiv(call.N, dkdv.block_n) * call.kv_heads,
        triton.cdiv(call.M, dq.block_m) * call.heads,
    )
    return call.launch(
        joined_kernel, (tiles.joined * programs,), dkdv,
        **{f"{name}_for_dq": call.tensor(name, dq) for name in FACTORS},
        **{f"{name}_for_dq": call.pointer(name) for name in LINES},
        dq=call.tensor("dq", dq), ROLES=tiles.joined,
        BLOCK_M_DQ=dq.block_m, BLOCK_N_DQ=dq.block_n, EVEN_N_DQ=call.N % dq.block_n == 0,
    )  # fmt: skip


def _with_stash(call: Arguments, tiles: Tiles, stash: Stash) -> Iterator[Launch]:
    """dk, dv and ds chunk by chunk, for as many heads at a time as the workspace holds."""
    product = replace(stash.product, tma=True)
    if max(product.block_m, product.block_n) > tiles.block_n:
        raise ValueError(
            f"the product of the stash has blocks of {product.block_m} queries and "
            f"{product.block_n} keys: more than the {tiles.block_n} keys of one ds tile"
        )
    memory, _ = _memory_and_processors(call.device)
    room = min(stash.bytes, memory // configs.STASH_SHARE)
    queries = room // (2 * call.N * call.group)  # that fit for one key/value head
    chunk = min(stash.chunk, triton.cdiv(call.M, 128) * 128, max(512, queries // 128 * 128))
    heads = max(1, min(call.kv_heads, queries // chunk))
    dtype = call["q"].dtype
    ds = meta((heads * call.group, call.N, aligned_length(chunk, dtype)), dtype)
    sums = meta((heads, call.N if chunk < call.M else 0, call.block_d), torch.float32)
    for name, layout in zip(STASH, (ds, sums, sums), strict=True):
        call.add_workspace(name, layout)
    for head in range(0, call.kv_heads, heads):
        now = min(heads, call.kv_heads - head)
        for lo in range(0, call.M, chunk):
            hi = min(lo + chunk, call.M)
            yield _dkdv(call, tiles, head, now, lo, hi, stash=True)
            q_heads = now * call.group
            yield call.launch(
                dq_from_stash_kernel, (triton.cdiv(hi - lo, product.block_m) * q_heads,), product,
                head_lo=head * call.group, heads=q_heads, chunk_lo=lo,
            )  # fmt: skip


def _memory_and_processors(device: torch.device) -> tuple[int, int]:
    """The GPU's bytes and multiprocessors; stand-ins where kernels are interpreted on a CPU."""
    if device.type != "cuda":
        return 32 << 30, 1
    gpu = torch.cuda.get_device_properties(device)
    return int(gpu.total_memory), gpu.multi_processor_count
