"""Registered parameters and gradients: names, shapes, placements, identity, at every moment."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    alone_mesh,
    assert_close,
    assert_trains_alike,
    batch,
    grid,
    line,
    local_part,
    mesh,
    optimizers_of,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, Tied, wrap

MESHES = {"line": line, "grid": grid, "single": alone_mesh}
PLACED = {
    "line": (Shard(0),),
    "grid": (Replicate(), Shard(0)),
    "single": (Shard(0),),
}


def _assert_sharded(model: nn.Module, like: nn.Module, shape: str) -> None:
    on, placed = MESHES[shape](), PLACED[shape]
    expected = dict(like.named_parameters())
    got = dict(model.named_parameters())
    assert list(got) == list(expected)
    for name, parameter in got.items():
        original = expected[name]
        assert isinstance(parameter, DTensor), f"{name} is a {type(parameter)}"
        assert isinstance(parameter, nn.Parameter), f"{name} is not a Parameter"
        assert parameter.is_leaf
        assert parameter.placements == placed, f"{name}: {parameter.placements}"
        assert parameter.device_mesh == on, f"{name}: {parameter.device_mesh}"
        assert parameter.shape == original.shape and parameter.dtype == original.dtype
        assert parameter.requires_grad == original.requires_grad, name
        local = parameter.to_local()
        assert local.shape == local_part(original, parameter).shape, name
        assert local.is_contiguous()


@case(4, shape=("line", "grid", "single"))
def before_forward(api: Api, shape: str) -> None:
    """Odd sizes: rows by torch.chunk's rule, values unchanged."""
    alone, model = twins(Stack, 7, 13, 3)
    model.layers[0].up.bias.requires_grad_(False)
    alone.layers[0].up.bias.requires_grad_(False)
    wrap(api, model, mesh=MESHES[shape]())
    _assert_sharded(model, alone, shape)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), alone.get_parameter(name)), name


@case(4, shape=("line", "grid", "single"))
def after_backward(api: Api, shape: str) -> None:
    alone, model = twins(Stack, 7, 13, 3)
    wrap(api, model, mesh=MESHES[shape]())
    before = {n: p for n, p in model.named_parameters()}
    square_loss(model, batch(0, 0, 7)).backward()
    _assert_sharded(model, alone, shape)
    for name, parameter in model.named_parameters():
        assert parameter is before[name], f"{name} is another object"
        grad = parameter.grad
        assert isinstance(grad, DTensor), f"{name}: gradient is a {type(grad)}"
        assert grad.placements == parameter.placements
        assert grad.device_mesh == parameter.device_mesh
        assert grad.shape == parameter.shape and grad.dtype == parameter.dtype
        assert grad.to_local().shape == parameter.to_local().shape, name


@case(4, reshard=(True, False, None, 2))
def between_forward_and_backward(api: Api, reshard: Any) -> None:
    """True: sharded. False: whole. An int: on the smaller mesh. None: whole at the root only."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    before = {n: p for n, p in model.named_parameters()}
    loss = square_loss(model, batch(0, dist.get_rank()))
    for name, parameter in model.named_parameters():
        expected = alone.get_parameter(name)
        kept = reshard is False or (reshard is None and name.startswith("head"))
        assert isinstance(parameter, nn.Parameter)
        assert parameter.requires_grad
        if kept:
            assert not isinstance(parameter, DTensor), f"{name} is not whole"
            assert torch.equal(parameter, expected), name
        elif reshard == 2:
            assert isinstance(parameter, DTensor), name
            assert parameter.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
            assert parameter.placements == (Replicate(), Shard(0)), name
            assert parameter.to_local().shape[0] == expected.shape[0] // 2
            assert torch.equal(whole(parameter), expected)
        else:
            assert parameter is before[name], f"{name} is not sharded"
    loss.backward()
    assert all(p is before[n] for n, p in model.named_parameters())


@case(2, style=("root", "blocks"))
def inside_forward(api: Api, style: str) -> None:
    """Whole plain Parameters while the module that owns them runs."""
    alone, model = twins(Stack)
    wrap(api, model, style, mesh=line())
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: Any) -> None:
        seen.update(module.named_parameters())
        for name, parameter in module.named_parameters():
            assert type(parameter) is nn.Parameter, f"{name} is a {type(parameter)}"
            assert torch.equal(parameter, alone.layers[1].get_parameter(name)), name

    model.layers[1].up.register_forward_pre_hook(lambda m, args: look(model.layers[1], args))
    square_loss(model, batch(0, 0))
    assert list(seen) == [n for n, _ in alone.layers[1].named_parameters()]


@case(2)
def identity_over_steps(api: Api) -> None:
    """An optimizer's references stay valid; what it sees is what the module has."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    ids = [id(p) for p in model.parameters()]
    opts = optimizers_of("adamw", model, alone)
    for _ in range(3):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        assert [id(p) for p in model.parameters()] == ids
        assert [id(p) for p in opts[0].param_groups[0]["params"]] == ids


@case(4, shape=("line", "grid"))
def optimizer_state(api: Api, shape: str) -> None:
    alone, model = twins(Stack, 7, 13, 3)
    wrap(api, model, mesh=MESHES[shape]())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts, data=lambda s, i: batch(s, i, 7))
    twin = dict(zip(model.parameters(), alone.parameters(), strict=True))
    for parameter, state in opts[0].state.items():
        for key in ("exp_avg", "exp_avg_sq"):
            assert isinstance(state[key], DTensor), key
            assert state[key].placements == parameter.placements
            assert_close(state[key], opts[1].state[twin[parameter]][key], key)


@case(2, to_none=(True, False))
def zeroed_gradients(api: Api, to_none: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    for _ in range(2):
        square_loss(model, batch(0, 0)).backward()
        model.zero_grad(set_to_none=to_none)
    if to_none:
        assert all(p.grad is None for p in model.parameters())
    else:
        assert all(not p.grad.to_local().any() for p in model.parameters())
    assert_trains_alike(model, alone)


@case(2)
def gradients_are_the_users(api: Api) -> None:
    """A gradient kept from one step is not overwritten by the next."""
    _, model = twins(Stack)
    wrap(api, model, mesh=line())
    square_loss(model, batch(0, 0)).backward()
    kept = [p.grad for p in model.parameters()]
    copies = [g.to_local().clone() for g in kept]
    model.zero_grad(set_to_none=True)
    square_loss(model, batch(1, 1)).backward()
    for old, copy, parameter in zip(kept, copies, model.parameters(), strict=True):
        assert torch.equal(old.to_local(), copy), "an old gradient changed"
        assert not torch.equal(parameter.grad.to_local(), copy) or not copy.any()


EDITS = {
    "add": lambda p: p.add_(0.25),
    "copy": lambda p: p.copy_(torch.ones_like(p) * 0.5),
    "init": lambda p: nn.init.constant_(p, 0.125),
    "local": lambda p: (p.to_local() if isinstance(p, DTensor) else p).mul_(0.5),
    "data": lambda p: p.data.add_(0.25),
}


@case(2, how=tuple(EDITS), low=(False, True))
def edited_by_hand(api: Api, how: str, low: bool) -> None:
    """A change of the sharded parameters between steps is what the next forward computes with."""
    alone, model = twins(Stack)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16 if low else None)
    wrap(api, model, mesh=line(), mp_policy=policy)
    square_loss(model, batch(0, 0)).backward()
    with torch.no_grad():
        for each in (model, alone):
            for parameter in each.parameters():
                EDITS[how](parameter)
    x = batch(0, 0)
    if low:
        alone, x = alone.to(torch.bfloat16), x.to(torch.bfloat16)
    with torch.no_grad():
        assert_close(model(x), alone(x), "output after the edit")


@case(2)
def duplicates_are_listed_once(api: Api) -> None:
    alone, model = twins(Tied)
    wrap(api, model, mesh=line())
    assert len(list(model.parameters())) == len(list(alone.parameters()))
    expected = [n for n, _ in alone.named_parameters(remove_duplicate=False)]
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == expected


@case(2)
def modules_keep_their_names(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, "leaves", mesh=line())
    assert [n for n, _ in model.named_modules()] == [n for n, _ in alone.named_modules()]
    assert [n for n, _ in model.named_children()] == ["layers", "head"]
    assert list(model.state_dict()) == list(alone.state_dict())


@case(4)
def submesh(api: Api) -> None:
    """A mesh that is a part of a larger one: its other axes do not take part."""
    half = mesh(2, 2, names=("outer", "dp"))["dp"]
    alone, model = twins(Stack)
    wrap(api, model, mesh=half)
    assert all(p.device_mesh == half for p in model.parameters())
    rank = dist.get_rank()
    place = (rank % 2, 2)
    assert_trains_alike(model, alone, place=place, data=lambda s, i: batch(s, i + 2 * (rank // 2)))


@case(2)
def shared_submodule(api: Api) -> None:
    """The same module under two names."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = self.a

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(torch.tanh(self.a(x)))

    alone, model = twins(Shares)
    api.fully_shard(model, mesh=line())
    assert model.a is model.b and isinstance(model.b.weight, DTensor)
    assert_trains_alike(model, alone)


@case(2, engines=("shardwise",), dim=(0, 1))
def whole_state_of_one_rank(api: Api, dim: int) -> None:
    """What no rank has to gather is copied all the same: training does not change it afterwards."""
    _, model = twins(Stack)
    wrap(api, model, mesh=alone_mesh(), shard_placement_fn=lambda p: Shard(min(dim, p.ndim - 1)))
    found = sw.full_state_dict(model)
    before = {name: value.clone() for name, value in found.items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    assert all(torch.equal(value, before[name]) for name, value in found.items())
    assert len({value.untyped_storage().data_ptr() for value in found.values()}) == len(found)
