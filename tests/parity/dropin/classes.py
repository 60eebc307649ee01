"""The class a wrapped module gets: names, bases, signatures, unsharding, recovery."""

from __future__ import annotations

import inspect
from typing import Any
from unittest import mock

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import IS_NEWEST, Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    assert_trains_alike,
    batch,
    counting,
    line,
    optimizers_of,
    raises,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.models import Block

FUNCTIONS = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


@case(2)
def class_of_a_wrapped_module(api: Api) -> None:
    """What other libraries test for."""
    model = Stack()
    wrap(api, model, mesh=line())
    assert isinstance(model, Stack) and isinstance(model, nn.Module)
    assert isinstance(model, api.FSDPModule)
    assert isinstance(model, torch_fsdp.FSDPModule)
    assert type(model).__name__ == "FSDPStack"
    assert type(model.layers[0]).__name__ == "FSDPBlock"
    mro = type(model).__mro__
    assert mro.index(api.FSDPModule) < mro.index(Stack)
    assert type(model.layers[0]) is type(model.layers[1]), "one class per original class"
    assert not isinstance(model.layers, api.FSDPModule)
    assert issubclass(api.FSDPModule, torch_fsdp.FSDPModule)


@case(2)
def slicing_a_sequential(api: Api) -> None:
    """A slice is a new container of the original class, with the same parts."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    api.fully_shard(model[0], mesh=line())
    api.fully_shard(model, mesh=line())
    part = model[:2]
    assert type(part) is nn.Sequential, type(part)
    assert part[0] is model[0] and len(part) == 2
    assert isinstance(part[0], api.FSDPModule)


@case(2)
def making_another_instance(api: Api) -> None:
    """The wrapped class called like a constructor makes an unwrapped module."""
    model = wrap(api, Stack(), mesh=line())
    other = type(model)(WIDTH, 4)
    assert type(other) is Stack
    assert other.layers[0].up.weight.shape == (4, WIDTH)


class Doubles:
    """No module, and says what the module beside it would say otherwise."""

    def before(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Named(Block):
    def before(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def factor(self) -> float:
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.before(x))


class Renamed(Doubles, Named):
    """Has other kinds of attributes under the names of a base's methods."""

    factor = 3.0  # type: ignore[assignment]

    @staticmethod
    def between(x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return x.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.between(x) * self.factor)


@case(2)
def attributes_as_the_class_has_them(api: Api) -> None:
    """The wrapped class inherits by the original's order of bases, whatever kind it is."""
    alone, model = twins(Stack)
    for each in (alone, model):
        torch.manual_seed(3)
        each.layers[1] = Renamed(WIDTH, 5)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone)


@case(2)
def methods_replaced_in_the_class(api: Api) -> None:
    """A method that the original class gets after wrapping is the wrapped module's, too."""
    alone, model = twins(Stack)
    for each in (alone, model):
        torch.manual_seed(3)
        each.layers[1] = Named(WIDTH, 5)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone, steps=1)
    with mock.patch.object(Named, "before", lambda self, x: -x):
        assert_trains_alike(model, alone, steps=1)


@case(2)
def every_public_method_is_there(api: Api) -> None:
    """Same names, same parameters, same defaults as torch's."""
    theirs = [n for n in vars(torch_fsdp.FSDPModule) if not n.startswith("_")]
    assert {"reshard", "set_requires_gradient_sync", "unshard"} < set(theirs)
    for name in theirs:
        ours = getattr(api.FSDPModule, name, None)
        assert callable(ours), f"FSDPModule.{name} is missing"
        _same_signature(name, ours, getattr(torch_fsdp.FSDPModule, name))


@case(2, name=FUNCTIONS)
def functions_take_the_same_arguments(api: Api, name: str) -> None:
    _same_signature(name, getattr(api, name), getattr(torch_fsdp, name))


def _same_signature(name: str, ours: Any, theirs: Any) -> None:
    got, expected = (inspect.signature(f).parameters for f in (ours, theirs))
    known = list(got)[: None if IS_NEWEST else len(expected)]  # an older torch has fewer
    assert known == list(expected), f"{name}: {list(got)}, torch has {list(expected)}"
    for key, parameter in expected.items():
        assert got[key].kind == parameter.kind, f"{name}({key}): {got[key].kind}"
        mine, default = got[key].default, parameter.default
        same = mine == default or type(mine).__name__ == type(default).__name__
        assert same, f"{name}({key}={mine}), torch has {default}"


class Breaks(Block):
    """Raises in forward, or in backward, once asked to."""

    broken = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.broken == "forward":
            raise ValueError("broken in forward")
        if self.broken == "backward":
            y.register_hook(_raise)
        return y


def _raise(grad: torch.Tensor) -> None:
    raise ValueError("broken in backward")


@case(2, where=("forward", "backward"), reshard=(True, False))
def recovery(api: Api, where: str, reshard: bool) -> None:
    """After an exception `reset_iter_state` makes the next iteration an ordinary one."""

    def make() -> nn.Module:
        return nn.Sequential(Block(WIDTH, 16), Breaks(WIDTH, 16), Block(WIDTH, 16))

    alone, model = twins(make)
    for part in (*model, model):
        api.fully_shard(part, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("sgd", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts)
    model[1].broken = where
    with raises(ValueError, f"broken in {where}"):
        square_loss(model, batch(5, 0)).backward()
    model.reset_iter_state()
    model[1].broken = ""
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model.zero_grad()
    assert_trains_alike(model, alone, steps=2, optimizer=opts)


@case(2)
def recovery_is_for_the_root(api: Api) -> None:
    model = wrap(api, Stack(), mesh=line())
    model(batch(0, 0))
    with raises(RuntimeError, "root"):
        model.layers[0].reset_iter_state()


@case(2, waited=(True, False))
def asynchronous_unshard(api: Api, waited: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    handles = [part.unshard(async_op=True) for part in (model, *model.layers)]
    assert all(isinstance(h, api.UnshardHandle) for h in handles)
    if waited:
        for handle in handles:
            handle.wait()
            handle.wait()
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, alone.get_parameter(name)), name
    with counting() as counted:
        got = model(batch(0, 0))
    assert counted.all == (0, 0, 0)
    assert_close(got, alone(batch(0, 0)), "output")


@case(2)
def unshard_by_hand(api: Api) -> None:
    """Before any forward, not recursive, values whole; reshard brings the same objects back."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    before = dict(model.named_parameters())
    assert model.unshard() is None
    assert torch.equal(model.head.weight, alone.head.weight)
    assert type(model.head.weight) is nn.Parameter
    assert isinstance(model.layers[0].up.weight, DTensor)
    assert model.reshard() is None
    assert dict(model.named_parameters()) == before
    assert all(p is before[n] for n, p in model.named_parameters())
    assert_trains_alike(model, alone)


@case(2)
def unshard_follows_the_policy(api: Api) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    policy = api.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    api.fully_shard(model, mesh=line(), mp_policy=policy)
    model.unshard()
    assert model.weight.dtype == torch.bfloat16
    model.reshard()
    assert model.weight.dtype == torch.float32
