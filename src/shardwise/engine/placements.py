"""How one parameter looks from outside: to users while it is sharded, to its module while it is
whole.

A plain parameter is a DTensor to users and a plain tensor to its module. A parameter that is a
DTensor already (tensor parallel) stays one: the engine cuts its local tensor, users see a DTensor
on both meshes, the module sees what it had.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise.engine import torch_private
from shardwise.engine.mesh import Mesh
from shardwise.planning.rows import Rows


@dataclass(frozen=True)
class MeshPlacement:
    """Where the parts of a tensor of a global shape are: all that a DTensor is but its values."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size

    @classmethod
    def of_rows(cls, rows: Rows, mesh: Mesh) -> MeshPlacement:
        """A plain parameter cut like `rows`, or whole where the unit has no shard axis."""
        cut = mesh.shard.group is not None and not rows.replicated
        inner: Placement = Shard(rows.dim) if cut else Replicate()
        placements = (Replicate(), inner) if mesh.device_mesh.ndim == 2 else (inner,)
        return cls(mesh.device_mesh, placements, torch.Size(rows.shape))

    @classmethod
    def of(cls, tensor: DTensor) -> MeshPlacement:
        return cls(tensor.device_mesh, tuple(tensor.placements), tensor.shape)

    def spec(self, dtype: torch.dtype) -> torch_private.DTensorSpec:
        """The same in torch's words, to make DTensors of again and again."""
        return torch_private.make_spec(self.mesh, self.placements, self.shape, dtype)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor over `local`; shares its memory."""
        return torch_private.make_dtensor(local, self.spec(local.dtype))


@dataclass(frozen=True)
class DTensorParameter:
    """A parameter that is a DTensor by itself: `whole` to its module, `sharded` to users.

    `summed_axes` are axes of `whole.mesh` over which the engine's own reduce sums: a gradient may
    stay partial there.
    """

    whole: MeshPlacement
    sharded: MeshPlacement
    summed_axes: frozenset[int] = frozenset()

    def local_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """The local tensor of a gradient, placed as its parameter is."""
        gradient = torch_private.completed(gradient)
        assert isinstance(gradient, DTensor)
        wanted = tuple(
            theirs if axis in self.summed_axes else ours
            for axis, (ours, theirs) in enumerate(
                zip(self.whole.placements, gradient.placements, strict=True)
            )
        )
        if wanted != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return torch_private.local_of(gradient)
