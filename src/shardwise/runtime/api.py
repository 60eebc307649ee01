"""What users call: shard a model, and ask a sharded model for its engine."""

from __future__ import annotations

from torch import nn

from shardwise.planning.plan import Plan
from shardwise.runtime import guard
from shardwise.runtime.engine import Engine

_ATTRIBUTE = "_shardwise"


def shard(model: nn.Module, plan: Plan) -> nn.Module:
    """Shard `model` in place as `plan` says, and return it. Parameter names stay; build the
    optimizer afterwards.
    """
    if is_sharded(model):
        raise ValueError(f"{type(model).__name__} is sharded already")
    if not isinstance(plan, Plan):
        raise TypeError(
            f"plan is a {type(plan).__name__}, expected a Plan (sw.Plan.of('zero3', mesh=8))"
        )
    engine = Engine(model, plan)
    model.__dict__[_ATTRIBUTE] = engine
    guard.watch_optimizers(engine)
    return model


def is_sharded(model: nn.Module) -> bool:
    return _ATTRIBUTE in model.__dict__


def engine_of(model: nn.Module) -> Engine:
    engine = model.__dict__.get(_ATTRIBUTE)
    if not isinstance(engine, Engine):
        raise ValueError(f"{type(model).__name__} is not sharded; call sw.shard(model, plan) first")
    return engine


def engine_of_parameter(parameter: nn.Parameter) -> Engine:
    """The engine that holds a visible parameter."""
    reference = getattr(parameter, "_shardwise_engine", None)
    engine = reference() if reference is not None else None
    if engine is None:
        raise ValueError(
            f"a parameter of shape {tuple(parameter.shape)} belongs to no sharded model; "
            "build the optimizer from model.parameters() after sw.shard(model, plan)"
        )
    return engine


def exposed_seconds(model: nn.Module) -> float | None:
    """Seconds this rank's host has waited for communication so far; None where streams wait instead
    (CUDA).
    """
    engine = engine_of(model)
    lanes = (engine.gather_lane, engine.reducer.scatter_lane, engine.reducer.replica_lane)
    return None if lanes[0].ordered else sum(lane.waited for lane in lanes)
