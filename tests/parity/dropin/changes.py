"""What changes after sharding or after the first step: blocks left out, modules put around others,
modules replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    alone_mesh,
    assert_trains_alike,
    batch,
    line,
    optimizers_of,
    twins,
)
from tests.parity.dropin.models import Branching, Stack, wrap
from tests.parity.models import Block


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = Block(WIDTH, 16), Block(WIDTH, 16), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        return self.head(sum(getattr(self, name)(x) for name in which))


@case(2, reshard=(True, False))
def blocks_left_out_later(api: Api, reshard: bool) -> None:
    """The first step uses every block; a later one leaves some out: no gradient, so no decay."""
    alone, model = twins(Branches)
    for part in (model.a, model.b, model):
        api.fully_shard(part, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("adamw", model, alone)
    for which in ("ab", "a", "ab", "b", "b"):
        assert_trains_alike(
            model,
            alone,
            steps=1,
            optimizer=opts,
            loss=lambda m, x, which=which: m(x, which).square().mean(),
        )


@case(2)
def parameters_left_out_later_by_a_rank_alone(api: Api) -> None:
    alone, model = twins(Branching)
    wrap(api, model, mesh=alone_mesh())
    opts = optimizers_of("adamw", model, alone)
    for both in (True, False, True, False):
        assert_trains_alike(
            model,
            alone,
            steps=1,
            optimizer=opts,
            place=(0, 1),
            loss=lambda m, x, both=both: m(x, both=both).square().mean(),
        )


@case(2, how=("checkpoint", "compile"), used=(False, True))
def wrapped_after_sharding(api: Api, how: str, used: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    if used:
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
    for each in (model, alone):
        for i, layer in enumerate(each.layers):
            each.layers[i] = (
                checkpoint_wrapper(layer)
                if how == "checkpoint"
                else torch.compile(layer, backend="eager")
            )
    assert_trains_alike(model, alone, steps=2, optimizer=opts)


class Dropping(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.drop: nn.Module = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(super().forward(x))


@case(2)
def a_module_without_parameters_replaced(api: Api) -> None:
    alone, model = twins(Dropping)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts)
    model.drop = nn.Identity()
    assert_trains_alike(model, alone, steps=2, optimizer=opts)


class Counting(Stack):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).detach().numpy().sum(axis=0)


@case(2)
def a_root_that_gives_an_array(api: Api) -> None:
    alone, model = twins(Counting)
    wrap(api, model, mesh=line())
    x = batch(0, 0)
    assert torch.allclose(torch.from_numpy(model(x)), torch.from_numpy(alone(x)))
