"""The groups a unit moves in; from a Plan's mesh to them, checked before any collective runs."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import processor
from shardwise.comms import gloo_threads
from shardwise.comms.real import Group
from shardwise.comms.versions import supported_devices, warn_if_untested
from shardwise.planning.plan import Plan


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


def mesh_of(plan: Plan, device: torch.device) -> Mesh:
    """The groups that a Plan asks for. Errors come before any collective."""
    _check(plan, device)
    prepare(device)
    both = _make_mesh(device.type, plan.mesh, ("replicate", "shard"))
    control = None if dist.get_backend() == "fake" else _control_mesh(both, plan)
    k, keep = plan.keep_after_forward, None
    if k is not None and not isinstance(k, bool):
        shape = (plan.replicate, plan.shard // k, k)
        keep = _group(_make_mesh(device.type, shape, ("replicate", "outer", "keep")), "keep", None)
    return Mesh(
        device,
        _group(both, "replicate", control),
        _group(both, "shard", control),
        # DTensors live on the axes that are there.
        both if plan.replicate > 1 else both["shard"],
        keep,
    )


def prepare(device: torch.device) -> None:
    """What a process needs before its first sharded model: said or done once."""
    warn_if_untested()
    gloo_threads.rest_at_exit()
    if device.type == "cpu":
        processor.settle()


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


def _group(mesh: DeviceMesh, axis: str, control: DeviceMesh | None) -> Group:
    hosts = control.get_group(axis) if control is not None else None
    return Group(axis, mesh.get_group(axis), mesh[axis].size(), mesh.get_local_rank(axis), hosts)


def _control_mesh(mesh: DeviceMesh, plan: Plan) -> DeviceMesh:
    """Groups for small host values. NCCL would stall the device for them, so such a mesh gets gloo
    groups beside.
    """
    if "cpu" in supported_devices(mesh.get_group("shard")):
        return mesh
    return _make_mesh("cpu", plan.mesh, ("replicate", "shard"), backend="gloo")


# Process groups are dear and never go away, so models of one mesh share them; gone with their
# world.
_meshes: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[object, ...], DeviceMesh]]
_meshes = weakref.WeakKeyDictionary()


def _make_mesh(
    device_type: str, shape: tuple[int, ...], names: tuple[str, ...], backend: str | None = None
) -> DeviceMesh:
    world = dist.group.WORLD
    assert world is not None
    made = _meshes.setdefault(world, {})
    key = (device_type, shape, backend)
    if key not in made:
        override: Any = {name: backend for name in names} if backend else None
        made[key] = init_device_mesh(
            device_type, shape, mesh_dim_names=names, backend_override=override
        )
    return made[key]


def _check(plan: Plan, device: torch.device) -> None:
    """Error when there is no process group, when the world has another size, or the backend cannot
    move `device`.
    """
    if not dist.is_initialized():
        if plan.world > 1:
            raise RuntimeError(
                f"the Plan's mesh {plan.mesh} has {plan.world} ranks, but torch.distributed is "
                "not initialised; "
                "start with torchrun (or `shardwise train`) and call "
                "torch.distributed.init_process_group first"
            )
        start_alone()
    world = dist.get_world_size()
    if plan.world != world:
        raise ValueError(
            f"the Plan's mesh {plan.mesh} has {plan.replicate} x {plan.shard} = {plan.world} "
            f"ranks, but {world} "
            f"{'is' if world == 1 else 'are'} running (rank {dist.get_rank()}); use a mesh whose "
            f"product is {world}"
        )
    backend = dist.get_backend()
    usable = supported_devices(dist.group.WORLD)
    if backend != "fake" and device.type not in usable:
        advice = (
            "move the model to the GPU before sharding it, or initialise with backend='gloo'"
            if device.type == "cpu"
            else "initialise with backend='cpu:gloo,cuda:nccl'"
        )
        raise ValueError(
            f"rank {dist.get_rank()}: the model is on {device}, but the process group's backend "
            f"{backend!r} moves "
            f"{sorted(usable)} tensors only; {advice}"
        )
