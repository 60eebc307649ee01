"""Meta device, conversions and re-initialisation after wrapping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    average_backward,
    batch,
    grid,
    line,
    raises,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, Tied, wrap

ODD = (7, 13, 3)


def _data(step: int, index: int) -> torch.Tensor:
    return batch(step, index, ODD[0])


def _meta(api: Api, make: Any = Stack, **settings: Any) -> Any:
    with torch.device("meta"):
        model = make(*ODD)
    return wrap(api, model, **{"mesh": line(), **settings})


@case(2)
def meta_parameters_are_described(api: Api) -> None:
    model = _meta(api)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.is_meta, name
        assert parameter.placements == (Shard(0),)
    assert model.head.weight.shape == (3, 7)
    assert model.head.weight.to_local().shape == (2 if dist.get_rank() == 0 else 1, 7)


@case(2)
def meta_must_be_materialised(api: Api) -> None:
    model = _meta(api)
    with raises(RuntimeError, "meta device.*head"):
        model(_data(0, 0))


@case(2, style=("blocks", "list_with_head"))
def meta_then_reset(api: Api, style: str) -> None:
    """`to_empty`, then each module's `reset_parameters`; also of modules that are one group, which
    get memory one after the other.
    """
    model = _meta(api, style=style)
    model.to_empty(device="cpu")
    assert all(p.device.type == "cpu" and isinstance(p, DTensor) for p in model.parameters())
    torch.manual_seed(3)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    bound = 1 / ODD[0] ** 0.5
    weight = whole(model.layers[0].up.weight)
    assert 0 < weight.abs().max() <= bound
    assert (whole(model.layers[0].norm.weight) == 1).all()
    alone = Stack(*ODD)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            alone.get_parameter(name).copy_(whole(parameter))
    assert_trains_alike(model, alone, data=_data)


@case(2)
def meta_then_assign(api: Api) -> None:
    alone, _ = twins(Stack, *ODD)
    model = _meta(api)
    values = {n: distribute_tensor(v, line(), [Shard(0)]) for n, v in alone.state_dict().items()}
    model.load_state_dict(values, assign=True)
    assert_same_parameters(model, alone, bound=0)
    assert_trains_alike(model, alone, data=_data)


def _assign_tied(api: Api, values: dict[str, torch.Tensor]) -> Any:
    model = _meta(api, lambda *_: Tied())
    sharded = {name: distribute_tensor(v, line(), [Shard(0)]) for name, v in values.items()}
    model.load_state_dict(sharded, assign=True, strict=False)
    return model


@case(2, given=("both", "one"))
def meta_then_assign_tied(api: Api, given: str) -> None:
    """Each place of a tie is given a parameter of its own, or one of them none: still tied."""
    alone = Tied()
    values = alone.state_dict()
    if given == "one":
        del values["stem.weight"]
    model = _assign_tied(api, values)
    assert_trains_alike(model, alone)
    assert model.head.weight is model.stem.weight


@case(2, engines=("shardwise",))
def meta_then_assign_the_other_name_of_a_tie(api: Api) -> None:
    alone = Tied()
    values = alone.state_dict()
    del values["head.weight"]
    assert_trains_alike(_assign_tied(api, values), alone)


@case(2, engines=("shardwise",))
def meta_then_assign_other_values_to_a_tie(api: Api) -> None:
    """Nobody knows which ones are meant. (torch takes one of them without a word.)"""
    values = Tied().state_dict()
    values["stem.weight"] = values["stem.weight"] + 1
    model = _assign_tied(api, values)
    with raises(RuntimeError, "'stem.weight' was tied to 'head.weight'"):
        model(batch(0, 0))


@case(4, shape=("line", "grid"))
def meta_then_broadcast(api: Api, shape: str) -> None:
    """Rank 0 has the values; everybody else has meta tensors made empty."""
    alone, _ = twins(Stack, *ODD)
    model = _meta(api, mesh=line() if shape == "line" else grid())
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state = alone.state_dict() if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=options)
    assert_same_parameters(model, alone, bound=0)
    assert_trains_alike(model, alone, data=_data)


class Buffered(Stack):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("scale", torch.ones(sizes[0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


@case(2)
def meta_without_rows(api: Api) -> None:
    """One row for two ranks: the second has memory of its own, of no bytes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(ODD[0], 1, bias=False))
    api.fully_shard(model, mesh=line())
    model.to_empty(device="cpu")
    assert model[0].weight.to_local().shape[0] == 1 - dist.get_rank()
    nn.init.ones_(model[0].weight)
    assert model(torch.ones(1, ODD[0])).item() == ODD[0]


@case(2)
def meta_buffers(api: Api) -> None:
    alone, _ = twins(Buffered, *ODD)
    model = _meta(api, Buffered)
    assert model.scale.is_meta
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.scale.fill_(1.0)
        for name, parameter in model.named_parameters():
            value = alone.get_parameter(name).detach()
            parameter.copy_(distribute_tensor(value, line(), [Shard(0)]))
    assert_trains_alike(model, alone, data=_data)


@case(2, used=(False, True))
def to_empty_of_real_parameters(api: Api, used: bool) -> None:
    alone, model = twins(Stack, *ODD)
    values = {k: v.clone() for k, v in alone.state_dict().items()}
    wrap(api, model, mesh=line())
    if used:
        square_loss(model, _data(0, 0)).backward()
        model.zero_grad()
    model.to_empty(device="cpu")
    options = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, values, options=options)
    assert_trains_alike(model, alone, data=_data)


CONVERSIONS = {
    "to": lambda m: m.to(torch.float64),
    "to_device_and_dtype": lambda m: m.to("cpu", torch.float64),
    "double": lambda m: m.double(),
}


@case(2, how=tuple(CONVERSIONS), style=("blocks", "list_with_head"))
def converted_after_wrapping(api: Api, how: str, style: str) -> None:
    """Before the first forward: parameters, gradients and compute follow the new dtype."""
    alone, model = twins(Stack, *ODD)
    wrap(api, model, style, mesh=line())
    assert CONVERSIONS[how](model) is model
    alone.double()
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.dtype == torch.float64
        assert parameter.to_local().dtype == torch.float64
    assert_trains_alike(model, alone, data=lambda s, i: _data(s, i).double(), bound=1e-7)


@case(2, how=("half", "bfloat16"))
def sixteen_bits_after_wrapping(api: Api, how: str) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    getattr(model, how)()
    getattr(alone, how)()
    dtype = getattr(torch, how)
    x = batch(0, dist.get_rank()).to(dtype)
    out = model(x)
    assert out.dtype == dtype
    assert_close(out.float(), alone(x).float(), "output", bound=1e-6)
    out.float().square().mean().backward()
    assert {p.grad.dtype for p in model.parameters()} == {dtype}
    average_backward(alone, [batch(0, i).to(dtype) for i in range(2)])
    assert_same_gradients(model, alone, bound=1e-2)


@case(2)
def conversions_that_change_nothing(api: Api) -> None:
    """`.to("cpu")`, `.float()`, `.train()`, `.apply()` between steps."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    for change in (
        lambda m: m.to("cpu"),
        lambda m: m.float(),
        lambda m: m.train(),
        lambda m: m.apply(lambda module: None),
    ):
        assert change(model) is model
        assert_trains_alike(model, alone, steps=1, optimizer="sgd")


@case(2)
def initialised_after_wrapping(api: Api) -> None:
    """`model.apply(init)` works on the sharded parameters."""
    model = wrap(api, Stack(), mesh=line())
    alone = Stack()

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.05)
            nn.init.zeros_(module.bias)

    model.apply(init)
    alone.apply(init)
    assert_same_parameters(model, alone, bound=0)
    assert_trains_alike(model, alone)


@case(2)
def requires_grad_of_everything(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    model.requires_grad_(False)
    assert not model(batch(0, 0)).requires_grad
    model.requires_grad_(True)
    model.reshard()
    model.requires_grad_(True)
    assert_trains_alike(model, alone)
