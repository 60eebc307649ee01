"""`fully_shard`: from one call to units of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, overload

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor, Shard

from shardwise.engine.api import check_unplanned
from shardwise.engine.attach import Options, divide
from shardwise.engine.extended import is_extended
from shardwise.engine.storage import Member, Offload
from shardwise.engine.torch_private import DataParallelMeshDims, parameters_of
from shardwise.engine.unit import Unit
from shardwise.fsdp2 import meshes, ties
from shardwise.fsdp2.meshes import Axes
from shardwise.fsdp2.module import FSDPModule, become_sharded
from shardwise.fsdp2.sharding import NAME, Sharding, is_applied, state_of
from shardwise.planning.units import why_not_cut

Placed = tuple[nn.Parameter, list[tuple[nn.Module, str]]]


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: Sequence[nn.Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = ...,
    mp_policy: MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
) -> list[FSDPModule]: ...


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> Any:
    """Shard `module` (or several, as one group) in place as torch's `fully_shard` does, and return
    it. Call it bottom-up: parameters of modules that are sharded already stay with those.

    mesh: one axis to shard over, or two named ones, (replicate, shard); by default all ranks.
    reshard_after_forward: True frees parameters after forward; False keeps them for backward; k
        keeps them cut among k ranks; None is True, but False for the root.
    shard_placement_fn: of a parameter, `Shard(dim)` for another dim than 0; None for the default.
    mp_policy: dtypes of compute, reduction and output.
    offload_policy: `CPUOffloadPolicy()` keeps parameters, gradients and optimizer on the host.
    ignored_params: parameters that stay as they are.
    dp_mesh_dims: which dims of `mesh` are data parallel, where parameters are DTensors on it all.

    Finds the parameters, moves them to the mesh's device, cuts each over the mesh, hangs DTensors
    in their places, and makes the module an instance of FSDPModule.
    """
    modules = _check_modules(module)
    axes = meshes.find_axes(mesh or meshes.default_mesh(), dp_mesh_dims)
    keep = meshes.keep_size(True if reshard_after_forward is None else reshard_after_forward, axes)
    groups = meshes.make_groups(axes, keep)
    managed = _managed_modules(modules)
    parameters = _find_parameters(managed, ignored_params or set())
    _move([p for p, _ in parameters], managed, groups.device)
    units: list[Unit] = []
    for members, own_axes in _group(modules, parameters, axes, shard_placement_fn):
        options = _make_options(mp_policy, offload_policy, keep)
        own_groups = meshes.make_groups(own_axes, keep)
        unit = Unit(type(modules[0]).__name__, modules, members, own_groups, options)
        divide(unit, own_groups.ranks)
        units.append(unit)
    sharding = Sharding(modules, units, groups, mp_policy, reshard_after_forward is None)
    kept = [(unit.parameters.members, unit.parameters.visible) for unit in units]
    sharding.homes = [
        ties.Home(sharding, member, visible)
        for members, seen in kept
        for member, visible in zip(members, seen, strict=True)
    ]
    for each in modules:
        become_sharded(each)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _make_options(
    precision: MixedPrecisionPolicy, offload: OffloadPolicy, keep: bool | int
) -> Options:
    """The options of one call. Gradients are reduced in the dtype they are computed in, unless the
    policy says another.
    """
    host = None
    if isinstance(offload, CPUOffloadPolicy):
        host = Offload(offload.pin_memory and torch.cuda.is_available())
    return Options(
        compute_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        precision=precision,
        offload=host,
        keep=keep,
        stays_shown=True,
    )


def _check_modules(module: Any) -> list[nn.Module]:
    """The outermost of the given modules, none of which is sharded or, by itself, a mere
    container.
    """
    container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    if container and type(module).forward is nn.Module.forward:
        raise ValueError(
            f"fully_shard does not support containers that do not implement forward: {module}"
        )
    given = [module] if isinstance(module, nn.Module) else list(module)
    if not given or isinstance(module, Iterator):
        raise IndexError(f"fully_shard expects a module or a list of modules, got {module!r}")
    for at, each in enumerate(given):
        twice = any(each is other for other in given[:at])
        if twice or is_applied(each, NAME):
            raise AssertionError(
                "Each distinct composable distributed API can only be applied to a module once. "
                f"fully_shard has already been applied to the following module:\n{each}"
            )
        check_unplanned(each)
    inside = {id(m) for each in given for m in each.modules() if m is not each}
    return [each for each in given if id(each) not in inside]


def _managed_modules(roots: list[nn.Module]) -> list[nn.Module]:
    """The modules whose own parameters the call takes, children first: all but those sharded or
    replicated already.
    """
    found: list[nn.Module] = []
    seen: set[int] = set()

    def visit(module: nn.Module) -> None:
        if id(module) in seen or is_applied(module, "replicate"):
            return
        if module not in roots and is_applied(module, NAME):
            return
        seen.add(id(module))
        for child in module.children():
            visit(child)
        found.append(module)

    for root in roots:
        visit(root)
    return found


def _find_parameters(managed: list[nn.Module], ignored: set[nn.Parameter]) -> list[Placed]:
    """Every parameter once, with all places where it hangs."""
    found: dict[int, Placed] = {}
    for module in managed:
        for key, parameter in parameters_of(module).items():
            if parameter is not None and parameter not in ignored:
                if why := why_not_cut(module, parameter):
                    raise RuntimeError(f"parameter {key!r} {why}, or give it to ignored_params")
                found.setdefault(id(parameter), (parameter, []))[1].append((module, key))
    return list(found.values())


def _move(
    parameters: Iterable[nn.Parameter], managed: list[nn.Module], device: torch.device
) -> None:
    """Parameters and buffers to the mesh's device, but for what has no memory yet."""
    buffers = [b for module in managed for b in module.buffers(recurse=False)]
    for tensor in (*parameters, *buffers):
        if tensor.device == device or tensor.device.type == "meta":
            continue
        if isinstance(tensor.data, DTensor):
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{tensor.data.device_mesh.device_type} for DTensor and {device.type} for FSDP"
            )
        tensor.data = tensor.data.to(device)


def _group(
    roots: list[nn.Module],
    parameters: list[Placed],
    axes: Axes,
    placement_fn: Callable[[nn.Parameter], Any] | None,
) -> list[tuple[list[Member], Axes]]:
    """Parameters that can travel together: of one dtype, over one mesh. A weight that modules
    inside share across their groups comes here, to the lowest group that covers them all.
    """
    groups: dict[tuple[Any, ...], tuple[list[Member], Axes]] = {}

    def add(member: Member, axes: Axes) -> None:
        parameter = member.original
        # A parameter that brings its own all-gather travels alone.
        alone = id(parameter) if is_extended(parameter) else None
        key = (parameter.dtype, id(axes.info or axes), alone)
        groups.setdefault(key, ([], axes))[0].append(member)

    for parameter, hangs in parameters:
        home = ties.home_of(parameter)
        if home is not None:
            home.tie(hangs, roots)
            continue
        dim, own_axes = _placement(parameter, axes, placement_fn)
        nested = meshes.nest(hangs[0][1], parameter, own_axes, dim)
        member = Member([hangs[0][1]], hangs, parameter, dim, nested)
        if dim and member.shape[dim] % own_axes.shard_size:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: "
                f"{torch.Size(member.shape)} (world size: {own_axes.shard_size})"
            )
        add(member, own_axes)
    for member in ties.collect(roots):
        add(member, axes)
    meshes.check_distinct([own_axes for _, own_axes in groups.values()])
    return list(groups.values())


def _placement(
    parameter: nn.Parameter, axes: Axes, placement_fn: Callable[[nn.Parameter], Any] | None
) -> tuple[int, Axes]:
    """The dim to cut and the axes to cut it over; `placement_fn` may choose both."""
    chosen: Any = placement_fn(parameter) if placement_fn is not None else None
    info = getattr(chosen, "mesh_info", None)
    if info is not None:  # torch's ShardPlacementResult
        axes = axes if info.mesh is axes.mesh else meshes.axes_of_info(info)
        chosen = chosen.placement
    if chosen is None:
        return 0, axes
    if not isinstance(chosen, Shard):
        raise ValueError(f"Invalid shard_placement_fn result: {chosen}")
    dim = chosen.dim if chosen.dim >= 0 else chosen.dim + parameter.ndim
    if not 0 <= dim < max(parameter.ndim, 1):
        raise AssertionError(
            f"Shard dim {chosen.dim} is invalid for {parameter.ndim}D tensor: {parameter.shape}"
        )
    return dim, axes
