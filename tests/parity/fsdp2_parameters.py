"""Rows 1 to 9 of docs/cases.md, for fsdp2_cases.py: which parameters a model has and uses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.parity.fsdp2_cases import (
    STEPS,
    WIDTH,
    Net,
    api,
    batch,
    build,
    case,
    judge,
    off,
    shard,
    square,
    train,
)
from tests.parity.models import Block


class TwoDtypes(Block):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        self.down.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))).bfloat16()).float()


@case(1, "two trainable dtypes in a unit")
def mixed_dtypes() -> str:
    return train(type("M", (Net,), {"block": TwoDtypes}), bound=0.02)


@case(1, "the second dtype frozen")
def mixed_dtypes_frozen() -> str:
    def before(model: Any, _step: int) -> None:
        for block in model.layers:
            block.down.requires_grad_(False)

    return train(type("M", (Net,), {"block": TwoDtypes}), bound=0.02, before=before)


class Tied(Net):
    """A matrix of a block is also another block's, or a matrix of the root."""

    blocks: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, 16)
        first, *rest = self.owners()
        for owner in rest:
            owner.weight = first.weight

    def owners(self) -> list[Any]:
        own = [self.layers[i].up for i in self.blocks]
        return own if len(own) > 1 else [*own, self.other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.other(x)[:, :4]


@case(2, "tied across two units", blocks=(0, 1))
@case(2, "tied between a unit and the root", blocks=(0,))
def tied(blocks: tuple[int, ...]) -> str:
    kind = type("M", (Tied,), {"blocks": blocks})
    model = shard(build(kind))
    first, second = model.owners()
    if first.weight is second.weight:
        return f"tie kept; {train(kind)}"
    more = len(list(model.parameters())) - len(list(build(kind).parameters()))
    # Not an outcome yet: an engine may notice at the first forward.
    for _ in range(2):
        square(model, batch(dist.get_rank())).backward()
    return f"wrong: the tie is lost ({more} parameter more) and trains apart, no error"


@case(2, "tied inside the root")
def tied_inside() -> str:
    class Inside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.back = nn.Linear(WIDTH, 4)
            self.back.weight = self.head.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.back(x)

    return train(Inside)


@case(3, "frozen at first, then trained", first=False)
@case(3, "frozen at first, then trained, bf16 compute", first=False, half=True)
@case(3, "trained at first, then frozen", first=True)
@case(3, "trained at first, then frozen, bf16 compute", first=True, half=True)
def thaw(first: bool, half: bool = False) -> str:
    def before(model: Any, step: int) -> None:
        model.layers[0].requires_grad_(first if step == 0 else not first)

    if not half:
        return train(Net, before=before)
    policy = api.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return train(Net, before=before, bound=0.02, mp_policy=policy)


@case(4, "partly frozen unit")
def partly_frozen() -> str:
    def before(model: Any, _step: int) -> None:
        model.layers[1].up.weight.requires_grad_(False)

    model = shard(build(Net))
    before(model, 0)
    square(model, batch(dist.get_rank())).backward()
    gradient = model.layers[1].up.weight.grad
    return f"{train(Net, before=before)}; gradient of the frozen one: {gradient}"


class ExtraBlock(Block):
    """One parameter more, made by `make`, that scales the output by its sum (plus one)."""

    make: Any = None

    def __init__(self, width: int, inner: int) -> None:
        super().__init__(width, inner)
        value = self.make()
        self.extra = nn.Parameter(value, requires_grad=value.is_floating_point())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.extra.sum())


@case(5, "0-d parameter", make=partial(torch.tensor, 0.2))
@case(6, "one row for two ranks", make=partial(torch.full, (1, 3), 0.1))
@case(6, "no rows at all", make=partial(torch.zeros, 0, 3))
@case(7, "integer parameter", make=partial(torch.ones, 4, dtype=torch.int64))
def extra(make: Callable[[], torch.Tensor]) -> str:
    block = type("B", (ExtraBlock,), {"make": staticmethod(make)})
    return train(type("M", (Net,), {"block": block}))


@case(6, "one row for two ranks, made on the meta device")
def empty_from_meta() -> str:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, 1, bias=False))
    shard(model)
    model.to_empty(device="cpu")
    nn.init.ones_(model[0].weight)
    return judge(abs(model(torch.ones(1, WIDTH)).item() - WIDTH))


class PartBlock(Block):
    """Can leave out its two matrices."""

    def forward(self, x: torch.Tensor, part: bool = False) -> torch.Tensor:
        return self.norm(x) if part else super().forward(x)


class Choosy(Net):
    """Leaves out the block `skip`, and runs only a part of the block `part`."""

    block = PartBlock
    skip: int | None = None
    part: int | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            if i != self.skip:
                x = layer(x, part=i == self.part)
        return self.head(x)


@case(8, "a unit that rank 1 does not use", skip=1)
@case(8, "parameters of a unit that rank 1 does not use", part=1)
@case(8, "the unit, with set_reduce_scatter_unused_params(True)", skip=1, fill=True)
@case(8, "the parameters, with set_reduce_scatter_unused_params(True)", part=1, fill=True)
def used_on_some(fill: bool = False, **what: int) -> str:
    kinds: list[Any] = [Choosy, type("M", (Choosy,), what)]
    alone, model = build(Choosy), shard(build(kinds[dist.get_rank()]))
    if fill:
        model.set_reduce_scatter_unused_params(True)
    opts = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (alone, model)]
    for step in range(STEPS):
        for rank in range(2):
            alone.__class__ = kinds[rank]
            (square(alone, batch(rank, step)) / 2).backward()
        square(model, batch(dist.get_rank(), step)).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return judge(off(model, alone))


@case(9, "a parameter that no rank uses", part=1)
@case(9, "a unit that no rank uses", skip=1)
def used_on_none(**what: int) -> str:
    kind = type("M", (Choosy,), what)
    model = shard(build(kind))
    square(model, batch(dist.get_rank())).backward()
    gradient = "None" if model.layers[1].down.weight.grad is None else "zeros"
    return f"{train(kind)}; its gradient is {gradient}"
