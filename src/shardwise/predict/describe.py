"""Describing a model by the units of a Plan.

    describe(model, Workload(sequence=2048, micro_batch=4))        by its blocks
    describe(model, (tokens, targets), plan)                       by the Plan's units

Tracing is the slow part (a second for a large model), and it does not depend on the units:
`trace_model` once and `describe_trace` for each Plan is the way to compare many.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.description.example import Call, loss_of_output
from shardwise.description.foreign import inputs_of_config
from shardwise.description.model import ModelDescription
from shardwise.description.parameters import UnitSpec
from shardwise.description.preset import load_preset
from shardwise.description.recompute import recompute_blocks
from shardwise.description.tracing.meta_copy import copy_to_meta
from shardwise.description.tracing.segments import describe_by
from shardwise.description.tracing.torch_private import is_compiled
from shardwise.description.tracing.trace import ModelTrace, trace_module
from shardwise.description.workload import Recomputing, Workload
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.planning.units import Cut, cut_units
from shardwise.predict.program import checkpointed, scaled

# Events of a trace that takes seconds (a scan, step by step): one size of micro-batch will do then.
LONG_TRACE = 100_000

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
    trace_on: str = "auto",
) -> ModelDescription:
    """What one micro-batch of `model` computes and keeps, unit by unit, traced on the meta device.

    inputs: a Workload (for models of tokens), or the model's arguments: one tensor, a sequence of
        positional ones, a mapping of keyword ones, or a pair (tuple, dict) of both; only their
        shapes and dtypes matter.
    plan: its units, one for one, and its compute dtype; or what `Plan.of(units=...)` takes. What it
        keeps whole counts with the modules that use it.
    loss: `loss(model, *inputs)`; without it the output itself, if it is a scalar (or has one as
        `.loss`), else the mean of its float tensors.
    device: whose fused kernels to count, "cuda" or "cpu".
    autocast: a dtype name. checkpoint: which blocks run again in backward, and how
        (`Recomputing`); or the names of modules. Both come from the Workload unless given here.
    trace_on: "meta"; "cpu" or "cuda" to trace a copy while it runs there for real; "auto": that
        only for a model that reads values, which the meta device does not have.
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
        trace_on=trace_on,
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
    trace_on: str = "auto",
    build: Callable[[], nn.Module] | None = None,
) -> ModelTrace:
    """Trace one micro-batch; see `describe` for the arguments, and `trace_module` for `build`."""
    args, kwargs = as_arguments(model, inputs)
    if isinstance(inputs, Workload):
        autocast = autocast or inputs.autocast
        checkpoint = checkpoint or inputs.checkpoint
    blocks = find_blocks(model)
    names, recomputing = _checkpointed(checkpoint, blocks)
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
        recomputing=recomputing,
        trace_on=trace_on,
        build=build,
    )


def describe_trace(trace: ModelTrace, plan: Plan, name: str = "model") -> ModelDescription:
    """Describe a traced model by the units of a resolved Plan."""
    return describe_by(plan.require_units(), trace, name)


class TracedModel:
    """A module, traced once for each micro-batch size, checkpointing and dtype. `inputs` gives its
    arguments for a workload; None: tokens. A model that reads values is run for real, once for each
    dtype; what is asked for beside is derived from that. Of one whose trace is long only the
    micro-batch sizes are.
    """

    compute_dtype: str | None = None  # any

    def __init__(
        self,
        model: nn.Module,
        name: str,
        inputs: Callable[[Workload], Any] | None = None,
        *,
        samples: int | None = None,  # of the example that was given
        loss: Callable[..., Tensor] | None = None,
        device: str = "cuda",
        trace_on: str = "auto",
        build: Callable[[], nn.Module] | None = None,
    ) -> None:
        self.model, self.name, self._inputs, self._samples = model, name, inputs, samples
        self._loss, self._device, self._trace_on, self._build = loss, device, trace_on, build
        self._real: bool | None = None if trace_on == "auto" else trace_on != "meta"
        self._long = False
        self._resolved: dict[Plan, Plan] = {}
        self._units: dict[tuple[Any, ...], tuple[UnitSpec, ...]] = {}  # by how the model is cut
        self._apart: dict[tuple[Any, ...], Plan] = {}  # by how a model is cut
        self._traces: dict[tuple[Any, ...], ModelTrace] = {}
        self._as_traced: dict[tuple[Any, ...], ModelDescription] = {}
        self._described: dict[tuple[Any, ...], ModelDescription] = {}

    @property
    def notes(self) -> tuple[str, ...]:
        """What readers of a prediction should know of how the model was traced."""
        said = dict.fromkeys(note for trace in self._traces.values() for note in trace.notes)
        more = "Other micro-batch sizes, and recomputation, are derived from that run."
        if self._long:
            more = (
                f"{self.name} has very many operators, so micro-batches of one size were traced: "
                "other sizes are derived from them."
            )
        return (*said, *((more,) if self._real or self._long else ()))

    @property
    def block_count(self) -> int:
        return len(find_blocks(self.model))

    @property
    def tells_operators(self) -> bool:
        """Of a real run only sums are kept; compiled blocks have operators that nobody sees."""
        return not self._real and not any(map(is_compiled, self.model.modules()))

    def at(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription]:
        """The Plan resolved, and the description of one micro-batch by it."""
        resolved = self._resolve(plan)
        base = self._base_of(workload)
        if self._real is None:
            try:
                found = self._trace(plan, base, "meta")
            except UserError:
                self._real = True  # tried, and told why, once more below
            else:
                self._real = False
                self._long = len(self._traces[found].events) > LONG_TRACE
        if self._long:
            base = dataclasses.replace(base, checkpoint=workload.checkpoint)
        elif not self._real:
            base = workload
        traced = self._trace(plan, base, self._trace_on if self._real else "meta")
        by = self._followed(resolved)
        if workload.checkpoint != base.checkpoint and by.name == "ddp":
            by = self._by_blocks  # buckets do not tell which blocks run again
        key = (traced, by.units, workload.micro_batch, workload.checkpoint)
        if key not in self._described:
            if (traced, by.units) not in self._as_traced:
                made = describe_trace(self._traces[traced], by, self.name)
                self._as_traced[traced, by.units] = made
            made = self._as_traced[traced, by.units]
            made = scaled(made, workload.micro_batch / base.micro_batch)
            if workload.checkpoint != base.checkpoint:
                made = checkpointed(made, workload.checkpoint)
            self._described[key] = made
        return resolved, self._described[key]

    def _resolve(self, plan: Plan) -> Plan:
        """`plan.resolve`; the model is cut once for all Plans that cut it alike."""
        if plan not in self._resolved:
            known = None if plan.units is not None else self._units.get(plan.cut_by)
            if known is None:
                found = plan.resolve(self.model)
                self._units[plan.cut_by] = found.require_units()
            else:
                found = dataclasses.replace(plan, units=known)
            self._resolved[plan] = found
        return self._resolved[plan]

    def _followed(self, resolved: Plan) -> Plan:
        """The Plan whose units a description follows; one for all meshes that are cut alike."""
        if not any(unit.whole for unit in resolved.require_units()):
            return resolved
        cut = (resolved.name == "ddp", resolved.reduce, resolved.message_bytes,
               resolved.bucket_bytes, resolved.cut)  # fmt: skip
        if cut not in self._apart:
            self._apart[cut] = by_modules(resolved, self.model)
        return self._apart[cut]

    @cached_property
    def _by_blocks(self) -> Plan:
        return by_modules(_as_plan(None), self.model)

    def _base_of(self, workload: Workload) -> Workload:
        """The micro-batch that shows whether the model reads values, and that a real run has: the
        example's own, or one sequence.
        """
        size = self._samples or 1
        return dataclasses.replace(workload, micro_batch=size, sizes=None, checkpoint="none")

    def _trace(self, plan: Plan, workload: Workload, trace_on: str) -> tuple[Any, ...]:
        """Trace it unless that has been done; the key of the trace."""
        key = (
            workload.sequence,
            workload.micro_batch,
            workload.autocast,
            workload.checkpoint,
            plan.compute_dtype,
        )
        if key in self._traces:
            return key
        self._traces[key] = trace_model(
            self.model,
            workload if self._inputs is None else self._inputs(workload),
            loss=self._loss,
            device=self._device,
            autocast=workload.autocast,
            checkpoint=workload.checkpoint,
            compute_dtype=plan.compute_dtype,
            trace_on=trace_on,
            build=self._build,
        )
        return key


def traced_preset(name: str, context: int, device: str = "cuda") -> TracedModel:
    """A preset model for sequences of up to `context` tokens."""
    preset = load_preset(name)
    # A language model gives its loss; the stack of the benchmarks is summed.
    loss = None if preset.kind == "lm" else loss_of_output(lambda output: output.sum())
    return TracedModel(preset.build(context), name, preset.inputs, loss=loss, device=device)


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
    resolved = plan if plan.units is not None else plan.resolve(model)
    if any(unit.whole for unit in resolved.require_units()):
        apart = dataclasses.replace(plan, whole=(), whole_below=0, units=None)
        return apart.resolve(model)
    return resolved


def _checkpointed(
    checkpoint: str | Sequence[str] | None, blocks: tuple[str, ...]
) -> tuple[tuple[str, ...], Recomputing]:
    if checkpoint is not None and not isinstance(checkpoint, str):
        return tuple(checkpoint), Recomputing()
    how = Recomputing.parse(checkpoint or "none")
    return ((), Recomputing()) if how is None else (how.choose(blocks), how)


def recompute(model: nn.Module, how: str) -> nn.Module:
    """Let backward compute a model's blocks once more instead of keeping what is in them: in place,
    before it is sharded. `how` is a word of `plan`'s answer (`Workload.checkpoint`):

        "nonreentrant"             every block
        "first-8", "every-2"       the first eight; every second one
        "op", "op-first-8", ...    all of them, those: but attention and every other product is kept
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"recompute needs an nn.Module, got {model!r:.60}")
    return recompute_blocks(model, how, find_blocks(model))


def as_arguments(model: nn.Module, inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments. Of a workload: tokens and targets, in the places where the
    model's forward takes them.
    """
    if not isinstance(inputs, Workload):
        return Call.of(inputs)
    known = inputs_of_config(model, inputs.micro_batch, inputs.sequence)
    if known is not None:
        return known
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
            "its inputs: give example inputs instead (inputs=, --inputs)"
        )
    return (tokens, targets)[: max(1, min(2, len(places)))], {}
