"""Touches of gradients and of the optimizer, and references that somebody keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.parity.sweep import Run, every_step, optimizer_of, touch, whole
from tests.parity.sweep_parameters import local

gradient = partial(touch, when="gradients")


def watched(run: Run) -> list[nn.Parameter]:
    """A parameter of a block and some of the root's."""
    return [run.model.layers[1].up.weight, run.model.norm.weight, run.model.head.weight]


# Gradients


@gradient("p.grad = None for some", everywhere=True)
def none(run: Run) -> None:
    for p in watched(run):
        p.grad = None


@gradient("p.grad = another tensor", everywhere=True)
def other(run: Run) -> None:
    for p in watched(run):
        p.grad = run.random(p.grad)


@gradient("p.grad = its clone")
def clone(run: Run) -> None:
    for p in watched(run):
        p.grad = p.grad.clone()


@gradient("p.grad.mul_", everywhere=True)
def scale(run: Run) -> None:
    for p in watched(run):
        p.grad.mul_(0.5)


@gradient("p.grad.data.mul_")
def scale_data(run: Run) -> None:
    for p in watched(run):
        p.grad.data.mul_(0.5)


@gradient("p.grad *= under no_grad, by to_local")
def scale_local(run: Run) -> None:
    for p in watched(run):
        local(p.grad).mul_(0.5)


@gradient("torch._foreach_mul_ of all gradients", everywhere=True)
def foreach(run: Run) -> None:
    torch._foreach_mul_([p.grad for p in run.model.parameters()], 0.5)


@gradient("clip_grad_norm_")
def clip(run: Run) -> Callable[[], Any]:
    norm = nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    return lambda: norm


@gradient("swap the gradients of two parameters")
def swap(run: Run) -> None:
    one, two = run.model.layers[0].up.weight, run.model.layers[1].up.weight
    one.grad, two.grad = two.grad, one.grad


@gradient("the gradients of two parameters become one tensor")
def one_gradient(run: Run) -> None:
    run.model.layers[0].up.weight.grad = run.model.layers[1].up.weight.grad


@gradient("zero some gradients in place, no step, go on")
def zero_some(run: Run) -> None:
    for p in watched(run):
        p.grad.zero_()


@touch("zero_grad(set_to_none=False) from now on", everywhere=True)
def zero_in_place(run: Run) -> None:
    run.sets_none = False


@every_step("model.zero_grad() in the optimizer's place")
def model_zero(run: Run) -> None:
    run.loss().backward()
    run.opt.step()
    run.model.zero_grad()


@touch("no zero_grad for a step", everywhere=True)
def accumulate(run: Run, instead: Callable[[Run], None] = lambda run: None) -> None:
    at = run.step

    def program(run: Run) -> None:
        run.loss().backward()
        run.opt.step()
        if run.step != at:
            run.opt.zero_grad()
        else:
            instead(run)

    run.program = program


touch("no zero_grad, some gradients None", everywhere=True)(partial(accumulate, instead=none))
touch("no zero_grad, some gradients replaced")(partial(accumulate, instead=other))


@every_step("two backwards, a block left out of the second", everywhere=True)
def accumulate_left_out(run: Run) -> None:
    run.loss().backward()
    run.model.left_out.add(1)
    run.loss().backward()
    run.model.left_out.clear()
    run.opt.step()
    run.opt.zero_grad()


@touch("a gradient set before forward", everywhere=True)
def preset(run: Run) -> None:
    for p in watched(run):
        p.grad = run.random(p.data)


@touch("a gradient kept and set again in the next step")
def again(run: Run) -> None:
    kept: list[Any] = []

    def use(run: Run) -> None:
        now = [p.grad for p in watched(run)]
        for p, before in zip(watched(run), kept, strict=False):
            p.grad = before
        kept[:] = now

    run.on_gradients = use


# Kept


def _keep(name: str, view: Callable[[torch.Tensor], Any]) -> None:
    """A way to hold on to a gradient over the steps that follow."""

    def keep(run: Run) -> Callable[[], Any]:
        held = [view(p.grad) for p in watched(run)]
        copies = [_copy(each) for each in held]
        return lambda: [bool((a == b).all()) for a, b in zip(map(_copy, held), copies, strict=True)]

    gradient(f"keep {name}", everywhere=True)(keep)


def _copy(kept: Any) -> torch.Tensor:
    kept = torch.as_tensor(kept) if not isinstance(kept, torch.Tensor) else kept
    return local(kept).detach().clone()


_keep("p.grad", lambda grad: grad)
_keep("p.grad.to_local()", local)
_keep("p.grad.detach()", lambda grad: grad.detach())
_keep("p.grad.data", lambda grad: grad.data)
_keep("a view of p.grad.to_local()", lambda grad: local(grad).view(-1)[:2])
_keep("p.grad's numpy array", lambda grad: local(grad).numpy())
_keep("p.grad.full_tensor()", lambda g: g.full_tensor() if isinstance(g, DTensor) else g)


@touch("keep detach, data, local and numpy of parameters")
def keep_parameters(run: Run) -> Callable[[], Any]:
    """They stand on the parameter's own memory: one process sees the new values in them."""
    kept = [view(p) for p in watched(run) for view in (torch.detach, lambda p: p.data)]
    rows = [(p, local(p.detach()), local(p.detach()).numpy()) for p in watched(run)]

    def look() -> Any:
        return [
            [whole(each) for each in kept],
            [bool((local(p) == mine).all()) for p, mine, _ in rows],
            [bool((local(p.detach()).numpy() == array).all()) for p, _, array in rows],
        ]

    return look


@touch("keep full_tensor() and clones of parameters")
def keep_full(run: Run) -> Callable[[], Any]:
    full = [p.full_tensor() if isinstance(p, DTensor) else p.clone() for p in watched(run)]
    return lambda: [each.detach().clone() for each in full]


@touch("keep the state dict")
def keep_state_dict(run: Run) -> Callable[[], Any]:
    state = run.model.state_dict()
    return lambda: {name: whole(value) for name, value in state.items()}


@touch("keep the optimizer's state", moments=["after"])
def keep_optimizer_state(run: Run) -> Callable[[], Any]:
    states = [run.opt.state[p] for p in watched(run)]
    tensors = [dict(state) for state in states]
    saved = run.opt.state_dict()
    return lambda: [states, tensors, saved["state"]]


@touch("keep parameters while they are unsharded")
def keep_unsharded(run: Run) -> Callable[[], Any]:
    """What a forward hook reads in the module, copied then, and only held after."""
    held, copies = [], []

    def read(module: Any, args: Any) -> None:
        held.append(module.weight)
        copies.append(whole(module.weight.detach().clone()))

    handle = run.model.layers[1].up.register_forward_pre_hook(read)

    def look() -> Any:
        handle.remove()
        return copies

    return look


@touch("keep an old loss and its output")
def keep_loss(run: Run) -> Callable[[], Any]:
    losses: list[torch.Tensor] = []

    def program(run: Run) -> None:
        losses.append(run.loss())
        losses[-1].backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program
    return lambda: [loss.grad_fn is not None for loss in losses]


# Optimizers


@touch("step hooks from now on", everywhere=True)
def step_hooks(run: Run) -> Callable[[], Any]:
    seen: list[Any] = []
    run.opt.register_step_pre_hook(
        lambda opt, a, k: seen.append(len(opt.param_groups[0]["params"]))
    )
    run.opt.register_step_post_hook(
        lambda opt, a, k: seen.append(len(opt.param_groups[0]["params"]))
    )
    return lambda: seen


@touch("a step hook that scales the gradients")
def scaling_hook(run: Run) -> None:
    def halve(opt: Any, args: Any, kwargs: Any) -> None:
        for p in run.model.parameters():
            p.grad.mul_(0.5)

    run.opt.register_step_pre_hook(halve)


@touch("step hooks for one step")
def hooks_once(run: Run) -> None:
    handle = run.opt.register_step_post_hook(lambda *_: handle.remove())


@every_step("step(closure) from now on", everywhere=True)
def closure(run: Run) -> None:
    def compute() -> torch.Tensor:
        run.opt.zero_grad()
        loss = run.loss()
        loss.backward()
        return loss

    run.opt.step(compute)
    run.opt.zero_grad()


@every_step("step(None), and twice in a step")
def step_twice(run: Run) -> None:
    run.loss().backward()
    run.opt.step(None)
    run.opt.step()
    run.opt.zero_grad()


@touch("another learning rate, and a scheduler")
def schedule(run: Run) -> None:
    run.opt.param_groups[0]["lr"] = 0.03
    scheduler = torch.optim.lr_scheduler.StepLR(run.opt, 1, 0.5)

    def program(run: Run) -> None:
        run.train_step()
        scheduler.step()

    run.program = program


@touch("move a parameter to a group of its own", everywhere=True)
def split_group(run: Run) -> None:
    moved = watched(run)
    group = run.opt.param_groups[0]
    group["params"] = [p for p in group["params"] if not any(p is q for q in moved)]
    run.opt.add_param_group({"params": moved, "lr": 0.05, "weight_decay": 0.0})


@touch("take a parameter out of the optimizer")
def drop_parameter(run: Run) -> None:
    group = run.opt.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not run.model.norm.weight]


@touch("a new optimizer")
def new_optimizer(run: Run) -> None:
    run.opt = optimizer_of(run.model.parameters())


@touch("another kind of optimizer")
def other_optimizer(run: Run) -> None:
    run.opt = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)


@touch("two optimizers from now on")
def two_optimizers(run: Run) -> None:
    layers = list(run.model.layers.parameters())
    others = [p for p in run.model.parameters() if not any(p is q for q in layers)]
    run.opt = optimizer_of(layers)
    second = torch.optim.SGD(others, lr=0.1)

    def program(run: Run) -> None:
        run.loss().backward()
        run.opt.step()
        second.step()
        run.opt.zero_grad()
        second.zero_grad()

    run.program = program


@touch("edit the optimizer's state in place", moments=["after"], everywhere=True)
def edit_state(run: Run) -> None:
    for p in watched(run):
        run.opt.state[p]["exp_avg"].mul_(2.0)
        run.opt.state[p]["step"].add_(5.0)


@touch("replace tensors of the optimizer's state", moments=["after"])
def replace_state(run: Run) -> None:
    for p in watched(run):
        state = run.opt.state[p]
        state["exp_avg"] = state["exp_avg"] * 2.0
        state["step"] = state["step"] + 5.0


@touch("delete the optimizer's state of some", moments=["after"], everywhere=True)
def delete_state(run: Run) -> None:
    for p in watched(run):
        del run.opt.state[p]


@touch("clear the optimizer's state", moments=["after"])
def clear_state(run: Run) -> None:
    run.opt.state.clear()


@touch("optimizer.load_state_dict of its own, copied")
def load_optimizer(run: Run) -> None:
    run.opt.load_state_dict(copy.deepcopy(run.opt.state_dict()))


@touch("load the optimizer's state a step later", moments=["after"])
def load_older(run: Run) -> None:
    saved = copy.deepcopy(run.opt.state_dict())
    at = run.step

    def program(run: Run) -> None:
        run.train_step()
        if run.step == at:
            run.opt.load_state_dict(saved)

    run.program = program


@touch("set_optimizer_state_dict of its own", moments=["after"])
def set_optimizer(run: Run) -> None:
    saved = get_optimizer_state_dict(run.model, run.opt)
    set_optimizer_state_dict(run.model, run.opt, saved)


@touch("torch.compile(opt.step)")
def compile_step(run: Run) -> None:
    step = torch.compile(run.opt.step, backend="eager")

    def program(run: Run) -> None:
        run.loss().backward()
        step()
        run.opt.zero_grad()

    run.program = program
