"""Where a search gets its descriptions from: a module, a preset, or one description alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

from torch import nn

from shardwise.description.model import ModelDescription, Pass, Segment, UnitDescription
from shardwise.description.preset import load_preset
from shardwise.description.workload import Workload
from shardwise.planning.buckets import group_by_bytes
from shardwise.planning.plan import DEFAULT_BUCKET_BYTES, LEAST_UNITS, Plan
from shardwise.planning.strategies import REDUCES
from shardwise.planning.units import ParameterSpec, UnitSpec
from shardwise.predict.describe import by_modules, describe_trace, trace_model
from shardwise.predict.program import scaled


class Source(Protocol):
    """Gives, for a Plan and a workload, the resolved Plan and the description of a micro-batch."""

    name: str
    compute_dtype: str | None  # what it computes in, if that is settled

    def at(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription]: ...


def as_source(model: nn.Module | ModelDescription | str, workload: Workload) -> Source:
    """A source of descriptions of `model`: a module, a preset's name, or a description of one
    micro-batch of `workload`.
    """
    if isinstance(model, ModelDescription):
        return FixedDescription(model, workload)
    if isinstance(model, str):
        preset = load_preset(model)
        return TracedModel(preset.build(workload.sequence), preset.name, preset.inputs)
    return TracedModel(model, type(model).__name__, None)


class TracedModel:
    """A module, traced once for each micro-batch size, checkpointing and dtype."""

    compute_dtype: str | None = None

    def __init__(
        self, model: nn.Module, name: str, inputs: Callable[[Workload], Any] | None
    ) -> None:
        self.model, self.name, self._inputs = model, name, inputs
        self._traces: dict[tuple[Any, ...], Any] = {}
        self._described: dict[tuple[Any, ...], ModelDescription] = {}

    def at(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription]:
        resolved = plan.resolve(self.model)
        shape = (
            workload.sequence,
            workload.micro_batch,
            workload.autocast,
            workload.checkpoint,
            plan.compute_dtype,
        )
        if shape not in self._traces:
            inputs = workload if self._inputs is None else self._inputs(workload)
            self._traces[shape] = trace_model(
                self.model,
                inputs,
                autocast=workload.autocast,
                checkpoint=workload.checkpoint,
                compute_dtype=plan.compute_dtype,
            )
        apart = any(unit.whole for unit in resolved.require_units())
        described = by_modules(plan, self.model) if apart else resolved
        key = (shape, described.units)
        if key not in self._described:
            self._described[key] = describe_trace(self._traces[shape], described, self.name)
        return resolved, self._described[key]


class FixedDescription:
    """One description: other micro-batch sizes are in proportion, and checkpointing is applied to
    it. Units are cut from its model's outline, so that they are the model's; a description that
    was made by hand has none, and gives its own. Its dtype is what it was made in.
    """

    def __init__(self, description: ModelDescription, workload: Workload) -> None:
        self.name, self._base, self._workload = description.name, description, workload
        self.compute_dtype = description.compute_dtype
        outline = description.outline
        self._model = None if outline is None else outline.build()
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
        if self._model is not None:
            return plan.resolve(self._model), self._made[key]
        units = cut_described(plan, self._base)
        return dataclasses.replace(plan, units=units), self._made[key]


def checkpointed(description: ModelDescription) -> ModelDescription:
    """The same model with every block but the root's recomputed in backward: forward leaves only
    the block's output, which is the next one's input.
    """
    known: dict[int, Segment] = {}

    def change(segment: Segment) -> Segment:
        forward, kept = segment.forward, min(segment.output_bytes, segment.forward.net_bytes)
        again = forward.net_bytes - kept
        return dataclasses.replace(
            segment,
            forward=Pass(forward.kernels, forward.peak_bytes, kept),
            recompute=Pass(forward.kernels, max(forward.peak_bytes, again), again),
            checkpointed=True,
        )

    def change_unit(unit: UnitDescription) -> UnitDescription:
        if unit.modules == ("",):
            return unit
        for segment in unit.segments:
            known.setdefault(id(segment), change(segment))
        return dataclasses.replace(unit, segments=tuple(known[id(s)] for s in unit.segments))

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
        specs = [spec for unit in ordered for spec in _specs(unit)]
        kind = REDUCES[plan.reduce].group
        groups = [[spec] for spec in specs] if kind == "parameter" else [specs]
        if kind == "bytes":
            most = plan.message_bytes or DEFAULT_BUCKET_BYTES["ddp"] or 1
            buckets = group_by_bytes(reversed(specs), lambda s: s.nbytes, most)
            groups = [list(reversed(bucket)) for bucket in reversed(buckets)]
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
    units = [UnitSpec(u.name, ("",), tuple(_specs(u))) for u in roots]
    for run in runs:
        modules = tuple(name for unit in run for name in unit.modules)
        label = run[0].name if len(run) == 1 else f"{run[0].name}..{run[-1].name}"
        units.append(UnitSpec(label, modules, tuple(s for unit in run for s in _specs(unit))))
    return tuple(units)


def _specs(unit: UnitDescription) -> list[ParameterSpec]:
    return [ParameterSpec(p.name, p.shape, p.dtype, p.trainable) for p in unit.parameters]
