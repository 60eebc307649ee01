"""What `shardwise emulate` trains: any model, Plan and mesh, under shardwise and under torch.

Models are built on the meta device and get memory after they were cut, so only this rank's part is
ever on the device (and, for data parallel, all of it).
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from shardwise.description.language_model import LM, OPTIMIZER, compute_loss, draw_tokens
from shardwise.description.preset import BENCH as BENCH_SIZE
from shardwise.description.preset import Preset, load_preset
from shardwise.description.workload import Sizes, Workload, show_sizes
from shardwise.engine.api import local, shard
from shardwise.engine.engine import engine_of, microbatches
from shardwise.engine.state import materialize
from shardwise.engine.torch_private import local_of
from shardwise.errors import UserError
from shardwise.planning.plan import DTYPES, Plan
from shardwise.planning.strategies import STRATEGIES
from shardwise.profiling.timing import Step

BENCH = "bench"  # the benchmarks' own model, 0.95 B parameters
ENGINES = ("shardwise", "torch")
AXES = ("replicate", "shard")  # of a mesh with replicas, for torch
TORCH_PLANS = ("ddp", "zero2", "zero3")  # what torch's engines do of the strategies

Inputs = tuple[torch.Tensor, ...]
Rows = tuple[tuple[Inputs, ...], ...]  # the micro-batches of every kind of rank
Item = TypeVar("Item")


@dataclass(frozen=True)
class Subject:
    """A model by name and one rank's micro-batches: `sizes` has the sequences of each, in a row
    for every kind of rank (`Workload.sizes`); without it, `batch` is the only one.
    """

    name: str
    batch: int
    length: int
    sizes: Sizes = ()

    @property
    def rows(self) -> Sizes:
        return self.sizes or ((self.batch,),)

    @property
    def tokens(self) -> str:
        """In words: what each micro-batch has."""
        return f"{show_sizes(self.rows)} x {self.length} tokens"

    @property
    def preset(self) -> Preset | None:
        return None if self.name == BENCH else load_preset(self.name)

    def build(self) -> nn.Module:
        """On the meta device."""
        if self.preset is not None:
            return self.preset.build(self.length)
        with torch.device("meta"):
            return LM(BENCH_SIZE, self.length)

    def draw_inputs(self, device: torch.device) -> Inputs:
        preset = self.preset
        if preset is not None and preset.kind == "ffn":
            draw = torch.Generator().manual_seed(1)
            like = preset.inputs(Workload(self.length, self.batch))
            return tuple(torch.randn(x.shape, generator=draw).to(device) for x in like)
        size = BENCH_SIZE if preset is None else preset.size()
        return draw_tokens(size, self.batch, self.length, device)

    def loss(self, model: nn.Module, inputs: Inputs) -> torch.Tensor:
        """A mean over this rank's batch."""
        preset = self.preset
        if preset is None:
            return compute_loss(model, *inputs)
        if preset.kind == "ffn":
            return model(*inputs).float().square().mean()
        return model(*inputs) / inputs[0].numel()

    def draw_rows(self, device: torch.device) -> Rows:
        """The inputs of every micro-batch of every row; those of one size are the same."""
        drawn = {
            size: replace(self, batch=size).draw_inputs(device)
            for size in {size for row in self.rows for size in row}
        }
        return tuple(tuple(drawn[size] for size in row) for row in self.rows)


@dataclass(frozen=True)
class Built:
    """A model under an engine, and one whole training step of it, by every row of sizes."""

    model: nn.Module
    steps: tuple[Step, ...]
    settings: dict[str, Any]


def wrap(
    engine: str, model: nn.Module, plan: Plan, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the meta device under `engine` as `plan` says, filled, and how it was wrapped."""
    return (_wrap_ours if engine == "shardwise" else _wrap_torch)(model, plan, device)


def each_micro_batch(
    engine: str, model: nn.Module, plan: Plan, batches: Sequence[Item]
) -> Iterator[Item]:
    """The micro-batches of a step. torch is told of the last one by its setters, where the Plan
    lets something wait for it.
    """
    if len(batches) == 1:
        yield batches[0]
    elif engine == "shardwise":
        yield from microbatches(model, batches)
    else:
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            if isinstance(model, FSDPModule) and plan.sync != "each":
                if plan.sync == "last":
                    model.set_requires_gradient_sync(last)
                model.set_requires_all_reduce(last)
                model.set_is_last_backward(last)
            elif isinstance(model, DistributedDataParallel):
                model.require_backward_grad_sync = last or plan.sync == "each"
            yield batch


def build(engine: str, subject: Subject, plan: Plan, device: torch.device, rows: Rows) -> Built:
    """`subject` under `engine` as `plan` says; the process group is there already."""
    ours = engine == "shardwise"
    model, settings = wrap(engine, subject.build(), plan, device)
    optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    if ours:
        optimizer = local(optimizer)
    cast: Callable[[], Any] = contextlib.nullcontext
    if isinstance(model, DistributedDataParallel) and plan.compute_dtype:
        cast = functools.partial(torch.autocast, device.type, dtype=DTYPES[plan.compute_dtype])

    def step(row: Sequence[Inputs]) -> None:
        # shardwise sums over ranks, torch averages; both sum over micro-batches.
        divisor = len(row) * (plan.world if ours else 1)
        optimizer.zero_grad()
        for inputs in each_micro_batch(engine, model, plan, row):
            with cast():
                mean = subject.loss(model, inputs)
            (mean / divisor if divisor > 1 else mean).backward()
        optimizer.step()

    steps = tuple(functools.partial(step, row) for row in rows)
    return Built(model, steps, settings | {"optimizer": "local(AdamW)" if ours else "AdamW"})


def check_torch(plan: Plan) -> None:
    """Error if torch has no engine for the Plan."""
    if plan.strategy not in [STRATEGIES[name] for name in TORCH_PLANS]:
        raise UserError(
            f"torch has no engine for {plan.title}: it has {', '.join(TORCH_PLANS)}, and hsdp over "
            "zero2 or zero3; use --engine shardwise"
        )


def _wrap_ours(
    model: nn.Module, plan: Plan, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    shard(model, plan, device if device.type == "cpu" else None)
    with warnings.catch_warnings():
        # torch's initialisers warn of DTensors on a host; `_fill` replaces what they draw.
        warnings.simplefilter("ignore", UserWarning)
        empty = set(materialize(model, device))
    _fill(model, device, {name: b for name, b in model.named_buffers() if name in empty})
    resolved = engine_of(model).plan
    assert resolved is not None
    return model, {"plan": resolved.title, "units": len(resolved.require_units())}


def _wrap_torch(
    model: nn.Module, plan: Plan, device: torch.device
) -> tuple[nn.Module, dict[str, Any]]:
    if plan.name != "ddp":
        sizes, names = ((plan.shard,), None) if plan.replicate == 1 else (plan.mesh, AXES)
        mesh = init_device_mesh(device.type, sizes, mesh_dim_names=names)
        settings = fully_shard_blocks(model, plan, mesh)
    else:
        settings = {"wrap": "DistributedDataParallel, its defaults"}
        if plan.compute_dtype:
            settings["compute"] = f"autocast to {plan.compute_dtype}"
    model.to_empty(device=device)
    _fill(model, device, dict(model.named_buffers()))
    return (DistributedDataParallel(model) if plan.name == "ddp" else model), settings


def fully_shard_blocks(
    model: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    fully_shard: Callable[..., Any] = fsdp.fully_shard,
) -> dict[str, Any]:
    """What torch's surface makes of the Plan: each block is wrapped, then the root."""
    policy = MixedPrecisionPolicy(
        param_dtype=DTYPES[plan.compute_dtype] if plan.compute_dtype else None,
        reduce_dtype=DTYPES[plan.reduce_dtype] if plan.reduce_dtype else None,
    )
    # None is torch's own choice: all but the root are resharded.
    reshard = False if plan.strategy.parameters == "step" else None
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
    return {"wrap": "fully_shard of each block, then the root", "reshard_after_forward": reshard}


@torch.no_grad()
def _fill(model: nn.Module, device: torch.device, buffers: dict[str, torch.Tensor]) -> None:
    """Small random numbers in all parameters, and in `buffers` that hold nothing: a GPU's clock
    depends on the values it multiplies. Norms have ones, biases zeros: with ones all tokens would
    have a part in common, which sends them to the same experts.
    """
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    for name, tensor in (*model.named_parameters(), *buffers.items()):
        if tensor.ndim > 1:
            local_of(tensor).normal_(std=0.02, generator=generator)
        else:
            local_of(tensor).fill_(0.0 if "bias" in name.rpartition(".")[2] else 1.0)
