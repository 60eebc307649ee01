"""What is checked around a step, and errors that say more than torch's: the model is what it was
when it was sharded, parameters are read where they are whole.
"""

from __future__ import annotations

import linecache
import re
import warnings
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.storage import keeper_of
from shardwise.engine.torch_private import children_of, parameters_of
from shardwise.engine.unit import Unit

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine, Structure

marked = 0  # how often parameters were told their engine


def mark(engine: Engine) -> None:
    """Let every visible parameter know its engine."""
    global marked
    marked += 1
    reference = weakref.ref(engine)
    for unit in engine.units:
        unit.parameters.engine = reference


def engine_training(parameter: torch.Tensor) -> Engine | None:
    """The engine that shards a parameter, if one does."""
    keeper = keeper_of(parameter)
    return keeper.engine() if keeper is not None and keeper.engine is not None else None


def engines_training(parameters: Iterable[torch.Tensor]) -> list[Engine]:
    """The engines that shard these parameters, each once, in their order."""
    return list(dict.fromkeys(filter(None, map(engine_training, parameters))))


def check_memory(units: list[Unit]) -> None:
    """Error that lists the parameters still without memory."""
    missing = [
        member.name
        for unit in units
        if unit.parameters.master.is_meta
        for member in unit.parameters.members
    ]
    if missing:
        raise RuntimeError(
            "FSDP parameters should be materialized from meta device before training, but the "
            f"following were still on meta device: {missing}\nFor example, call "
            "module.to_empty(device) to materialize to device and call module.reset_parameters() "
            "on each module to initialize values, or shardwise.materialize(module), which does "
            "both and lists what nobody initialised."
        )


def check_apart(model: nn.Module) -> None:
    """Error for two parameters over the same memory: sharded, each would get its own."""
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters():
        plain = type(parameter.data) is torch.Tensor  # others may have no memory to tell of
        if not plain or parameter.is_meta or not parameter.numel():
            continue
        other = names.setdefault(parameter.data_ptr(), name)
        if other != name:
            raise ValueError(
                f"parameters {other!r} and {name!r} are two, over the same memory; sharded, they "
                "would have different values. Let them be one parameter (head.weight = "
                "embed.weight, not head.weight.data = ...), or give one a copy (.clone())"
            )


def check_structure(structure: Structure, may_grow: bool) -> None:
    """Error if a module with parameters, or a parameter, was replaced since, or unless it
    `may_grow` added or taken out. (A parameter put in another's place is found when its unit is
    shown.) What was added and nobody shards trains as torch trains it: each rank its own.
    """
    model = structure.model()
    assert model is not None
    now, then = find_owners(model.modules()), structure.owners
    # Else it is something around known modules (torch.compile, a checkpoint wrapper), or one
    # without parameters.
    if now == then:
        return
    grown = all(set(keys) <= set(now.get(i, ())) for i, keys in then.items())
    # A module taken out, whole and for nothing else, is one that no step runs any more.
    shrunk = all(then.get(i) == keys for i, keys in now.items())
    if not (may_grow and (grown or shrunk)):
        raise RuntimeError(
            f"{_first_change(structure, model)} was added, removed or replaced after sharding; it "
            "would be neither sharded nor trained. Change the model before it is sharded "
            "(adapters, too, are added before)"
        )
    # Trainable parameters that no engine and no DTensor keeps alike on all ranks.
    added = [
        name
        for name, parameter in model.named_parameters()
        if name not in structure.names and parameter.requires_grad
        if not isinstance(parameter, DTensor) and engine_training(parameter) is None
    ]
    if added and dist.get_world_size() > 1:
        warnings.warn(
            f"{added[0]!r}{f' and {len(added) - 1} more' if added[1:] else ''} came into the "
            "model after it was sharded: each rank trains its own, as under torch's "
            "fully_shard. Call fully_shard on the modules that have them, or all-reduce their "
            "gradients yourself",
            stacklevel=2,
        )


def _first_change(structure: Structure, model: nn.Module) -> str:
    """The first thing that is not as it was."""
    modules = {id(module) for module in structure.seen[2]}
    for name, module in model.named_modules():
        if name and id(module) not in modules:
            return f"the module {name!r} ({type(module).__name__})"
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return f"the parameter {min(names ^ structure.names, default='?')!r}"


def find_owners(modules: Iterable[nn.Module]) -> dict[int, tuple[str, ...]]:
    """Who has parameters of its own, and under which keys."""
    dicts = map(parameters_of, modules)
    return {id(own): tuple(own) for own in dicts if any(p is not None for p in own.values())}


def check_unmoved(parameters: Iterable[torch.Tensor], optimizer: torch.optim.Optimizer) -> None:
    """Error if the optimizer is from before sharding, or from while parameters were gathered; or
    cannot step DTensors.
    """
    for parameter in parameters:
        cut = isinstance(parameter, DTensor) and engine_training(parameter) is not None
        if cut and isinstance(optimizer, torch.optim.Adafactor):
            raise RuntimeError(
                "torch's Adafactor takes norms of whole matrices, and cannot step parameters that "
                "are sharded. Keep them whole and shard its state: Plan.of('ddp', ...), or no "
                "Plan, and sw.ShardedOptimizer(model.parameters(), torch.optim.Adafactor, lr=...)"
            )
        moved = getattr(parameter, "_shardwise_moved", None)
        if moved is not None and getattr(parameter, "_shardwise_full", False):
            raise RuntimeError(
                f"{type(optimizer).__name__} was built while {moved!r} was gathered, as a forward "
                "or unshard() leaves it, and holds the full parameter, which is not what trains; "
                "build the optimizer before the first forward, or after model.reshard()"
            )
        if moved is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__} was built before sharding and holds the old parameter "
                f"{moved!r}, which no longer trains; build the optimizer from model.parameters() "
                "after sw.shard(model, plan) or fully_shard(model)"
            )


_SAYS = "got mixed torch.Tensor and DTensor"
_PARTS = re.compile(r"\.(\w+)|\[(\w+)\]")
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\w+\])+")


def explain(error: BaseException, advice: str) -> None:
    """Add to torch's own message, once, which parameter was read and what to do."""
    if not isinstance(error, RuntimeError) or _SAYS not in str(error) or advice in str(error):
        return
    names = list(dict.fromkeys(_read(error.__traceback__)))
    what = f"the sharded parameter {names[0]!r}" if names else "a sharded parameter"
    error.args = (
        f"{error}\nshardwise: {what} was read outside the forward of its unit, while only this "
        f"rank's rows are here. {advice}",
    )


def _read(trace: TracebackType | None) -> Iterator[str]:
    """Names of sharded parameters that the innermost frames mention, the innermost first."""
    frames: list[tuple[FrameType, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    for frame, line in reversed(frames):
        for read in _CHAIN.findall(linecache.getline(frame.f_code.co_filename, line)):
            name = _name_of(_look_up(frame, read))
            if name is not None:
                yield name


def _look_up(frame: FrameType, chain: str) -> Any:
    """The value of `self.a.b[0]` in a frame, through modules only; None if it cannot be told."""
    value = frame.f_locals.get(_PARTS.sub("", chain))
    for attribute, index in _PARTS.findall(chain):
        if not isinstance(value, nn.Module):
            break  # a method of what was found
        key = attribute or str(frame.f_locals.get(index, index))
        value = children_of(value).get(key, parameters_of(value).get(key))
    return value


def _name_of(value: Any) -> str | None:
    keeper = keeper_of(value) if isinstance(value, DTensor) else None
    pairs = zip(keeper.members, keeper.visible, strict=True) if keeper is not None else ()
    return next((member.name for member, visible in pairs if visible is value), None)


def tell_written(unit: Unit, module: nn.Module, is_error: bool) -> None:
    """A training forward wrote to gathered parameters, which is lost: only this rank's rows of the
    masters stay. An error under a Plan, a warning through the drop-in.
    """
    p = unit.parameters
    names = [p.members[i].name for i in p.moved_shown] or [member.name for member in p.members]
    more = f" and {len(names) - 3} more" if names[3:] else ""
    shown = ", ".join(map(repr, names[:3])) + more
    message = (
        f"the forward of {type(module).__name__} wrote in place, or other memory (`p.data = `), to "
        f"a parameter of unit {unit.name!r} ({shown}) while it was gathered; that is lost when the "
        "unit is gathered anew. Constrain the parameter between steps (under torch.no_grad(), on "
        "the model's own parameter) or compute what is used from it in forward (a parametrization)"
    )
    if is_error:
        raise RuntimeError(
            f"{message}; or let the Plan keep it whole (ddp, or whole=[...]) and write in place "
            "(p.data.copy_)"
        )
    unit.note_writes()
    warnings.warn(f"{message}. Under torch's fully_shard it is lost, too", stacklevel=3)
