"""From torch's DeviceMesh to the engine's groups, and from a parameter to how it is cut on them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise.engine import torch_private
from shardwise.engine.collectives import (
    Group,
    PerWorld,
    control_of,
)
from shardwise.engine.forms import Form, Nested
from shardwise.engine.mesh import Mesh, default_device, prepare, start_alone
from shardwise.fsdp2.policies import DataParallelMeshDims


@dataclass(frozen=True)
class Axes:
    """The data-parallel axes of a call: a mesh of (shard) or (replicate, shard) or (replicate).

    With `dims`, parameters are DTensors on `full`, of which these axes are a part.
    """

    mesh: DeviceMesh
    shards: bool = True
    dims: DataParallelMeshDims | None = None
    full: DeviceMesh | None = None

    @property
    def replicates(self) -> bool:
        return not self.shards or self.mesh.ndim == 2

    @property
    def shard_size(self) -> int:
        return self.mesh.size(self.mesh.ndim - 1) if self.shards else 1


def default_mesh() -> DeviceMesh:
    """All ranks on one axis, on the accelerator if there is one."""
    if not dist.is_initialized():
        if "RANK" in os.environ:
            dist.init_process_group()
        else:
            start_alone()
    made = _defaults.here
    if None not in made:
        made[None] = init_device_mesh(default_device().type, (dist.get_world_size(),))
    return made[None]


_defaults: PerWorld[DeviceMesh] = PerWorld()  # one for all calls without a mesh


def find_axes(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> Axes:
    """Check a mesh as torch does, and take the data-parallel axes out of it."""
    if dims is None:
        if mesh.ndim not in (1, 2):
            raise ValueError(f"fully_shard expects a 1D or 2D DeviceMesh but got {mesh}")
        if mesh.ndim == 2 and mesh.mesh_dim_names is None:
            raise AssertionError("Please init the 2D mesh for HSDP with mesh_dim_names specified")
        return Axes(mesh)
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError("mesh must have mesh_dim_names when dp_mesh_dims is provided")
    for name in (*dims.shard_names, *dims.replicate_names):
        if name not in names:
            raise ValueError(f"Mesh dim name '{name}' not found in mesh.mesh_dim_names {names}")
    shard = _flat(mesh, dims.shard_names)
    replicate = _flat(mesh, dims.replicate_names)
    if shard is None:
        assert replicate is not None
        return Axes(replicate, False, dims, mesh)
    both = shard if replicate is None else torch_private.concatenate([replicate, shard])
    return Axes(both, True, dims, mesh)


def _flat(mesh: DeviceMesh, names: tuple[str, ...]) -> DeviceMesh | None:
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else mesh[names]._flatten("_".join(names))


# One Axes per torch FSDPMeshInfo that a shard_placement_fn returned, found again by identity.
_of_infos: PerWorld[tuple[Any, Axes]] = PerWorld()


def axes_of_info(info: Any, default: Axes) -> Axes:
    """The axes of a parameter that has a mesh of its own (torch's FSDPMeshInfo)."""
    if info.mesh is default.mesh:
        return default
    known = _of_infos.here.get(id(info))
    if known is None or known[0] is not info:
        known = (info, Axes(info.mesh, info.shard_mesh_dim is not None))
        _of_infos.here[id(info)] = known
    return known[1]


def check_distinct(several: list[Axes]) -> None:
    """Error where one process group is described twice: the two would wait for each other."""
    for i, ours in enumerate(several):
        for theirs in several[:i]:
            if ours is not theirs and ours.mesh == theirs.mesh and ours.shards == theirs.shards:
                raise ValueError(
                    "Params sharing the same process group must use the same FSDPMeshInfo object, "
                    f"but got different objects for {ours.mesh}"
                )


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    handle = getattr(torch, mesh.device_type)
    return torch.device(mesh.device_type, handle.current_device())


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


# By identity of torch's mesh (which each entry keeps alive), kind of axes and size of the kept
# groups: calls on one mesh share their groups, and what a setter does to them.
_meshes: PerWorld[Mesh] = PerWorld()


def make_mesh(axes: Axes, keep: bool | int) -> Mesh:
    """The engine's groups on `axes`."""
    small = 0 if isinstance(keep, bool) else keep
    key = (id(axes.mesh), axes.shards, small)
    made = _meshes.here
    if key in made:
        return made[key]
    device = device_of(axes.mesh)
    _check_backend(axes.mesh, device)
    prepare(device)
    last = axes.mesh.ndim - 1
    mesh = Mesh(
        device,
        _group("replicate", axes.mesh, 0 if axes.replicates else None),
        _group("shard", axes.mesh, last if axes.shards else None),
        axes.mesh,
        *(_keep_group(axes.mesh, small) if small else ()),
    )
    made[key] = mesh
    return mesh


def _keep_group(mesh: DeviceMesh, k: int) -> tuple[Group, DeviceMesh]:
    small = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, k))
    return _group("keep", small, 1), small


def _group(axis: str, mesh: DeviceMesh, dim: int | None) -> Group:
    if dim is None:
        return Group(axis, None, 1, 0, None)
    group = mesh.get_group(dim)
    return Group(axis, group, mesh.size(dim), mesh.get_local_rank(dim), control_of(group))


def _check_backend(mesh: DeviceMesh, device: torch.device) -> None:
    """Error where torch would crash: a group whose backend cannot move the device's tensors."""
    group = mesh.get_group(mesh.ndim - 1)
    usable = torch_private.supported_devices(group)
    if dist.get_backend(group) != "fake" and device.type not in usable:
        raise ValueError(
            f"rank {dist.get_rank()}: the mesh is for {device.type} tensors, but its process "
            f"group's backend {dist.get_backend(group)!r} moves {sorted(usable)} only; initialise "
            f"with a backend for {device.type} ('cpu:gloo,cuda:nccl' has both)"
        )


def nest(name: str, parameter: nn.Parameter, axes: Axes, dim: int) -> Nested | None:
    """How a parameter that is a DTensor by itself looks sharded; None for a plain one."""
    data = parameter.data
    if not isinstance(data, DTensor):
        if axes.dims is not None:
            raise ValueError(
                "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD "
                "mesh (e.g. via distribute_module). Got plain tensor for parameter "
                f"'{name}'."
            )
        return None
    return _nest_beside(data, axes, dim) if axes.dims is None else _nest_inside(data, axes, dim)


def _nest_beside(data: DTensor, axes: Axes, dim: int) -> Nested:
    """Tensor parallel on a mesh of its own: the two meshes side by side."""
    inner = Form.of(data)
    if len(inner.placements) > 2:
        raise NotImplementedError(
            f"FSDP only supports 1D TP/EP or 2D EP+TP, not {inner.placements}"
        )
    cut = _cut(dim, _shards_of(inner, dim, 0))
    outer: tuple[Placement, ...] = (cut,) if axes.shards else ()
    if axes.replicates:
        outer = (Replicate(), *outer)
    mesh = torch_private.concatenate([axes.mesh, inner.mesh])
    return Nested(inner, Form(mesh, (*outer, *inner.placements), inner.shape))


def _nest_inside(data: DTensor, axes: Axes, dim: int) -> Nested:
    """Parameters on the full mesh: the data-parallel axes, replicated so far, become sharded."""
    assert axes.dims is not None and axes.full is not None
    whole = Form.of(data)
    if whole.mesh is not axes.full:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            "different mesh objects"
        )
    names = cast(tuple[str, ...], axes.full.mesh_dim_names)
    for kind, wanted in (
        ("shard", axes.dims.shard_names),
        ("replicate", axes.dims.replicate_names),
    ):
        for name in wanted:
            placement = whole.placements[names.index(name)]
            if not isinstance(placement, Replicate):
                raise ValueError(
                    f"Expected Replicate() on DP {kind} dim '{name}' (index {names.index(name)}) "
                    f"but got {placement}"
                )
    shard_axes = [names.index(name) for name in axes.dims.shard_names]
    placements = list(whole.placements)
    for axis in shard_axes:
        placements[axis] = _cut(dim, _shards_of(whole, dim, axis + 1))
    summed = frozenset([*shard_axes, *(names.index(n) for n in axes.dims.replicate_names)])
    sharded = Form(whole.mesh, tuple(placements), whole.shape)
    if len(shard_axes) > 1:
        sharded = _flatten_axes(sharded, axes, shard_axes, names)
    return Nested(whole, sharded, summed)


def _flatten_axes(form: Form, axes: Axes, shard_axes: list[int], names: tuple[str, ...]) -> Form:
    """Several data-parallel axes as the one they are flattened into."""
    assert axes.dims is not None
    meshes: list[DeviceMesh] = []
    placements: list[Placement] = []
    for axis, name in enumerate(names):
        if axis == shard_axes[0]:
            meshes.append(axes.mesh)
            placements += [*([Replicate()] if axes.replicates else []), form.placements[axis]]
        elif name not in (*axes.dims.shard_names, *axes.dims.replicate_names):
            meshes.append(form.mesh[name])
            placements.append(form.placements[axis])
    return Form(torch_private.concatenate(meshes), tuple(placements), form.shape)


def _shards_of(form: Form, dim: int, first: int) -> int:
    """Into how many parts the axes from `first` on cut `dim`."""
    parts = 1
    for axis in range(first, form.mesh.ndim):
        if torch_private.shard_dim(form.placements[axis]) == dim:
            parts *= form.mesh.size(axis)
    return parts


def _cut(dim: int, parts_within: int) -> Placement:
    """A shard of what other axes have cut already is a strided one of the whole."""
    return torch_private.strided_shard(dim, parts_within) if parts_within > 1 else Shard(dim)
