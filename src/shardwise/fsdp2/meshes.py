"""From torch's DeviceMesh to the engine's groups, and from a parameter to how it is cut on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise.engine import torch_private
from shardwise.engine.mesh import (
    AXES,
    DTensorParameter,
    Mesh,
    MeshPlacement,
    check_backend,
    default_device,
    groups_on,
    shared_mesh,
    start_alone,
)
from shardwise.engine.torch_private import DataParallelMeshDims
from shardwise.engine.words import PerWorld


@dataclass(frozen=True)
class Axes:
    """The data-parallel axes of a call, and the mesh whose dims they are.

    With `dims`, parameters are DTensors on `full`, of which these axes are a part.
    """

    mesh: DeviceMesh
    names: tuple[str, ...]  # of AXES, one or both
    dims: DataParallelMeshDims | None = None
    full: DeviceMesh | None = None
    info: Any = None  # torch's FSDPMeshInfo that they come from

    @property
    def shard_size(self) -> int:
        return self.mesh.size(self.names.index("shard")) if "shard" in self.names else 1


def default_mesh() -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one; the same for every call."""
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group()
        else:
            start_alone()
    return shared_mesh(default_device().type, (dist.get_world_size(),))


def find_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> Axes:
    """Check a mesh as torch does, and take the data-parallel axes out of it."""
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        return Axes(mesh, AXES[-mesh.ndim :])
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    wanted = {"replicate": dims.replicate_names, "shard": dims.shard_names}
    parts = {axis: _flat(mesh, inside) for axis, inside in wanted.items() if inside}
    several = list(parts.values())
    together = torch_private.concatenate(several) if len(several) > 1 else several[0]
    return Axes(together, tuple(parts), dims, mesh)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh:
    if len(names) == 1:
        return mesh[names[0]]
    return torch_private.flatten(mesh[names], "_".join(names))


def axes_of_info(info: Any) -> Axes:
    """The axes of a parameter that has a mesh of its own (torch's FSDPMeshInfo)."""
    names = AXES[:1] if info.shard_mesh_dim is None else AXES[-info.mesh.ndim :]
    return Axes(info.mesh, names, info=info)


def check_distinct(several: list[Axes]) -> None:
    """Error where one process group is described twice: the two would wait for each other."""
    for i, ours in enumerate(several):
        for theirs in several[:i]:
            same = (ours.mesh, ours.names) == (theirs.mesh, theirs.names)
            if same and ours.info is not theirs.info:
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, "
                    f"but got different objects for {ours.mesh}"
                )


def keep_size(reshard_after_forward: Any, axes: Axes) -> bool | int:
    """What torch's reshard_after_forward leaves in memory: all, none, or one part of k."""
    value = reshard_after_forward
    if not isinstance(value, bool | int):
        raise ValueError(
            "reshard_after_forward should be a bool or an int representing the group size to "
            f"reshard to, not {value}"
        )
    if isinstance(value, bool):
        return not value
    if axes.dims is not None:
        raise NotImplementedError(
            "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)"
        )
    size = axes.shard_size
    if value < 1 or value > size or size % value:
        raise ValueError(
            f"If passing reshard_after_forward as an int, it should be a factor of {size}, "
            f"not {value}"
        )
    if value == 1:
        return True
    return False if value == size else value


# By identity of torch's mesh (which each entry keeps alive), its axes and size of the kept groups:
# calls on one mesh share their groups, and what a setter does to them.
_groups: PerWorld[Mesh] = PerWorld()


def make_groups(axes: Axes, keep: bool | int) -> Mesh:
    """The engine's groups on `axes`."""
    small = 0 if isinstance(keep, bool) else keep
    key = (id(axes.mesh), axes.names, small)

    def make() -> Mesh:
        kind = axes.mesh.device_type
        device = torch.device(kind)
        if kind != "cpu":
            device = torch.device(kind, torch.get_device_module(kind).current_device())
        what = f"the mesh is for {kind} tensors"
        advice = f"initialise with a backend for {kind} ('cpu:gloo,cuda:nccl' has both)"
        check_backend(axes.mesh.get_group(axes.mesh.ndim - 1), device, what, advice)
        return groups_on(axes.mesh, axes.names, device, keep=small)

    return _groups.get(key, make)


def nest(name: str, parameter: nn.Parameter, axes: Axes, dim: int) -> DTensorParameter | None:
    """How a parameter that is a DTensor by itself looks sharded; None for a plain one."""
    data = parameter.data
    if isinstance(data, DTensor):
        whole = MeshPlacement.of(data)
        return _nest_beside(whole, axes, dim) if axes.dims is None else _nest_in(whole, axes, dim)
    if axes.dims is not None:
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
            f"mesh (e.g. via distribute_module). Got plain tensor for parameter '{name}'."
        )
    return None


def _nest_beside(inner: MeshPlacement, axes: Axes, dim: int) -> DTensorParameter:
    """Tensor parallel on a mesh of its own: the two meshes side by side."""
    if len(inner.placements) > 2:
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {inner.placements}"
        )
    placements = (*_placements(axes, _cut(inner, dim, 0)), *inner.placements)
    mesh = torch_private.concatenate([axes.mesh, inner.mesh])
    return DTensorParameter(inner, MeshPlacement(mesh, placements, inner.shape))


def _nest_in(whole: MeshPlacement, axes: Axes, dim: int) -> DTensorParameter:
    """Parameters on the full mesh: its data-parallel axes, replicated so far, become sharded.
    Several that are sharded become the one that they are flattened into.
    """
    assert axes.dims is not None and axes.full is not None
    if whole.mesh is not axes.full:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            "different mesh objects"
        )
    names = cast(tuple[str, ...], axes.full.mesh_dim_names)
    kinds = dict.fromkeys(axes.dims.shard_names, "shard")
    kinds.update(dict.fromkeys(axes.dims.replicate_names, "replicate"))
    for name, kind in kinds.items():
        placement = whole.placements[names.index(name)]
        if not isinstance(placement, Replicate):
            raise ValueError(
                f"Expected Replicate() on DP {kind} dim '{name}' (index {names.index(name)}) "
                f"but got {placement}"
            )
    summed = frozenset(map(names.index, kinds))
    if "shard" not in axes.names:
        return DTensorParameter(whole, whole, summed)
    first = names.index(axes.dims.shard_names[0])
    cut = _cut(whole, dim, first + 1)
    placements = [cut if i == first else theirs for i, theirs in enumerate(whole.placements)]
    mesh = whole.mesh
    if len(axes.dims.shard_names) > 1:
        meshes: list[DeviceMesh] = []
        placements = []
        for i, name in enumerate(names):
            if i == first:
                meshes.append(axes.mesh)
                placements += _placements(axes, cut)
            elif name not in kinds:
                meshes.append(mesh[name])
                placements.append(whole.placements[i])
        mesh = torch_private.concatenate(meshes)
    return DTensorParameter(whole, MeshPlacement(mesh, tuple(placements), whole.shape), summed)


def _placements(axes: Axes, cut: Placement) -> list[Placement]:
    """How a parameter is placed on the data-parallel axes themselves."""
    return [cut if name == "shard" else Replicate() for name in axes.names]


def _cut(whole: MeshPlacement, dim: int, first: int) -> Placement:
    """A shard along `dim`; a strided one of the whole where axes from `first` on have cut it."""
    parts = 1
    for axis in range(first, whole.mesh.ndim):
        if torch_private.shard_dim(whole.placements[axis]) == dim:
            parts *= whole.mesh.size(axis)
    return torch_private.strided_shard(dim, parts) if parts > 1 else Shard(dim)
