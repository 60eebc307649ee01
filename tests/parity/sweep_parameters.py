"""Touches of parameters and modules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor

from tests.parity.sweep import Run, optimizer_of, touch, whole


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# Replaced, tied, swapped


@touch("replace a parameter, and tell the optimizer", everywhere=True)
def replace(run: Run) -> None:
    for module in (run.model.layers[1].up, run.model.head):
        old = module.weight
        module.weight = nn.Parameter(run.random(old.data))
        run.tell_optimizer(old, module.weight)


@touch("replace a parameter, the optimizer untold")
def replace_untold(run: Run) -> None:
    module = run.model.layers[1].up
    module.weight = nn.Parameter(run.random(module.weight.data))


@touch(
    "replace a parameter by a whole tensor",
    dropin="'layers.1.up.weight' was replaced",
    zero3="'layers.1.up.weight' was replaced",
    zero2="'layers.1.up.weight' was replaced",
    hsdp="'layers.1.up.weight' was replaced",
    everywhere=True,
)
def replace_whole(run: Run) -> None:
    old = run.model.layers[1].up.weight
    new = run.model.layers[1].up.weight = nn.Parameter(torch.full(old.shape, 0.1))
    run.tell_optimizer(old, new)


@touch("replace a parameter by one of another shape", dropin="'head.bias'", plan="'head.bias'")
def replace_shape(run: Run) -> None:
    old = run.model.head.bias
    new = run.model.head.bias = nn.Parameter(run.like(torch.zeros(1), old.data))
    run.tell_optimizer(old, new)


def _forget(run: Run, *parameters: nn.Parameter) -> None:
    """The optimizer lets go of them."""
    for group in run.opt.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is q for q in parameters)]
    for p in parameters:
        run.opt.state.pop(p, None)


@touch("tie two parameters of the root", everywhere=True)
def tie_root(run: Run) -> None:
    _forget(run, run.model.head.weight)
    run.model.head.weight = run.model.embed.weight


@touch("tie parameters of two units", everywhere=True)
def tie_units(run: Run) -> None:
    first, second = run.model.layers[0].up, run.model.layers[2].up
    _forget(run, second.weight)
    second.weight = first.weight


@touch("tie, the optimizer keeps the old one")
def tie_untold(run: Run) -> None:
    run.model.head.weight = run.model.embed.weight


@touch("tie a block's parameter to the root's", everywhere=True)
def tie_to_root(run: Run) -> None:
    _forget(run, run.model.layers[1].norm.weight)
    run.model.layers[1].norm.weight = run.model.norm.weight


@touch("tie the root's parameter to a block's")
def tie_to_block(run: Run) -> None:
    _forget(run, run.model.norm.weight)
    run.model.norm.weight = run.model.layers[1].norm.weight


@touch("tie two parameters of one block")
def tie_inside(run: Run) -> None:
    block = run.model.layers[1]
    _forget(run, block.norm.bias)
    block.norm.bias = block.down.bias


@touch("tie three", everywhere=True)
def tie_three(run: Run) -> None:
    layers = run.model.layers
    for i in (0, 2):
        _forget(run, layers[i].up.weight)
        layers[i].up.weight = layers[1].up.weight


def _later(run: Run, at: int, function: Callable[[Run], None]) -> None:
    """Before a later step of the loop."""

    def program(run: Run) -> None:
        if run.step == at:
            function(run)
        run.train_step()

    run.program = program


@touch("tie, and untie a step later", everywhere=True)
def tie_untie(run: Run) -> None:
    tie_root(run)

    def untie(run: Run) -> None:
        head = run.model.head
        head.weight = nn.Parameter(head.weight.detach().clone())
        run.opt.add_param_group({"params": [head.weight]})

    _later(run, run.step + 1, untie)


@touch("tie, and hang the old parameter back a step later")
def tie_back(run: Run) -> None:
    old = run.model.layers[2].up.weight
    run.model.layers[2].up.weight = run.model.layers[0].up.weight
    _later(run, run.step + 1, lambda run: setattr(run.model.layers[2].up, "weight", old))


def _tie(model: Any) -> None:
    model.head.weight = model.embed.weight


@touch(
    "untie what was tied before sharding",
    prepare=_tie,
    dropin="'head.weight' was tied to 'embed.weight'",
    plan="'head.weight' was tied to 'embed.weight'",
    everywhere=True,
)
def untie(run: Run) -> None:
    head = run.model.head
    head.weight = nn.Parameter(head.weight.detach().clone())
    run.opt.add_param_group({"params": [head.weight]})


@touch("replace both names of what was tied before sharding", prepare=_tie, everywhere=True)
def replace_tied(run: Run) -> None:
    old = run.model.embed.weight
    new = run.model.embed.weight = run.model.head.weight = nn.Parameter(run.random(old.data))
    run.tell_optimizer(old, new)


def _swap(one: nn.Module, other: nn.Module, key: str, other_key: str | None = None) -> None:
    a, b = getattr(one, key), getattr(other, other_key or key)
    setattr(one, key, b)
    setattr(other, other_key or key, a)


@touch("swap parameters of two blocks", everywhere=True)
def swap_blocks(run: Run) -> None:
    _swap(run.model.layers[0].up, run.model.layers[1].up, "weight")


@touch("swap two parameters of one block", everywhere=True)
def swap_inside(run: Run) -> None:
    block = run.model.layers[0]
    _swap(block.norm, block.down, "bias")


@touch("swap a block's parameter with the root's")
def swap_root(run: Run) -> None:
    _swap(run.model.layers[0].norm, run.model.norm, "weight")


@touch("torch.utils.swap_tensors of two parameters")
def swap_tensors(run: Run) -> None:
    for group in run.opt.param_groups:
        for p in group["params"]:
            p.grad = None
    torch.utils.swap_tensors(run.model.layers[0].up.weight, run.model.layers[1].up.weight)


# Frozen and thawed


@touch("freeze a parameter", everywhere=True)
def freeze(run: Run) -> None:
    run.model.layers[1].up.weight.requires_grad_(False)


@touch("freeze a block", everywhere=True)
def freeze_block(run: Run) -> None:
    run.model.layers[0].requires_grad_(False)


@touch("freeze all but the head", everywhere=True)
def freeze_all(run: Run) -> None:
    run.model.requires_grad_(False)
    run.model.head.requires_grad_(True)


@touch("freeze a block, and thaw it a step later", everywhere=True)
def freeze_thaw(run: Run) -> None:
    freeze_block(run)
    _later(run, run.step + 1, lambda run: run.model.layers[0].requires_grad_(True))


@touch("thaw a block", prepare=lambda model: model.layers[1].requires_grad_(False), everywhere=True)
def thaw(run: Run) -> None:
    run.model.layers[1].requires_grad_(True)


@touch("thaw a parameter and add its group", prepare=lambda m: m.norm.weight.requires_grad_(False))
def thaw_group(run: Run) -> None:
    _forget(run, run.model.norm.weight)
    run.model.norm.weight.requires_grad_(True)
    run.opt.add_param_group({"params": [run.model.norm.weight], "lr": 0.05})


# Cast


@touch("cast the model to float64, with the optimizer's state", everywhere=True)
def cast(run: Run) -> None:
    run.model.double()
    for state in run.opt.state.values():
        state.update({k: v.double() for k, v in state.items() if k != "step"})


@touch("cast to float64 and back")
def cast_back(run: Run) -> None:
    run.model.double().float()


@touch(
    "cast one parameter by p.data",
    dropin="'layers.1.up.weight'",
    plan="'layers.1.up.weight'",
)
def cast_one(run: Run) -> None:
    # One process computes with it, cast on the fly; a unit has one dtype.
    weight = run.model.layers[1].up.weight
    weight.data = weight.data.double()
    run.model.layers[1].up.forward = lambda x, up=run.model.layers[1].up: nn.functional.linear(
        x, up.weight.float(), up.bias
    )


@touch("cast by swap_tensors")
def cast_swapped(run: Run) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.model.double().float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# Written

MIXED = "got mixed torch.Tensor and DTensor"
NO_EFFECT = "'(layers.1.up|norm).weight' was given other memory by `p.data = `"


def _write(name: str, function: Callable[[Run, nn.Parameter], None]) -> None:
    """A way to write, to a block's parameter and to the root's."""

    def write(run: Run) -> None:
        with torch.no_grad():
            for p in (run.model.layers[1].up.weight, run.model.norm.weight, run.model.head.weight):
                function(run, p)

    touch(name, everywhere=True)(write)

    def written_between(run: Run) -> Callable[[], Any]:
        """Evaluate, write, and evaluate again: units that stay gathered show stale values."""
        before = run.evaluate()
        write(run)
        after = run.evaluate()
        return lambda: [before, after]

    touch(f"{name}, between two evaluations")(written_between)


_write("p.data.mul_", lambda _, p: p.data.mul_(0.5))
_write("p.mul_ under no_grad", lambda _, p: p.mul_(0.5))
_write("p.copy_", lambda run, p: p.copy_(run.random(p)))
_write("p.data = p.data", lambda _, p: setattr(p, "data", p.data))
_write("p.detach().mul_", lambda _, p: p.detach().mul_(0.5))
_write("to_local().mul_", lambda _, p: local(p).mul_(0.5))


@touch("nn.init.constant_", everywhere=True)
def initialise(run: Run) -> None:
    for p in (run.model.layers[1].norm.weight, run.model.norm.weight, run.model.head.bias):
        nn.init.constant_(p, 0.5)


@touch(
    "p.data = another tensor",
    dropin=NO_EFFECT,
    zero3=NO_EFFECT,
    zero2=NO_EFFECT,
    hsdp=NO_EFFECT,
    everywhere=True,
)
def assign_data(run: Run) -> None:
    """A DTensor's own `.data = ` does nothing to its values."""
    for p in (run.model.layers[1].up.weight, run.model.norm.weight):
        p.data = run.random(p.data)


@touch("torch._foreach_mul_ of all parameters", everywhere=True)
def foreach(run: Run) -> Callable[[], Any]:
    parameters = list(run.model.parameters())
    seen = [run.evaluate()]
    with torch.no_grad():
        torch._foreach_mul_(parameters, 0.5)
    seen.append(run.evaluate())
    return lambda: seen


@touch("torch._foreach_mul_ of parameters read after an evaluation", dropin=MIXED)
def foreach_after(run: Run) -> None:
    """Of which the root's are gathered, as in torch."""
    run.evaluate()
    with torch.no_grad():
        torch._foreach_mul_(list(run.model.parameters()), 0.5)


@touch("numpy's *= of all parameters read after an evaluation")
def foreach_local(run: Run) -> Callable[[], Any]:
    seen = [run.evaluate()]
    for p in run.model.parameters():
        array = local(p.detach()).numpy()
        array *= 0.5
    seen.append(run.evaluate())
    return lambda: seen


@touch("a forward without backward, p.data.mul_, and on", everywhere=True)
def forward_then_write(run: Run) -> None:
    run.loss()
    for p in run.model.parameters():
        p.data.mul_(0.5)


@touch("a forward without backward, p.data.mul_ of parameters read before it")
def forward_then_write_older(run: Run) -> None:
    parameters = list(run.model.parameters())
    run.loss()
    for p in parameters:
        p.data.mul_(0.5)


@touch("other values for an evaluation, and back", everywhere=True)
def averaged(run: Run) -> Callable[[], Any]:
    """As an average of the weights is tried out."""
    parameters = list(run.model.parameters())
    backup = [p.data.clone() for p in parameters]
    for p in parameters:
        p.data.copy_(run.random(p.data))
    seen = run.evaluate()
    for p, values in zip(parameters, backup, strict=True):
        p.data.copy_(values)
    return lambda: seen


_LOST = "wrote in place to a parameter of unit"


@touch(
    "an embedding renormalises its rows in forward (max_norm)",
    zero2=_LOST,
    zero3=_LOST,
    hsdp=_LOST,
)
def renormalised(run: Run) -> None:
    run.model.embed.max_norm = 1.0


# Loaded


def _other_values(run: Run) -> dict[str, torch.Tensor]:
    return {name: run.random(p, len(name)) for name, p in run.model.state_dict().items()}


@touch("load_state_dict", everywhere=True)
def load(run: Run) -> None:
    run.model.load_state_dict(_other_values(run))


@touch("load_state_dict(assign=True), a new optimizer", everywhere=True)
def load_assign(run: Run) -> None:
    run.model.load_state_dict(_other_values(run), assign=True)
    run.opt = optimizer_of(run.model.parameters())


@touch("load_state_dict(assign=True), the optimizer untold")
def load_assign_untold(run: Run) -> None:
    run.model.load_state_dict(_other_values(run), assign=True)


@touch("load_state_dict of a block, assign=True")
def load_block(run: Run) -> None:
    block = run.model.layers[1]
    old = list(block.parameters())
    values = {name: run.random(p, len(name)) for name, p in block.state_dict().items()}
    block.load_state_dict(values, assign=True)
    for before, after in zip(old, block.parameters(), strict=True):
        run.tell_optimizer(before, after)


@touch("load_state_dict by swap_tensors")
def load_swapped(run: Run) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        run.model.load_state_dict(_other_values(run))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@touch("set_model_state_dict", everywhere=True)
def set_state(run: Run) -> None:
    set_model_state_dict(run.model, _other_values(run))


@touch("set_model_state_dict(full_state_dict=True)", everywhere=True)
def set_full_state(run: Run) -> None:
    state = run.model.state_dict()
    full = {n: run.random(torch.empty(p.shape), len(n)) for n, p in state.items()}
    set_model_state_dict(run.model, full, options=StateDictOptions(full_state_dict=True))


@touch("get_model_state_dict, kept")
def kept_state(run: Run) -> Callable[[], Any]:
    full = get_model_state_dict(run.model, options=StateDictOptions(full_state_dict=True))
    kept = {name: value.clone() if run.alone else value for name, value in full.items()}
    return lambda: kept


# Copied


@touch("deepcopy, train the original", everywhere=True)
def copy_keep(run: Run) -> Callable[[], Any]:
    twin = copy.deepcopy(run.model)
    return lambda: [whole(p) for p in twin.parameters()]


@touch("deepcopy, train the copy", everywhere=True)
def copy_train(run: Run) -> Callable[[], Any]:
    first = run.model
    run.model = copy.deepcopy(first)
    run.opt = optimizer_of(run.model.parameters())
    return lambda: [whole(p) for p in first.parameters()]


@touch("deepcopy, train both by turns")
def copy_both(run: Run) -> Callable[[], Any]:
    twin = copy.deepcopy(run.model)
    other = optimizer_of(twin.parameters())

    def program(run: Run) -> None:
        run.train_step()
        run.loss(twin).backward()
        other.step()
        other.zero_grad()

    run.program = program
    return lambda: [whole(p) for p in twin.parameters()]


@touch("deepcopy of a block, in its place", dropin="'layers.1'", plan="'layers.1'")
def copy_block(run: Run) -> None:
    old = run.model.layers[1]
    new = run.model.layers[1] = copy.deepcopy(old)
    for before, after in zip(old.parameters(), new.parameters(), strict=True):
        run.tell_optimizer(before, after)


@touch("AveragedModel, updated each step")
def averaged_model(run: Run) -> Callable[[], Any]:
    average = torch.optim.swa_utils.AveragedModel(run.model)

    def program(run: Run) -> None:
        run.train_step()
        average.update_parameters(run.model)

    run.program = program
    return lambda: [whole(p) for p in average.module.parameters()]


# Modules


class Adapted(nn.Module):
    """A block and a small addition beside it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.side = block, nn.Linear(8, 8, bias=False)
        nn.init.constant_(self.side.weight, 0.05)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x) + self.side(x)
        return out


@touch("add a module, sharded by itself", plan="'layers.1'.* was added")
def add_sharded(run: Run) -> None:
    adapted = run.model.layers[1] = Adapted(run.model.layers[1])
    run.shard(adapted.side)
    run.opt.add_param_group({"params": [adapted.side.weight]})


@touch("add a module, its gradients averaged by hand", plan="'layers.1'.* was added")
def add_averaged(run: Run) -> None:
    adapted = run.model.layers[1] = Adapted(run.model.layers[1])
    weight = adapted.side.weight
    run.opt.add_param_group({"params": [weight]})

    def average(run: Run) -> None:
        if not run.alone:
            torch.distributed.all_reduce(weight.grad)
            weight.grad /= run.world

    run.on_gradients = average


@touch(
    "add a module",
    dropin="warning: 'layers.1.side.weight' came into the model",
    plan="'layers.1'.* was added",
    everywhere=True,
)
def add_module(run: Run) -> None:
    adapted = run.model.layers[1] = Adapted(run.model.layers[1])
    run.opt.add_param_group({"params": [adapted.side.weight]})


@touch(
    "add a parameter to a block",
    dropin="warning: 'layers.1.extra' came into the model",
    plan="'layers.1.extra' was added",
)
def add_parameter(run: Run) -> None:
    block = run.model.layers[1]
    block.extra = nn.Parameter(torch.ones(8))
    block.register_forward_hook(lambda module, args, out: out * module.extra)
    run.opt.add_param_group({"params": [block.extra]})


@touch("remove a block", plan="was added, removed", everywhere=True)
def remove_block(run: Run) -> None:
    del run.model.layers[1]


@touch("a block becomes Identity", plan="'layers.1'")
def identity_block(run: Run) -> None:
    run.model.layers[1] = nn.Identity()


@touch("remove a parameter", dropin="'layers.1.scale'", plan="'layers.1.scale'")
def remove_parameter(run: Run) -> None:
    run.model.layers[1].scale = None
    run.model.layers[1].uses_scale = False


@touch("swap two blocks", everywhere=True)
def swap_modules(run: Run) -> None:
    layers = run.model.layers
    layers[0], layers[1] = layers[1], layers[0]


@touch("use a block twice, in another's place")
def share_block(run: Run) -> None:
    run.model.left_out.add(2)
    run.model.norm.register_forward_pre_hook(lambda _, args: (run.model.layers[0](args[0]),))


@touch("wrap a block in a module without parameters", everywhere=True)
def wrap_block(run: Run) -> None:
    run.model.layers[1] = nn.Sequential(run.model.layers[1])


@touch("weight_norm of a layer", dropin="'layers.1.up", plan="'layers.1.up")
def parametrize(run: Run) -> None:
    nn.utils.parametrizations.weight_norm(run.model.layers[1].up)
    run.opt = optimizer_of(run.model.parameters())
