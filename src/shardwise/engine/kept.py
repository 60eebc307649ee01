"""What stays of a unit from forward to backward for keep_after_forward = k: this rank's piece in a
smaller group of k ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardwise.engine.collectives import Group
from shardwise.engine.forms import Form
from shardwise.engine.route import Route
from shardwise.engine.storage import Buffer, Parameters


class Kept(Buffer):
    """The piece, and the `route` from the group's pieces back to the full parameters."""

    def __init__(
        self, parameters: Parameters, group: Group, mesh: DeviceMesh | None, mode: str
    ) -> None:
        """Needs full parameters with memory. With `mesh` users see the pieces meanwhile."""
        layout, full = parameters.layout, parameters.full_bytes
        super().__init__(layout.full_numel // group.size, full.dtype, full.device)
        self.route = Route(group, layout, self.flat, full, mode, whole=True)
        # What hangs in the modules meanwhile: the module's own dict, the key in it, the parameter.
        self.places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        if mesh is not None:
            self._make_visible(parameters, mesh)
        self.release()

    def _make_visible(self, parameters: Parameters, mesh: DeviceMesh) -> None:
        """DTensors on the smaller groups' mesh, for parameters whose pieces are the rows such a
        DTensor has.
        """
        moved = [i for i, rows in enumerate(parameters.layout.rows) if rows.part > 0]
        for i, piece in zip(moved, self.route.pieces, strict=True):
            rows, member = parameters.layout.rows[i], parameters.members[i]
            if not rows.even or rows.dim or member.nested is not None:
                continue
            form = Form(mesh, (Replicate(), Shard(0)), torch.Size(rows.shape))
            with torch.no_grad():
                tensor = form.wrap(piece.view(-1, *rows.shape[1:]))
            kept = nn.Parameter(tensor, requires_grad=parameters.visible[i].requires_grad)
            self.places += [(module._parameters, key, kept) for module, key in member.places]

    def fill(self) -> None:
        """Take this rank's piece from the full parameters."""
        self.allocate()
        torch._foreach_copy_(self.route.pieces, self.route.own)
