"""Touches of what runs: hooks, compilation, exceptions, what a step uses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from tests.parity.sweep import PLANS, Planned, Run, every_step, optimizer_of, touch
from tests.parity.sweep_gradients import watched

# Hooks


@touch("forward hook that changes a block's output", everywhere=True)
def forward_hook(run: Run) -> None:
    run.model.layers[1].register_forward_hook(lambda module, args, out: out * 0.5)


@touch("forward pre-hook that changes a block's input")
def pre_hook(run: Run) -> None:
    run.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))


@touch("forward hooks on the model that read parameters")
def reading_hook(run: Run) -> Callable[[], Any]:
    seen: list[Any] = []
    run.model.layers[1].up.register_forward_hook(
        lambda module, args, out: seen.append(module.weight.detach().sum().item()) or None
    )
    return lambda: [torch.tensor(each) for each in seen]


@touch(
    "forward hook that adds a parameter's norm to the output",
    dropin="'layers.1.up.weight' was read out",
    zero3="'layers.1.up.weight' was read out",
)
def regularising_hook(run: Run) -> None:
    run.model.layers[1].register_forward_hook(
        lambda module, args, out: out + module.up.weight.square().sum() * 0.01
    )


@touch("full backward hook on a block", everywhere=True)
def backward_hook(run: Run) -> Callable[[], Any]:
    seen: list[int] = []

    def halve(module: Any, inputs: Any, outputs: Any) -> Any:
        seen.append(1)
        return (inputs[0] * 0.5,)

    run.model.layers[1].register_full_backward_hook(halve)
    return lambda: len(seen)


@touch("full backward pre-hook on a block")
def backward_pre_hook(run: Run) -> None:
    run.model.layers[1].register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))


@touch("full backward hooks on the model and all modules")
def backward_hooks(run: Run) -> Callable[[], Any]:
    seen: list[str] = []
    for name, module in run.model.named_modules():
        if name not in ("layers", "embed"):
            module.register_full_backward_hook(lambda *_, name=name: seen.append(name) or None)
    # The model's own input has no gradient, so its hook runs as soon as its output's is there.
    return lambda: sorted(seen)


@touch("tensor hook that scales a parameter's gradient", everywhere=True)
def tensor_hook(run: Run) -> None:
    for p in watched(run):
        p.register_hook(lambda grad: grad * 0.5)


@touch("tensor hook that looks at a parameter's gradient")
def looking_hook(run: Run) -> Callable[[], Any]:
    seen: dict[int, Any] = {}
    for i, p in enumerate(watched(run)):
        p.register_hook(lambda grad, i=i: seen.update({i: grad.clone()}))
    return lambda: seen


@touch("tensor hook that scales, over two backwards", everywhere=True)
def tensor_hook_twice(run: Run) -> None:
    """Not all that has been added up, but what each backward adds goes through the hook."""
    tensor_hook(run)

    def program(run: Run) -> None:
        run.loss().backward()
        run.loss(tokens=run.batch.flip(1)).backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("tensor hook on an activation", everywhere=True)
def activation_hook(run: Run) -> None:
    def scale(module: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(lambda grad: grad * 0.5)

    run.model.layers[1].register_forward_hook(scale)


@touch("post-accumulate-grad hook that scales", everywhere=True)
def accumulated_hook(run: Run) -> None:
    for p in watched(run):
        p.register_post_accumulate_grad_hook(_halve)


@touch("post-accumulate-grad hook that takes the gradient off")
def taking_hook(run: Run) -> Callable[[], Any]:
    taken: list[torch.Tensor] = []

    def take(p: torch.Tensor) -> None:
        taken.append(p.grad)  # type: ignore[arg-type]
        p.grad = None

    run.model.norm.weight.register_post_accumulate_grad_hook(take)
    return lambda: taken


@touch("an optimizer in each parameter's hook", everywhere=True)
def hook_optimizers(run: Run) -> None:
    for p in run.model.parameters():
        own = torch.optim.SGD([p], lr=0.05)

        def step(_: torch.Tensor, own: torch.optim.Optimizer = own) -> None:
            own.step()
            own.zero_grad()

        p.register_post_accumulate_grad_hook(step)
    run.opt = torch.optim.SGD(run.model.parameters(), lr=0.0)


@touch("a hook that is removed a step later")
def removed_hook(run: Run) -> None:
    handle = run.model.layers[1].register_forward_hook(lambda m, a, out: out * 0.5)
    at = run.step

    def program(run: Run) -> None:
        run.train_step()
        if run.step == at:
            handle.remove()

    run.program = program


def _halve(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(0.5)


# Compiled


@touch("torch.compile of the model")
def compile_model(run: Run) -> None:
    torch._dynamo.reset()
    run.model.compile(backend="eager")


@touch("torch.compile(model), a wrapper")
def compile_wrapper(run: Run) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(run.model, backend="eager")

    def program(run: Run) -> None:
        run.loss(compiled).backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("torch.compile of a block, in place")
def compile_block(run: Run) -> None:
    torch._dynamo.reset()
    run.model.layers[1].compile(backend="eager")


@touch("torch.compile of a block, a wrapper in its place")
def compile_block_wrapper(run: Run) -> Callable[[], Any]:
    torch._dynamo.reset()
    block = run.model.layers[1]
    run.model.layers[1] = torch.compile(block, backend="eager")

    def unwrap() -> None:
        run.model.layers[1] = block

    return unwrap


# Exceptions


def _once(run: Run) -> Callable[..., None]:
    """Raises the first time it is called."""
    at = run.step

    def fail(*_: Any) -> None:
        nonlocal at
        if at == run.step:
            at = -1
            raise Planned

    return fail


@touch("raise in a forward", everywhere=True)
def raise_forward(run: Run) -> None:
    run.model.layers[1].up.register_forward_pre_hook(_once(run))


@touch("raise in a forward hook of the model")
def raise_hook(run: Run) -> None:
    run.model.register_forward_hook(_once(run))


@touch("raise between forward and backward", everywhere=True)
def raise_between(run: Run) -> None:
    fail = _once(run)

    def program(run: Run) -> None:
        loss = run.loss()
        fail()
        loss.backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("raise in a full backward hook", everywhere=True)
def raise_backward(run: Run) -> None:
    run.model.layers[1].register_full_backward_hook(_once(run))


@touch("raise in a hook on an activation")
def raise_activation(run: Run) -> None:
    fail = _once(run)

    def hang(module: Any, args: Any, out: torch.Tensor) -> None:
        if out.requires_grad:
            out.register_hook(fail)

    run.model.layers[1].up.register_forward_hook(hang)


@touch("raise in a tensor hook on a parameter")
def raise_tensor_hook(run: Run) -> None:
    run.model.layers[1].up.weight.register_hook(_once(run))


@touch("raise in a post-accumulate-grad hook", everywhere=True)
def raise_accumulated(run: Run) -> None:
    run.model.layers[1].up.weight.register_post_accumulate_grad_hook(_once(run))


@touch("raise in an optimizer's pre-hook", everywhere=True)
def raise_optimizer(run: Run) -> None:
    run.opt.register_step_pre_hook(_once(run))


@touch("raise in an optimizer's post-hook")
def raise_after_optimizer(run: Run) -> None:
    run.opt.register_step_post_hook(_once(run))


@touch("raise in an evaluation", everywhere=True)
def raise_evaluation(run: Run) -> None:
    handle = run.model.layers[1].up.register_forward_pre_hook(_once(run))
    try:
        run.evaluate()
    except Planned:
        run.model.train()
    handle.remove()


def _in_parts(run: Run, after_first: Callable[[], None]) -> None:
    """A step of two micro-batches."""
    tokens = run.batch
    if run.alone or run.engine == "torch":
        ways = iter([tokens, tokens.flip(1)])
    else:
        ways = sw.microbatches(run.model, [tokens, tokens.flip(1)])
    for i, part in enumerate(ways):
        (run.loss(tokens=part) / 2).backward()
        if i == 0:
            after_first()


@touch("raise between two micro-batches", everywhere=True)
def raise_micro(run: Run) -> None:
    fail = _once(run)

    def program(run: Run) -> None:
        _in_parts(run, fail)
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("raise in a micro-batch's forward", everywhere=True)
def raise_in_micro(run: Run) -> None:
    calls = _once(run)
    seen: list[int] = []

    def second(*_: Any) -> None:
        seen.append(1)
        if len(seen) % 2 == 0:
            calls()

    run.model.layers[1].up.register_forward_pre_hook(second)

    def program(run: Run) -> None:
        _in_parts(run, lambda: None)
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


# What a step uses


@touch("leave out a block from now on", everywhere=True)
def leave_out(run: Run) -> None:
    run.model.left_out.add(1)


@touch("leave out a block for a step", everywhere=True)
def leave_out_once(run: Run) -> None:
    at = run.step

    def program(run: Run) -> None:
        run.model.left_out = {1} if run.step == at else set()
        run.train_step()

    run.program = program


@every_step("leave out another block in each step", everywhere=True)
def leave_out_turns(run: Run) -> None:
    run.model.left_out = {run.step % 3}
    run.train_step()


@touch("leave out a parameter from now on", everywhere=True)
def leave_out_parameter(run: Run) -> None:
    run.model.layers[1].uses_scale = False


@touch("a block's output goes unused from now on", everywhere=True)
def unused_output(run: Run) -> None:
    run.model.ignored.add(1)


@touch("a loss of one block alone", dropin="^equal|lazily initialized for layers.1")
def part(run: Run) -> None:
    at = run.step

    def program(run: Run) -> None:
        if run.step != at:
            run.train_step()
            return
        x = torch.linspace(-1, 1, 32).view(4, 8)
        loss = run.model.layers[1](x).square().mean()
        (loss / run.world if run.engine in PLANS else loss).backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("an evaluation before each step", everywhere=True)
def evaluations(run: Run) -> Callable[[], Any]:
    seen: list[torch.Tensor] = []

    def program(run: Run) -> None:
        seen.append(run.evaluate())
        run.train_step()

    run.program = program
    return lambda: seen


@every_step("an evaluation between forward and backward", everywhere=True)
def evaluation_inside(run: Run) -> None:
    loss = run.loss()
    run.evaluate()
    loss.backward()
    run.opt.step()
    run.opt.zero_grad()


@every_step("two forwards, then both backwards")
def two_forwards(run: Run) -> None:
    losses = [run.loss(), run.loss(tokens=run.batch.flip(1))]
    for loss in losses:
        loss.backward()
    run.opt.step()
    run.opt.zero_grad()


@every_step("backward twice through one graph")
def retained(run: Run) -> None:
    loss = run.loss()
    loss.backward(retain_graph=True)
    loss.backward()
    run.opt.step()
    run.opt.zero_grad()


@every_step("torch.autograd.grad of the output before backward")
def autograd_grad(run: Run) -> None:
    seen: list[torch.Tensor] = []
    handle = run.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    loss = run.loss()
    handle.remove()
    torch.autograd.grad(loss, seen, retain_graph=True)
    loss.backward()
    run.opt.step()
    run.opt.zero_grad()


@touch("activation checkpointing from now on")
def checkpointed(run: Run) -> None:
    for layer in run.model.layers:
        plain = layer.forward
        layer.forward = lambda x, plain=plain: checkpoint(plain, x, use_reentrant=False)


@touch("a step without backward")
def no_backward(run: Run) -> None:
    at = run.step

    def program(run: Run) -> None:
        if run.step != at:
            run.train_step()
            return
        run.loss()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("a parameter's square added to the loss")
def regularised(run: Run) -> None:
    """Read outside of forward: the sharded parameter is part of the loss itself."""
    at = run.step

    def program(run: Run) -> None:
        loss = run.loss()
        if run.step >= at:
            weight = run.model.norm.weight
            extra = weight.square().sum() * 0.1
            extra = extra.full_tensor() if hasattr(extra, "full_tensor") else extra
            loss = loss + (extra / run.world if run.engine in PLANS else extra)
        loss.backward()
        run.opt.step()
        run.opt.zero_grad()

    run.program = program


@touch("train only a new head's optimizer")
def head_only(run: Run) -> None:
    run.opt = optimizer_of(run.model.head.parameters())
    run.opt.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


@every_step("an evaluation, then model.zero_grad()")
def evaluated_zero(run: Run) -> None:
    run.loss().backward()
    run.opt.step()
    out = run.evaluate()
    if run.engine not in PLANS:
        out @ run.model.head.weight  # gathered, as torch has it after an evaluation
    run.model.zero_grad()


@touch(
    "an optimizer built after an evaluation", dropin="built while '(embed|head|norm).* was gathered"
)
def evaluated_optimizer(run: Run) -> None:
    run.evaluate()
    run.opt = optimizer_of(run.model.parameters())


@every_step("an evaluation between backward and clipping")
def evaluated_clip(run: Run) -> None:
    run.loss().backward()
    run.evaluate()
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)
    run.opt.step()
    run.opt.zero_grad()


@touch("read a parameter after an evaluation", plan="got mixed torch.Tensor and DTensor")
def evaluated_read(run: Run) -> Callable[[], Any]:
    """As a loss that is fused with the head does."""
    seen = run.evaluate() @ run.model.head.weight
    return lambda: seen
