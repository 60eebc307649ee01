"""Describing a model by the units of a Plan.

    describe(model, Workload(sequence=2048, micro_batch=4))        by its blocks
    describe(model, (tokens, targets), plan)                       by the Plan's units
    describe_preset("llama8b", workload, plan)                     by size, without code

Tracing is the slow part (a second for a large model), and it does not depend on the units:
`trace_model` once and `describe_trace` for each Plan is the way to compare many.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.description.model import ModelDescription
from shardwise.description.preset import load_preset
from shardwise.description.tracing.meta_copy import copy_to_meta
from shardwise.description.tracing.segments import describe_by
from shardwise.description.tracing.trace import ModelTrace, trace_module
from shardwise.description.workload import CHECKPOINTS, Workload
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.planning.units import Cut, cut_units

Inputs = Workload | Tensor | Sequence[Any] | Mapping[str, Any]


def describe(
    model: nn.Module,
    inputs: Inputs,
    plan: Plan | Cut | Any = None,
    *,
    loss: Callable[..., Tensor] | None = None,
    device: str = "cuda",
    autocast: str | None = None,
    checkpoint: str | Sequence[str] | None = None,
    name: str | None = None,
) -> ModelDescription:
    """What one micro-batch of `model` computes and keeps, unit by unit, traced on the meta device.

    inputs: a Workload (for models of tokens), or the model's arguments: one tensor, a sequence of
        positional ones, or a mapping of keyword ones; only their shapes and dtypes matter.
    plan: its units, one for one, and its compute dtype; or what `Plan.of(units=...)` takes. What it
        keeps whole counts with the modules that use it.
    loss: `loss(model, *inputs)`; without it the output itself, if it is a scalar (or has one as
        `.loss`), else its sum.
    device: whose fused kernels to count, "cuda" or "cpu".
    autocast: a dtype name. checkpoint: "reentrant" or "nonreentrant" for every block, or the names
        of modules. Both come from the Workload unless given here.
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"describe needs an nn.Module, got {model!r:.60}; `search` takes a preset's name too"
        )
    resolved = by_modules(_as_plan(plan), model)
    trace = trace_model(
        model,
        inputs,
        loss=loss,
        device=device,
        autocast=autocast,
        checkpoint=checkpoint,
        compute_dtype=resolved.compute_dtype,
    )
    described = describe_trace(trace, resolved, name or type(model).__name__)
    return dataclasses.replace(described, outline=copy_to_meta(model))


def trace_model(
    model: nn.Module,
    inputs: Inputs,
    *,
    loss: Callable[..., Tensor] | None = None,
    device: str = "cuda",
    autocast: str | None = None,
    checkpoint: str | Sequence[str] | None = None,
    compute_dtype: str | None = None,
) -> ModelTrace:
    """Trace one micro-batch; see `describe` for the arguments."""
    args, kwargs = _as_arguments(model, inputs)
    if isinstance(inputs, Workload):
        autocast = autocast or inputs.autocast
        checkpoint = checkpoint or inputs.checkpoint
    blocks = find_blocks(model)
    names, reentrant = _checkpointed(checkpoint, blocks)
    return trace_module(
        model,
        args,
        kwargs,
        loss=loss,
        device=device,
        autocast=autocast,
        compute_dtype=compute_dtype,
        casts=("", *blocks) if compute_dtype else (),
        checkpoint=names,
        reentrant=reentrant,
    )


def describe_trace(trace: ModelTrace, plan: Plan, name: str = "model") -> ModelDescription:
    """Describe a traced model by the units of a resolved Plan."""
    return describe_by(plan.require_units(), trace, name)


class TracedModel:
    """A module, traced once for each micro-batch size, checkpointing and dtype. `inputs` gives its
    arguments for a workload; None: tokens.
    """

    compute_dtype: str | None = None  # any

    def __init__(
        self, model: nn.Module, name: str, inputs: Callable[[Workload], Any] | None = None
    ) -> None:
        self.model, self.name, self._inputs = model, name, inputs
        self._resolved: dict[Plan, Plan] = {}
        self._traces: dict[tuple[Any, ...], ModelTrace] = {}
        self._described: dict[tuple[Any, ...], ModelDescription] = {}

    def at(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription]:
        """The Plan resolved, and the description of one micro-batch by it."""
        if plan not in self._resolved:
            self._resolved[plan] = plan.resolve(self.model)
        resolved = self._resolved[plan]
        traced = (
            workload.sequence,
            workload.micro_batch,
            workload.autocast,
            workload.checkpoint,
            plan.compute_dtype,
        )
        if traced not in self._traces:
            self._traces[traced] = trace_model(
                self.model,
                workload if self._inputs is None else self._inputs(workload),
                autocast=workload.autocast,
                checkpoint=workload.checkpoint,
                compute_dtype=plan.compute_dtype,
            )
        apart = any(unit.whole for unit in resolved.require_units())
        by = by_modules(plan, self.model) if apart else resolved
        key = (traced, by.units)
        if key not in self._described:
            self._described[key] = describe_trace(self._traces[traced], by, self.name)
        return resolved, self._described[key]


def traced_preset(name: str, context: int) -> TracedModel:
    """A preset model for sequences of up to `context` tokens."""
    preset = load_preset(name)
    return TracedModel(preset.build(context), name, preset.inputs)


def describe_preset(
    name: str, workload: Workload, plan: Plan | Cut | Any = None, *, sequences: int | None = None
) -> ModelDescription:
    """As `describe`, of a preset model; `sequences` is the micro-batch where the workload's differ.

    The last few models are kept with their traces, so that many Plans of one workload are quick.
    """
    if sequences is not None:
        workload = dataclasses.replace(workload, micro_batch=sequences, sizes=None)
    model = _recent_preset(name, workload.sequence)
    _, described = model.at(_as_plan(plan), workload)
    return dataclasses.replace(described, outline=model.model)


_recent_preset = lru_cache(maxsize=4)(traced_preset)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Names of the model's repeated blocks (or of the runs it is cut into without them)."""
    units = cut_units(model, Cut(), None)
    return tuple(name for unit in units for name in unit.modules if name)


def _as_plan(plan: Plan | Cut | Any) -> Plan:
    return plan if isinstance(plan, Plan) else Plan.of("zero3", units=plan)


def by_modules(plan: Plan, model: nn.Module) -> Plan:
    """The Plan whose units a description follows: parameters that are kept whole travel apart, but
    count with the modules that compute with them.
    """
    resolved = plan.resolve(model)
    if any(unit.whole for unit in resolved.require_units()):
        apart = dataclasses.replace(plan, whole=(), whole_below=0, units=None)
        return apart.resolve(model)
    return resolved


def _checkpointed(
    checkpoint: str | Sequence[str] | None, blocks: tuple[str, ...]
) -> tuple[tuple[str, ...], bool]:
    if checkpoint is None or checkpoint == "none":
        return (), False
    if isinstance(checkpoint, str):
        if checkpoint not in CHECKPOINTS:
            raise ValueError(
                f"checkpoint is {checkpoint!r}, expected one of {CHECKPOINTS}, or module names"
            )
        return blocks, checkpoint == "reentrant"
    return tuple(checkpoint), False


def _as_arguments(model: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments. Of a workload: tokens and targets, in the places where the
    model's forward takes them.
    """
    if isinstance(inputs, Tensor):
        return (inputs,), {}
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if not isinstance(inputs, Workload):
        return tuple(inputs), {}
    shape = (inputs.micro_batch, inputs.sequence)
    tokens = torch.empty(shape, dtype=torch.int64, device="meta")
    targets = tokens.clone()
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" in parameters:
        labels = {"labels": targets} if "labels" in parameters else {}
        return (), {"input_ids": tokens, **labels}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in parameters.values() if p.kind in kinds]
    if not any(isinstance(module, nn.Embedding) for module in model.modules()):
        raise UserError(
            f"{type(model).__name__} has no embedding, so a workload of tokens says nothing about "
            "its inputs: give describe() example inputs instead"
        )
    return (tokens, targets)[: max(1, min(2, len(places)))], {}
