"""Gathers of bytes: this rank's rows as codes with a scale for each block, everybody's turned back
into the compute dtype. The master stays as it is, and its owner computes with what the others got.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shardwise.engine import torch_private
from shardwise.engine.collectives import Handle, Unpack
from shardwise.engine.unit import UnitGather
from shardwise.planning.blocks import BLOCK, CODES, SCALE_BYTES, Message

if TYPE_CHECKING:
    from shardwise.planning.rows import Layout


def encode(values: torch.Tensor, code: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat values as codes, and a scale for each block. A block with a value that is no number, or
    infinite, has such a scale: it arrives as no number.
    """
    numel, most = values.numel(), CODES[_name(code)]
    blocks = values.new_zeros(-(-numel // BLOCK) * BLOCK, dtype=torch.float32)
    blocks[:numel] = values
    blocks = blocks.view(-1, BLOCK)
    scales = blocks.abs().amax(1) / most
    scales[scales == 0] = 1.0
    scaled = blocks / scales[:, None]
    if code is torch.int8:
        scaled = (scaled + 0.5).floor_().nan_to_num_(0.0, 0.0, 0.0)
    return scaled.to(code).view(-1)[:numel], scales


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Values of (ranks, numel) codes and (ranks, blocks) scales, in float32."""
    return codes.float() * scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]


def _name(code: torch.dtype) -> str:
    return str(code).removeprefix("torch.")


class QuantisedGather(UnitGather):
    """A packed gather whose message is codes and scales."""

    def __init__(
        self,
        code: torch.dtype,
        group: Any,
        layout: Layout,
        source: torch.Tensor,
        full: torch.Tensor,
        lend: Any = None,
    ) -> None:
        super().__init__(group, layout, source, full, "packed", lend=lend)
        self.code, self.stages, self.mode = code, True, "packed"
        self.message = Message(layout, full.element_size())
        moved = [i for i, rows in enumerate(layout.rows) if rows.part]
        self._coded = [at for at, i in enumerate(moved) if i in self.message.coded]
        self._plain = [at for at, i in enumerate(moved) if i in self.message.plain]
        self._kernels = None
        if source.is_cuda and torch_private.has_triton():
            from shardwise.engine.quantised_kernels import Kernels

            self._kernels = Kernels(self.message, code, source.device)

    def _start_packed(self) -> tuple[Handle, Unpack]:
        ranks, nbytes = self.group.size, self.message.nbytes
        if self.lend is not None:
            flat, self.staging = self.lend(ranks * nbytes, torch.uint8)
        else:
            flat = torch.empty(ranks * nbytes, dtype=torch.uint8, device=self.full.device)
        messages = flat.view(ranks, nbytes)
        self._write(messages[self.group.rank])

        def unpack() -> None:
            self._read(messages, self.full, self.parts, whole=True)
            self.give_staging()

        return self.group.all_gather(flat, messages[self.group.rank]), unpack

    def _pieces_as_gathered(self) -> list[torch.Tensor]:
        """By the same arithmetic as everybody's."""
        message = torch.empty(self.message.nbytes, dtype=torch.uint8, device=self.full.device)
        self._write(message)
        shard = torch.empty_like(self.source, dtype=self.full.dtype)
        pieces = list(shard.split(self.sizes))
        self._read(message.view(1, -1), shard, [piece.view(1, -1) for piece in pieces], whole=False)
        return pieces

    def _sections(self, messages: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], Any]:
        """Of some ranks' messages: scales, the parameters that travel as they are, codes."""
        m = self.message
        scales = messages[:, : m.scales * SCALE_BYTES].view(torch.float32)
        sizes = [self.sizes[at] for at in self._plain]
        end = m.plain_start + sum(sizes) * m.itemsize
        plain = messages[:, m.plain_start : end].view(self.full.dtype).split(sizes, dim=1)
        codes = messages[:, m.codes_start :].view(self.code)
        return scales, list(plain), codes

    @torch.no_grad()
    def _write(self, message: torch.Tensor) -> None:
        """This rank's rows as a message."""
        scales, plain, codes = self._sections(message.view(1, -1))
        if self._plain:
            rows = [self.pieces[at].view(1, -1) for at in self._plain]
            torch_private.foreach_copy_(plain, rows)
        if self._kernels is not None:
            self._kernels.write(self.source, scales, codes)
            return
        scale = place = 0
        for at in self._coded:
            found, scaled_by = encode(self.pieces[at], self.code)
            codes[0, place : place + found.numel()] = found
            scales[0, scale : scale + scaled_by.numel()] = scaled_by
            scale, place = scale + scaled_by.numel(), place + found.numel()

    @torch.no_grad()
    def _read(
        self, messages: torch.Tensor, flat: torch.Tensor, parts: list[torch.Tensor], whole: bool
    ) -> None:
        """Messages to `parts`, (ranks, piece) each, which lie in `flat`: everybody's, `whole`
        parameter after parameter, or those of one rank.
        """
        scales, plain, codes = self._sections(messages)
        if self._plain:
            torch_private.foreach_copy_([parts[at] for at in self._plain], plain)
        if self._kernels is not None:
            self._kernels.read(scales, codes, flat, len(messages), self.message.nbytes, whole)
            return
        scale = place = 0
        for at in self._coded:
            size = self.sizes[at]
            blocks = -(-size // BLOCK)
            found = codes[:, place : place + size], scales[:, scale : scale + blocks]
            parts[at].copy_(decode(*found))
            scale, place = scale + blocks, place + size
