"""How long things live: what a program keeps stays as it was, what it lets go is gone, and a step
that ends in an exception leaves a model that trains on.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    alone_mesh,
    assert_same_parameters,
    assert_trains_alike,
    batch,
    counting,
    line,
    optimizers_of,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.models import Block

# What a program may keep of a gradient, and of a parameter.
OF_GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "gradient": lambda p: p.grad,
    "detached": lambda p: p.grad.detach(),
    "data": lambda p: p.grad.data,
    "local": lambda p: p.grad.to_local(),
    "local detached": lambda p: p.grad.to_local().detach(),
    "view": lambda p: p.grad.to_local()[:1],
    "numpy": lambda p: p.grad.to_local().numpy(),
    "whole": lambda p: p.grad.full_tensor(),
}
OF_PARAMETERS: dict[str, Callable[[Any], Any]] = {
    "whole": lambda p: p.detach().full_tensor().clone(),
    "clone": lambda p: p.detach().clone(),
    "local clone": lambda p: p.to_local().detach().clone().numpy(),
}


def copied(value: Any) -> Any:
    value = value.to_local() if hasattr(value, "to_local") else value
    return torch.as_tensor(value).detach().clone()


def assert_kept(kept: dict[str, tuple[Any, torch.Tensor]]) -> None:
    for name, (value, then) in kept.items():
        assert torch.equal(copied(value), then), f"{name} is not what it was"


def keep(model: nn.Module, getters: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    found = {}
    for what, get in getters.items():
        for name, parameter in model.named_parameters():
            value = get(parameter)
            found[f"{what} of {name}"] = (value, copied(value))
    return found


@case(2, where=("line", "alone"), low=(False, True))
def what_is_kept_stays(api: Api, where: str, low: bool) -> None:
    """Gradients and copies, kept over the steps that follow."""
    dtype = torch.bfloat16 if low else None
    policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = wrap(api, Stack(), mesh=line() if where == "line" else alone_mesh(), mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: dict[str, Any] = {}
    for step in range(4):
        square_loss(model, batch(step, dist.get_rank())).backward()
        now = {**keep(model, OF_GRADIENTS), **keep(model, OF_PARAMETERS)}
        opt.step()
        opt.zero_grad()
        assert_kept(kept)
        kept.update({f"step {step}: {name}": value for name, value in now.items()})
    assert_kept(kept)


@case(2)
def what_belongs_to_the_step_follows_it(api: Api) -> None:
    """State dicts, local tensors and optimizer state are the parameters' own memory, and go on
    with them; gradients that are not cleared add up in place.
    """
    model = wrap(api, Stack(), mesh=line())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    square_loss(model, batch(0, dist.get_rank())).backward()
    opt.step()
    held = {name: value for name, value in model.state_dict().items()}
    moments = {p: opt.state[p]["exp_avg"] for p in model.parameters()}
    local = model.head.weight.to_local()
    gradient = model.head.weight.grad
    before = gradient.to_local().clone()
    square_loss(model, batch(1, dist.get_rank())).backward()
    opt.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(held[name].to_local(), parameter.to_local()), name
        assert opt.state[parameter]["exp_avg"] is moments[parameter]
    assert torch.equal(local, model.head.weight.to_local())
    assert gradient is model.head.weight.grad
    assert not torch.equal(gradient.to_local(), before)


@case(2)
def one_gradient_cleared_and_kept(api: Api) -> None:
    """Of a unit whose other gradients add up."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    ranks, rank = dist.get_world_size(), dist.get_rank()
    kept, then = None, torch.empty(0)
    for step in range(3):
        for i in range(ranks):
            (square_loss(alone, batch(step, i)) / ranks).backward()
        square_loss(model, batch(step, rank)).backward()
        for name, parameter in model.named_parameters():
            expected = dict(alone.named_parameters())[name].grad
            assert torch.allclose(parameter.grad.full_tensor(), expected, atol=1e-6), (step, name)
        if kept is not None:
            assert torch.equal(kept.to_local(), then)
        kept = model.layers[0].up.weight.grad
        then = kept.to_local().clone()
        model.layers[0].up.weight.grad = None
        alone.layers[0].up.weight.grad = None


class Wrapped(Stack):
    """Blocks whose forward runs in a closure under activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.forward = _checkpointed(layer.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: checkpoint(forward, x, use_reentrant=False)


def nothing_stays(model: nn.Module, end: str) -> list[Any]:
    """Train, end as told, and give weak references, and a loss that somebody keeps."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        loss = square_loss(model, batch(step, 0))
        loss.backward()
        opt.step()
        opt.zero_grad()
    if end == "forward":
        handle = model.layers[1].register_forward_hook(_raise)
        _expect(lambda: square_loss(model, batch(2, 0)))
        handle.remove()
    if end == "backward":
        handle = model.layers[0].register_forward_hook(_raise_in_backward)
        loss = square_loss(model, batch(2, 0))
        _expect(loss.backward)
        handle.remove()
    if end == "profile":
        import shardwise as sw

        with sw.profile(model, steps=2):
            for step in range(2):
                square_loss(model, batch(step, 0)).backward()
                opt.step()
                opt.zero_grad()
    parts = [model, model.layers[0], model.layers[0].up, model.head.weight]
    return [loss, *map(weakref.ref, parts)]


def _raise(*_: Any) -> None:
    raise ZeroDivisionError("planted")


def _raise_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(_raise)


def _expect(function: Callable[[], Any]) -> None:
    try:
        function()
    except ZeroDivisionError:
        return
    raise AssertionError("the planted exception did not come")


@case(
    2,
    engines=("shardwise",),
    kind=("plain", "closures"),
    end=("", "forward", "backward", "profile"),
)
def a_deleted_model_is_gone(api: Api, kind: str, end: str) -> None:
    """Also while its last loss is kept. (torch's engine keeps the whole model then.) A graph whose
    backward failed keeps what it needs: closures, and the parameters that it ends in.
    """
    if (kind, end) == ("closures", "backward"):
        return
    model = wrap(api, Stack() if kind == "plain" else Wrapped(), mesh=line())
    loss, *references = nothing_stays(model, end)
    del model
    gc.unfreeze()
    gc.collect()
    wanted = references[:3] if end == "backward" else references
    left = [type(r()).__name__ for r in wanted if r() is not None]
    assert not left, f"still there: {left}"
    assert loss.requires_grad


@case(2, place=("forward", "backward", "gradient"))
def trains_on_after_an_exception(api: Api, place: str) -> None:
    """The step in which it was raised is as if it had never been."""
    if api.engine == "torch" and place != "forward":
        return  # its state is left inside the backward; `reset_iter_state` is newer
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    for step in range(3):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        if place == "forward":
            handle = model.layers[1].register_forward_hook(_raise)
        elif place == "backward":
            handle = model.layers[0].register_full_backward_hook(_raise)
        else:
            handle = model.head.weight.register_post_accumulate_grad_hook(_raise)
        _expect(lambda step=step: square_loss(model, batch(step, 9)).backward())
        handle.remove()
        if place == "forward" and api.engine == "torch":
            model.reset_iter_state() if hasattr(model, "reset_iter_state") else None
        with torch.no_grad():
            assert torch.allclose(model(batch(step, 3)), alone(batch(step, 3)), atol=1e-5)
        opts[0].zero_grad()
    assert_same_parameters(model, alone)


@case(2, at=(0, 1, 2))
def a_forward_that_raises_leaves_what_others_have_accumulated(api: Api, at: int) -> None:
    """Micro-batches without sync, but for the last; the one that raises is left out."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for i in range(4):
            model.set_requires_gradient_sync(i == 3)
            if i == at:
                handle = model.layers[1].register_forward_hook(_raise)
                _expect(lambda i=i, step=step: model(batch(step, i)))
                handle.remove()
                if api.engine == "torch":
                    _forget_forward(model)
                continue
            square_loss(model, batch(step, 4 * rank + i)).backward()
            for r in range(ranks):
                (square_loss(alone, batch(step, 4 * r + i)) / ranks).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


def _forget_forward(model: Any) -> None:
    """What a forward that raised leaves in torch's engine."""
    model.reshard()


@case(2)
def the_first_step_is_like_any_other(api: Api) -> None:
    """As many collectives on the user's groups; checks among ranks go elsewhere."""
    model = nn.Sequential(*[Block(8, 16) for _ in range(3)])
    for part in (*model, model):
        api.fully_shard(part, mesh=line())
    seen = []
    for step in range(3):
        objects: list[str] = []
        original = dist.all_gather_object
        dist.all_gather_object = lambda *a, **k: objects.append("gather") or original(*a, **k)  # noqa: B023
        try:
            with counting() as counted:
                model(batch(step, 0)).square().mean().backward()
        finally:
            dist.all_gather_object = original
        seen.append((counted.all, len(objects)))
    assert seen[0] == seen[1] == seen[2], seen
    assert not any(objects for _, objects in seen)
