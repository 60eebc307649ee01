"""Frozen, thawed, unused, integer and ignored parameters, and buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    average_backward,
    batch,
    grid,
    line,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Branching, Stack, wrap

FROZEN = {
    "one": lambda m: [m.layers[0].up.weight],
    "bias": lambda m: [m.layers[0].up.bias, m.layers[1].down.bias, m.head.bias],
    "block": lambda m: list(m.layers[0].parameters()),
    "all_but_head": lambda m: list(m.layers.parameters()),
    "root_only": lambda m: list(m.head.parameters()),
}


@case(2, what=tuple(FROZEN))
def frozen(api: Api, what: str) -> None:
    alone, model = twins(Stack)
    for each in (alone, model):
        for parameter in FROZEN[what](each):
            parameter.requires_grad_(False)
    wrap(api, model, mesh=line())
    still = {n for n, p in alone.named_parameters() if not p.requires_grad}
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == still
    assert_trains_alike(model, alone)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == still


@case(2, way=("thaw", "freeze", "swap"))
def frozen_for_a_while(api: Api, way: str) -> None:
    """`requires_grad_` on the registered (sharded) parameters between steps."""
    alone, model = twins(Stack)
    first = [] if way == "freeze" else [lambda m: m.layers[0].up.weight]
    later = [] if way == "thaw" else [lambda m: m.layers[1].down.weight]
    for each in (alone, model):
        for pick in first:
            pick(each).requires_grad_(False)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone, steps=1, optimizer="sgd")
    for each in (alone, model):
        for pick in first:
            pick(each).requires_grad_(True)
        for pick in later:
            pick(each).requires_grad_(False)
    assert_trains_alike(model, alone, steps=2, optimizer="sgd")


@case(2, style=("root", "blocks"))
def unused(api: Api, style: str) -> None:
    """Used on no rank: the gradient stays None, the optimizer leaves the values alone."""
    alone, model = twins(Branching)
    wrap(api, model, style, mesh=line())
    before = whole(model.other.weight).clone()
    assert_trains_alike(model, alone)
    assert torch.equal(whole(model.other.weight), before)


@case(2)
def used_in_some_steps(api: Api) -> None:
    alone, model = twins(Branching)
    wrap(api, model, mesh=line())
    for both in (False, True, False):
        assert_trains_alike(
            model,
            alone,
            steps=1,
            optimizer="sgd",
            loss=lambda m, x, both=both: m(x, both=both).square().mean(),
        )


@case(2)
def unused_reduced_as_zero(api: Api) -> None:
    """`set_reduce_scatter_unused_params`: zeros instead of None, on every rank."""
    alone, model = twins(Branching)
    wrap(api, model, mesh=line())
    model.set_reduce_scatter_unused_params(True)
    square_loss(model, batch(0, dist.get_rank())).backward()
    grad = model.other.weight.grad
    assert isinstance(grad, DTensor)
    assert not whole(grad).any()
    average_backward(alone, [batch(0, i) for i in range(2)])
    assert_close(model.head.weight.grad, alone.head.weight.grad, "head.weight")


@case(2)
def used_on_one_rank_only(api: Api) -> None:
    """With zeros for the rank that did not use it, the average is over all ranks."""
    rank = dist.get_rank()
    alone, model = twins(Branching)
    wrap(api, model, mesh=line())
    model.set_reduce_scatter_unused_params(True)
    (alone(batch(0, 0), both=True).square().mean() / 2).backward()
    (alone(batch(0, 1)).square().mean() / 2).backward()
    model(batch(0, rank), both=rank == 0).square().mean().backward()
    assert_same_gradients(model, alone)


@case(2)
def integers_and_buffers(api: Api) -> None:
    """A parameter that is a table of integers is sharded and never trained; buffers stay whole."""

    class Lookup(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(WIDTH).flip(0), requires_grad=False)
            self.register_buffer("scale", torch.full((WIDTH,), 0.5))
            self.register_buffer("seen", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return super().forward(x[:, self.order] * self.scale)

    alone, model = twins(Lookup)
    wrap(api, model, mesh=line())
    assert model.order.dtype == torch.int64
    assert type(model.scale) is torch.Tensor and model.scale.shape == (WIDTH,)
    assert_trains_alike(model, alone)
    assert model.seen.item() == 2
    assert "seen" not in model.state_dict() and "scale" in model.state_dict()


@case(2)
def batch_norm_keeps_its_statistics(api: Api) -> None:
    """Buffers are neither sharded nor averaged: each rank has those of its own batches."""
    alone, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    api.fully_shard(model, mesh=line())
    x = batch(0, dist.get_rank())
    square_loss(model, x).backward()
    square_loss(alone, x)
    assert_close(model[1].running_mean, alone[1].running_mean, "running_mean")
    assert model[1].num_batches_tracked.item() == 1


@case(2, style=("root", "blocks"))
def ignored(api: Api, style: str) -> None:
    """Ignored parameters stay what they were, and nobody reduces their gradients."""
    alone, model = twins(Stack)
    left_out = {model.head.weight, model.layers[0].up.bias}
    wrap(api, model, style, mesh=line(), ignored_params=left_out)
    assert model.head.weight in left_out and not isinstance(model.head.weight, DTensor)
    assert model.layers[0].up.bias in left_out
    assert isinstance(model.head.bias, DTensor)
    square_loss(model, batch(0, dist.get_rank())).backward()
    assert model.head.weight in left_out, "an ignored parameter was replaced"
    square_loss(alone, batch(0, dist.get_rank())).backward()
    for name in ("head.weight", "layers.0.up.bias"):
        got, expected = (m.get_parameter(name).grad for m in (model, alone))
        assert not isinstance(got, DTensor)
        assert_close(got, expected, f"{name}'s own gradient")
    other = twins(Stack)[0]
    average_backward(other, [batch(0, i) for i in range(2)])
    assert_close(model.head.bias.grad, other.head.bias.grad, "head.bias")


@case(4)
def ignored_on_replicas(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=grid(), ignored_params=set(model.head.parameters()))
    kinds = {n: isinstance(p, DTensor) for n, p in model.named_parameters()}
    assert {n for n, sharded in kinds.items() if not sharded} == {"head.weight", "head.bias"}

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x).square().mean()

    loss(model, batch(0, dist.get_rank())).backward()
    for parameter in model.head.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 4
    average_backward(alone, [batch(0, i) for i in range(4)], loss)
    assert_same_gradients(model, alone)


@case(2)
def a_group_without_parameters(api: Api) -> None:
    """Modules with nothing to shard may be wrapped too."""
    alone, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), Stack()))
    api.fully_shard(model[1], mesh=line())
    api.fully_shard(model, mesh=line())
    assert isinstance(model[1], api.FSDPModule)
    assert_trains_alike(model, alone)


@case(2)
def everything_in_children(api: Api) -> None:
    """The root's own group is empty when the children hold all parameters."""
    alone, model = twins(Stack)
    for part in (*model.layers, model.head, model):
        api.fully_shard(part, mesh=line())
    assert_trains_alike(model, alone)


@case(2, dtype=(torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.int16))
def frozen_of_another_dtype(api: Api, dtype: torch.dtype) -> None:
    """A frozen matrix of another dtype travels with the trained ones, also one of a dtype that the
    backend moves none of.
    """

    class Mixed(Stack):
        def __init__(self) -> None:
            super().__init__()
            mix = (2 * torch.randn(WIDTH, WIDTH)).to(dtype)
            self.mix = nn.Parameter(mix, requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x @ self.mix.to(x.dtype))

    alone, model = twins(Mixed)
    wrap(api, model, mesh=line())
    assert model.mix.dtype == dtype
    assert_trains_alike(model, alone)
    assert_same_parameters(model, alone)
