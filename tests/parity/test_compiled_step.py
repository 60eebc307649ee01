"""torch.compile around an optimizer's step, or around what it does to each parameter."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

import shardwise as sw
from tests.parity.test_local_step import same_everywhere, same_state, shard_by
from tests.ranks import Ranks


def _update(p: Any, grad: Any, step: Any, mean: Any, rate: Any) -> None:
    mean.lerp_(grad, 0.1)
    p.sub_(mean * rate / (1 - 0.9**step))


class Inner(torch.optim.Optimizer):
    """Compiles the update of one parameter, as torchao's optimizers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": torch.tensor(0.01)})
        self.update = torch.compile(_update, fullgraph=True, dynamic=False, backend="aot_eager")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p].update(step=torch.tensor(0.0), mean=torch.zeros_like(p))
                state = self.state[p]
                state["step"] += 1
                self.update(p.detach(), p.grad, state["step"], state["mean"], group["lr"])


def _steps(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Compiled and other steps in turn, also on state that was copied."""
    if kind == "inner":
        optimizer: torch.optim.Optimizer = Inner(model.parameters())
        compiled = optimizer.step
    else:
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        compiled = torch.compile(optimizer.step, backend="eager")
    for i, step in enumerate([optimizer.step, compiled, compiled, optimizer.step, compiled]):
        draw = torch.Generator().manual_seed(i)
        model(torch.randn(4, 64, generator=draw)).pow(2).mean().backward()
        step()
        if i == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.zero_grad()
    return optimizer


def _compiles(kind: str) -> None:
    models = []
    for api in (sw, fsdp):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 5))
        models.append(shard_by(api, made))
    mine, other = (_steps(model, kind) for model in models)
    same_state(mine.state_dict(), other.state_dict())
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        same_everywhere(p.detach(), q.detach(), kind)
    torch._dynamo.reset()


def test_a_compiled_step_is_torchs(two: Ranks) -> None:
    two.run(_compiles, "whole")


def test_an_optimizer_that_compiles_its_updates(two: Ranks) -> None:
    two.run(_compiles, "inner")
