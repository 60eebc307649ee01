"""Rows 10 to 18 of docs/cases.md, for fsdp2_cases.py: how a model runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tests.parity.fsdp2_cases import (
    Net,
    api,
    batch,
    build,
    case,
    judge,
    shard,
    square,
    train,
    whole,
)
from tests.parity.models import Block


class Growing(Block):
    """Every block has another size."""

    made = 0

    def __init__(self, width: int, inner: int) -> None:
        Growing.made += 1
        super().__init__(width, inner * (1 + Growing.made % 3))


class Ordered(Net):
    order = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in self.order:
            x = self.layers[i](x)
        return self.head(x)


@case(10, "blocks of one shape in another order on rank 1", block=Block)
@case(10, "blocks of several shapes in another order on rank 1", block=Growing)
def other_order(block: Any) -> str:
    kind = type("M", (Ordered,), {"block": block})
    alone, model = build(kind), shard(build(kind))
    if dist.get_rank() == 1:
        alone.order = model.order = (0, 2, 1)
    got, expected = model(batch(0)), alone(batch(0))
    got.square().sum().backward()
    return judge(float((got - expected).norm() / expected.norm()), what="the output")


@case(11, "three batches on rank 0, two on rank 1")
def uneven_batches() -> str:
    model = shard(build(Net))
    for step in range(3 - dist.get_rank()):
        square(model, batch(dist.get_rank(), step)).backward()
    return "works"


@case(12, "mean loss over 9 rows on rank 0 and 3 on rank 1")
def uneven_tokens() -> str:
    alone, model = build(Net), shard(build(Net))
    rows = [torch.cat([batch(0, step) for step in range(3)]), batch(1)]
    alone(torch.cat(rows)).square().mean().backward()
    model(rows[dist.get_rank()]).square().mean().backward()
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    error = max(float((whole(p.grad) - q.grad).norm() / q.grad.norm()) for p, q in pairs)
    return judge(error, what="gradients (each rank weighs the same)")


@case(13, "two forwards, one backward")
def two_forwards() -> str:
    return train(Net, loss=lambda m, x: square(m, x) + square(m, 2 * x))


@case(13, "two forwards, two backwards")
def two_backwards() -> str:
    def loss(model: Any, x: torch.Tensor) -> torch.Tensor:
        first, second = square(model, x), square(model, 2 * x)
        share = 1.0 if hasattr(model, "reshard") else 0.5  # the caller halves in one process
        (first * share).backward()
        return second

    return train(Net, loss=loss)


@case(13, "a unit called twice in a forward")
def called_twice() -> str:
    return train(type("M", (Net,), {"run": lambda self, layer, x: layer(layer(x))}))


class Checkpointed(Net):
    reentrant = False

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


class Inside(Block):
    """Checkpoints within its own forward, so recomputation does not call the unit's module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class Gathers(TorchDispatchMode):
    """Counts all-gathers."""

    count = 0

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "allgather" in str(func)
        return func(*args, **(kwargs or {}))


@case(14, "checkpointed blocks", kind=Checkpointed)
@case(14, "checkpointed blocks, re-entrant", kind=type("M", (Checkpointed,), {"reentrant": True}))
@case(14, "checkpointed inside the block", kind=type("M", (Net,), {"block": Inside}))
def checkpointed(kind: Any) -> str:
    model = shard(build(kind))
    for _ in range(2):  # the second step is like all later ones
        with Gathers() as log:
            square(model, batch(0).requires_grad_()).backward()
    outcome = train(kind, loss=lambda m, x: square(m, x.requires_grad_()))
    return f"{outcome}; {log.count} gathers for 3 blocks and the root"


class Methods(Block):
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x)


class Encoding(Net):
    block = Methods

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        return layer.encode(x)

    @torch.no_grad()
    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.cat([x, x[-1:] + self(x)[-1:].sum()])
        return x


@case(15, "a unit's method other than forward", register=False)
@case(15, "the same, after register_fsdp_forward_method", register=True)
def methods(register: bool) -> str:
    def prepare(model: Any) -> None:
        for layer in model.layers:
            if register:
                api.register_fsdp_forward_method(layer, "encode")

    return train(Encoding, prepare=prepare)


@case(15, "generate(), the same length on both ranks", more=0)
@case(15, "generate(), two tokens more on rank 0", more=2)
def generate(more: int) -> str:
    kind = type("M", (Encoding,), {"run": Net.run})
    count = 3 + (more if dist.get_rank() == 0 else 0)
    got, expected = (m.generate(batch(0), count) for m in (shard(build(kind)), build(kind)))
    return judge(float((got - expected).norm() / expected.norm()), what="tokens")


class Reading(Net):
    """The root computes with a matrix of its first block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + nn.functional.linear(x, self.layers[0].up.weight[:8]))


@case(16, "a unit's parameter in the root's forward")
def read_outside() -> str:
    return train(Reading)


@case(16, "a unit's parameter added to the loss")
def read_in_the_loss() -> str:
    return train(Net, loss=lambda m, x: square(m, x) + m.layers[0].up.weight.square().sum())


class Viewing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).unsqueeze(0).squeeze(0)


def add_in_place(_self: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y += x
    return y


def scale_a_view(_self: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
    y = layer(x)
    y.view(-1)[:5].mul_(0.5)
    return y


@case(17, "in-place on a unit's output", block=Block, run=add_in_place)
@case(17, "in-place on a view of a unit's output", block=Block, run=scale_a_view)
@case(17, "in-place on an output that is a view itself", block=Viewing, run=add_in_place)
def in_place(**what: Any) -> str:
    return train(type("M", (Net,), what))


@dataclass
class Output:
    hidden: torch.Tensor


class Opaque:
    """Nothing that a tree of containers is known to be."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Packing(Block):
    pack: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(super().forward(x))


@case(18, "dict outputs", pack=lambda y: {"hidden": y}, unpack=lambda y: y["hidden"])
@case(18, "nested outputs", pack=lambda y: [{"a": (y, None)}], unpack=lambda y: y[0]["a"][0])
@case(18, "dataclass outputs", pack=Output, unpack=lambda y: y.hidden)
@case(18, "outputs inside a plain object", pack=Opaque, unpack=lambda y: y.hidden)
def outputs(pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> str:
    block = type("B", (Packing,), {"pack": staticmethod(pack)})
    run = lambda _self, layer, x: unpack(layer(x))  # noqa: E731
    return train(type("M", (Net,), {"block": block, "run": run}))
