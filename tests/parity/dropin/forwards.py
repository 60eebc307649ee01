"""What users do around forward: methods, containers, hooks, recomputation, compilation."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_trains_alike,
    average_backward,
    batch,
    counting,
    line,
    optimizers_of,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.models import Block


class Coder(Stack):
    """Has work to do outside of forward."""

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * scale

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


@case(2, style=("root", "blocks"))
def other_methods(api: Api, style: str) -> None:
    """Registered methods gather like forward, and their gradients are reduced."""
    alone, model = twins(Coder)
    wrap(api, model, style, mesh=line())
    for name in ("encode", "decode"):
        api.register_fsdp_forward_method(model, name)

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.decode(m.encode(x, scale=0.5)).square().mean()

    assert_trains_alike(model, alone, loss=loss)


class Sliced(Block):
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.down(torch.tanh(self.up(x)))


class CallsMethods(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Sliced(WIDTH, 16)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner.double(x))


@case(2)
def methods_of_children(api: Api) -> None:
    """The root's forward calls a registered method of a wrapped child."""
    alone, model = twins(CallsMethods)
    wrapped = api.fully_shard(model.inner, mesh=line())
    api.fully_shard(model, mesh=line())
    api.register_fsdp_forward_method(wrapped, "double")
    for each in (alone, model):
        each.inner.norm.requires_grad_(False)
    assert_trains_alike(model, alone)


@case(2)
def methods_of_unwrapped_modules(api: Api) -> None:
    """Registering on a module that is not wrapped does nothing, also for unknown names."""
    model = Coder()
    before = model.encode
    api.register_fsdp_forward_method(model, "encode")
    api.register_fsdp_forward_method(model, "no_such_method")
    assert model.encode == before


@dataclass
class Result:
    y: torch.Tensor
    extra: dict[str, Any]


class Returns(Block):
    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, 16)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        y = super().forward(x)
        return {
            "tuple": (y, None, 3),
            "list": [y, y * 2],
            "dict": {"y": y, "n": 3},
            "dataclass": Result(y, {"note": "kept", "double": y * 2}),
            "nested": {"a": [({"y": y},)]},
        }[self.kind]


PICK = {
    "tuple": lambda out: out[0],
    "list": lambda out: out[0] + out[1],
    "dict": lambda out: out["y"],
    "dataclass": lambda out: out.y + out.extra["double"],
    "nested": lambda out: out["a"][0][0]["y"],
}


class Outer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = Returns(kind)
        self.second = Returns(kind)

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(PICK[self.first.kind](self.first(x)))


@case(2, kind=tuple(PICK))
def outputs(api: Api, kind: str) -> None:
    """Gradients are reduced whatever container the output comes in."""
    alone, model = twins(Outer, kind)
    for part in (model.first, model.second, model):
        api.fully_shard(part, mesh=line(), reshard_after_forward=True)
    assert type(model(batch(0, 0))) is type(alone(batch(0, 0)))
    assert_trains_alike(model, alone, loss=lambda m, x: PICK[kind](m(x)).square().mean())


class InPlace(Stack):
    """Changes what its blocks return: all of it, or through a view."""

    view = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            before, x = x, layer(x)
            if self.view:
                x.view(-1)[:5].mul_(0.5)
            else:
                x += before
        return self.head(x)


@case(2, view=(False, True), reshard=(True, False))
def outputs_changed_in_place(api: Api, view: bool, reshard: bool) -> None:
    alone, model = twins(InPlace)
    alone.view = model.view = view
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    assert_trains_alike(model, alone)


class Takes(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.inner = Block(WIDTH, 16)
        self.kind = kind
        inner = self.inner.forward
        self.inner.forward = lambda *a, **k: inner(_unpack(*a, **k))  # type: ignore[method-assign]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.kind == "kwargs":
            return self.inner(hidden=x)
        if self.kind == "dict":
            return self.inner({"hidden": x, "none": None})
        return self.inner(Result(x, {}))


def _unpack(given: Any = None, hidden: torch.Tensor | None = None) -> torch.Tensor:
    if hidden is not None:
        return hidden
    return given["hidden"] if isinstance(given, dict) else given.y


@case(2, kind=("kwargs", "dict", "dataclass"))
def inputs(api: Api, kind: str) -> None:
    alone, model = twins(Takes, kind)
    api.fully_shard(model.inner, mesh=line())
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)


@case(2, reshard=(True, False))
def gradient_of_the_input(api: Api, reshard: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    mine, theirs = (batch(0, dist.get_rank()).requires_grad_() for _ in range(2))
    square_loss(model, mine).backward()
    square_loss(alone, theirs).backward()
    assert_close(mine.grad, theirs.grad, "input gradient")
    alone.zero_grad()
    average_backward(alone, [batch(0, i) for i in range(2)])
    assert_same_gradients(model, alone)


@case(2)
def autograd_grad(api: Api) -> None:
    """`torch.autograd.grad` of the input leaves the parameters' gradients alone."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    mine, theirs = (batch(0, dist.get_rank()).requires_grad_() for _ in range(2))
    (got,) = torch.autograd.grad(square_loss(model, mine), [mine])
    (expected,) = torch.autograd.grad(square_loss(alone, theirs), [theirs])
    assert_close(got, expected, "input gradient")
    assert all(p.grad is None for p in model.parameters())
    assert_trains_alike(model, alone)


@case(2, mode=("no_grad", "inference_mode"), reshard=(True, False))
def evaluation_between_steps(api: Api, mode: str, reshard: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("sgd", model, alone)
    for step in range(2):
        assert_trains_alike(model, alone, steps=1, optimizer=opts)
        model.eval()
        with getattr(torch, mode)():
            got, expected = model(batch(9, step)), alone(batch(9, step))
        assert_close(got, expected, "evaluation")
        model.train()


@case(2)
def evaluation_first(api: Api) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    with torch.no_grad():
        assert_close(model(batch(9, 0)), alone(batch(9, 0)), "evaluation")
    assert_trains_alike(model, alone, optimizer=opts)


@case(2)
def a_forward_without_backward(api: Api) -> None:
    """A training forward whose loss is dropped must not spoil the next step."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    square_loss(model, batch(3, 0))
    assert_trains_alike(model, alone, optimizer=opts)


class Recomputed(Stack):
    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedReentrant(Recomputed):
    reentrant = True


@case(2, reentrant=(False, True), reshard=(True, False))
def checkpointing(api: Api, reentrant: bool, reshard: bool) -> None:
    alone, model = twins(RecomputedReentrant if reentrant else Recomputed)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x.clone().requires_grad_()).square().mean()

    assert_trains_alike(model, alone, loss=loss)


class RecomputedInside(Block):
    """Checkpoints within its own forward: recomputation does not call the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@case(2, reshard=(True, False))
def checkpointing_inside_a_block(api: Api, reshard: bool) -> None:
    alone, model = twins(Stack)
    for each in (alone, model):
        for layer in each.layers:
            layer.__class__ = RecomputedInside
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    assert_trains_alike(model, alone)


@case(2, reentrant=(False, True))
def checkpoint_wrappers(api: Api, reentrant: bool) -> None:
    """torch's wrapper inside, `fully_shard` around it; names as torch gives them."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    alone, model = twins(Stack)
    for each in (alone, model):
        for index, layer in enumerate(each.layers):
            each.layers[index] = checkpoint_wrapper(layer, checkpoint_impl=kind)
    wrap(api, model, mesh=line())

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m(x.clone().requires_grad_()).square().mean()

    assert_trains_alike(model, alone, loss=loss)


KEPT: dict[str, Any] = {
    "products": [torch.ops.aten.addmm.default],
    "everything": lambda *_, **__: CheckpointPolicy.PREFER_SAVE,
}


class RecomputedPartly(Stack):
    kept = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keep = partial(create_selective_checkpoint_contexts, KEPT[self.kept])
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False, context_fn=keep)
        return self.head(x)


@case(2, kept=tuple(KEPT), reshard=(True, False))
def selective_checkpointing(api: Api, kept: str, reshard: bool) -> None:
    """torch counts operations there: those of the engine are not the model's."""
    alone, model = twins(RecomputedPartly)
    alone.kept = model.kept = kept
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    assert_trains_alike(model, alone)


@case(2)
def checkpointing_gathers_once_more_only(api: Api) -> None:
    """Recomputation uses the parameters that backward gathered."""
    model = wrap(api, Recomputed(), mesh=line())
    for _ in range(2):
        with counting() as counted:
            square_loss(model, batch(0, 0)).backward()
    assert counted.all == (2 + 1 + 2, 3, 0), counted.all


@case(2, backend=("eager", "aot_eager"))
def compiled_blocks(api: Api, backend: str) -> None:
    torch._dynamo.reset()
    alone, model = twins(Stack)
    for layer in model.layers:
        layer.compile(backend=backend)
    wrap(api, model, mesh=line())
    try:
        assert_trains_alike(model, alone)
    finally:
        torch._dynamo.reset()


@case(2, when=("before", "after"), how=("in place", "a wrapper"))
def compiled_blocks_without_graph_breaks(api: Api, when: str, how: str) -> None:
    """`fullgraph=True` is about the blocks' own code, not about what runs around it."""
    torch._dynamo.reset()
    alone, model = twins(Stack)
    if when == "after":
        wrap(api, model, mesh=line())
    for i, layer in enumerate(model.layers):
        if how == "in place":
            layer.compile(backend="eager", fullgraph=True)
        else:
            model.layers[i] = torch.compile(layer, backend="eager", fullgraph=True)
    if when == "before":
        wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    try:
        for step in range(2):
            batches = [batch(step, i) for i in range(2)]
            average_backward(alone, batches)
            square_loss(model, batches[dist.get_rank()]).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    finally:
        torch._dynamo.reset()
    for got, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert_close(got, expected, "a parameter of compiled blocks")


class Scripted(nn.Module):
    """No parameters: torch lets nobody replace those of a scripted module."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.scale


@case(2, way=("script", "trace"))
def scripted_parts(api: Api, way: str) -> None:
    alone, model = twins(Stack)
    for each in (alone, model):
        with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
            made: Any = torch.jit.script(Scripted())
            if way == "trace":
                made = torch.jit.trace(Scripted(), batch(0, 0))
        torch.manual_seed(3)
        each.layers[1] = nn.Sequential(nn.Linear(WIDTH, WIDTH), made)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone)
    assert list(model.state_dict()) == list(alone.state_dict())


@case(2)
def compiled_whole(api: Api) -> None:
    torch._dynamo.reset()
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    compiled = torch.compile(model, backend="eager")

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return (compiled if m is model else m)(x).square().mean()

    try:
        assert_trains_alike(model, alone, loss=loss)
    finally:
        torch._dynamo.reset()


@case(2, when=("before", "after"))
def hooks_of_the_user(api: Api, when: str) -> None:
    """Forward hooks see whole parameters inside the wrapped module and may change the output."""
    alone, model = twins(Stack)
    seen: list[str] = []

    def watch(m: nn.Module) -> None:
        block = m.layers[0]
        block.register_forward_pre_hook(lambda mod, args: seen.append("pre"))
        block.register_forward_hook(lambda mod, args, out: out * 2)
        block.up.register_forward_hook(
            lambda mod, args, out: seen.append("whole" if _whole(mod) else "sharded")
        )
        block.register_full_backward_hook(lambda mod, gi, go: seen.append("backward"))

    if when == "before":
        watch(model)
    wrap(api, model, mesh=line())
    if when == "after":
        watch(model)
    alone.layers[0].register_forward_hook(lambda mod, args, out: out * 2)
    assert_trains_alike(model, alone, loss=lambda m, x: m(x.requires_grad_()).square().mean())
    assert seen == ["pre", "whole", "backward"] * 2, seen


def _whole(module: nn.Module) -> bool:
    return not isinstance(module.weight, DTensor)


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = part(x)
        return x


@case(2)
def containers_with_forward(api: Api) -> None:
    alone, model = twins(lambda: ListWithForward(Block(WIDTH, 16) for _ in range(2)))
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)


class Chunked(nn.Module):
    """The main forward stops before the head, which the loss calls once per chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(WIDTH, 16)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.block(x))


@case(2, chunks=(1, 2))
def chunked_loss(api: Api, chunks: int) -> None:
    """Norm and head are one group, of which forward runs only the norm."""
    alone, model = twins(Chunked)
    api.fully_shard(model.block, mesh=line())
    api.fully_shard([model.norm, model.head], mesh=line())
    api.fully_shard(model, mesh=line())

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = m(x)
        return sum(m.head(h).square().mean() for h in hidden.chunk(chunks)) / chunks

    assert_trains_alike(model, alone, loss=loss)


class Skipping(nn.Module):
    """Can leave out its second half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, skip: bool = False) -> torch.Tensor:
        x = self.first(x)
        return x if skip else self.second(x)


@case(4)
def a_kept_module_left_out_of_the_next_forward(api: Api) -> None:
    """What a smaller group kept for a backward that never came is still there to be read."""
    alone, model = twins(Skipping)
    for module in (model.first, model.second, model):
        api.fully_shard(module, mesh=line(), reshard_after_forward=2)
    model(batch(0, 0))
    assert_close(model(batch(1, 0), skip=True), alone(batch(1, 0), skip=True), "output")
    for (name, mine), theirs in zip(
        model.second.named_parameters(), alone.second.parameters(), strict=True
    ):
        assert_close(mine.full_tensor(), theirs, name)
