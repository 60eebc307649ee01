"""A route: one way by which a gather brings a unit's full parameters together, from the shards of
one group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from shardwise.engine.collectives import DONE, All, Group, Handle, allocate
from shardwise.planning.rows import Layout, Rows
from shardwise.planning.strategies import choose_gather

Unpack = Callable[[], None]


def nothing_to_unpack() -> None:
    return None


class Way(Protocol):
    """Anything that gathers."""

    stages: bool  # what arrives has to be copied out: `full` is not written before `unpack`

    @property
    def is_current(self) -> bool:
        """This rank's piece of `full` is what the source holds now."""

    def take_back(self) -> None:
        """Copy this rank's piece of `full` to the source, where it is another."""

    def start(self) -> tuple[Handle, Unpack]:
        """Issue the gather; `unpack` is to run when it has ended."""


class Route:
    """From `source`, this rank's piece of every parameter, to `full` by gathers over `group`."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        source: torch.Tensor,
        full: torch.Tensor,
        mode: str,
        custom: Any = None,
        whole: bool = False,
    ) -> None:
        """Make every view once: `parts[i]` is the i-th parameter in `full` as (ranks, piece).

        `custom` moves the data instead of the group's own all-gather. `whole`: pieces are stretches
        of `full`, whatever dims the parameters are cut along.
        """
        self.group, self.source, self.full, self.custom = group, source, full, custom
        # 1, or the n/k shards that make one piece of a smaller group.
        factor = layout.ranks // group.size
        moved = [i for i, rows in enumerate(layout.rows) if rows.part > 0]
        self.sizes = [layout.rows[i].part * factor for i in moved]
        starts = [layout.offsets[i] * layout.ranks for i in moved]
        self.flats = [
            full[start : start + size * group.size]
            for start, size in zip(starts, self.sizes, strict=True)
        ]
        self.parts = [flat.view(group.size, -1) for flat in self.flats]
        self.pieces = list(source.split(self.sizes))
        self.own = [part[group.rank] for part in self.parts]
        cut_inside = [not whole and layout.rows[i].dim > 0 for i in moved]
        self.scattered = any(cut_inside) and group.size > 1
        if self.scattered:
            self.parts = [
                _slices(flat, layout.rows[i]) if inside else part
                for i, flat, part, inside in zip(
                    moved, self.flats, self.parts, cut_inside, strict=True
                )
            ]
        self.copies = source.dtype != full.dtype or source.device != full.device
        self.mode = self._choose(mode)
        self.stages = self.mode == "packed" and group.size > 1

    def _choose(self, asked: str) -> str:
        if self.scattered or self.custom is not None:
            return "packed"
        device = self.full.device
        mode = choose_gather(asked, len(self.parts), self.full.nbytes, device.type != "cpu")
        return "packed" if mode == "grouped" and not self.group.gathers_grouped(device) else mode

    @property
    def is_current(self) -> bool:
        """For dims other than 0 nobody looks."""
        pairs = zip(self.own, self.pieces, strict=True)
        return not self.scattered and all(torch.equal(own, piece.to(own)) for own, piece in pairs)

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy this rank's piece of `full` to the source; what a cast alone has changed stays."""
        for part, piece in zip(self.parts, self.pieces, strict=True):
            own = part[self.group.rank].reshape(-1)
            piece.copy_(torch.where(own == piece.to(own), piece, own.to(piece)))

    def start(self) -> tuple[Handle, Unpack]:
        """Issue the gather; `unpack` is to run when it has ended."""
        if self.group.size == 1:
            self.full.copy_(self.source)
            return DONE, nothing_to_unpack
        if self.mode == "packed":
            return self._start_packed()
        inputs = self.pieces
        if self.copies:
            inputs = self.own
            if len(inputs) == 1:
                inputs[0].copy_(self.pieces[0], non_blocking=True)
            else:
                torch._foreach_copy_(inputs, self.pieces, non_blocking=True)
        if self.mode == "grouped":
            return self.group.all_gather_grouped(self.flats, inputs), nothing_to_unpack
        handles = [
            self.group.all_gather(flat, piece)
            for flat, piece in zip(self.flats, inputs, strict=True)
        ]
        return (handles[0] if len(handles) == 1 else All(handles)), nothing_to_unpack

    def _start_packed(self) -> tuple[Handle, Unpack]:
        ranks, numel = self.group.size, self.source.numel()
        flat = allocate(self.custom, ranks * numel, self.full.dtype, self.full.device)
        staging = flat.view(ranks, numel)
        own = self.source
        if self.copies or self.custom is not None:
            own = staging[self.group.rank]
            own.copy_(self.source, non_blocking=True)

        def unpack() -> None:
            if self.scattered:
                split = staging.split(self.sizes, dim=1)
                torch._foreach_copy_(
                    self.parts, [s.reshape(p.shape) for s, p in zip(split, self.parts, strict=True)]
                )
            else:
                torch.split_with_sizes_copy(staging, self.sizes, dim=1, out=self.parts)

        return self.group.all_gather(flat, own, self.custom), unpack


def _slices(flat: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A whole parameter as (ranks, *slice), for one that is cut along another dim than 0."""
    return flat.view(rows.shape).unflatten(rows.dim, (rows.ranks, -1)).movedim(rows.dim, 0)
