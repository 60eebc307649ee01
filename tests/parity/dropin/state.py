"""State dicts of models and optimizers, plain and through torch's helpers."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    OPTIMIZERS,
    WIDTH,
    assert_close,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    grid,
    line,
    optimizers_of,
    raises,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, Tied, wrap

ODD = (7, 13, 3)  # rows that do not divide


def _odd_batch(step: int, index: int) -> torch.Tensor:
    return batch(step, index, ODD[0])


class Buffered(Stack):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("ticks", torch.arange(3.0))


def _pair(api: Api, make: Any = Buffered, **settings: Any) -> tuple[Any, Any]:
    """The oracle, and a sharded model of other values."""
    alone, model = twins(make, *(ODD if make is not Tied else ()))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    wrap(api, model, **{"mesh": line(), **settings})
    return alone, model


@case(4, shape=("line", "grid"))
def state_dict(api: Api, shape: str) -> None:
    """The unwrapped model's keys; parameters as DTensors on the parameters' own memory."""
    alone, model = twins(Buffered, *ODD)
    wrap(api, model, mesh=line() if shape == "line" else grid())
    for _ in range(2):
        state = model.state_dict()
        assert list(state) == list(alone.state_dict())
        assert type(state["ticks"]) is torch.Tensor
        for name, parameter in model.named_parameters():
            value = state[name]
            assert isinstance(value, DTensor) and not value.requires_grad, name
            assert value.placements == parameter.placements
            assert value.to_local().data_ptr() == parameter.to_local().data_ptr(), name
            assert torch.equal(whole(value), alone.get_parameter(name)), name
        with torch.no_grad():
            model(_odd_batch(0, 0))


@case(2, reshard=(True, False))
def state_dict_between_forward_and_backward(api: Api, reshard: bool) -> None:
    """Sharded also while forward's parameters are still whole."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    square_loss(model, batch(0, 0))
    state = model.state_dict()
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert torch.equal(whole(value), alone.get_parameter(name))


@case(2, sizes=(ODD, (64, 64, 64)))
def copies_of_state(api: Api, sizes: tuple[int, ...]) -> None:
    """copy.deepcopy of state dicts and parameters: equal, in memory of their own."""
    _, model = twins(Stack, *sizes)
    wrap(api, model, mesh=line())
    optimizer = optimizers_of("adamw_fused", model)[0]
    for step in range(2):
        square_loss(model, batch(step, 0, sizes[0])).backward()
        optimizer.step()
        optimizer.zero_grad()
        states = optimizer.state_dict()["state"]
        for found in (model.state_dict(), dict(model.named_parameters()), *states.values()):
            copied = copy.deepcopy(found)
            for name, value in found.items():
                assert type(copied[name]) is type(value), name
                before = whole(value).clone()
                assert torch.equal(whole(copied[name]), before), name
                with torch.no_grad():
                    copied[name].add_(1)
                assert torch.equal(whole(value), before), name
                assert not torch.equal(whole(copied[name]), before), name


def _sharded_copy(model: nn.Module, values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        name: distribute_tensor(values[name], like.device_mesh, like.placements)
        if isinstance(like, DTensor)
        else values[name]
        for name, like in model.state_dict().items()
    }


@case(2, assign=(False, True), used=(False, True))
def load_state_dict(api: Api, assign: bool, used: bool) -> None:
    """Before or after the first forward; the loaded values are what is trained."""
    alone, model = _pair(api)
    if used:
        square_loss(model, _odd_batch(0, 0)).backward()
        model.zero_grad()
    before = dict(model.named_parameters())
    done = model.load_state_dict(_sharded_copy(model, alone.state_dict()), assign=assign)
    assert not done.missing_keys and not done.unexpected_keys
    if not assign:
        assert all(p is before[n] for n, p in model.named_parameters())
    assert_same_parameters(model, alone, bound=0)
    assert_trains_alike(model, alone, data=_odd_batch)


@case(2)
def load_from_another_model(api: Api) -> None:
    alone, first = twins(Buffered, *ODD)
    wrap(api, first, mesh=line())
    _, second = _pair(api)
    second.load_state_dict(first.state_dict())
    assert_same_parameters(second, alone, bound=0)
    assert_trains_alike(second, alone, data=_odd_batch)


@case(2)
def load_with_wrong_keys(api: Api) -> None:
    alone, model = _pair(api)
    values = _sharded_copy(model, alone.state_dict())
    del values["head.bias"]
    values["extra"] = torch.ones(1)
    with raises(RuntimeError, "Missing key.*head.bias.*"):
        model.load_state_dict(values)
    told = model.load_state_dict(values, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["head.bias"], ["extra"])
    assert_close(model.head.weight, alone.head.weight, "head.weight", bound=0)


@case(2, cpu=(False, True))
def full_model_state(api: Api, cpu: bool) -> None:
    """Whole tensors: on every rank, or on rank 0 alone with `cpu_offload`."""
    alone, model = twins(Buffered, *ODD)
    wrap(api, model, mesh=line())
    square_loss(model, _odd_batch(0, 0)).backward()
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu)
    state = get_model_state_dict(model, options=options)
    if cpu and dist.get_rank() != 0:
        assert state == {}
        return
    assert list(state) == list(alone.state_dict())
    for name, value in alone.state_dict().items():
        assert not isinstance(state[name], DTensor)
        assert torch.equal(state[name], value), name


@case(2)
def sharded_model_state(api: Api) -> None:
    alone, model = twins(Buffered, *ODD)
    wrap(api, model, mesh=line())
    state = get_model_state_dict(model)
    assert list(state) == list(alone.state_dict())
    assert all(isinstance(state[n], DTensor) for n, _ in model.named_parameters())


@case(2)
def state_without_frozen(api: Api) -> None:
    alone, model = twins(Stack)
    model.layers[0].requires_grad_(False)
    wrap(api, model, mesh=line())
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert list(state) == [n for n in alone.state_dict() if not n.startswith("layers.0")]


@case(2)
def state_of_a_submodule(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    options = StateDictOptions(full_state_dict=True)
    state = get_model_state_dict(model.layers[1], options=options)
    assert list(state) == list(alone.layers[1].state_dict())
    assert torch.equal(state["up.weight"], alone.layers[1].up.weight)


@case(2, broadcast=(False, True), strict=(True, False))
def set_full_model_state(api: Api, broadcast: bool, strict: bool) -> None:
    """From whole tensors on every rank, or on rank 0 alone; with a key missing if not strict."""
    alone, model = _pair(api)
    state = {k: v.clone() for k, v in alone.state_dict().items()}
    if broadcast and dist.get_rank() != 0:
        state = {}
    if not strict:
        state.pop("layers.0.norm.weight", None)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast, strict=strict)
    set_model_state_dict(model, state, options=options)
    if not strict:
        assert not whole(model.layers[0].norm.weight).any()
        with torch.no_grad():
            model.layers[0].norm.weight.fill_(1.0)
    assert_same_parameters(model, alone, bound=0)
    assert_trains_alike(model, alone, data=_odd_batch)


@case(4)
def set_full_model_state_of_replicas(api: Api) -> None:
    alone, model = _pair(api, mesh=grid())
    state = alone.state_dict() if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    assert_same_parameters(model, alone, bound=0)


@case(2)
def tied_state(api: Api) -> None:
    """A tied matrix is in the state under both names, and still tied after loading."""
    alone, model = twins(Tied)
    wrap(api, model, mesh=line())
    state = model.state_dict()
    assert torch.equal(whole(state["stem.weight"]), whole(state["head.weight"]))
    options = StateDictOptions(full_state_dict=True)
    full = get_model_state_dict(model, options=options)
    _, other = _pair(api, Tied)
    set_model_state_dict(other, full, options=options)
    assert other.stem.weight is other.head.weight
    assert_same_parameters(other, alone, bound=0)
    assert_trains_alike(other, alone)


@case(2, way=("sharded", "full", "flat", "broadcast"))
def optimizer_state(api: Api, way: str) -> None:
    """Saved after a step, set into a new model and optimizer, and training goes on the same."""
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=2, optimizer=opts, data=_odd_batch)
    options = StateDictOptions(
        full_state_dict=way in ("full", "broadcast"), flatten_optimizer_state_dict=way == "flat"
    )
    values, state = get_state_dict(model, opts[0], options=options)
    flat = way == "flat"
    moments = state if flat else state["state"]["head.weight"]
    moment = moments["state.head.weight.exp_avg" if flat else "exp_avg"]
    assert isinstance(moment, DTensor) is (way in ("sharded", "flat"))
    assert_close(moment, opts[1].state[alone.head.weight]["exp_avg"], "exp_avg")
    if way == "broadcast":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        if dist.get_rank() != 0:
            values, state = {}, {}
    _, fresh = _pair(api, Stack)
    opt = optimizers_of("adamw", fresh)[0]
    if way == "broadcast":  # `set_state_dict` itself takes no empty state
        set_model_state_dict(fresh, values, options=options)
        set_optimizer_state_dict(fresh, opt, state, options=options)
    else:
        set_state_dict(fresh, opt, model_state_dict=values, optim_state_dict=state, options=options)
    assert_trains_alike(fresh, alone, steps=2, optimizer=[opt, opts[1]], data=_odd_batch)


@case(4)
def optimizer_state_of_replicas(api: Api) -> None:
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=grid())
    opts = optimizers_of("momentum", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts, data=_odd_batch)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = get_optimizer_state_dict(model, opts[0], options=options)
    if dist.get_rank() == 0:
        moment = state["state"]["head.weight"]["momentum_buffer"]
        assert_close(moment, opts[1].state[alone.head.weight]["momentum_buffer"], "momentum")
    opt = optimizers_of("momentum", model)[0]
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, opt, state, options=options)
    assert_trains_alike(model, alone, steps=1, optimizer=[opt, opts[1]], data=_odd_batch)


@case(2)
def optimizer_state_the_plain_way(api: Api) -> None:
    """`optimizer.state_dict()` and `load_state_dict`, with no helper."""
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts, data=_odd_batch)
    opt = optimizers_of("adamw", model)[0]
    opt.load_state_dict(opts[0].state_dict())
    assert_trains_alike(model, alone, steps=2, optimizer=[opt, opts[1]], data=_odd_batch)


@case(2)
def state_in_training_order(api: Api) -> None:
    """Taking a state dict between any two calls of a step does not disturb the step."""
    alone, model = twins(Stack, WIDTH, 12)
    wrap(api, model, mesh=line())

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m is not model:
            return m(x).square().mean()
        m.state_dict()
        value = m(x).square().mean()
        m.state_dict()
        return value

    assert_trains_alike(model, alone, loss=loss)


@case(2, optimizer=("adamw", "momentum", "adagrad"))
def optimizer_state_in_the_order_of_parameters(api: Api, optimizer: str) -> None:
    """State is listed as the optimizer's parameters are, whatever groups of `fully_shard` and of
    the optimizer they are in.
    """
    alone, model = twins(Stack, WIDTH, 12)
    wrap(api, model, mesh=line())
    orders = []
    for each in (model, alone):
        names = dict(each.named_parameters())
        biases = [p for name, p in names.items() if name.endswith("bias")]
        groups = [{"params": [p for p in names.values() if all(p is not b for b in biases)]}]
        opt = OPTIMIZERS[optimizer]([*groups, {"params": biases}])
        each(batch(0, 0)).square().mean().backward()
        opt.step()
        keys = {id(p): name for name, p in names.items()}
        orders.append([keys[id(p)] for p in opt.state])
        assert list(opt.state_dict()["state"]) == list(range(len(names)))
    assert orders[0] == orders[1]
