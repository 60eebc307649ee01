"""Where shardwise does more than torch: what torch says, and what shardwise does instead.

Each scenario is for one engine; torch's are here so that a change on its side is noticed.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    line,
    mesh,
    optimizers_of,
    raises,
    square_loss,
    twins,
    whole,
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


@case(2, engines=TORCH)
def inference_before_training_ends_it(api: Api) -> None:
    model = wrap(api, Stack(), mesh=line())
    with torch.inference_mode():
        model(batch(0, 0))
    with raises(RuntimeError, "nference tensor"):
        model(batch(0, 0)).sum().backward()


@case(2, engines=OURS, first=("forward", "unshard", "state"), reshard=(True, False))
def inference_before_training(api: Api, first: str, reshard: bool) -> None:
    """What is made in inference mode and outlives it is made for training."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("adamw", model, alone)
    with torch.inference_mode():
        if first == "forward":
            assert_close(model(batch(0, 0)), alone(batch(0, 0)), "evaluation")
        elif first == "unshard":
            model.unshard()
        else:
            assert sw.full_state_dict(model).keys() == alone.state_dict().keys()
    assert_trains_alike(model, alone, optimizer=opts)


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


class Sharing(nn.Module):
    """Two blocks have the same module, and a list of parameters of the model's."""

    def __init__(self, shared: nn.Linear, offsets: nn.ParameterList, at: int) -> None:
        super().__init__()
        self.own, self.shared, self.offsets, self.at = nn.Linear(WIDTH, WIDTH), shared, offsets, at

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(torch.tanh(self.own(x))) + self.offsets[self.at]


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.offsets = nn.ParameterList(torch.full((WIDTH,), 0.1) for _ in range(2))
        self.blocks = nn.ModuleList(Sharing(shared, self.offsets, at) for at in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@case(2, engines=OURS)
def a_module_that_two_groups_share(api: Api) -> None:
    """torch takes its sharded parameters for those of another mesh, and fails in words of its own;
    here they go to the lowest group that covers all who have it, as tied weights do.
    """
    alone, model = twins(Shared)
    for part in (*model.blocks, model):
        api.fully_shard(part, mesh=line())
    assert_trains_alike(model, alone)
    _, apart = twins(Shared)
    for part in apart.blocks:
        api.fully_shard(part, mesh=line())
    with raises(ValueError, "no call of fully_shard covers all modules"):
        apart(batch(0, 0))


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


class NoRows(Stack):
    """With a parameter that has no elements, which is used all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.nothing.sum())


@case(2, engines=TORCH)
def parameters_without_rows_end_in_backward(api: Api) -> None:
    model = wrap(api, NoRows(), mesh=line())
    with raises(RuntimeError, "expects non-empty tensor"):
        square_loss(model, batch(0, 0)).backward()


@case(2, engines=OURS)
def parameters_without_rows_train(api: Api) -> None:
    alone, model = twins(NoRows)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone)


def _thaw_in_sixteen_bits(api: Api) -> Any:
    """A model whose first block was frozen in its first step."""
    model = wrap(
        api,
        Stack(),
        mesh=line(),
        mp_policy=api.MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    )
    model.layers[0].requires_grad_(False)
    square_loss(model, batch(0, 0)).backward()
    model.layers[0].requires_grad_(True)
    return model


@case(2, engines=TORCH)
def thawing_in_sixteen_bits_ends_in_backward(api: Api) -> None:
    model = _thaw_in_sixteen_bits(api)
    with raises(RuntimeError, "BFloat16"):
        square_loss(model, batch(0, 0)).backward()


@case(2, engines=OURS)
def thawing_in_sixteen_bits_trains(api: Api) -> None:
    model = _thaw_in_sixteen_bits(api)
    before = whole(model.layers[0].up.weight).clone()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, batch(0, 0)).backward()
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    opt.step()
    assert not torch.equal(whole(model.layers[0].up.weight), before)


def _step_an_early_optimizer(api: Api) -> tuple[Any, torch.Tensor]:
    """One that was built before sharding."""
    model = Stack()
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    wrap(api, model, mesh=line())
    square_loss(model, batch(0, 0)).backward()
    before = whole(model.head.weight).clone()
    opt.step()
    return model, before


@case(2, engines=TORCH)
def an_early_optimizer_steps_nothing(api: Api) -> None:
    model, before = _step_an_early_optimizer(api)
    assert torch.equal(whole(model.head.weight), before)


@case(2, engines=OURS)
def an_early_optimizer_is_an_error(api: Api) -> None:
    with raises(RuntimeError, "SGD was built before sharding and holds the old parameter"):
        _step_an_early_optimizer(api)


@case(2, engines=OURS)
def an_optimizer_of_gathered_parameters_is_an_error(api: Api) -> None:
    """As torch leaves the root's after an evaluation; its `step` would change nothing there."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    with torch.no_grad():
        model(batch(0, 0))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    square_loss(model, batch(0, 0)).backward()
    with raises(RuntimeError, "SGD was built while 'head.weight' was gathered.*model.reshard()"):
        opt.step()
    model.zero_grad()
    model.reshard()
    assert_trains_alike(model, alone)


def _device_that_the_group_does_not_move() -> DeviceMesh:
    """CPU tensors, on a group that moves CUDA tensors only."""
    return DeviceMesh.from_group(dist.new_group(backend="cuda:gloo"), "cpu")


@case(2, engines=TORCH)
def a_group_for_another_device_ends_in_forward(api: Api) -> None:
    model = wrap(api, Stack(), mesh=_device_that_the_group_does_not_move())
    with raises(RuntimeError, "No backend type associated with device type cpu"):
        model(batch(0, 0))


@case(2, engines=OURS)
def a_group_for_another_device_is_an_error(api: Api) -> None:
    with raises(ValueError, r"the mesh is for cpu tensors, but .* moves \['cuda'\] tensors only"):
        wrap(api, Stack(), mesh=_device_that_the_group_does_not_move())


def _on_two_meshes(api: Api) -> tuple[Any, Any]:
    """Blocks on replicas of shards, the root on shards alone; with gradients."""
    alone, model = twins(Stack)
    for layer in model.layers:
        api.fully_shard(layer, mesh=mesh(1, 2, names=("replicate", "shard")))
    api.fully_shard(model, mesh=line())
    for each in (alone, model):
        square_loss(each, batch(0, 0)).backward()
    return alone, model


@case(2, engines=TORCH)
def two_meshes_are_not_clipped_together(api: Api) -> None:
    _, model = _on_two_meshes(api)
    with raises(RuntimeError, "same mesh"):
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@case(2, engines=OURS)
def two_meshes_are_clipped_together(api: Api) -> None:
    alone, model = _on_two_meshes(api)
    expected = nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    assert_close(api.clip_grad_norm(model, 0.01), expected, "norm")
    assert_same_gradients(model, alone)
