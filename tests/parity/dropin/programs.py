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
from torch.distributed._composable.contract import _get_registry
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor

from tests.parity.dropin.catalog import ENGINES, Api, case
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
    """What torch's helpers and tests ask of it: also before and after the root is known."""
    model = wrap(api, Stack(), mesh=line())
    root, inner = api.fully_shard.state(model), api.fully_shard.state(model.layers[0])
    assert root is model._get_fsdp_state() and inner is not root
    assert api.fully_shard.state(model.head) is None
    assert root._is_root is None and inner._is_root is None and not root._state_ctx.all_states
    root._lazy_init()
    assert root._is_root is True and inner._is_root is False
    layers = [api.fully_shard.state(layer) for layer in model.layers]
    assert root._state_ctx.all_states == [root, *layers]
    assert inner._state_ctx is root._state_ctx
    assert {m: "fully_shard" in (_get_registry(m) or {}) for m in model.modules()} == {
        m: isinstance(m, api.FSDPModule) for m in model.modules()
    }
    assert _fsdp_state._get_module_fsdp_state(model) is root
    parts = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    api.fully_shard(list(parts), mesh=line())
    with raises(RuntimeError, "requires a single root module but got"):
        api.fully_shard.state(parts[0])._lazy_init()
    early = wrap(api, Stack(), mesh=line())
    api.fully_shard.state(early.layers[0])._lazy_init()
    with raises(RuntimeError, "already been lazily initialized for layers.0\n.*root module first"):
        api.fully_shard.state(early)._lazy_init()


@case(2)
def a_newer_pipeline_stage(api: Api) -> None:
    """What newer torch's pipelines do with a stage after they tried it out, and after the last
    micro-batch: every name that they use is answered, and gradients are those of one process.
    """
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=False)
    square_loss(model, batch(9, 0)).backward()  # the stage is tried out
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            if module._get_fsdp_state()._is_root and hasattr(module, "reset_iter_state"):
                module.reset_iter_state()
            module.reshard()
            for parameter in module.parameters():
                parameter.grad = None
    ranks = dist.get_world_size()
    for micro in range(2):
        model.set_is_last_backward(False)
        model.set_reshard_after_backward(False)
        model.set_requires_gradient_sync(False)
        square_loss(model, batch(micro, dist.get_rank())).backward()
        for i in range(ranks):
            (square_loss(alone, batch(micro, i)) / ranks).backward()
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    state = api.fully_shard.state(model)
    for each in state._state_ctx.all_states:
        for group in getattr(each, "_fsdp_param_groups", [each._fsdp_param_group]):
            if group is not None:  # an older torch's pipelines ask, too
                group.post_backward()
    state._root_post_backward_final_callback()
    for module in model.modules():
        if isinstance(module, api.FSDPModule):
            module.reshard()
    assert_same_gradients(model, alone)


# Transforms of torch.func.


# An older torch's engine does not know them.
TRANSFORMS = ENGINES if hasattr(_fsdp_state, "RegisterPreBackwardFunction") else ("shardwise",)


@case(2, engines=TRANSFORMS, warm=(False, True), reshard=(True, False))
def jvp(api: Api, warm: bool, reshard: bool) -> None:
    """Values, tangents, and the gradients of both; also as the first forward there is."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    if warm:
        square_loss(model, batch(9, 0)).backward()
        model.zero_grad()

    def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        value, tangent = torch.func.jvp(model, (x,), (x.flip(0),))
        return value.square().mean() + tangent.square().mean()

    assert_trains_alike(model, alone, loss=loss)
    x = batch(3, dist.get_rank())
    expected = torch.func.grad(lambda x: alone(x).sum())(x)
    assert_close(torch.func.grad(lambda x: model(x).sum())(x), expected, "gradient of the input")


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
