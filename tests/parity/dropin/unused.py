"""Parameters that go unused: no gradient where no rank produced one, in every step; zeros from the
ranks that did not, where others did.
"""

from __future__ import annotations

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
    grid,
    line,
    mesh,
    optimizers_of,
    twins,
)
from tests.parity.models import Block


class Moody(nn.Module):
    """What `how` names goes unused: a block's output, a block, one parameter of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Block(WIDTH, 16), Block(WIDTH, 16), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.gate = Gated()

    def forward(self, x: torch.Tensor, how: str) -> torch.Tensor:
        y = self.a(x)
        if how != "block":
            z = self.b(x)
            y = y if how == "output" else y + z
        y = self.gate(y, how != "parameter")
        return self.head(y * self.scale if how != "root" else y)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor, gated: bool) -> torch.Tensor:
        return self.up(x) * self.gate if gated else self.up(x)


# What is used in each step; "" uses all.
STEPS = ("", "output", "block", "parameter", "root", "", "output", "output")


@case(2, first=("", "output", "parameter"), reshard=(True, False))
def nothing_where_nobody_produced_one(api: Api, first: str, reshard: bool) -> None:
    alone, model = twins(Moody)
    for part in (model.a, model.b, model.gate, model):
        api.fully_shard(part, mesh=line(), reshard_after_forward=reshard)
    _train(model, alone, (first, *STEPS))


@case(4)
def nothing_where_nobody_produced_one_on_replicas(api: Api) -> None:
    alone, model = twins(Moody)
    for part in (model.a, model.b, model.gate, model):
        api.fully_shard(part, mesh=grid())
    _train(model, alone, STEPS)


def _train(model: nn.Module, alone: nn.Module, steps: tuple[str, ...]) -> None:
    """AdamW decays what has a gradient, also one of zeros."""
    opts = optimizers_of("adamw", model, alone)
    for how in steps:
        assert_trains_alike(
            model,
            alone,
            steps=1,
            optimizer=opts,
            loss=lambda m, x, how=how: m(x, how).square().mean(),
        )


@case(2, engines=("shardwise",), shape=((2,), (2, 1)))
def some_ranks_use_it_and_others_do_not(api: Api, shape: tuple[int, ...]) -> None:
    """Ranks differ in what they use, and differ anew in every step."""
    alone, model = twins(Moody)
    names = ("replicate", "shard") if len(shape) == 2 else None
    for part in (model.a, model.b, model.gate, model):
        # What is freed after forward is gathered in backward, by all ranks or none.
        api.fully_shard(part, mesh=mesh(*shape, names=names), reshard_after_forward=False)
    opts = optimizers_of("adamw", model, alone)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    moods = (("", "output"), ("parameter", "output"), ("output", "output"), ("root", "parameter"))
    for step, hows in enumerate((*moods, *moods)):
        for i in range(ranks):
            (alone(batch(step, i), hows[i]).square().mean() / ranks).backward()
        model(batch(step, rank), hows[rank]).square().mean().backward()
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2)
def accumulated_over_passes(api: Api) -> None:
    """Used in one pass of a step, unused in the other."""
    alone, model = twins(Moody)
    for part in (model.a, model.b, model.gate, model):
        api.fully_shard(part, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for step, pair in enumerate((("", "output"), ("output", "output"), ("output", "parameter"))):
        for at, how in enumerate(pair):
            for i in range(ranks):
                (alone(batch(step, 2 * at + i), how).square().mean() / ranks).backward()
            model(batch(step, 2 * at + rank), how).square().mean().backward()
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)
