# mypy: disable-error-code="attr-defined,import-not-found,import-untyped,no-untyped-def"
"""GPU kernels of quantised gathers: all blocks of a unit in one launch. Importing this needs
Triton.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from shardwise.planning.blocks import BLOCK, CODES, SCALE_BYTES, Message

_PER_PROGRAM = 8  # blocks: 2,048 elements
# Of a block: where its elements are in a shard, how many, where their codes are, where the first
# rank's are in the full unit, and how far apart the ranks' are there.
_COLUMNS = 5


@triton.jit
def _write(source, scales, codes, table, count, MOST: tl.constexpr, PER: tl.constexpr,
           BLOCK: tl.constexpr, COLUMNS: tl.constexpr, INTEGER: tl.constexpr):  # fmt: skip
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    there = block < count
    row = table + block * COLUMNS
    start = tl.load(row, mask=there, other=0)
    length = tl.load(row + 1, mask=there, other=0)
    place = tl.load(row + 2, mask=there, other=0)
    i = tl.arange(0, BLOCK)[None, :]
    inside = i < length[:, None]
    values = tl.load(source + start[:, None] + i, mask=inside, other=0.0).to(tl.float32)
    most = tl.max(tl.abs(values), axis=1)
    # The largest of some values need not tell that one is no number.
    wrong = tl.max((values != values).to(tl.int32), axis=1)
    # As the host divides: rounded to the nearest.
    scale = tl.where(most == 0.0, 1.0, tl.div_rn(most, tl.full(most.shape, MOST, tl.float32)))
    scale = tl.where(wrong > 0, float("nan"), scale)
    tl.store(scales + block, scale, mask=there)
    scaled = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    if INTEGER:
        scaled = tl.floor(scaled + 0.5)
        scaled = tl.where(scaled == scaled, scaled, 0.0)
    tl.store(codes + place[:, None] + i, scaled.to(codes.dtype.element_ty), mask=inside)


@triton.jit
def _read(scales, codes, full, table, count, scale_stride, code_stride, WHOLE: tl.constexpr,
          PER: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    rank = tl.program_id(1).to(tl.int64)
    block = tl.program_id(0) * PER + tl.arange(0, PER)
    there = block < count
    row = table + block * COLUMNS
    length = tl.load(row + 1, mask=there, other=0)
    place = tl.load(row + 2, mask=there, other=0) + rank * code_stride
    if WHOLE:
        to = tl.load(row + 3, mask=there, other=0)
        to += rank * tl.load(row + 4, mask=there, other=0)
    else:
        to = tl.load(row, mask=there, other=0)
    i = tl.arange(0, BLOCK)[None, :]
    inside = i < length[:, None]
    scale = tl.load(scales + rank * scale_stride + block, mask=there, other=0.0)
    values = tl.load(codes + place[:, None] + i, mask=inside, other=0.0).to(tl.float32)
    values = values * scale[:, None]
    tl.store(full + to[:, None] + i, values.to(full.dtype.element_ty), mask=inside)


@cache
def _find_blocks(message: Message, device: torch.device) -> torch.Tensor:
    """The table of a unit's blocks. Kept: a unit whose memory moves asks again, perhaps while a
    graph is recorded, which nothing of the host may enter.
    """
    layout, rows, place = message.layout, [], 0
    for i in message.coded:
        part, start = layout.rows[i].part, layout.offsets[i]
        for at in range(0, part, BLOCK):
            full = start * layout.ranks + at
            rows.append((start + at, min(BLOCK, part - at), place + at, full, part))
        place += part
    return torch.tensor(rows, dtype=torch.int64, device=device).view(-1, _COLUMNS)


class Kernels:
    """The kernels on one unit's blocks."""

    def __init__(self, message: Message, code: torch.dtype, device: torch.device) -> None:
        self.table = _find_blocks(message, device)
        self.count = len(self.table)
        self._grid = triton.cdiv(self.count, _PER_PROGRAM)
        self._shape = {"PER": _PER_PROGRAM, "BLOCK": BLOCK, "COLUMNS": _COLUMNS}
        self._most, self._integer = CODES[str(code).removeprefix("torch.")], code is torch.int8

    def write(self, source: torch.Tensor, scales: torch.Tensor, codes: torch.Tensor) -> None:
        """One rank's rows into the sections of its message."""
        if self.count:
            _write[(self._grid,)](
                source, scales, codes, self.table, self.count, MOST=self._most,
                INTEGER=self._integer, **self._shape,
            )  # fmt: skip

    def read(
        self, scales: torch.Tensor, codes: torch.Tensor, flat: torch.Tensor, ranks: int,
        stride: int, whole: bool,
    ) -> None:  # fmt: skip
        """Messages of `ranks` ranks, so many bytes apart, into a full unit or one rank's shard."""
        if self.count:
            _read[(self._grid, ranks)](
                scales, codes, flat, self.table, self.count, stride // SCALE_BYTES, stride,
                WHOLE=whole, **self._shape,
            )  # fmt: skip
