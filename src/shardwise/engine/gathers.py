"""The ways by which a gather brings a unit's full parameters together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardwise.engine import torch_private
from shardwise.engine.arena import Loan
from shardwise.engine.collectives import DONE, All, Group, Handle, Unpack, allocate
from shardwise.engine.gradients import slices_of
from shardwise.planning.rows import Layout
from shardwise.planning.strategies import choose_gather

# Gives memory for so many elements of a dtype, and what gives it back.
Lend = Callable[[int, torch.dtype], tuple[torch.Tensor, Loan | None]]


class UnitGather:
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
        lend: Lend | None = None,
    ) -> None:
        """Make every view once: `parts[i]` is the i-th parameter in `full` as (ranks, piece).

        `custom` moves the data instead of the group's own all-gather. `whole`: pieces are stretches
        of `full`, whatever dims the parameters are cut along. `lend` gives memory for staging.
        """
        self.lend = lend if custom is None else None
        self.staging: Loan | None = None  # of the gather under way
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
        # How many ranks' pieces of each have rows in them; the rest is padding.
        self._holders = [-(-layout.rows[i].holders // factor) for i in moved]
        cut_inside = [not whole and layout.rows[i].dim > 0 for i in moved]
        self.scattered = any(cut_inside) and group.size > 1
        if self.scattered:
            for at, (i, flat) in enumerate(zip(moved, self.flats, strict=True)):
                if cut_inside[at]:
                    rows = layout.rows[i]
                    self.parts[at] = slices_of(flat.view(rows.shape), rows)
        self.copies = source.dtype != full.dtype or source.device != full.device
        self.mode = self._choose(mode)
        # What arrives has to be copied out: `full` is not written before `unpack`.
        self.stages = self.mode == "packed" and group.size > 1
        # A host leaves padding where it is; for a GPU one kernel that copies all is less work.
        self._sparse = layout.mostly_padding and full.device.type == "cpu" and not self.scattered

    def _choose(self, asked: str) -> str:
        if self.scattered or self.custom is not None:
            return "packed"
        device = self.full.device
        mode = choose_gather(asked, len(self.parts), self.full.nbytes, device.type != "cpu")
        return "packed" if mode == "grouped" and not self.group.groups_calls(device) else mode

    @property
    def is_current(self) -> bool:
        """This rank's piece of `full` is what the source holds now. For dims other than 0 nobody
        looks.
        """
        here, sent = self._here, self._pieces_as_gathered()
        return not self.scattered and all(torch.equal(self.own[i], sent[i]) for i in here)

    @property
    def _here(self) -> list[int]:
        """Parameters of which this rank has rows."""
        return [i for i, holders in enumerate(self._holders) if self.group.rank < holders]

    def _pieces_as_gathered(self) -> list[torch.Tensor]:
        """What a gather makes of this rank's pieces."""
        return [piece.to(self.full) for piece in self.pieces]

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy this rank's piece of `full` to the source; what the gather itself changed stays."""
        sent = self._pieces_as_gathered()
        for i in self._here:
            own, piece = self.parts[i][self.group.rank].reshape(-1), self.pieces[i]
            piece.copy_(torch.where(own == sent[i], piece, own.to(piece)))

    def start(self) -> tuple[Handle, Unpack]:
        """Issue the gather; `unpack` is to run when it has ended."""
        if self.group.size == 1:
            self.full.copy_(self.source)
            return DONE, None
        if self.mode == "packed":
            return self._start_packed()
        inputs = self.pieces
        if self.copies:
            inputs = self.own
            if len(inputs) == 1:
                inputs[0].copy_(self.pieces[0], non_blocking=True)
            else:
                torch_private.foreach_copy_(inputs, self.pieces, non_blocking=True)
        if self.mode == "grouped":
            return self.group.all_gather_grouped(self.flats, inputs), None
        handles = [
            self.group.all_gather(flat, piece)
            for flat, piece in zip(self.flats, inputs, strict=True)
        ]
        return (handles[0] if len(handles) == 1 else All(handles)), None

    def give_staging(self) -> None:
        """What arrived is in its place, or nobody wants it."""
        give, self.staging = self.staging, None
        if give is not None:
            give()

    def _start_packed(self) -> tuple[Handle, Unpack]:
        ranks, numel = self.group.size, self.source.numel()
        if self.lend is not None:
            flat, self.staging = self.lend(ranks * numel, self.full.dtype)
        else:
            flat = allocate(self.custom, ranks * numel, self.full.dtype, self.full.device)
        staging = flat.view(ranks, numel)
        own = self.source
        if self.copies or self.custom is not None:
            own = staging[self.group.rank]
            own.copy_(self.source, non_blocking=True)

        def unpack() -> None:
            if self.scattered:
                split = staging.split(self.sizes, dim=1)
                torch_private.foreach_copy_(
                    self.parts, [s.reshape(p.shape) for s, p in zip(split, self.parts, strict=True)]
                )
            elif self._sparse:
                split = staging.split(self.sizes, dim=1)
                torch_private.foreach_copy_(
                    [part[:held] for part, held in zip(self.parts, self._holders, strict=True)],
                    [piece[:held] for piece, held in zip(split, self._holders, strict=True)],
                )
            else:
                torch.split_with_sizes_copy(staging, self.sizes, dim=1, out=self.parts)
            self.give_staging()

        return self.group.all_gather(flat, own, self.custom), unpack
