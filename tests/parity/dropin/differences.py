"""Where shardwise does more than torch: what torch says, and what shardwise does instead.

Each scenario is for one engine; torch's are here so that a change on its side is noticed.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    line,
    raises,
    twins,
)
from tests.parity.dropin.models import Stack, Tied, wrap

TORCH, OURS = ("torch",), ("shardwise",)


@case(2, engines=TORCH)
def deepcopy_is_refused(api: Api) -> None:
    model = wrap(api, Stack(), mesh=line())
    with raises(AssertionError, "does not support deepcopy"):
        copy.deepcopy(model)


@case(2, engines=OURS, used=(False, True))
def deepcopy_is_a_second_model(api: Api, used: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    if used:
        assert_trains_alike(model, alone, steps=1)
    second, other = copy.deepcopy(model), copy.deepcopy(alone)
    assert isinstance(second, api.FSDPModule) and type(second) is type(model)
    assert all(isinstance(p, DTensor) for p in second.parameters())
    mine = {id(p) for p in model.parameters()}
    assert not mine & {id(p) for p in second.parameters()}
    assert_trains_alike(second, other)
    assert_same_parameters(model, alone)
    assert_trains_alike(model, alone)


class Gated(Stack):
    """With a 0-d gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate


@case(2, engines=TORCH)
def scalars_are_refused(api: Api) -> None:
    with raises(ValueError, "doesn't support scalar parameters.*gate"):
        wrap(api, Gated(), mesh=line())


@case(2, engines=OURS)
def scalars_train(api: Api) -> None:
    alone, model = twins(Gated)
    wrap(api, model, mesh=line())
    assert isinstance(model.gate, DTensor) and model.gate.shape == ()
    assert_trains_alike(model, alone)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Linear(WIDTH, WIDTH).to(torch.float64)
        self.high = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.double()).float())


@case(2, engines=TORCH)
def trained_dtypes_may_not_mix(api: Api) -> None:
    model = api.fully_shard(TwoDtypes(), mesh=line())
    with raises(AssertionError, "uniform original parameter dtype"):
        model(batch(0, 0))


@case(2, engines=OURS)
def trained_dtypes_may_mix(api: Api) -> None:
    alone, model = twins(TwoDtypes)
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)
    assert model.low.weight.grad is None and model.low.weight.dtype == torch.float64


def _wrap_apart(api: Api, model: Any) -> None:
    """The two users of one matrix in groups of their own."""
    for part in (model.stem, model.head, *model.layers, model):
        api.fully_shard(part, mesh=line())


@case(2, engines=TORCH)
def ties_across_groups_are_refused(api: Api) -> None:
    model = Tied()
    _wrap_apart(api, model)
    with raises(ValueError, "shared with a parameter already managed"):
        model(batch(0, 0))


class Viewed(nn.Module):
    """Its block returns a view, which the caller changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, WIDTH // 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(self.fc(x))
        y += 1
        return y


@case(2, engines=TORCH)
def views_changed_in_place_are_warned_of(api: Api) -> None:
    model = Viewed()
    api.fully_shard(model.block, mesh=line())
    api.fully_shard(model, mesh=line())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(0, 0))
    assert any("returned a view tensor" in str(w.message) for w in caught), caught


@case(2, engines=OURS)
def views_changed_in_place_train(api: Api) -> None:
    alone, model = twins(Viewed)
    api.fully_shard(model.block, mesh=line(), reshard_after_forward=True)
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)


@case(2, engines=TORCH)
def strided_parameters_are_refused(api: Api) -> None:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(torch.ones(WIDTH, WIDTH).t()[:, ::2])
    with raises(NotImplementedError, "non-contiguous"):
        api.fully_shard(module, mesh=line())
