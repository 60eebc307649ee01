"""Programs of every kind that a checkpoint is saved from and loaded into, and their whole state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.engine.grouped_step import ELEMENTS
from tests.parity.models import Model, loss_sum, token_batch

State = dict[str, torch.Tensor]
MakeOptimizer = Callable[..., torch.optim.Optimizer]


@dataclass
class Program:
    """A model with its optimizer, and how it takes one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    sum_gradients: bool = False  # the program itself adds them up over the ranks
    grouped: str = ""  # the layout of `sharded_step`

    def step(self, number: int) -> None:
        tokens = token_batch(number, dist.get_rank() if dist.is_initialized() else 0)
        loss_sum(self.model(tokens), tokens).backward()
        if self.grouped:
            sw.sharded_step(self.model.parameters(), self.optimizer, layout=self.grouped)
        else:
            for parameter in self.model.parameters() if self.sum_gradients else ():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
            self.optimizer.step()
        self.optimizer.zero_grad()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


KINDS = (
    "plain", "torch ddp", "torch fully_shard", "drop-in", "sharded optimizer", "sharded_step rows",
    "sharded_step flat", "ddp", "zero1", "zero2", "zero3", "hsdp",
)  # fmt: skip


def make(kind: str, seed: int = 0, optimizer: MakeOptimizer = adamw) -> Program:
    """A program of the odd model; `seed` decides its values."""
    model = fit_for_torch(build_small(seed))
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "plain":
        return Program(model, optimizer(model.parameters()), sum_gradients=world > 1)
    if kind == "torch ddp":
        return Program(DistributedDataParallel(model), optimizer(model.parameters()))
    if kind == "torch fully_shard":
        for layer in model.layers:
            torch_fully_shard(layer)
        torch_fully_shard(model)
    elif kind == "drop-in":
        for layer in model.layers:
            sw.fully_shard(layer)
        sw.fully_shard(model)
    elif kind == "sharded optimizer":
        trained = [p for p in model.parameters() if p.requires_grad]
        inner = sw.ShardedOptimizer(trained, torch.optim.AdamW, lr=0.01)
        return Program(model, inner, sum_gradients=True)
    elif kind.startswith("sharded_step"):
        return Program(model, optimizer(model.parameters()), grouped=kind.split()[1])
    else:
        mesh = (2, world // 2) if kind == "hsdp" else world
        sw.shard(model, sw.Plan.of(kind, mesh=mesh))
    return Program(model, optimizer(model.parameters()))


def build_small(seed: int = 0) -> Model:
    """Of one odd block, its head tied to its embedding."""
    torch.manual_seed(seed)
    return Model(odd=True, width=7, inner=13, blocks=1)


def fit_for_torch(model: Any) -> Any:
    """torch's data parallel takes no unused parameter, its `fully_shard` none without dims or of
    another dtype.
    """
    for layer in model.layers:
        layer.idle.requires_grad_(False)
        layer.gate = nn.Parameter(layer.gate.detach().view(1))
        steps = layer.steps.detach()
        del layer.steps
        layer.register_buffer("steps", steps)
    return model


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def state_of(program: Program) -> State:
    """All of model and optimizer, whole, by name; found without shardwise's checkpoints."""
    model = program.model
    model = model.module if isinstance(model, DistributedDataParallel) else model
    found = {name: whole(tensor).clone() for name, tensor in model.state_dict().items()}
    optimizer = program.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    if isinstance(optimizer, sw.ShardedOptimizer):
        order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
        for i, state in optimizer.full_state_dict()["state"].items():
            found |= {f"{order[i]} {key}": value for key, value in state.items()}
        return found
    for name, parameter in model.named_parameters():
        state = dict(optimizer.state.get(parameter, {}))
        if program.grouped:
            state = _gather_elements(parameter, state)
        found |= {f"{name} {key}": whole(value).clone() for key, value in state.items()}
    return found


def _gather_elements(parameter: torch.Tensor, state: dict[str, Any]) -> dict[str, Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, state)
    joined: dict[str, Any] = {}
    for each in everyone:
        if ELEMENTS not in each:
            joined.update(each)  # whole: just loaded
            continue
        start, stop, _ = each.pop(ELEMENTS)
        for key, value in each.items():
            if value.dim() == 0 and key == "step":
                joined[key] = value
                continue
            flat = joined.setdefault(key, torch.zeros_like(parameter).detach()).view(-1)
            flat[start:stop] = value.reshape(-1)
    return joined


def assert_same(ours: State, theirs: State, about: str = "") -> None:
    assert ours.keys() == theirs.keys(), (about, ours.keys() ^ theirs.keys())
    for key, value in ours.items():
        other = theirs[key]
        assert value.dtype == other.dtype and value.shape == other.shape, (about, key)
        assert torch.equal(value, other), (about, key)
