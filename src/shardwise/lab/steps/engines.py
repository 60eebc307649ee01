"""The candidates of a comparison: the same model and optimizer under shardwise and under torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.description.language_model import LM, OPTIMIZER, compute_loss
from shardwise.emulation.engines import fully_shard_blocks
from shardwise.profiling.timing import Step

# What each strategy is compared with.
PEERS = {
    "zero3": "fully_shard",
    "zero2": "fully_shard",
    "zero1": "ZeroRedundancyOptimizer",
    "ddp": "DistributedDataParallel",
}

Tensors = dict[str, torch.Tensor]  # by name


@dataclass(frozen=True)
class Precision:
    """The dtypes of compute and of the gradients' reduce; None is the parameters' own."""

    compute: str | None = None
    reduce: str | None = None

    def plan(
        self, strategy: str, mesh: int | tuple[int, int] | None = None, **settings: Any
    ) -> sw.Plan:
        """The strategy in these dtypes; by default over all ranks."""
        settings |= {"compute_dtype": self.compute, "reduce_dtype": self.reduce}
        return sw.Plan.of(strategy, mesh or dist.get_world_size(), **settings)


@dataclass(frozen=True)
class Wrapped:
    """A model under an engine, with its optimizer. Its gradients are the average over the ranks:
    torch divides, shardwise sums, so there the loss carries the divisor.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    divisor: int
    settings: dict[str, Any]
    capture: Callable[[Callable[..., None]], Callable[..., None]] | None = None

    def step_on(self, tokens: torch.Tensor, targets: torch.Tensor, micro_batches: int = 1) -> Step:
        """One whole training step; of several micro-batches, all on the same tokens."""
        divisor = self.divisor * micro_batches
        batches = [(tokens, targets)] * micro_batches

        def step(*given: tuple[torch.Tensor, torch.Tensor]) -> None:
            self.optimizer.zero_grad()
            for inputs, goals in given if len(given) == 1 else sw.microbatches(self.model, given):
                loss = compute_loss(self.model, inputs, goals)
                (loss / divisor if divisor > 1 else loss).backward()
            self.optimizer.step()

        run = step if self.capture is None else self.capture(step)
        return lambda: run(*batches)

    def whole(self) -> Tensors:
        """Every parameter and its gradient, whole; a collective call."""
        return whole_tensors(self.model)


Wrap = Callable[[LM, str, Precision], Wrapped]


def wrap_ours(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """shardwise with the defaults of a Plan."""
    return wrap_plan(model, precision.plan(strategy))


def wrap_plan(
    model: LM,
    plan: sw.Plan,
    shard: Callable[[LM, sw.Plan], object] | None = None,
    settings: dict[str, Any] = OPTIMIZER,
) -> Wrapped:
    """shardwise, and the optimizer, an AdamW of these settings, on flat local buffers."""
    plan = plan.resolve(model)
    (shard or sw.shard)(model, plan)
    optimizer = sw.local(torch.optim.AdamW(model.parameters(), **settings))
    told = {
        "plan": dataclasses.asdict(dataclasses.replace(plan, units=None)),
        "units": len(plan.require_units()),
        "optimizer": "local(AdamW)",
    }
    return Wrapped(model, optimizer, plan.world, told)


def wrap_compiled(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """shardwise's compiled graphs, with the defaults of a Plan."""
    return wrap_plan(model, precision.plan(strategy), sw.compile)


def wrap_blocks_compiled(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """shardwise's engine over compiled blocks, with the defaults of a Plan."""
    for block in model.layers:
        block.compile()
    return wrap_ours(model, strategy, precision)


def wrap_theirs_compiled(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """torch's engine over compiled blocks, which is how it is used with torch.compile."""
    for block in model.layers:
        block.compile()
    wrapped = wrap_theirs(model, strategy, precision)
    return dataclasses.replace(wrapped, settings=wrapped.settings | {"blocks": "torch.compile"})


def wrap_theirs(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """torch: `fully_shard` on each block, then on the root; or DistributedDataParallel as it is,
    with torch's optimizer that shards its state for `zero1`.
    """
    if PEERS[strategy] == "fully_shard":
        return _wrap_by(fsdp.fully_shard, model, strategy, precision)
    wrapped = DistributedDataParallel(model)
    optimizer: torch.optim.Optimizer
    if strategy == "zero1":
        # Its package compiles optimizers when it is imported.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, **OPTIMIZER)
    else:
        optimizer = torch.optim.AdamW(wrapped.parameters(), **OPTIMIZER)
    settings = {"wrap": "DistributedDataParallel, its defaults"}
    told = "ZeroRedundancyOptimizer(AdamW)" if strategy == "zero1" else "AdamW"
    return Wrapped(wrapped, optimizer, 1, settings | {"optimizer": told})


def wrap_dropin(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """torch's program with the import changed: `from shardwise import fully_shard`."""
    return _wrap_by(sw.fully_shard, model, strategy, precision)


def _wrap_by(
    fully_shard: Callable[..., Any], model: LM, strategy: str, precision: Precision
) -> Wrapped:
    mesh = mesh_of(next(model.parameters()).device.type)
    settings = fully_shard_blocks(model, precision.plan(strategy), mesh, fully_shard)
    settings["wrap"] = f"{fully_shard.__module__.partition('.')[0]}: {settings['wrap']}"
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    return Wrapped(model, optimizer, 1, settings | {"optimizer": "AdamW"})


class TorchCaptured:
    """A step in a plain `torch.cuda.graph`, as a user of torch would write it: always on the inputs
    of its recording.
    """

    def __init__(self, step: Callable[..., None]) -> None:
        self._step, self._calls = step, 0
        self._aside = torch.cuda.Stream()  # cuBLAS keeps memory for every stream that it meets
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *inputs: Any) -> None:
        self._calls += 1
        if self._graph is not None:
            self._graph.replay()
            return
        current, aside = torch.cuda.current_stream(), self._aside
        aside.wait_stream(current)
        if self._calls <= 3:
            with torch.cuda.stream(aside):
                self._step(*inputs)
            current.wait_stream(aside)
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._step(*inputs)
        self._graph = graph
        graph.replay()


def captured(wrap: Wrap) -> Wrap:
    """The candidate of `wrap`, its step captured: ours by sw.capture, torch's by torch."""

    def wrap_captured(model: LM, strategy: str, precision: Precision) -> Wrapped:
        wrapped = wrap(model, strategy, precision)
        ours = "plan" in wrapped.settings
        for group in wrapped.optimizer.param_groups:
            group["capturable"] = True
        settings = wrapped.settings | {"captured": "sw.capture" if ours else "torch.cuda.graph"}
        capture = sw.capture if ours else TorchCaptured
        return dataclasses.replace(wrapped, settings=settings, capture=capture)

    return wrap_captured


def wrap_arena(model: LM, strategy: str, precision: Precision) -> Wrapped:
    """shardwise with its memory in an arena."""
    return wrap_plan(model, precision.plan(strategy, memory="arena"))


# How a program reaches shardwise: by a Plan, through torch's surface, as compiled graphs, captured.
OURS: dict[str, Wrap] = {
    "plan": wrap_ours, "fully_shard": wrap_dropin, "compile": wrap_compiled,
    "capture": captured(wrap_ours), "capture compiled": captured(wrap_blocks_compiled),
}  # fmt: skip
THEIRS: dict[str, Wrap] = {
    "plan": wrap_theirs, "fully_shard": wrap_theirs, "compile": wrap_theirs_compiled,
    "capture": wrap_theirs, "capture compiled": wrap_theirs_compiled,
}  # fmt: skip
# What else runs in turn with the two.
BESIDE: dict[str, dict[str, Wrap]] = {
    "compile": {"our engine, compiled blocks": wrap_blocks_compiled},
    "capture": {
        "ours, eager": wrap_ours,
        "ours, eager, arena": wrap_arena,
        "ours, captured, arena": captured(wrap_arena),
        "fully_shard, captured": captured(wrap_theirs),
    },
    "capture compiled": {
        "ours, eager": wrap_blocks_compiled,
        "fully_shard, captured": captured(wrap_theirs_compiled),
    },
}


_meshes: dict[tuple[int, ...], DeviceMesh] = {}


def mesh_of(
    device_type: str, shape: tuple[int, ...] = (), names: tuple[str, ...] | None = None
) -> DeviceMesh:
    """All ranks, in one row or in this shape. One mesh for all candidates of a process: process
    groups are dear and never go away.
    """
    shape = shape or (dist.get_world_size(),)
    if shape not in _meshes:
        _meshes[shape] = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return _meshes[shape]


def whole_tensors(model: nn.Module) -> Tensors:
    """Every parameter and its gradient, whole; a collective call."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")  # DistributedDataParallel's
        found[name] = _whole(parameter.detach())
        if parameter.grad is not None:
            found[f"{name}, its gradient"] = _whole(parameter.grad)
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def largest_difference(ours: nn.Module, theirs: nn.Module) -> tuple[float, str]:
    """Of all parameters and gradients; a collective call."""
    return compare_tensors(whole_tensors(ours), whole_tensors(theirs))


def compare_tensors(mine: Tensors, other: Tensors) -> tuple[float, str]:
    """The largest difference, relative to the tensor's largest value, and where."""
    if mine.keys() != other.keys():
        return math.inf, ", ".join(sorted(mine.keys() ^ other.keys()))
    worst, where = 0.0, ""
    for name, expected in other.items():
        if torch.equal(mine[name], expected):
            continue
        difference = float((mine[name] - expected).abs().max() / expected.abs().max())
        if math.isnan(difference):
            difference = math.inf
        if difference > worst:
            worst, where = difference, name
    return worst, where
