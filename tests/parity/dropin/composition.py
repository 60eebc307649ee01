"""What users put around it: clipping, scaling, hooks, offload, odd modules, tensor extensions."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    OPTIMIZERS,
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    average_backward,
    batch,
    grid,
    line,
    mesh,
    optimizers_of,
    raises,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, wrap

ODD = (7, 13, 3)


def _backward(model: Any, alone: Any, width: int = WIDTH, step: int = 0) -> None:
    batches = [batch(step, i, width) for i in range(dist.get_world_size())]
    average_backward(alone, batches)
    square_loss(model, batches[dist.get_rank()]).backward()


@case(2, foreach=(True, False, None), norm=(2.0, 1.0, float("inf")))
def clipping(api: Api, foreach: Any, norm: float) -> None:
    """The norm of all shards together, equal on all ranks; gradients scaled by it."""
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=line())
    _backward(model, alone, ODD[0])
    totals = [
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-2, norm_type=norm, foreach=foreach)
        for m in (model, alone)
    ]
    assert_close(whole(totals[0]), totals[1], "norm")
    assert totals[1] > 1e-2, "nothing was clipped"
    assert_same_gradients(model, alone)


@case(4)
def clipping_on_replicas(api: Api) -> None:
    alone, model = twins(Stack, *ODD)
    wrap(api, model, mesh=grid())
    opts = optimizers_of("adamw", model, alone)
    for step in range(2):
        _backward(model, alone, ODD[0], step)
        totals = [torch.nn.utils.clip_grad_norm_(m.parameters(), 1e-2) for m in (model, alone)]
        assert_close(whole(totals[0]), totals[1], "norm")
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2)
def clipping_by_value(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    _backward(model, alone)
    for each in (model, alone):
        torch.nn.utils.clip_grad_value_(each.parameters(), 1e-3)
    assert_same_gradients(model, alone)


@case(2)
def grad_scaler(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("sgd", model, alone)
    scalers = [torch.amp.GradScaler("cpu", init_scale=64.0) for _ in opts]
    for step in range(2):
        batches = [batch(step, i) for i in range(2)]
        scalers[0].scale(square_loss(model, batches[dist.get_rank()])).backward()
        for x in batches:
            scalers[1].scale(square_loss(alone, x) / 2).backward()
        for scaler, opt in zip(scalers, opts, strict=True):
            scaler.unscale_(opt)
        assert_same_gradients(model, alone)
        for scaler, opt in zip(scalers, opts, strict=True):
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2)
def grad_scaler_skips_on_all_ranks(api: Api) -> None:
    """An infinity in one rank's rows: no rank steps, and the scale goes down everywhere."""
    _, model = twins(Stack)
    wrap(api, model, mesh=line())
    opt = optimizers_of("sgd", model)[0]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = {n: whole(p).clone() for n, p in model.named_parameters()}
    scaler.scale(square_loss(model, batch(0, 0))).backward()
    if dist.get_rank() == 1:
        model.head.weight.grad.to_local()[0, 0] = float("inf")
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 32.0
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter), before[name]), f"{name} was stepped"


@case(2)
def autocast(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = m(x)
        assert out.dtype == torch.bfloat16
        return out.float().square().mean()

    assert_trains_alike(model, alone, loss=loss, optimizer="momentum")


@case(2)
def parameter_groups_and_schedules(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts, schedules = [], []
    for each in (model, alone):
        groups = [
            {"params": [p for p in each.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in each.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ]
        opts.append(torch.optim.AdamW(groups, lr=1e-2))
        schedules.append(torch.optim.lr_scheduler.StepLR(opts[-1], 1, gamma=0.5))
    for _ in range(3):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        for schedule in schedules:
            schedule.step()


@case(2, sync=(True, False))
def post_accumulate_hooks(api: Api, sync: bool) -> None:
    """Called once per reduced gradient, with `.grad` and the parameter in their places; never
    while not syncing.
    """
    model = wrap(api, Stack(), mesh=line())
    called: list[str] = []
    names = {id(p): n for n, p in model.named_parameters()}

    def hook(parameter: torch.Tensor) -> None:
        assert isinstance(parameter.grad, DTensor)
        assert model.get_parameter(names[id(parameter)]) is parameter
        called.append(names[id(parameter)])

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        model.set_requires_gradient_sync(sync or step == 1)
        square_loss(model, batch(step, 0)).backward()
    assert sorted(called) == sorted([*names.values()] * (2 if sync else 1)), called


@case(2)
def optimizer_inside_backward(api: Api) -> None:
    """One optimizer per parameter, stepped by its hook."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = {p: OPTIMIZERS["momentum"]([p]) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        opts[parameter].step()
        opts[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    opt = optimizers_of("momentum", alone)[0]
    for step in range(3):
        _backward(model, alone, step=step)
        opt.step()
        opt.zero_grad()
        assert all(p.grad is None for p in model.parameters())
    assert_same_parameters(model, alone)


@case(2, reshard=(True, False))
def cpu_offload(api: Api, reshard: bool) -> None:
    alone, model = twins(Stack, *ODD)
    wrap(
        api,
        model,
        mesh=line(),
        offload_policy=api.CPUOffloadPolicy(pin_memory=False),
        reshard_after_forward=reshard,
    )
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert_trains_alike(model, alone, data=lambda s, i: batch(s, i, ODD[0]))


class Attends(nn.Module):
    """torch's own encoder layer, whose attention reads its projection's weights directly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@case(2)
def transformer_layers(api: Api) -> None:
    alone, model = twins(Attends)
    wrap(api, model, mesh=line())

    def data(step: int, index: int) -> torch.Tensor:
        return batch(step, index, WIDTH, 6).view(2, 3, WIDTH)

    # Bias gradients that are zero up to rounding become signs under Adam.
    assert_trains_alike(model, alone, data=data, optimizer="sgd", bound=1e-4)
    model.eval()
    alone.eval()
    with torch.no_grad():
        assert_close(model(data(9, 9)), alone(data(9, 9)), "evaluation", bound=1e-4)


@case(2)
def recurrent_layers(api: Api) -> None:
    class Recurs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = torch.zeros(x.shape[0], WIDTH)
            for _ in range(3):
                state = self.cell(x, state)
            return self.head(state)

    alone, model = twins(Recurs)
    for part in (model.cell, model):
        api.fully_shard(part, mesh=line())
    assert_trains_alike(model, alone)


@case(2)
def parametrised_modules(api: Api) -> None:
    """Parameters that live in a parametrisation, under its names."""

    def make() -> nn.Module:
        return nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)
        )

    alone, model = twins(make)
    api.fully_shard(model, mesh=line())
    assert "0.parametrizations.weight.original0" in dict(model.named_parameters())
    assert_trains_alike(model, alone)


@case(2)
def averaged_weights(api: Api) -> None:
    """A moving average kept by the user over the sharded parameters."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    averages = [[p.detach().clone() for p in m.parameters()] for m in (model, alone)]
    for _ in range(2):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        for kept, each in zip(averages, (model, alone), strict=True):
            torch._foreach_lerp_(kept, [p.detach() for p in each.parameters()], 0.5)
    for got, expected in zip(*averages, strict=True):
        assert isinstance(got, DTensor)
        assert_close(got, expected, "average")


@case(2, which=("replicate", "replicate_with_fsdp"))
def replicated_around_and_inside(api: Api, which: str) -> None:
    """`replicate` leaves sharded children to their engine, `fully_shard` replicated ones to theirs;
    neither takes what the other has.
    """
    home = importlib.import_module(f"torch.distributed._composable.{which}")
    replicate = home.replicate
    on = mesh(dist.get_world_size(), names=("replicate",))
    settings = {"mesh": on} if which == "replicate_with_fsdp" else {}
    alone, model = twins(Stack)
    api.fully_shard(model.layers[0], mesh=on)
    replicate(model, **settings)
    assert_trains_alike(model, alone)
    with raises(RuntimeError, "on a Module already managed by `fully_shard`"):
        replicate(api.fully_shard(nn.Linear(WIDTH, WIDTH), mesh=on), **settings)
    alone, model = twins(Stack)
    replicate(model.layers[0], **settings)
    before = dict(model.layers[0].named_parameters())
    api.fully_shard(model, mesh=on)
    assert dict(model.layers[0].named_parameters()) == before
    assert_trains_alike(model, alone)
