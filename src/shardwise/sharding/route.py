"""A route: one way by which a gather brings a unit's full parameters together, from the shards of
one group.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardwise.comms.real import DONE, All, Group, Handle
from shardwise.planning.placement import Layout

Unpack = Callable[[], None]

# gloo, measured on 2 ranks (`shardwise bench gather`): from this mean size of a tensor on, calls of
# their own that write it in place pay: 1.8 times the packed step at 256 KiB, 0.78 at 1 MiB.
EACH_FROM_BYTES = 2**20


def nothing_to_unpack() -> None:
    return None


class Route:
    """From `source`, this rank's piece of every parameter, to `full` by gathers over `group`."""

    def __init__(
        self, group: Group, layout: Layout, source: torch.Tensor, full: torch.Tensor, mode: str
    ) -> None:
        """Make every view once: `parts[i]` is the i-th parameter in `full` as (ranks, piece)."""
        self.group, self.source, self.full = group, source, full
        factor = (
            layout.ranks // group.size
        )  # 1, or the n/k shards that make one piece of a smaller group
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
        self.casts = source.dtype != full.dtype
        self.mode = self._choose(mode)
        self.stages = self.mode == "packed" and group.size > 1

    def _choose(self, mode: str) -> str:
        """One parameter is gathered straight into place. `auto` packs, except large tensors on a
        CPU, where a copy-out costs the host more than calls of their own.
        """
        if len(self.parts) <= 1:
            return "each"
        if mode != "auto":
            return mode
        mean = self.full.numel() * self.full.element_size() / len(self.parts)
        return "each" if self.full.device.type == "cpu" and mean >= EACH_FROM_BYTES else "packed"

    def start(self) -> tuple[Handle, Unpack]:
        """Issue the gather; `unpack` is to run when it has ended."""
        if self.group.size == 1:
            self.full.copy_(self.source)
            return DONE, nothing_to_unpack
        if self.mode == "packed":
            return self._start_packed()
        inputs = self.pieces
        if self.casts:
            torch._foreach_copy_(self.own, self.pieces)
            inputs = self.own
        if self.mode == "grouped":
            return self.group.all_gather_grouped(self.flats, inputs), nothing_to_unpack
        handles = [
            self.group.all_gather(flat, piece)
            for flat, piece in zip(self.flats, inputs, strict=True)
        ]
        return (handles[0] if len(handles) == 1 else All(handles)), nothing_to_unpack

    def _start_packed(self) -> tuple[Handle, Unpack]:
        ranks = self.group.size
        staging = torch.empty(
            (ranks, self.source.numel()), dtype=self.full.dtype, device=self.full.device
        )
        own = self.source
        if self.casts:
            own = staging[self.group.rank]
            own.copy_(self.source)

        def unpack() -> None:
            torch.split_with_sizes_copy(staging, self.sizes, dim=1, out=self.parts)

        return self.group.all_gather(staging.view(-1), own), unpack
