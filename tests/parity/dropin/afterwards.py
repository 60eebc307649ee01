"""What programs do to a model that is sharded already: tie weights, add adapters, write to
parameters where no version counter sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    line,
    local_part,
    optimizers_of,
    twins,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.models import Block

ROWS = 11


class Language(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.block = Block(WIDTH, 16)
        self.head = nn.Linear(WIDTH, rows, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x.abs() * 7).long() % self.embed.num_embeddings
        return self.head(self.block(self.embed(tokens)))


@case(2, where=("root", "units", "nested"), when=(0, 1, 2), replaced=(False, True))
def tied_after_sharding(api: Api, where: str, when: int, replaced: bool) -> None:
    """torch follows a tie that was made before the first forward, if the ranks have equal rows;
    here at any time.
    """
    if api.engine == "torch" and (when or replaced):
        return
    alone, model = twins(Language, 12 if api.engine == "torch" else ROWS)
    parts = {"root": [], "units": [model.embed, model.head], "nested": [model.head]}[where]
    for part in (*parts, model.block, model):
        api.fully_shard(part, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    for step in range(4):
        if step == when:
            for each in (model, alone):
                if replaced:
                    each.embed.weight = nn.Parameter(each.embed.weight.detach().clone())
                each.head.weight = each.embed.weight
            opts = optimizers_of("adamw", model, alone)
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
    assert model.head.weight is model.embed.weight


class Adapter(nn.Module):
    """What PEFT puts around a layer."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


@case(2, when=(0, 1), own=(True, False), frozen=(True, False))
def adapters_on_a_sharded_model(api: Api, when: int, own: bool, frozen: bool) -> None:
    """With a `fully_shard` of their own they are sharded; without, each rank trains its own, so all
    ranks see the same batch here.
    """
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    for step in range(3):
        if step == when:
            for each in (model, alone):
                torch.manual_seed(3)
                for parameter in each.parameters() if frozen else ():
                    parameter.requires_grad_(False)
                for layer in each.layers:
                    layer.up = Adapter(layer.up)
                    if own and each is model:
                        api.fully_shard(layer.up.down, mesh=line())
                        api.fully_shard(layer.up.up, mesh=line())
            opts = optimizers_of("adamw", model, alone)
        for each in (model, alone):
            each(batch(step, 0)).square().mean().backward()
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@torch.no_grad()
def _foreach(parameters: list[Any]) -> None:
    torch._foreach_mul_(parameters, 0.5)


WRITES: dict[str, Callable[[list[Any]], Any]] = {
    "data": lambda parameters: [p.data.mul_(0.5) for p in parameters],
    "foreach": _foreach,
    "foreach on data": lambda parameters: torch._foreach_mul_([p.data for p in parameters], 0.5),
    "copy": torch.no_grad()(lambda parameters: [p.copy_(p * 0.5) for p in parameters]),
    "local": torch.no_grad()(
        lambda parameters: [
            (p.to_local() if hasattr(p, "to_local") else p).mul_(0.5) for p in parameters
        ]
    ),
    "numpy": torch.no_grad()(
        lambda parameters: [
            (p.to_local() if hasattr(p, "to_local") else p).detach().numpy().__imul__(0.5)
            for p in parameters
        ]
    ),
}


@case(2, engines=("shardwise",), low=(False, True), reshard=(None, False))
def silent_writes_between_forwards(api: Api, low: bool, reshard: bool | None) -> None:
    """An evaluation leaves parameters gathered; the next forward computes with what was written
    since. (torch computes with the old ones.)
    """
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    wrap(api, model, mesh=line(), mp_policy=policy, reshard_after_forward=reshard)
    bound = 3e-2 if low else 1e-5
    x = batch(0, 0)
    # As an optimizer or an average of the weights holds them.
    held = {id(each): list(each.parameters()) for each in (model, alone)}
    weights = {id(each): each.head.weight for each in (model, alone)}
    for trains in (False, True):  # a forward that could have been trained, and was not, as well
        for name, write in WRITES.items():
            for each in (model, alone):
                with torch.set_grad_enabled(trains):
                    each(x)
                write(held[id(each)])
            with torch.no_grad():
                assert torch.allclose(model(x).float(), alone(x), atol=bound), (trains, name)
            for each in (model, alone):
                for parameter in held[id(each)]:
                    parameter.data.mul_(2.0)
    # Where only one rank's rows change, all gather anew.
    with torch.no_grad():
        model(x)
    whole = torch.zeros_like(alone.head.weight)
    whole[-1] = 1.0
    weights[id(alone)].data.add_(whole)
    weight = weights[id(model)]
    weight.data.to_local().add_(local_part(whole, weight))
    with torch.no_grad():
        assert torch.allclose(model(x).float(), alone(x), atol=bound)


@case(2)
def kept_over_steps_and_written(api: Api) -> None:
    """Parameters that stay gathered after backward: an optimizer's step is seen."""
    if api.engine == "torch":
        return  # computes with the old parameters
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1, foreach=True) for m in (model, alone)]
    for step in range(3):
        for i in range(dist.get_world_size()):
            (alone(batch(step, i)).square().mean() / dist.get_world_size()).backward()
        model(batch(step, dist.get_rank())).square().mean().backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    model.reshard()
    for layer in model.layers:
        layer.reshard()
    assert_same_parameters(model, alone)
