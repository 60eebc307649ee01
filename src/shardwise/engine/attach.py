"""From a module and a resolved Plan to its units, attached in place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.engine.mesh import Mesh, default_device, unsharded
from shardwise.engine.storage import Member, Offload
from shardwise.engine.unit import Unit
from shardwise.planning.plan import Plan, cast_dtypes, find_dtype, sums_in
from shardwise.planning.units import places
from shardwise.schedule.policy import UnitPolicy


@dataclass
class Options(UnitPolicy):
    """What one unit does; from the Plan, or from one call of `fully_shard`, whose setters may
    change it between passes.
    """

    compute_dtype: torch.dtype | None = None  # None: the parameters' own
    reduce_dtype: torch.dtype | None = None  # None: the parameters' own
    sum_dtype: torch.dtype | None = None  # None: the reduce dtype
    gather: str = "auto"
    gather_dtype: torch.dtype | None = None  # None: the compute dtype; else codes in blocks
    precision: Any = None  # handed to parameters that bring their own all-gather
    plain: bool = False  # users see plain tensors (ddp)
    offload: Offload | None = None
    zeroes_unused: bool = False  # parameters that no rank used get zeros, not None
    divide_before: float = 1.0  # gradients, before and after they are summed
    divide_after: float = 1.0
    custom_gather: Any = None  # objects with `allocate` and a call, as torch's AllGather
    custom_scatter: Any = None
    after_reduce: Callable[[torch.Tensor], None] | None = None
    after_reduce_stream: torch.cuda.Stream | None = None

    def dtypes(self, own: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
        """Compute and reduce dtype of parameters whose own dtype is `own`."""
        return cast_dtypes(own, self.compute_dtype, self.reduce_dtype)

    def sums_in(self, own: torch.dtype) -> torch.dtype:
        """What gradients of such parameters are added in."""
        return sums_in(self.dtypes(own)[1], self.sum_dtype)


def divide(unit: Unit, factor: float) -> None:
    """Divide a unit's gradients by `factor` in all. A dtype of small range takes about the square
    root of it before the sum and the rest after, so that neither end of the range is left.
    """
    options, before = unit.options, 1.0
    if options.dtypes(unit.parameters.dtype)[1] not in (torch.float32, torch.bfloat16):
        while factor % before == 0 and factor / before > before:
            before *= 2
    options.divide_before, options.divide_after = before, factor / before


def find_device(model: nn.Module) -> torch.device:
    """The one device of all parameters; an error names the first that is elsewhere. For a model
    that is still on the meta device: the accelerator, if the process group moves its tensors.
    """
    first: dict[torch.device, str] = {}  # the first parameter on each device
    for name, parameter in model.named_parameters():
        first.setdefault(parameter.device, name)
    if not first:
        raise ValueError(f"{type(model).__name__} has no parameters to shard")
    device, *others = [device for device in first if device.type != "meta"] or [default_device()]
    if others:
        raise ValueError(
            f"parameter {first[others[0]]!r} is on {others[0]}, but {first[device]!r} is on "
            f"{device}; move the model to one device before sharding it"
        )
    return device


def attach(model: nn.Module, plan: Plan, mesh: Mesh) -> list[Unit]:
    """Make every unit of the Plan over `model`'s parameters, in the Plan's order."""
    modules = dict(model.named_modules(remove_duplicate=False))
    members: dict[str, Member] = {}
    for names, parameter in places(model):
        if not isinstance(parameter, nn.Parameter) or type(parameter.data) is not torch.Tensor:
            raise ValueError(
                f"parameter {names[0]!r} is a {type(parameter.data).__name__}; sharding by a Plan "
                "starts from plain tensors (was the model sharded already? with tensor parallel, "
                "use shardwise.fully_shard)"
            )
        hangs = [(modules[name.rpartition(".")[0]], name.rpartition(".")[2]) for name in names]
        # A module reachable by two names is one place.
        unique = list({(id(module), key): (module, key) for module, key in hangs}.values())
        members[names[0]] = Member(names, unique, parameter)
    specs = plan.require_units()
    all_ranks = unsharded(mesh) if any(spec.whole for spec in specs) else mesh
    units = []
    for spec in specs:
        is_root = spec.modules == ("",)
        options = Options(
            **vars(plan.unit_policy(is_root, spec.name)),
            compute_dtype=find_dtype(plan.compute_dtype),
            reduce_dtype=find_dtype(plan.reduce_dtype),
            sum_dtype=find_dtype(plan.sum_dtype),
            gather=plan.gather,
            gather_dtype=None if plan.gather_dtype is None else getattr(torch, plan.gather_dtype),
            plain=plan.strategy.state == "replicate",
        )
        unit = Unit(
            spec.name,
            [modules[name] for name in spec.modules],
            [members[p.name] for p in spec.parameters],
            all_ranks if spec.whole else mesh,
            options,
            is_root,
        )
        if plan.average:
            divide(unit, plan.world)
        if mesh.device.type == "cuda":
            # What the whole parameters had goes back to the device, unit by unit: the next one's
            # rows would lie in it, and keep the rest.
            torch.cuda.empty_cache()
        units.append(unit)
    return units
