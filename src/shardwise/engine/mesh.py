"""The groups a unit moves in; from a Plan's mesh to them, checked before any collective runs."""

from __future__ import annotations

import atexit
import functools
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardwise import processor
from shardwise.engine.collectives import (
    Group,
    PerWorld,
    control_of,
)
from shardwise.engine.torch_private import supported_devices, warn_if_untested
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
    own = plan.device_mesh
    if own is not None:
        _check_own(own, device)
    names = ("replicate", "shard")
    both = _make_mesh(device.type, plan.mesh, names) if own is None else own
    k, keep = plan.keep_after_forward, None
    if k is not None and not isinstance(k, bool):
        shape = (plan.replicate, plan.shard // k, k)
        small = _make_mesh(device.type, shape, ("replicate", "outer", "keep"))
        keep = Group("keep", small.get_group("keep"), k, small.get_local_rank("keep"), None)
    # DTensors live on the caller's mesh, or on the axes that are there.
    seen = both if own is not None or plan.replicate > 1 else both["shard"]
    replicate, shard = (_group(plan, both, axis) for axis in names)
    return Mesh(device, replicate, shard, seen, keep)


def unsharded(mesh: Mesh) -> Mesh:
    """Groups for what every rank keeps whole: summed over all ranks, and seen on the same mesh."""
    everyone = Group("all", dist.group.WORLD, dist.get_world_size(), dist.get_rank(), None)
    return Mesh(mesh.device, everyone, Group("shard", None, 1, 0, None), mesh.device_mesh)


def prepare(device: torch.device) -> None:
    """What a process needs before its first sharded model: said or done once."""
    warn_if_untested()
    rest_at_exit()
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


def _group(plan: Plan, mesh: DeviceMesh, axis: str) -> Group:
    """One axis of the Plan's mesh; a caller's mesh of one axis lacks the other."""
    only = "replicate" if plan.name == "ddp" else "shard"
    if mesh.ndim == 1 and axis != only:
        return Group(axis, None, 1, 0, None)
    dim = 0 if mesh.ndim == 1 or axis == "replicate" else 1
    group = mesh.get_group(dim)
    return Group(axis, group, mesh.size(dim), mesh.get_local_rank(dim), control_of(group))


# Process groups are dear and never go away, so models of one mesh share them.
_meshes: PerWorld[DeviceMesh] = PerWorld()


def _make_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    made = _meshes.here
    key = (device_type, shape)
    if key not in made:
        made[key] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return made[key]


def _check_own(mesh: DeviceMesh, device: torch.device) -> None:
    """Error for a caller's mesh of another device, or with its ranks in another order: the groups
    beside it (of host values, of all ranks, of those that keep a unit together) follow the world's.
    """
    if mesh.device_type != device.type:
        raise ValueError(f"the model is on {device}, but the Plan's mesh is for {mesh.device_type}")
    if mesh.mesh.flatten().tolist() != list(range(dist.get_world_size())):
        raise ValueError(
            f"the Plan's mesh {mesh} has its ranks in another order than the world; use "
            "init_device_mesh, which counts them up"
        )


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


_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo"  # how torch names those threads
_NAP_S = 1e-3
_PATIENCE_S = 2.0


@functools.cache  # once
def rest_at_exit() -> None:
    """Let the end of this program wait until gloo's threads have nothing left to do."""
    atexit.register(_wait_until_idle)


def _wait_until_idle() -> None:
    """Sleep, which leaves the lock to whoever waits for it, until all of them sleep too.

    One that waits for another rank sleeps as well, so this never waits for a rank that has gone.
    """
    until, idle = time.monotonic() + _PATIENCE_S, 0
    while idle < 3 and time.monotonic() < until:
        time.sleep(_NAP_S)
        idle = 0 if any(_is_busy(task) for task in _threads()) else idle + 1


def _threads() -> list[Path]:
    return list(_TASKS.iterdir()) if _TASKS.is_dir() else []


def _is_busy(task: Path) -> bool:
    """Whether a thread of gloo runs, or could run if it got a processor."""
    try:
        name, _, rest = (task / "stat").read_text().partition(") ")
    except OSError:  # it has ended
        return False
    return f"({_NAME}" in name and not rest.startswith("S")
