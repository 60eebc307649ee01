"""The groups a unit moves in; from a Plan's mesh, or a caller's, to them, checked before any
collective runs. And how one parameter looks on a mesh: to users while it is sharded, to its module
while it is whole.

A plain parameter is a DTensor to users and a plain tensor to its module. A parameter that is a
DTensor already (tensor parallel) stays one: the engine cuts its local tensor, users see a DTensor
on both meshes, the module sees what it had.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shardwise import processor
from shardwise.engine import process, uncaught
from shardwise.engine.collectives import Group
from shardwise.engine.torch_private import (
    DTensorSpec,
    ask_for_whole_numbers,
    completed,
    default_store,
    in_process,
    local_of,
    make_dtensor,
    make_spec,
    supported_devices,
    warn_if_untested,
)
from shardwise.engine.words import PerWorld
from shardwise.planning.plan import Plan
from shardwise.planning.rows import Rows
from shardwise.watch import rank as watched

AXES = ("replicate", "shard")


@dataclass
class Mesh:
    """This rank's groups on the mesh (replicate, shard), and the DTensors' own mesh."""

    device: torch.device
    replicate: Group
    shard: Group
    device_mesh: DeviceMesh  # of the visible parameters: replicate and shard, or shard alone
    keep: Group | None = None  # of neighbours that hold a unit together: keep_after_forward = k
    keep_mesh: DeviceMesh | None = None  # of what users see of parameters kept so
    scatter: Group = field(init=False)  # reduces gradients; the shard group, unless set apart

    def __post_init__(self) -> None:
        self.scatter = self.shard

    @property
    def ranks(self) -> int:
        return self.replicate.size * self.shard.size

    def separate_scatters(self, enable: bool) -> None:
        """Reduce gradients in a process group of their own over the same ranks, or no longer."""
        shard = self.shard
        if not enable or shard.group is None:
            self.scatter = shard
            return
        ranks = shard.members
        group = _scatter_groups.get(
            ranks, lambda: dist.new_group(list(ranks), use_local_synchronization=True)
        )
        self.scatter = replace(shard, group=group)


_scatter_groups: PerWorld[dist.ProcessGroup] = PerWorld()


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

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """The same in torch's words, to make DTensors of again and again."""
        return make_spec(self.mesh, self.placements, self.shape, dtype)

    def wrap(self, local: torch.Tensor) -> DTensor:
        """A DTensor over `local`; shares its memory."""
        return make_dtensor(local, self.spec(local.dtype))


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
        gradient = completed(gradient)
        assert isinstance(gradient, DTensor)
        wanted = tuple(
            theirs if axis in self.summed_axes else ours
            for axis, (ours, theirs) in enumerate(
                zip(self.whole.placements, gradient.placements, strict=True)
            )
        )
        if wanted != tuple(gradient.placements):
            gradient = gradient.redistribute(placements=wanted)
        return local_of(gradient)


def mesh_of(plan: Plan, device: torch.device) -> Mesh:
    """The groups that a Plan asks for. Errors come before any collective."""
    own = plan.device_mesh
    _check(plan, device)
    both = shared_mesh(device.type, plan.mesh, AXES) if own is None else own
    only = "replicate" if plan.name == "ddp" else "shard"
    axes = AXES if both.ndim == 2 else (only,)
    k = plan.keep_after_forward
    # DTensors live on the caller's mesh, or on the axes that are there.
    seen = both if own is not None or plan.replicate > 1 else both["shard"]
    ask_for_whole_numbers(seen)
    keep = 0 if k is None or isinstance(k, bool) else k
    return groups_on(both, axes, device, seen, keep, plain=False)


def groups_on(
    mesh: DeviceMesh,
    axes: tuple[str, ...],
    device: torch.device,
    seen: DeviceMesh | None = None,
    keep: int = 0,
    plain: bool = True,
) -> Mesh:
    """This rank's groups on a mesh whose dims are `axes`: replicate, shard, or both. Users see
    DTensors on `seen`, or on the mesh itself. With `keep`, neighbours in groups of that size hold a
    unit together. `plain` as `Group` has it.
    """
    # What a process needs before its first sharded model: said or done once.
    warn_if_untested()
    watch_ranks()
    if device.type == "cpu":
        processor.settle()
        process.keep_heap()
    replicate, shard = (_group(axis, mesh, axes, device, plain) for axis in AXES)
    if not keep:
        return Mesh(device, replicate, shard, seen or mesh)
    key = (mesh.device_type, tuple(mesh.mesh.flatten().tolist()), keep)
    small = _meshes.get(key, lambda: DeviceMesh(mesh.device_type, mesh.mesh.view(-1, keep)))
    kept = _group("keep", small, ("outer", "keep"), device, plain)
    return Mesh(device, replicate, shard, seen or mesh, kept, small)


def _group(
    axis: str, mesh: DeviceMesh, axes: tuple[str, ...], device: torch.device, plain: bool
) -> Group:
    """The group along one axis of a mesh; this rank by itself where the mesh lacks it."""
    if axis not in axes:
        return Group(axis, None, 1, 0, None)
    return Group.of(axis, mesh.get_group(axes.index(axis)), device, plain)


def unsharded(mesh: Mesh) -> Mesh:
    """Groups for what every rank keeps whole: summed over all ranks, and seen on the same mesh."""
    everyone = Group.of("all", None, mesh.device, mesh.shard.plain)
    return Mesh(mesh.device, everyone, Group("shard", None, 1, 0, None), mesh.device_mesh)


def watch_ranks() -> None:
    """Let a process beside this rank watch it, where ranks are processes that need each other."""
    world, store = dist.group.WORLD, default_store()
    unreal = dist.get_backend() in ("fake", "threaded") or in_process(store)
    if world is None or dist.get_world_size() == 1 or unreal:
        return
    reference = weakref.ref(world)
    watched.begin(
        dist.get_rank(),
        dist.get_world_size(),
        store,
        lambda: dist.is_initialized() and dist.group.WORLD is reference(),
        uncaught.explain,
    )


# How launchers tell a process that it has company.
_WORLDS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def start_alone() -> None:
    """A process group of this process only, which needs no launcher. An error where a launcher has
    started others: they would train a model each.
    """
    for name in _WORLDS:
        if int(os.environ.get(name) or 1) > 1:
            raise RuntimeError(
                f"{os.environ[name]} ranks were started ({name}), but torch.distributed is not "
                "initialised, so each would train a model of its own: call "
                "torch.distributed.init_process_group first"
            )
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def default_device() -> torch.device:
    """The accelerator if there is one and the process group moves its tensors, else the host.

    One that torch was built for is not there without its driver.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not dist.is_initialized():
        return accelerator or torch.device("cpu")
    if accelerator.type not in supported_devices(dist.group.WORLD):
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


# Process groups are dear and never go away, so models of one mesh share them.
_meshes: PerWorld[DeviceMesh] = PerWorld()


def shared_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """All ranks in this shape, on the same mesh as others that ask for it."""
    return _meshes.get(
        (device_type, shape), lambda: init_device_mesh(device_type, shape, mesh_dim_names=names)
    )


def _check(plan: Plan, device: torch.device) -> None:
    """Error when there is no process group, when the world has another size, when the backend
    cannot move `device`, or for a caller's mesh of another device or order.
    """
    if not dist.is_initialized():
        if plan.world > 1:
            raise RuntimeError(
                f"the Plan's mesh {plan.mesh} has {plan.world} ranks, but torch.distributed is "
                "not initialised; start with torchrun (or `shardwise train`) and call "
                "torch.distributed.init_process_group first"
            )
        start_alone()
    world = dist.get_world_size()
    if plan.world != world:
        raise ValueError(
            f"the Plan's mesh {plan.mesh} has {plan.replicate} x {plan.shard} = {plan.world} "
            f"ranks, but {world} {'is' if world == 1 else 'are'} running (rank "
            f"{dist.get_rank()}); use a mesh whose product is {world}"
        )
    advice = (
        "move the model to the GPU before sharding it, or initialise with backend='gloo'"
        if device.type == "cpu"
        else "initialise with backend='cpu:gloo,cuda:nccl'"
    )
    check_backend(dist.group.WORLD, device, f"the model is on {device}", advice)
    mesh = plan.device_mesh
    if mesh is not None and mesh.device_type != device.type:
        raise ValueError(f"the model is on {device}, but the Plan's mesh is for {mesh.device_type}")
    # The groups beside it (of host values, of all ranks, of those that keep a unit together) follow
    # the world's order.
    if mesh is not None and mesh.mesh.flatten().tolist() != list(range(world)):
        raise ValueError(
            f"the Plan's mesh {mesh} has its ranks in another order than the world; use "
            "init_device_mesh, which counts them up"
        )


def check_backend(
    group: dist.ProcessGroup | None, device: torch.device, what: str, advice: str
) -> None:
    """Error where torch would crash: a group whose backend cannot move the device's tensors."""
    backend, usable = dist.get_backend(group), supported_devices(group)
    if backend != "fake" and device.type not in usable:
        raise ValueError(
            f"rank {dist.get_rank()}: {what}, but the process group's backend {backend!r} moves "
            f"{sorted(usable)} tensors only; {advice}"
        )
