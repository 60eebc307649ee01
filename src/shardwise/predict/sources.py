"""Where a search gets its descriptions from: a module, a preset, or one description alone."""

from __future__ import annotations

import dataclasses

from torch import nn

from shardwise.description.model import ModelDescription, PassFacts, UnitDescription, UnitSegment
from shardwise.description.parameters import UnitSpec
from shardwise.description.workload import Workload
from shardwise.planning.groups import group_by_bytes
from shardwise.planning.plan import LEAST_UNITS, Plan
from shardwise.planning.strategies import REDUCES
from shardwise.planning.units import group_parameters
from shardwise.predict.describe import TracedModel, traced_preset
from shardwise.predict.program import scaled


def as_source(model: nn.Module | ModelDescription | str, workload: Workload) -> Source:
    """A source of descriptions of `model`: a module, a preset's name, or a description of one
    micro-batch of `workload`. Its `compute_dtype` is None where any will do.
    """
    if isinstance(model, ModelDescription):
        return FixedDescription(model, workload)
    if isinstance(model, str):
        return traced_preset(model, workload.sequence)
    return TracedModel(model, type(model).__name__)


class FixedDescription:
    """One description: other micro-batch sizes are in proportion, and checkpointing is applied to
    it. Units are cut from its model's outline, so that they are the model's; a description that
    was made by hand has none, and gives its own. Its dtype is what it was made in.
    """

    def __init__(self, description: ModelDescription, workload: Workload) -> None:
        self.name, self._base, self._workload = description.name, description, workload
        self.compute_dtype = description.compute_dtype
        self._made: dict[tuple[int, str], ModelDescription] = {}

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
                made = checkpointed(made)
            self._made[key] = made
        if self._base.outline is not None:
            return plan.resolve(self._base.outline), self._made[key]
        units = cut_described(plan, self._base)
        return dataclasses.replace(plan, units=units), self._made[key]


Source = TracedModel | FixedDescription


def checkpointed(description: ModelDescription) -> ModelDescription:
    """The same model with every block but the root's recomputed in backward: forward leaves only
    the block's output, which is the next one's input.
    """

    def change(segment: UnitSegment) -> UnitSegment:
        forward, kept = segment.forward, min(segment.output_bytes, segment.forward.net_bytes)
        again = forward.net_bytes - kept
        return dataclasses.replace(
            segment,
            forward=PassFacts(forward.kernels, forward.peak_bytes, kept),
            recompute=PassFacts(forward.kernels, max(forward.peak_bytes, again), again),
            checkpointed=True,
        )

    def change_unit(unit: UnitDescription) -> UnitDescription:
        if unit.modules == ("",):
            return unit
        return dataclasses.replace(unit, segments=tuple(change(s) for s in unit.segments))

    return dataclasses.replace(
        description, units=tuple(change_unit(unit) for unit in description.units)
    )


def cut_described(plan: Plan, description: ModelDescription) -> tuple[UnitSpec, ...]:
    """The units of a Plan from those of a description made by hand, which has no modules: the
    blocks are its own units.
    """
    ordered = sorted(
        description.units, key=lambda u: min((s.position for s in u.segments), default=0)
    )
    if plan.name == "ddp":
        specs = [parameter for unit in ordered for parameter in unit.parameters]
        groups = group_parameters(specs, REDUCES[plan.reduce].group, plan.message_bytes or 1)
        return tuple(UnitSpec(f"bucket{i}", ("",), tuple(g)) for i, g in enumerate(groups))
    roots = [u for u in description.units if u.modules == ("",)]
    blocks = [u for u in ordered if u.modules != ("",)]
    limit = plan.message_bytes
    if limit and plan.bucket_bytes is None:
        total = sum(u.parameter_bytes for u in description.units)
        limit = min(limit, total // LEAST_UNITS)
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
