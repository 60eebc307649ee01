"""Where a search gets its descriptions from: a module, a preset, or one description alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import nn

from shardwise.description.example import Call, Example, loss_of_output, parse_tensors
from shardwise.description.foreign import build_model, build_on_host, find_function, is_foreign
from shardwise.description.model import ModelDescription
from shardwise.description.parameters import UnitSpec
from shardwise.description.tracing.trace import check_arguments
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.planning.groups import group_by_bytes
from shardwise.planning.plan import Plan
from shardwise.planning.strategies import REDUCES
from shardwise.planning.units import group_parameters
from shardwise.predict.describe import TracedModel, traced_preset
from shardwise.predict.program import checkpointed, scaled


def as_source(
    model: nn.Module | ModelDescription | str,
    workload: Workload,
    *,
    inputs: Example | None = None,
    loss: Callable[..., Any] | None = None,
    trace_on: str = "auto",
    device: str = "cuda",
) -> Source:
    """A source of descriptions of `model`: a module, a preset's name, the name of somebody's
    function or config, or a description of one micro-batch of `workload`. Its `compute_dtype` is
    None where any will do.
    """
    if isinstance(model, ModelDescription):
        if inputs is not None or loss is not None:
            raise UserError(
                "a description has been made with its inputs and its loss: give them to "
                "sw.describe, or give the model itself"
            )
        return FixedDescription(model, workload)
    if isinstance(model, str) and not is_foreign(model):
        if inputs is not None or loss is not None:
            raise UserError(f"{model} is a preset, which has inputs and a loss of its own")
        return traced_preset(model, workload.sequence, device)
    module = named_model(model) if isinstance(model, str) else model
    if not isinstance(module, nn.Module):
        raise UserError(
            f"a model is an nn.Module, a description of one, a preset's name or FILE.py:FUNCTION, "
            f"got {model!r:.60}"
        )

    def inputs_for(work: Workload) -> Call:
        assert inputs is not None
        call = inputs.sized(work.micro_batch)
        check_arguments(module, *call)
        return call

    return TracedModel(
        module,
        model if isinstance(model, str) else type(model).__name__,
        None if inputs is None else inputs_for,
        samples=None if inputs is None else inputs.samples,
        loss=None if loss is None else loss_of_output(loss),
        device=device,
        trace_on=trace_on,
        build=(lambda: build_on_host(model)) if isinstance(model, str) else None,
    )


named_model = lru_cache(maxsize=4)(build_model)


def as_example(inputs: Any, model: nn.Module | ModelDescription | str) -> Example | None:
    """Example inputs as users give them; text is of tensors, or names a function."""
    if inputs is None or isinstance(inputs, Example):
        return inputs
    if isinstance(model, str) and not is_foreign(model):
        raise UserError(f"{model} is a preset, which has inputs of its own: leave --inputs out")
    if not isinstance(inputs, str):
        return Example(inputs)
    if "[" not in inputs:
        beside = model if isinstance(model, str) else ""
        return Example(find_function(inputs, "--inputs", beside))
    module = named_model(model) if isinstance(model, str) else model
    if not isinstance(module, nn.Module):
        raise UserError("example inputs are for a model, and a description has been made with some")
    return Example(parse_tensors(inputs, module.forward))


def workload_of(example: Example) -> Workload:
    """One rank's step that is the example, once."""
    if example.sequence is not None:
        return Workload(example.sequence, example.samples)
    return Workload(1, example.samples, of="samples")


class FixedDescription:
    """One description: other micro-batch sizes are in proportion, and checkpointing is applied to
    it. Units are cut from its model's outline, so that they are the model's; a description that
    was made by hand has none, and gives its own. Its dtype is what it was made in.
    """

    def __init__(self, description: ModelDescription, workload: Workload) -> None:
        self.name, self._base, self._workload = description.name, description, workload
        self.compute_dtype, self.notes = description.compute_dtype, description.notes
        self._made: dict[tuple[int, str], ModelDescription] = {}

    @property
    def block_count(self) -> int:
        return sum(unit.modules != ("",) for unit in self._base.units)

    tells_operators = False  # only sums are described

    def at(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription]:
        if workload.sequence != self._workload.sequence:
            raise ValueError(
                f"the description is of sequences of {self._workload.sequence} tokens, the "
                f"workload's have {workload.sequence}: describe the model again"
            )
        key = (workload.micro_batch, workload.checkpoint)
        if key not in self._made:
            factor = workload.micro_batch / self._workload.micro_batch
            made = scaled(self._base, factor)
            if workload.checkpoint != "none" and self._workload.checkpoint == "none":
                made = checkpointed(made, workload.checkpoint)
            self._made[key] = made
        if self._base.outline is not None:
            return plan.resolve(self._base.outline), self._made[key]
        units = cut_described(plan, self._base)
        return dataclasses.replace(plan, units=units), self._made[key]


Source = TracedModel | FixedDescription


def cut_described(plan: Plan, description: ModelDescription) -> tuple[UnitSpec, ...]:
    """The units of a Plan from those of a description made by hand, which has no modules: the
    blocks are its own units.
    """
    ordered = sorted(
        description.units, key=lambda u: min((s.position for s in u.segments), default=0)
    )
    limit = plan.message_bytes_of(sum(u.parameter_bytes for u in description.units))
    if plan.name == "ddp":
        specs = [parameter for unit in ordered for parameter in unit.parameters]
        groups = group_parameters(specs, REDUCES[plan.reduce].group, limit or 1)
        return tuple(UnitSpec(f"bucket{i}", ("",), tuple(g)) for i, g in enumerate(groups))
    roots = [u for u in description.units if u.modules == ("",)]
    blocks = [u for u in ordered if u.modules != ("",)]
    runs = (
        group_by_bytes(blocks, lambda u: u.parameter_bytes, limit)
        if limit
        else [[u] for u in blocks]
    )
    units = [UnitSpec(u.name, ("",), u.parameters) for u in roots]
    for run in runs:
        modules = tuple(name for unit in run for name in unit.modules)
        label = run[0].name if len(run) == 1 else f"{run[0].name}..{run[-1].name}"
        parameters = tuple(parameter for unit in run for parameter in unit.parameters)
        units.append(UnitSpec(label, modules, parameters))
    return tuple(units)
