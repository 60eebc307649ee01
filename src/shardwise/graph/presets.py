"""Graphs of a preset's step on ranks that are not there: traced, and not run, by rank 0 of an
imagined world.

Every module with parameters is a unit of its own: nothing is gathered before it is used, and every
gradient goes as soon as it is there. That is where passes start from. The mesh is
(replicate, shard, tensor), neighbours first in the last axis; norms' weights, which every
tensor-parallel rank has whole, are cut over the last two axes together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from shardwise.description.collectives import Members
from shardwise.description.parameters import places
from shardwise.description.preset import Preset
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.graph.cost import MeshAxis
from shardwise.graph.executor import GraphParameter
from shardwise.graph.lower import Lowering
from shardwise.graph.tensor_parallel import TensorParallelLM
from shardwise.graph.torch_private import (
    compile_graphs,
    cut_joint_graph,
    join_imagined_world,
    name_of_group,
    without_collecting,
)
from shardwise.graph.trace import Inputs, Whole, call_marked
from shardwise.kernels.attention.ops import attention_op
from shardwise.planning.plan import Plan
from shardwise.planning.rows import Rows

# What a graph starts from: a unit for every module with parameters, nothing gathered ahead.
UNITS = (nn.Linear, nn.Embedding, nn.RMSNorm)
REDUCES_UNDER_WAY = 16  # reduce-scatters before backward waits for the oldest; about two blocks


@dataclass(frozen=True)
class TracedStep:
    """One micro-batch, forward and backward, and the mesh's axes by the names of their groups."""

    forward: Graph
    backward: Graph
    axes: Mapping[str, MeshAxis]
    plan: Plan


def plan_by_modules(name: str, mesh: int | str | tuple[int, ...]) -> Plan:
    """A Plan whose schedule leaves all choices to the passes."""
    more: dict[str, Any] = {} if name == "ddp" else {"units": UNITS}
    if name in ("zero3", "hsdp"):
        more["keep_after_forward"] = False
    return Plan.of(
        name, mesh, forward_prefetch=0, backward_prefetch=0, reduce_depth=REDUCES_UNDER_WAY,
        compute_dtype="bfloat16", reduce_dtype="float32", **more,
    )  # fmt: skip


def trace_preset(
    preset: Preset, plan: Plan, workload: Workload, *, tensor: int = 1, recompute: bool = False
) -> TracedStep:
    """The graphs of `preset` under `plan`, with `tensor` ranks of tensor parallelism in the place
    of each of the Plan's. `recompute`: backward makes every block's activations again.
    """
    if preset.kind != "lm":
        raise UserError(f"{preset.name} is no language model: only those are traced as graphs")
    if workload.sequence % tensor:
        raise UserError(f"--tp {tensor} does not divide a sequence of {workload.sequence} tokens")
    with _imagined_mesh(plan, tensor) as mesh, _attention_as_one_node():
        model = _with_buffers(preset.build(workload.sequence))
        if tensor > 1:
            model = TensorParallelLM(model, tensor, mesh.names["tensor"])
        if recompute:
            model.layers = nn.ModuleList(map(Recomputed, model.layers))  # type: ignore[arg-type]
        resolved = plan.resolve(model)
        forward, backward = _trace(
            model,
            resolved,
            mesh,
            [torch.empty_like(x, device="cpu") for x in preset.inputs(workload)],
        )
        return TracedStep(forward, backward, mesh.axes, resolved)


class Recomputed(nn.Module):
    """A block whose activations are made again in backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return made


@dataclass(frozen=True)
class _Mesh:
    """The groups of rank 0 by the names of the axes, and what those are."""

    names: Mapping[str, str]
    axes: Mapping[str, MeshAxis]


@contextmanager
def _imagined_mesh(plan: Plan, tensor: int) -> Iterator[_Mesh]:
    shard, replicate = plan.shard, plan.replicate
    shapes = {
        "shard": Members(shard, tensor),
        "tensor": Members(tensor),
        "combined": Members(shard * tensor),
        "replicate": Members(replicate, shard * tensor),
    }
    if dist.is_initialized():
        raise UserError(
            "graphs of ranks that are not there are traced in a process without a group, and this "
            "one has one: call torch.distributed.destroy_process_group first"
        )
    join_imagined_world(shard * replicate * tensor)
    try:
        names = {
            axis: name_of_group(dist.new_group([i * m.stride for i in range(m.ranks)]))
            for axis, m in shapes.items()
        }
        yield _Mesh(names, {names[axis]: MeshAxis(axis, m) for axis, m in shapes.items()})
    finally:
        dist.destroy_process_group()


@contextmanager
def _attention_as_one_node() -> Iterator[None]:
    """On the meta device torch takes attention apart; this project's operator stays whole."""
    plain = functional.scaled_dot_product_attention

    def attend(
        q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, enable_gqa: bool = False
    ) -> Tensor:
        scale = q.shape[-1] ** -0.5
        mixed: Tensor = attention_op(q, k, v, None, None, is_causal, scale, None, "fp32", False)[0]
        return mixed

    functional.scaled_dot_product_attention = attend  # type: ignore[assignment]
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain


def _facts(model: nn.Module, plan: Plan, mesh: _Mesh) -> Iterator[GraphParameter]:
    unit_of = {p.name: unit for unit in plan.require_units() for p in unit.parameters}
    dtype_of = {p.name: p.dtype for unit in plan.require_units() for p in unit.parameters}
    tensor = next(a.members.ranks for a in mesh.axes.values() if a.name == "tensor")
    norms = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.RMSNorm)}
    for names, parameter in places(model):
        unit = unit_of[names[0]]
        combined = tensor > 1 and names[0] in norms
        ranks = 1 if unit.whole or plan.name == "ddp" else plan.shard * (tensor if combined else 1)
        master, compute, reduce = plan.dtypes(dtype_of[names[0]])
        yield GraphParameter(
            tuple(names), unit.name, Rows(tuple(parameter.shape), ranks), master, compute, reduce,
            mesh.names["combined" if combined else "shard"], mesh.names["replicate"],
            plan.replicate,
        )  # fmt: skip


def _trace(
    model: nn.Module, plan: Plan, mesh: _Mesh, inputs: Sequence[Tensor]
) -> tuple[Graph, Graph]:
    """Both graphs, with collectives where the Plan's schedule has them. Nothing is run."""
    facts = list(_facts(model, plan, mesh))
    parts = [torch.empty(p.rows.part, dtype=p.master, requires_grad=True) for p in facts]
    found: list[Graph] = []
    whole = Whole(model)

    def call(parts: list[Tensor], inputs: Sequence[Tensor]) -> Any:
        return call_marked(whole, facts, Inputs(parts), tuple(inputs), {})[0]

    def compile_module(module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowering = Lowering(facts, plan, scatters=True, all_reduces=True)

        def partition(
            joint: GraphModule, inputs: Sequence[Any], **given: Any
        ) -> tuple[GraphModule, GraphModule]:
            lowering.tag(joint.graph)
            forward, backward = cut_joint_graph(joint, inputs, False, **given)
            found.append(lowering.forward(forward.graph))
            found.append(lowering.backward(backward.graph))
            raise _Traced

        return compile_graphs(
            module, inputs, partition=partition, whole=_refuse, finish=_refuse, inductor=False
        )

    try:
        with without_collecting():
            torch.compile(call, backend=compile_module, fullgraph=True)(parts, inputs)
    except Exception:  # torch.compile wraps the one that ends it
        if len(found) != 2:
            raise
    finally:
        torch.compiler.reset()
    forward, backward = found
    return forward, backward


def _with_buffers(model: nn.Module) -> nn.Module:
    """The model with buffers of a CPU's. On the meta device torch has kernels of its own for
    operators that are made of others elsewhere (`where` with a number, `nll_loss`), and these have
    no gradients. Parameters stay there: their parts take their places, whose memory nobody touches.
    """
    for module in model.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=False)
    return model


class _Traced(Exception):
    """Both graphs are there: what would be run is not needed."""


def _refuse(*_: Any) -> GraphModule:
    raise AssertionError("a step has a backward")
