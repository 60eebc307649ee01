"""What a measured timeline says of where it comes from."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.engine import Engine


def describe(
    engines: list[Engine], model: nn.Module | None, device: str, fake: bool
) -> dict[str, str]:
    """Engine, plan and device, as the labels of a Timeline; `fake` ranks have a network that is
    emulated.
    """
    engine = "shardwise" if engines else "torch"
    plans = [e.plan.title for e in engines if e.plan is not None]
    if not plans:
        plans = ["fully_shard"] if engines else [_wrapping(model)]
    emulated = fake or hasattr(getattr(dist.all_reduce, "__self__", None), "network")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    return {
        "title": f"{engine}, {plans[0]}, {name}",
        "source": "emulated" if emulated else "measured",
        "engine": engine,
        "plan": plans[0],
        "device": name,
    }


def find_device(model: nn.Module | None, engines: list[Engine]) -> str:
    if engines:
        return engines[0].mesh.device.type
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wrapping(model: nn.Module | None) -> str:
    if model is None:
        return "torch"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    kinds = {base.__name__ for base in type(model).__mro__}
    return "fully_shard" if "FSDPModule" in kinds else "unsharded"
