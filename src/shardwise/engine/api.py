"""What users call: shard a model, and ask a sharded model for its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shardwise.engine import checks, torch_private
from shardwise.engine.agreement import check_plan
from shardwise.engine.arena import Arena
from shardwise.engine.attach import attach, find_device
from shardwise.engine.engine import ENGINE_KEY, Engine, engine_of, is_sharded
from shardwise.engine.executor import TensorExecutor
from shardwise.engine.hooks import Node
from shardwise.engine.local_step import watch_optimizers
from shardwise.engine.mesh import Mesh, mesh_of
from shardwise.engine.parameter_runs import ELEMENTWISE
from shardwise.engine.state import copy_module, let_load_whole, repeat_unit
from shardwise.engine.uneven import introduce
from shardwise.engine.unit import Unit
from shardwise.planning.plan import Plan, find_dtype

_ONE_WAY = (
    "a model is sharded by sw.shard(model, plan) or by fully_shard, not by both: leave one of them "
    "out, or start from a new model"
)


def shard(model: nn.Module, plan: Plan, device: torch.device | None = None) -> nn.Module:
    """Shard `model` in place as `plan` says, and return it. Parameter names stay; build the
    optimizer afterwards. `device` is where it will be; default: where it is.
    """
    check_whole(model)
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is {plan!r:.40}, a {type(plan).__name__}, expected a Plan "
            "(sw.Plan.of('zero3', mesh=8)), or 'auto'"
        )
    device = device or find_device(model)
    plan = plan.resolve(model)
    checks.check_apart(model)
    check_plan(plan)
    if device.type == "cuda":
        torch_private.let_segments_grow()  # before anything that stays is allocated
    mesh = mesh_of(plan, device)
    units = attach(model, plan, mesh)
    let_load_whole(model)
    _start(model, plan, units, mesh)
    return model


def check_whole(model: nn.Module) -> None:
    """Error for what is no model, or one of which something is sharded already."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is {model!r:.40}, a {type(model).__name__}, expected an nn.Module")
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ValueError(
                f"{_how_sharded(name, module)}; sw.shard takes a whole, unsharded model"
            )
    check_unplanned(model)
    for name, parameter in model.named_parameters():
        moved = getattr(parameter, "_shardwise_moved", None)
        if moved is not None:
            raise ValueError(
                f"parameter {name!r} of {type(model).__name__} was sharded already, as {moved!r} "
                "of another model, which has a sharded one in its place now; shard one module that "
                "has both models inside, or give each a parameter of its own"
            )


def _start(model: nn.Module, plan: Plan, units: list[Unit], mesh: Mesh) -> None:
    """An engine over `units`, the hooks that call it, and what `copy.deepcopy` calls."""
    on_gpu = mesh.device.type == "cuda"
    arena = Arena(mesh.device) if plan.has_arena(on_gpu) else None
    executor = TensorExecutor(mesh.device, arena)
    engine = Engine(model, units, mesh, plan.policy, executor)
    engine.plan = plan
    introduce(engine)
    nodes = _hang(model, plan, engine)
    bind(model, engine)

    def copy(memo: dict[int, Any]) -> nn.Module:
        """The same training of a copy: its own rows, gradients, hooks and engine, the same groups.
        No communication.
        """
        for unit in units:
            unit.free()
        for node in nodes:
            node.unhang()
            del node.module.__dict__["__deepcopy__"]
        unbind(model)
        try:
            twin, copies = copy_module(model, memo)
        finally:
            bind(model, engine)
            for node in nodes:
                node.hang()
            let_copy()
        _start(twin, plan, [repeat_unit(unit, copies) for unit in units], mesh)
        return twin

    def let_copy() -> None:
        for node in nodes:
            node.module.__dict__["__deepcopy__"] = copy if node.module is model else _refuse_part

    let_copy()


def _refuse_part(memo: dict[int, Any]) -> nn.Module:
    raise RuntimeError(
        "a part of a model that a Plan shards has no engine to be copied with; copy the model, "
        "which then trains by itself, and take the part from the copy"
    )


def bind(model: nn.Module, engine: Engine | Callable[[], Engine]) -> None:
    """From now on `engine_of(model)` is `engine`, or what calling it gives."""
    model.__dict__[ENGINE_KEY] = engine
    watch_optimizers()


def unbind(model: nn.Module) -> None:
    del model.__dict__[ENGINE_KEY]


def _hang(model: nn.Module, plan: Plan, engine: Engine) -> list[Node]:
    """One node for every module that units run with; the model's own node is the root."""
    by_module: dict[int, tuple[nn.Module, list[Unit]]] = {id(model): (model, [])}
    for unit in engine.units:
        for module in unit.modules:
            by_module.setdefault(id(module), (module, []))[1].append(unit)
    computes, outputs = find_dtype(plan.compute_dtype), find_dtype(plan.output_dtype)
    nodes = []
    for module, units in by_module.values():
        is_root = module is model
        floats = is_root or any(unit.parameters.dtype.is_floating_point for unit in units)
        node = Node(module, units, None, computes if floats else None, outputs if is_root else None)
        node.join(engine, is_root)
        nodes.append(node)
    return nodes


def _how_sharded(name: str, module: nn.Module) -> str:
    what = f"{type(module).__name__} ({name})" if name else type(module).__name__
    by = "by a Plan" if isinstance(module.__dict__[ENGINE_KEY], Engine) else "by fully_shard"
    return f"{what} is sharded already, {by}"


def check_unplanned(model: nn.Module) -> None:
    """Error for a model that a Plan shards, for one around it, and for a part of it."""
    for name, module in model.named_modules():
        if isinstance(module.__dict__.get(ENGINE_KEY), Engine):
            raise ValueError(f"{_how_sharded(name, module)}; {_ONE_WAY}")
    for name, parameter in model.named_parameters():
        engine = checks.engine_training(parameter)
        if engine is not None and engine.plan is not None:
            raise ValueError(
                f"parameter {name!r} of {type(model).__name__} is sharded already, by a Plan; "
                f"{_ONE_WAY}"
            )


def local(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """`optimizer` itself, once it is sure that it steps on flat local buffers: an error if it is of
    a kind that cannot, or has no parameter of a sharded model.
    """
    if type(optimizer) not in ELEMENTWISE:
        kinds = ", ".join(kind.__name__ for kind in ELEMENTWISE)
        raise TypeError(
            f"sw.local takes optimizers that treat every element alike ({kinds}), got "
            f"{type(optimizer).__name__}; use it directly: it works on the sharded parameters"
        )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if checks.engine_training(parameter) is None:
                raise ValueError(
                    f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model; "
                    "build the optimizer from model.parameters() after sw.shard(model, plan)"
                )
    return optimizer


def exposed_seconds(model: nn.Module) -> float | None:
    """Seconds this rank's host has waited for communication so far; None where streams wait instead
    (CUDA).
    """
    return engine_of(model).executor.waited
