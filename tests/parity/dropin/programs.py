"""Less trodden paths of real programs, each with torch's engine and with shardwise's: torch's
pipeline schedules, copies of parts, unusual lists, graphs that are kept or cut.
"""

from __future__ import annotations

import copy
import io
from collections import namedtuple
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_close,
    assert_same_gradients,
    assert_same_parameters,
    assert_trains_alike,
    average_backward,
    batch,
    line,
    mesh,
    optimizers_of,
    raises,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.models import Block

RESHARD = (True, False, None)


def _average_backward(alone: nn.Module, step: int, loss: Any = square_loss) -> None:
    average_backward(alone, [batch(step, i) for i in range(dist.get_world_size())], loss)


# Pipelines: torch's schedules reach into the state of a sharded stage.

SCHEDULES = {
    "gpipe": (ScheduleGPipe, 1),
    "1f1b": (Schedule1F1B, 1),
    "interleaved": (ScheduleInterleaved1F1B, 2),
    "zero_bubble": (ScheduleInterleavedZeroBubble, 2),
}


def _target_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


@case(4, schedule=tuple(SCHEDULES))
def pipeline(api: Api, schedule: str) -> None:
    """Two pipeline ranks of one or two stages, each stage sharded over two ranks, four
    micro-batches; what the micro-batches added up is reduced once.
    """
    kind, each = SCHEDULES[schedule]
    on = mesh(2, 2, names=("pipeline", "data"))
    rank, place = on["pipeline"].get_local_rank(), on["data"].get_local_rank()
    mine = [rank + 2 * i for i in range(each)]
    pairs = [twins(Stack) for _ in range(2 * each)]
    alone = nn.Sequential(*(a for a, _ in pairs))
    stages = [wrap(api, pairs[i][1], mesh=on["data"], reshard_after_forward=False) for i in mine]
    group = on["pipeline"].get_group()
    parts = [
        PipelineStage(stage, i, 2 * each, torch.device("cpu"), group=group)
        for i, stage in zip(mine, stages, strict=True)
    ]
    runs: Any = kind(parts if each > 1 else parts[0], n_microbatches=4, loss_fn=_target_loss)
    opts = optimizers_of("adamw", alone, nn.ModuleList(stages))
    for step in range(3):
        data = [(batch(step, i, rows=8), batch(step + 50, i, rows=8)) for i in range(2)]
        for x, target in data:
            (_target_loss(alone(x), target) / 2).backward()
        x, target = data[place]
        arguments = (x,) if 0 in mine else ()
        runs.step(*arguments, **({"target": target} if 2 * each - 1 in mine else {}))
        for i, stage in zip(mine, stages, strict=True):
            for module in stage.modules():
                if isinstance(module, api.FSDPModule):
                    module.reshard()
            assert_same_gradients(stage, alone[i])
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for i, stage in zip(mine, stages, strict=True):
        assert_same_parameters(stage, alone[i])


@case(2)
def state_of_a_module(api: Api) -> None:
    model = wrap(api, Stack(), mesh=line())
    assert api.fully_shard.state(model) is not None
    assert api.fully_shard.state(model.layers[0]) is not api.fully_shard.state(model)
    assert api.fully_shard.state(model.head) is None


# Lists and copies.


@case(2, order=("once", "again"))
def the_same_module_twice(api: Api, order: str) -> None:
    part = nn.Linear(WIDTH, WIDTH)
    if order == "again":
        api.fully_shard(part, mesh=line())
    said = "only be applied to a module once. fully_shard has already been applied to the following"
    with raises(AssertionError, rf"{said} module:\n.*Linear\(in_features=8"):
        api.fully_shard([part, part], mesh=line())


@case(2, kind=("list", "iterator"))
def a_list_of_nothing(api: Api, kind: str) -> None:
    parts = [] if kind == "list" else iter([nn.Linear(WIDTH, WIDTH)])
    with raises(IndexError, ""):
        api.fully_shard(parts, mesh=line())


class HeadFirst(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for layer in self.layers:
            x = layer(x)
        return x


@case(2, reshard=(True, False))
def a_container_in_a_list(api: Api, reshard: bool) -> None:
    """The container never runs by itself; the module beside it gathers for both."""
    alone, model = twins(HeadFirst)
    api.fully_shard([model.head, model.layers], mesh=line(), reshard_after_forward=reshard)
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)


@case(2)
def copies_of_parts(api: Api) -> None:
    """A part that is not wrapped by itself: its copy is an ordinary module with DTensors."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    assert_trains_alike(model, alone, steps=1, optimizer=opts)
    twin = copy.deepcopy(model.head)
    assert type(twin) is nn.Linear
    for ours, theirs in zip(twin.parameters(), model.head.parameters(), strict=True):
        assert isinstance(ours, DTensor) and ours.placements == theirs.placements
        assert ours.to_local().data_ptr() != theirs.to_local().data_ptr()
        ours.grad = torch.ones_like(ours)
    torch.optim.SGD(twin.parameters(), lr=0.5).step()
    assert_close(twin.weight, alone.head.weight - 0.5, "the copy")
    assert_trains_alike(model, alone, steps=1, optimizer=opts)
    model.head.load_state_dict(twin.state_dict())
    assert torch.equal(whole(model.head.weight), whole(twin.weight))


@case(2)
def saved_by_torch_save(api: Api) -> None:
    """Sharded model and optimizer state through a file each, and training goes on."""
    alone, model = twins(Stack, 9, 17, 5)
    wrap(api, model, mesh=line())
    opts = optimizers_of("adamw", model, alone)
    data = lambda step, i: batch(step, i, width=9)  # noqa: E731
    assert_trains_alike(model, alone, steps=2, optimizer=opts, data=data)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opts[0].state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=False)
    _, other = twins(Stack, 9, 17, 5)
    wrap(api, other, mesh=line())
    other.load_state_dict(saved["model"])
    opt = torch.optim.AdamW(other.parameters(), lr=0.5)
    opt.load_state_dict(saved["optimizer"])
    assert_trains_alike(other, alone, steps=2, optimizer=[opt, opts[1]], data=data)


# Graphs that are kept or cut, and forwards inside forwards.


@case(2, reshard=RESHARD)
def backward_twice(api: Api, reshard: Any) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    loss = square_loss(model, batch(0, dist.get_rank()))
    loss.backward(retain_graph=True)
    loss.backward()
    _average_backward(alone, 0)
    _average_backward(alone, 0)
    assert_same_gradients(model, alone)
    model.zero_grad()
    alone.zero_grad()
    assert_trains_alike(model, alone)


@case(2, reshard=RESHARD)
def evaluation_before_backward(api: Api, reshard: Any) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("adamw", model, alone)
    for step in range(2):
        loss = square_loss(model, batch(step, dist.get_rank()))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert_close(model(batch(9, 0)), alone(batch(9, 0)), "evaluation")
        loss.backward()
        _average_backward(alone, step)
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


class Cut(Stack):
    """Two outputs whose graphs do not meet."""

    def forward(self, x: torch.Tensor) -> Any:
        y = self.layers[0](x)
        return self.head(self.layers[1](y.detach())), y


@case(2, reshard=RESHARD)
def a_backward_for_each_output(api: Api, reshard: Any) -> None:
    alone, model = twins(Cut)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("adamw", model, alone)
    for step in range(3):
        outputs = model(batch(step, dist.get_rank()))
        for i in (0, 1):
            outputs[i].square().mean().backward()
            _average_backward(alone, step, lambda m, x, i=i: m(x)[i].square().mean())
            assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


Pair = namedtuple("Pair", "y note")


class Noted(Block):
    """Returns something that is not its result, or not only."""

    def __init__(self, kind: str) -> None:
        super().__init__(WIDTH, 16)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return {
            "namedtuple": Pair(y, "kept"),
            "none": None,
            "text": "done",
            "shape": y.shape,
            "detached": y.detach(),
        }[self.kind]


class Beside(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.noted, self.head = Noted(kind), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
        found = self.noted(x)
        return found, self.head(found.y if isinstance(found, Pair) else x)


@case(2, kind=("namedtuple", "none", "text", "shape", "detached"))
def outputs_that_lead_nowhere(api: Api, kind: str) -> None:
    """A block without a tensor to go back from gets no gradient, and nobody waits for it."""
    alone, model = twins(Beside, kind)
    api.fully_shard(
        model.noted,
        mesh=line(),
        reshard_after_forward=True,
        mp_policy=api.MixedPrecisionPolicy(output_dtype=torch.float32),
    )
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone, loss=lambda m, x: m(x)[1].square().mean())
    assert type(model(batch(0, 0))[0]) is type(alone(batch(0, 0))[0])


class Speaks(Stack):
    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    def generate(self, x: torch.Tensor, tokens: int = 3) -> torch.Tensor:
        for _ in range(tokens):
            x = self(x) + self.embed(x)
        return x


@case(2, reshard=RESHARD)
def methods_that_call_forward(api: Api, reshard: Any) -> None:
    """A registered method runs forward several times and another registered method in between."""
    alone, model = twins(Speaks)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    for name in ("embed", "generate"):
        api.register_fsdp_forward_method(model, name)
    opts = optimizers_of("adamw", model, alone)
    with torch.no_grad():
        assert_close(model.generate(batch(9, 0)), alone.generate(batch(9, 0)), "generated")

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.generate(x, tokens=2).square().mean()

    assert_trains_alike(model, alone, optimizer=opts, loss=loss)
