"""Settings of the engine change how it moves, never what it computes."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.description.recompute import run_again
from shardwise.description.workload import Recomputing
from shardwise.engine import gradients, uncaught
from shardwise.engine.engine import engine_of
from shardwise.schedule.unit import State
from tests.parity.models import (
    VOCABULARY,
    Block,
    Model,
    OddBlock,
    build,
    loss_sum,
    token_batch,
)
from tests.parity.oracle import difference, train_alone
from tests.parity.training import compare, compare_many
from tests.ranks import Ranks

BOUND = 1e-6
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed": ("zero3", {"gather": "packed"}),
    "grouped": ("zero3", {"gather": "grouped"}),
    "each": ("zero3", {"gather": "each"}),
    "no-prefetch": ("zero3", {"forward_prefetch": 0, "backward_prefetch": 0}),
    "deep-prefetch": ("zero3", {"forward_prefetch": 3, "backward_prefetch": 2}),
    "deep-reduce": ("zero3", {"reduce_depth": 4}),
    "keep-all": ("zero3", {"keep_after_forward": True}),
    "keep-none": ("zero3", {"keep_after_forward": False}),
    "by-class": ("zero3", {"units": [Block]}),
    "by-pattern": ("zero3", {"units": ["layers.*", "head"]}),
    "by-count": ("zero3", {"units": 50}),
    "merged": ("zero3", {"bucket_bytes": 3000}),
    "leaves": ("zero3", {"units": [nn.Linear, nn.LayerNorm]}),
    "zero2-by-count": ("zero2", {"units": 50}),
    "zero1-small": ("zero1", {"bucket_bytes": 200}),
    "reduce-f64": ("zero3", {"reduce_dtype": "float64"}),
    "ddp-reduce-f64": ("ddp", {"reduce_dtype": "float64"}),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_do_not_change_the_result(two: Ranks, setting: str) -> None:
    name, settings = SETTINGS[setting]
    cases = [
        (("odd", name, 2, "adamw", (2, 2), dtype), {"settings": {**settings, "sync": sync}})
        for dtype, sync in (("float32", "each"), ("bfloat16", "last"))
    ]
    for errors in two.run(compare_many, cases):
        assert max(errors) <= BOUND


@pytest.mark.parametrize("gather", ("packed", "each"))
def test_keeping_in_a_smaller_group(four: Ranks, gather: str) -> None:
    settings = {"keep_after_forward": 2, "gather": gather}
    cases = [
        (("odd", "zero3", 4, "adamw", (2,) * 4, dtype), {"settings": settings})
        for dtype in ("float32", "bfloat16")
    ]
    for errors in four.run(compare_many, cases):
        assert max(errors) <= BOUND


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_torchs_own_step_equals_the_flat_one(two: Ranks, name: str) -> None:
    cases = [
        ((kind, name, 2, opt, (2, 2), dtype), {"by_torch": True})
        for kind in ("even", "odd")
        for opt in ("sgd", "adamw")
        for dtype in ("float32", "bfloat16")
    ]
    for errors in two.run(compare_many, cases):
        assert max(errors) <= BOUND


@pytest.mark.parametrize("sync", ("scatter_each_reduce_last", "last"))
@pytest.mark.parametrize(
    ("name", "mesh", "counts"),
    [
        ("hsdp", (2, 2), (3, 3, 1, 1)),
        ("hsdp", (2, 2), (2, 2, 0, 0)),
        ("ddp", 4, (2, 0, 1, 3)),
        ("ddp", 4, (0, 1, 1, 0)),
    ],
)
def test_uneven_work_is_weighted_by_tokens(
    four: Ranks, name: str, mesh: Any, counts: tuple[int, ...], sync: str
) -> None:
    """Cases 11 and 12: replicas run different numbers of micro-batches, also none."""
    cases = [
        ((kind, name, mesh, "adamw", counts, "float32"), {"settings": {"sync": sync}})
        for kind in ("even", "odd")
    ]
    for errors in four.run(compare_many, cases):
        assert max(errors) <= BOUND


def test_one_rank_is_the_same_path() -> None:
    """World size 1, no process group needed: parameters are still DTensors, numbers are one
    process's.
    """
    for name in ("ddp", "zero1", "zero2", "zero3"):
        for dtype in ("float32", "bfloat16"):
            assert compare("odd", name, 1, "adamw", (2,), dtype) <= BOUND


def _plain_loop(name: str, backwards: int) -> float:
    """No sw.microbatches: every backward is a step of its own, gradients add up until zero_grad."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=world))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        batches = [token_batch(step, i) for i in range(world * backwards)]
        total = sum(b.numel() for b in batches)
        for i in range(backwards):
            tokens = batches[rank * backwards + i]
            (loss_sum(model(tokens), tokens) / total).backward()
        sw.clip_grad_norm(model, 1.0)
        opt.step()
        opt.zero_grad()
    expected = train_alone("odd", "float32", "adamw", (backwards,) * world)
    return difference(sw.full_state_dict(model), expected)


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_backward_without_microbatches_accumulates(two: Ranks, name: str) -> None:
    assert max(two.run(_plain_loop, name, 1)) <= BOUND
    assert max(two.run(_plain_loop, name, 2)) <= BOUND


def _two_forwards(name: str, one_backward: bool) -> float:
    """Case 13: two forwards before a backward, together or apart."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=world))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        batches = [token_batch(step, i) for i in range(2 * world)]
        total = sum(b.numel() for b in batches)
        mine = batches[2 * rank : 2 * rank + 2]
        losses = [loss_sum(model(tokens), tokens) / total for tokens in mine]
        if one_backward:
            (losses[0] + losses[1]).backward()
        else:
            losses[0].backward()
            losses[1].backward()
        sw.clip_grad_norm(model, 1.0)
        opt.step()
        opt.zero_grad()
    expected = train_alone("odd", "float32", "adamw", (2,) * world)
    return difference(sw.full_state_dict(model), expected)


@pytest.mark.parametrize("one_backward", (True, False))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_two_forwards_before_a_backward(two: Ranks, name: str, one_backward: bool) -> None:
    assert max(two.run(_two_forwards, name, one_backward)) <= BOUND


class Looped(Model):
    """Case 13: every block is called twice, in another order the second time."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *reversed(self.layers)]:
            x = layer(x)
        return self.head(x)


class Checkpointed(Model):
    """Case 14: activation checkpointing of each block."""

    reentrant = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class Reentrant(Checkpointed):
    reentrant = True


class KeptProducts(Checkpointed):
    """Blocks with units inside, recomputed but for attention and every other product."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = run_again(Recomputing(keeps_products=True), True, layer, x)
        return self.head(x)


class InnerBlock(OddBlock):
    """Checkpoints inside its own forward: recomputation never calls the unit's module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class InnerCheckpointed(Model):
    block = InnerBlock


class TiedCheckpointed(Checkpointed):
    """The same matrix in two checkpointed blocks: its gradient arrives twice in one backward."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.layers[1].up.weight = self.layers[0].up.weight


class TiedReentrant(TiedCheckpointed):
    reentrant = True


class Compiled(Model):
    """`torch.compile` of individual blocks before sharding, by both spellings."""

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self.layers[0].compile(backend="aot_eager")
        self.layers[1] = torch.compile(self.layers[1], backend="aot_eager")


KINDS: dict[str, type[Model]] = {
    c.__name__: c
    for c in (
        Looped,
        Checkpointed,
        Reentrant,
        KeptProducts,
        InnerCheckpointed,
        TiedCheckpointed,
        TiedReentrant,
        Compiled,
    )
}


def _train_kind(kind: str, name: str, mesh: Any, settings: dict[str, Any]) -> tuple[float, dict]:
    """A model class under a Plan against the same class in one process."""
    rank, world = dist.get_rank(), dist.get_world_size()
    odd = {"odd": True, "width": 7, "inner": 13}
    torch.manual_seed(0)
    alone = KINDS[kind](**odd)
    torch.manual_seed(0)
    model = sw.shard(KINDS[kind](**odd), sw.Plan.of(name, mesh=mesh, **settings))
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (alone, model)]
    for step in range(4):
        batches = [token_batch(step, i) for i in range(world)]
        total = sum(b.numel() for b in batches)
        for tokens in batches:
            (loss_sum(alone(tokens), tokens) / total).backward()
        with sw.record() as log:
            (loss_sum(model(batches[rank]), batches[rank]) / total).backward()
        for _, opt in pairs:
            opt.step()
            opt.zero_grad()
    return difference(sw.full_state_dict(model), dict(alone.state_dict())), log.counts()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_unusual_forwards(two: Ranks, kind: str, name: str) -> None:
    for error, _ in two.run(_train_kind, kind, name, 2, {}):
        assert error <= BOUND


@pytest.mark.parametrize("kind", ("Checkpointed", "Reentrant", "InnerCheckpointed", "Compiled"))
@pytest.mark.parametrize("inner", ("zero2", "zero3"))
def test_unusual_forwards_in_hybrid(four: Ranks, kind: str, inner: str) -> None:
    for error, _ in four.run(_train_kind, kind, "hsdp", (2, 2), {"inner": inner}):
        assert error <= BOUND


@pytest.mark.parametrize("kind", ("Checkpointed", "Reentrant"))
def test_checkpointing_gathers_no_more_than_needed(two: Ranks, kind: str) -> None:
    """Case 14: once for forward and once for backward, whether or not the block is recomputed."""
    settings = {"gather": "packed", "units": [Block]}
    for _, counts in two.run(_train_kind, kind, "zero3", 2, settings):
        # OddBlock has float and integer parameters: two units per block, and a root.
        assert counts["all_gather"] == 2 * 2 * 3 + 1


class Folded(nn.Module):
    """Calls itself; its parameters are read when the inner call is over."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.9))

    def forward(self, x: torch.Tensor, times: int = 2) -> torch.Tensor:
        if times:
            x = self(x, times - 1)
        return torch.tanh(self.dense(x)) * self.scale


class Head(nn.Module):
    """Its own bias is read last, inside a module whose weight is the embedding's."""

    def __init__(self, width: int, embed: nn.Embedding) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(embed.num_embeddings))
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, embed.num_embeddings)
        self.decoder.weight, self.decoder.bias = embed.weight, self.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(self.dense(x)))


class Nested(nn.Module):
    """Units by bytes have modules inside each other, and one runs three times (as ALBERT's)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 12)
        self.lead, self.folded, self.last = nn.Linear(12, 12), Folded(12), nn.Linear(12, 12)
        self.head = Head(12, self.embed)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.folded(torch.tanh(self.last(self.lead(x))))
        return self.head(x)


def _train_nested(name: str, settings: dict[str, Any]) -> tuple[float, int]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Nested()
    torch.manual_seed(0)
    plan = sw.Plan.of(name, mesh=world, **settings).resolve(Nested())
    assert plan.units is not None
    torch.manual_seed(0)
    model = sw.shard(Nested(), plan)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=1e-2)) for m in (alone, model)]
    for step in range(3):
        batches = [token_batch(step, i) for i in range(world)]
        for tokens in batches:
            (loss_sum(alone(tokens), tokens) / 100).backward()
        (loss_sum(model(batches[rank]), batches[rank]) / 100).backward()
        for _, opt in pairs:
            opt.step()
            opt.zero_grad()
    most = max(len(unit.modules) for unit in plan.units)
    return difference(sw.full_state_dict(model), dict(alone.state_dict())), most


@pytest.mark.parametrize("bucket_bytes", (None, 2000, 4000))
@pytest.mark.parametrize("name", ("zero1", "zero2", "zero3"))
def test_modules_of_a_unit_inside_each_other(
    two: Ranks, name: str, bucket_bytes: int | None
) -> None:
    for error, modules in two.run(_train_nested, name, {"bucket_bytes": bucket_bytes}):
        assert error <= BOUND and modules > 1


def _half(dtype: str, name: str) -> list[float]:
    """Losses of a small run in 16 bits; fp32 masters must stay fp32."""
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = sw.Plan.of(name, mesh=world, compute_dtype=dtype, output_dtype="float32")
    model = sw.shard(build("even"), plan)
    opt = sw.local(torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(20):
        tokens = token_batch(0, rank)
        logits = model(tokens)
        assert logits.dtype == torch.float32
        loss = loss_sum(logits, tokens) / (tokens.numel() * world)
        loss.backward()
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        opt.step()
        opt.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ("ddp", "zero2", "zero3"))
@pytest.mark.parametrize("dtype", ("float16", "bfloat16"))
def test_sixteen_bits_learn_with_full_masters(two: Ranks, dtype: str, name: str) -> None:
    for losses in two.run(_half, dtype, name):
        assert losses[-1] < 0.5 * losses[0]


def _no_grad_forward(name: str) -> tuple[float, bool]:
    world = dist.get_world_size()
    alone, model = build("odd"), sw.shard(build("odd"), sw.Plan.of(name, mesh=world))
    tokens = token_batch(0, 0)
    names = [n for n, _ in alone.named_parameters()]
    with torch.no_grad():
        error = (alone(tokens) - model(tokens)).abs().max().item()
        error = max(error, (alone(tokens) - model(tokens)).abs().max().item())
    visible = dict(model.named_parameters())
    sharded = [isinstance(p, DTensor) for p in visible.values()]
    return error, list(visible) == names and set(sharded) == {name != "ddp"}


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_evaluation_leaves_the_model_as_it_was(two: Ranks, name: str) -> None:
    for error, same in two.run(_no_grad_forward, name):
        assert error < 1e-6
        assert same


def _input_penalty(model: Any, x: torch.Tensor) -> torch.Tensor:
    """Of the gradient of the input, with another forward between it and its own backward."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean() + model(x.detach()).square().mean()


def _penalised(name: str) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()

    def build_net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Sequential(*[Block(8, 16) for _ in range(3)]), nn.Linear(8, 2))

    alone, model = build_net(), build_net()
    if name == "drop-in":
        for module in (*model[0], model):  # type: ignore[index,misc]
            sw.fully_shard(module)
    else:
        sw.shard(model, sw.Plan.of(name, mesh=world, average=True))
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for batch in torch.randn(3, world, 4, 8, generator=torch.Generator().manual_seed(1)):
        _input_penalty(model, batch[rank]).backward()
        states = {unit.name: unit.state for unit in engine_of(model).units}
        assert set(states.values()) == {State.FREE}, states
        for each in batch:
            (_input_penalty(alone, each) / world).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return difference(sw.full_state_dict(model), alone.state_dict())


@pytest.mark.parametrize("name", ("zero2", "zero3", "drop-in"))
def test_a_gradient_penalty(two: Ranks, name: str) -> None:
    """A backward goes through the graph that another one made of itself: what that one had
    gathered stays until then, and no longer.
    """
    assert max(two.run(_penalised, name)) < BOUND


def _left_by_transforms(name: str) -> list[tuple[str, ...]]:
    """What stays gathered after transforms of torch.func whose gradients nobody goes through, and
    what one through which a backward goes needs.
    """
    torch.manual_seed(0)
    alone = nn.Sequential(*[Block(8, 16) for _ in range(3)], nn.Linear(8, 2))
    model: Any = copy.deepcopy(alone)
    if name == "drop-in":
        for module in (*model[:3], model):
            sw.fully_shard(module)
    else:
        sw.shard(model, sw.Plan.of(name, dist.get_world_size()))
    x = torch.linspace(-1, 1, 32).view(4, 8)
    left = []

    def square(m: nn.Module, at: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = functional_call(m, {}, (at,))
        return made.square().mean()

    def note() -> None:
        units = engine_of(model).units
        left.append(tuple(u.name for u in units if u.state is not State.FREE and not u.is_root))

    with torch.no_grad():
        for transform in (grad, vjp_of_one, jacrev, lambda f: vmap(grad(f)), hessian):
            at = x[:1] if transform is hessian else x
            found, wanted = (transform(partial(square, m))(at) for m in (model, alone))
            torch.testing.assert_close(found, wanted)
            note()
    found = grad(partial(square, model))(x)
    del found
    model(x)
    note()
    for m in (model, alone):
        grad(partial(square, m))(x).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        if q.grad is not None:
            ranks = 1 if name == "drop-in" else dist.get_world_size()  # of the same batch
            torch.testing.assert_close(p.grad.full_tensor(), ranks * q.grad)
    note()
    return left


def vjp_of_one(function: Any) -> Any:
    return lambda x: vjp(function, x)[1](torch.tensor(1.0))


@pytest.mark.parametrize("name", ("zero2", "zero3", "drop-in"))
def test_transforms_leave_nothing_gathered(two: Ranks, name: str) -> None:
    for left in two.run(_left_by_transforms, name):
        if name == "zero2":  # one forward without a backward
            left.pop(-2)
        assert set(left) == {()}, left


class Beside(nn.Module):
    """Keeps a loss of what is inside, and returns what its `head`, which then goes unused, makes of
    it: with a gradient or without.
    """

    def __init__(self, detached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList(Block(8, 16) for _ in range(2))
        self.head = nn.Linear(8, 2)
        self.detached = detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x = x * self.scale
        self.loss = x.square().mean()
        return self.head(x).detach() if self.detached else self.head(x)


def _beside(name: str, detached: bool) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = sw.Plan.of(name, mesh=world, average=True)
    alone, model = Beside(detached), sw.shard(Beside(detached), plan)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    batches = torch.randn(3, world, 4, 8, generator=torch.Generator().manual_seed(1))
    for batch in batches:
        model(batch[rank])
        model.loss.backward()
        for each in batch:
            alone(each)
            (alone.loss / world).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return difference(sw.full_state_dict(model), alone.state_dict())


@pytest.mark.parametrize("detached", (False, True))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_a_loss_that_is_kept_beside_the_output(two: Ranks, name: str, detached: bool) -> None:
    """No gradient comes to what the model returns: the first one that is complete tells. And what
    the root keeps for backward is there, though its output carries no gradient.
    """
    assert max(two.run(_beside, name, detached)) < BOUND


class Aside(nn.Module):
    """Makes a loss of its output and its own parameters, which is no part of what it returns."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.scale = nn.Parameter(torch.full((8,), 1.1))
        self.head = nn.Linear(8, 2)
        self.where = where

    def forward(self, x: torch.Tensor, kept: list[torch.Tensor]) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        if self.where != "hook":
            aside = self.head(torch.sin(out * self.scale)).square().mean()
        if self.where == "list":
            kept.append(aside)
        elif self.where == "attribute":
            self.loss = aside
        return out


class WithAsides(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Aside(where) for _ in range(3))
        self.last = nn.Linear(8, 2)
        self.kept: list[torch.Tensor] = []
        self.where = where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x, self.kept)
        return self.last(x)

    def losses(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output's, and those that were kept."""
        self.kept.clear()
        made = self(x).square().mean()
        if self.where == "attribute":
            self.kept = [block.loss for block in self.blocks]  # type: ignore[misc]
        aside, self.kept = torch.stack(self.kept).sum(), []
        return made, aside


def _keep_by_hooks(model: Any) -> None:
    for block in model.blocks:
        block.down.register_forward_hook(
            lambda down, _, out, block=block: model.kept.append(
                (out @ down.weight).square().mean() + (out * block.scale).sin().mean()
            )
        )


def _asides(name: str, where: str, use: str) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = WithAsides(where), WithAsides(where)
    if name == "drop-in":
        for module in (*model.blocks, model):
            sw.fully_shard(module)
    else:
        sw.shard(model, sw.Plan.of(name, mesh=world, average=True))
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]

    def train(m: Any, x: torch.Tensor, share: int) -> None:
        made, aside = (loss / share for loss in m.losses(x))
        if use == "one after the other":
            made.backward(retain_graph=True)
            aside.backward()
        else:
            (made + aside if use == "together" else aside).backward()

    for step, batch in enumerate(torch.randn(4, world, 4, 8, generator=_seeded(1))):
        if where == "hook" and step == 1:  # hung after a first step
            _keep_by_hooks(model)
            _keep_by_hooks(alone)
        if where == "hook" and step == 0:
            model(batch[rank]).square().mean().backward()
            for each in batch:
                (alone(each).square().mean() / world).backward()
        else:
            train(model, batch[rank], 1)
            for each in batch:
                train(alone, each, world)
        for opt in opts:
            opt.step()
            opt.zero_grad()
        states = {u.name: u.state for u in engine_of(model).units if u.options.keep is not True}
        # The first step shows where losses are kept: until the next one all stays.
        assert step == 0 or name != "zero3" or set(states.values()) == {State.FREE}, states
    return difference(sw.full_state_dict(model), alone.state_dict())


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("use", ("together", "alone", "one after the other"))
@pytest.mark.parametrize("where", ("attribute", "list", "hook"))
@pytest.mark.parametrize("name", ("ddp", "zero2", "zero3", "drop-in"))
def test_a_loss_that_a_block_keeps_aside(two: Ranks, name: str, where: str, use: str) -> None:
    """Backward reads parameters of a block before any gradient comes to what the block returned:
    its unit is gathered then. (torch reads where no memory is.)
    """
    assert max(two.run(_asides, name, where, use)) < BOUND


def _freed_reads() -> str:
    """A loss that nobody can see, of a parameter that was read again behind its block's back."""
    model = sw.shard(WithAsides("hook"), sw.Plan.of("zero3", mesh=dist.get_world_size()))
    model(torch.ones(4, 8)).sum().backward()
    block: Any = model.blocks[0]
    kept: dict[str, torch.Tensor] = {}

    class Hidden(nn.Module):
        def forward(self, out: torch.Tensor) -> torch.Tensor:
            kept["loss"] = (out * block.scale).sin().mean()
            return out

    forward = block.forward
    block.forward = lambda x, kept: Hidden()(forward(x, kept))
    model(torch.ones(4, 8))
    try:
        kept["loss"].backward()
    except RuntimeError as error:
        uncaught.explain(error)
        return str(error)
    return "no error"


def test_a_read_of_freed_parameters_is_an_error(two: Ranks) -> None:
    """Not the end of the process."""
    for said in two.run(_freed_reads):
        assert "shape [8]" in said and "keep it on the block" in said


class Stepping(nn.Module):
    """A block that moves its input against the gradient of an energy of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.energy, self.rate = Block(8, 16), nn.Parameter(torch.full((8,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = x.detach().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(self.energy(start).square().mean(), start)
        return self.energy(x - self.rate * slope)


class BackwardInside(nn.Module):
    """Runs a backward in its forward, and goes on with its own parameters and its blocks'."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(Block(8, 16), Stepping(), Block(8, 16))
        self.scale, self.head = nn.Parameter(torch.full((8,), 1.1)), nn.Linear(8, 2)
        self.kind = kind

    def forward(self, x: torch.Tensor, share: int) -> torch.Tensor:
        made: torch.Tensor = self.net(x) * self.scale
        if self.kind == "cut":  # the head's part in pieces, as for a long sequence
            cut = made.detach().requires_grad_()
            for piece in cut.chunk(2):
                (self.head(piece).square().sum() / share).backward()
            assert cut.grad is not None
            return (made * cut.grad).sum()
        loss = self.head(made).square().mean() / share
        if self.kind == "block":
            return loss
        loss.backward()
        if self.kind == "ends":
            return loss.detach()
        return self.head(self.net(-x) * self.scale).square().mean() / share


def _backward_inside(name: str, kind: str) -> float:
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = BackwardInside(kind), BackwardInside(kind)
    if name == "drop-in":
        for module in (*model.net, model):
            sw.fully_shard(module)
    else:
        plan = sw.Plan.of(name, mesh=world, units=["net.*"], average=True)
        sw.shard(model, plan)
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    for batch in torch.randn(3, world, 4, 8, generator=_seeded(1)):
        for m, rows, share in ((model, batch[rank : rank + 1], 1), (alone, batch, world)):
            for each in rows:
                loss = m(each, share)
                if loss.requires_grad:
                    loss.backward()
        states = {u.name: u.state for u in engine_of(model).units if not u.is_root}
        assert set(states.values()) == {State.FREE} or name in ("ddp", "zero1"), states
        for opt in opts:
            opt.step()
            opt.zero_grad()
    if kind == "block":
        with torch.no_grad():
            assert (model(batch[0], 1) - alone(batch[0], 1)).abs() < BOUND
    return difference(sw.full_state_dict(model), alone.state_dict())


@pytest.mark.parametrize("kind", ("ends", "goes on", "cut", "block"))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3", "drop-in"))
def test_a_backward_inside_of_a_forward(two: Ranks, name: str, kind: str) -> None:
    """What runs meanwhile stays gathered, and in its place, until its forward has ended."""
    assert max(two.run(_backward_inside, name, kind)) < BOUND


def _thaw(name: str, by_torch: bool) -> float:
    """Freeze a matrix after two steps and thaw another; equals one process doing the same."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = build("even"), sw.shard(build("even"), sw.Plan.of(name, mesh=world))
    for m in (alone, model):
        m.layers[0].up.weight.requires_grad_(False)
    opts = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (alone, model)]
    if by_torch:
        opts[1].register_step_pre_hook(lambda *_: None)
    for step in range(6):
        if step == 3:
            for m in (alone, model):
                m.layers[0].up.weight.requires_grad_(True)
                m.layers[2].down.weight.requires_grad_(False)
        batches = [token_batch(step, i) for i in range(world)]
        total = sum(b.numel() for b in batches)
        for tokens in batches:
            (loss_sum(alone(tokens), tokens) / total).backward()
        (loss_sum(model(batches[rank]), batches[rank]) / total).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    return difference(sw.full_state_dict(model), dict(alone.state_dict()))


@pytest.mark.parametrize("by_torch", (False, True))
@pytest.mark.parametrize("name", ("ddp", "zero2", "zero3"))
def test_freezing_and_thawing_between_steps(two: Ranks, name: str, by_torch: bool) -> None:
    assert max(two.run(_thaw, name, by_torch)) <= BOUND


def _penalty(name: str) -> float:
    """`torch.autograd.grad` in between accumulates nothing, so nothing is reduced or attached."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=world))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[torch.Tensor] = []
    model.embed.register_forward_hook(lambda _m, _a, out: seen.append(out))
    for step in range(5):
        batches = [token_batch(step, i) for i in range(world)]
        total = sum(b.numel() for b in batches)
        seen.clear()
        loss = loss_sum(model(batches[rank]), batches[rank])
        (slope,) = torch.autograd.grad(loss, seen[0])
        assert slope.shape == seen[0].shape
        assert all(p.grad is None for p in model.parameters())
        (loss_sum(model(batches[rank]), batches[rank]) / total).backward()
        sw.clip_grad_norm(model, 1.0)
        opt.step()
        opt.zero_grad()
    expected = train_alone("odd", "float32", "adamw", (1,) * world)
    return difference(sw.full_state_dict(model), expected)


def _gradient_of_an_output(settings: dict[str, Any]) -> None:
    """`torch.autograd.grad` of an output alone begins a backward that runs no unit."""
    torch.manual_seed(0)
    alone, model = Model(), Model()
    model.load_state_dict(alone.state_dict())
    sw.shard(model, sw.Plan.of("zero3", mesh=dist.get_world_size(), average=True, **settings))
    for step in range(2):
        for each in (alone, model):
            out = each(token_batch(step, 0))
            (gradient,) = torch.autograd.grad(out.square().mean(), [out], retain_graph=True)
            (out * gradient).sum().backward()
        for p, q in zip(model.parameters(), alone.parameters(), strict=True):
            assert torch.allclose(p.grad.full_tensor(), q.grad, atol=1e-6)
        model.zero_grad()
        alone.zero_grad()


def test_gradients_of_an_output_alone(four: Ranks) -> None:
    for settings in ({"keep_after_forward": 2}, {"keep_after_forward": 2, "backward_prefetch": 3}):
        four.run(_gradient_of_an_output, settings)


@pytest.mark.parametrize("name", ("ddp", "zero2", "zero3"))
def test_gradients_of_inputs_alone(two: Ranks, name: str) -> None:
    assert max(two.run(_penalty, name)) <= BOUND


class Fragile(Model):
    """Raises in the backward of its second block when told to."""

    fail = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if self.fail and i == 1:
                x.register_hook(self._raise)
        return self.head(x)

    @staticmethod
    def _raise(_: torch.Tensor) -> None:
        raise ArithmeticError("planted")


def _recover(name: str) -> float:
    """All ranks catch the same failure in backward, and go on with the next batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = sw.shard(Fragile(odd=True, width=7, inner=13), sw.Plan.of(name, mesh=world))
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5):
        batches = [token_batch(step, i) for i in range(world)]
        total = sum(b.numel() for b in batches)
        model.fail = True
        with pytest.raises(ArithmeticError, match="planted"):
            loss_sum(model(batches[rank]), batches[rank]).backward()
        model.fail = False
        (loss_sum(model(batches[rank]), batches[rank]) / total).backward()
        sw.clip_grad_norm(model, 1.0)
        opt.step()
        opt.zero_grad()
    expected = train_alone("odd", "float32", "adamw", (1,) * world)
    return difference(sw.full_state_dict(model), expected)


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_a_backward_that_failed_is_forgotten(two: Ranks, name: str) -> None:
    assert max(two.run(_recover, name)) <= BOUND


class PartlyFrozen(nn.Module):
    """Trainable after frozen, in one unit: the frozen matrix is needed after all gradients came."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3)
        )
        for layer in self.layers:
            layer[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x) + layer(2 * x)
        return x


def _partly_frozen(leaf_input: bool) -> None:
    torch.manual_seed(0)
    alone = PartlyFrozen()
    torch.manual_seed(0)
    model = sw.shard(PartlyFrozen(), sw.Plan.of("zero3", mesh=dist.get_world_size()))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1), requires_grad=leaf_input)
    for _ in range(3):
        gradients = []
        for m in (alone, model):
            x.grad = None
            m.zero_grad()
            m(x).square().sum().backward()
            gradients.append(None if x.grad is None else x.grad.clone())
        if leaf_input:
            torch.testing.assert_close(*gradients)
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            if q.grad is None:
                assert p.grad is None, name
            else:
                torch.testing.assert_close(p.grad.full_tensor(), dist.get_world_size() * q.grad)


@pytest.mark.parametrize("leaf_input", (True, False))
def test_partly_frozen_units(two: Ranks, leaf_input: bool) -> None:
    two.run(_partly_frozen, leaf_input)


# Data parallel on a host: gradients go to the message as they come


def train_placing(least: int) -> list[float]:
    """Steps whose gradients of at least so many bytes are placed as they come: with micro-batches
    that add up, other dtypes, parameters that nobody uses, and one that comes twice in a backward.
    Then a backward that fails midway, and a step after it.
    """
    before, gradients.PLACED_FROM_BYTES = gradients.PLACED_FROM_BYTES, least
    try:
        cases = [
            ((kind, "ddp", 2, "adamw", (2, 2), dtype), {"settings": {"sync": sync}})
            for kind, dtype, sync in (
                ("odd", "float32", "each"), ("odd", "bfloat16", "last"), ("even", "float32", "last")
            )
        ]  # fmt: skip
        return [*compare_many(cases), *(_twice(fails) for fails in (False, True))]
    finally:
        gradients.PLACED_FROM_BYTES = before


def _twice(fails: bool) -> float:
    """Two re-entrant checkpoints of one layer: its gradients come twice. The spare has none."""

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.inner = nn.ModuleDict({"layer": nn.Linear(8, 8), "spare": nn.Linear(8, 8)})
            self.breaks = False

        def forward(self) -> torch.Tensor:
            x = torch.full((2, 8), 0.5, requires_grad=True)
            for _ in range(2):
                x = checkpoint(self.inner["layer"], x, use_reentrant=True)
                if self.breaks:
                    x.register_hook(_raise)
            return x.square().sum()

    alone, model = Root(), sw.shard(Root(), sw.Plan.of("ddp", dist.get_world_size()))
    for each in (alone, model):
        if fails and each is model:
            model.breaks = True
            with pytest.raises(ZeroDivisionError):
                model().backward()
            model.breaks = False
        each().backward()
    assert model.inner["spare"].weight.grad is None
    expected = alone.inner["layer"].weight.grad * dist.get_world_size()
    return float((model.inner["layer"].weight.grad - expected).abs().max() / expected.abs().max())


def _raise(_: torch.Tensor) -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("least", (0, 200, 2**40))
def test_gradients_are_placed_as_they_come_or_together(two: Ranks, least: int) -> None:
    for errors in two.run(train_placing, least):
        assert max(errors) <= BOUND


def peak_of_gradients() -> int:
    """The most gradients of a backward that are held at once."""
    torch.manual_seed(0)
    model = sw.shard(
        nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(6)]),
        sw.Plan.of("ddp", dist.get_world_size()),
    )
    (unit,) = engine_of(model).units
    held = []
    for shown in unit.gradients.shown:
        shown.register_post_accumulate_grad_hook(
            lambda _: held.append(sum(each.grad is not None for each in unit.gradients.shown))
        )
    model(torch.randn(2, 128)).sum().backward()
    assert len(held) == 6
    return max(held)


def test_a_backward_holds_no_gradients_beside_the_message(two: Ranks) -> None:
    assert two.run(peak_of_gradients) == [0, 0]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
        self.out = nn.Linear(6 * 36, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.conv(x)).flatten(1))


def _train_normed(name: str, own_unit: bool) -> bool:
    """A batch norm in 16 bits keeps its statistics, and computes with a rounded scale in 32."""
    torch.manual_seed(0)
    alone, model = Normed(), Normed()
    model.load_state_dict(alone.state_dict())
    for parameter in alone.parameters():
        parameter.data = parameter.data.bfloat16()
    x = torch.linspace(-1, 1, 2 * 3 * 64).view(2, 3, 8, 8)
    conv, norm, out = alone.conv, alone.norm, alone.out
    made = functional.batch_norm(
        conv(x.bfloat16()), norm.running_mean, norm.running_var, norm.weight.float(),
        norm.bias.float(), training=True, momentum=norm.momentum,
    )  # fmt: skip
    expected = out(made.flatten(1))
    units: Any = [nn.BatchNorm2d, nn.Linear] if own_unit else None
    plan = sw.Plan.of(name, 2, units=units, compute_dtype="bfloat16", reduce_dtype="float32")
    found = sw.shard(model, plan)(x)
    expected.float().square().sum().backward()
    found.float().square().sum().backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    grads = all(
        torch.equal(_whole(mine.grad), 2 * whole.grad.float())  # type: ignore[union-attr, arg-type]
        for whole, mine in pairs
    )
    kept = model.norm.running_mean
    assert kept is not None and kept.dtype == torch.float32
    return torch.equal(found, expected) and grads and torch.equal(kept, norm.running_mean)


def _whole(gradient: Any) -> torch.Tensor:
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


@pytest.mark.parametrize("name", ["zero3", "ddp"])
@pytest.mark.parametrize("own_unit", [False, True])
def test_a_norm_with_statistics_trains_in_16_bits(two: Ranks, name: str, own_unit: bool) -> None:
    assert all(two.run(_train_normed, name, own_unit))


class Generating(nn.Module):
    """One layer computes with a matrix that another one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.makes = nn.Linear(4, 8), nn.Linear(8, 64)
        self.block, self.layer, self.head = Block(8, 16), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        made = self.makes(x.mean(0)).view(8, 8)
        return self.head(functional_call(self.layer, {"weight": made}, (x,)))


def _lend(name: str, settings: dict[str, Any], compiled: bool) -> None:
    """`functional_call` computes with what it is given, and the parameters stay what they were."""
    torch.manual_seed(0)
    alone, model = Generating(), Generating()
    model.load_state_dict(alone.state_dict())
    plan = sw.Plan.of(name, mesh=2, average=True, **settings)
    if compiled:
        torch._dynamo.reset()
        sw.compile(model, plan, backend="graph")
    else:
        sw.shard(model, plan)
    x, bias = torch.randn(4, 4), torch.randn(2)
    for _ in range(2):
        for each in (alone, model):
            opt = torch.optim.AdamW(each.parameters(), lr=0.1)
            each(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            functional_call(each, {"head.bias": bias}, (x,)).square().mean().backward()
            assert each.head.bias.grad is None and each.layer.weight.grad is None
            opt.step()
            opt.zero_grad()
        ours, theirs = sw.full_state_dict(model), alone.state_dict()
        assert difference(ours, theirs) < BOUND, name


@pytest.mark.filterwarnings("ignore:Generating is run by the engine's hooks")
@pytest.mark.parametrize("compiled", [False, True])
def test_tensors_lent_for_a_call(two: Ranks, compiled: bool) -> None:
    for name in ("ddp", "zero1", "zero2", "zero3"):
        two.run(_lend, name, {}, compiled)
    two.run(_lend, "zero3", {"units": [nn.Linear]}, compiled)


class Halving(nn.Module):
    """One layer computes with half of its own matrix, which is read before it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = {"weight": self.layer.weight * 0.5}
        return self.head(functional_call(self.layer, half, (self.stem(x),)))


def _lend_a_part(name: str) -> None:
    model = sw.shard(Halving(), sw.Plan.of(name, mesh=2, units=[nn.Linear]))
    with pytest.raises(RuntimeError, match="was read outside the forward of its unit"):
        model(torch.ones(2, 4))


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_rows_lent_for_a_call_are_an_error(two: Ranks, name: str) -> None:
    two.run(_lend_a_part, name)
