"""Inputs and faults of docs/cases.md that concern a sharded model itself, by their number there."""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw
from tests.parity.models import Block
from tests.ranks import Ranks

WIDTH = 8


class Net(nn.Module):
    """Two blocks and a head; what a case needs besides is switched on."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(Block(WIDTH, 16) for _ in range(2))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(WIDTH).float(), persistent=False)
        self.how = ""

    def forward(self, x: torch.Tensor) -> Any:
        for layer in self.layers:
            x = layer(x)
        if self.how == "extra":
            x = self.extra(x)
        if self.how == "leak":
            x = x @ self.layers[0].up.weight.t() @ self.layers[0].down.weight.t()
        return self.head(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


class Opaque:
    """Holds a tensor where nobody looks."""

    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


@dataclass
class Answer:
    loss: torch.Tensor
    parts: dict[str, list[torch.Tensor]]


class Viewing(Net):
    """Its blocks return views, which are changed in place; its answer is nested (17, 18)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, WIDTH // 2)), Flat())
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> Answer:
        for layer in self.layers:
            x = layer(x)
            x += 1
        return Answer(self.head(x).square().mean(), {"seen": [x]})


class Flat(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flatten(1)


def _data(i: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(i))


def _wrapped(model: nn.Module, way: str) -> Any:
    if way == "plan":
        return sw.shard(model, sw.Plan.of("zero3", mesh=dist.get_world_size()))
    for layer in model.layers:
        sw.fully_shard(layer)
    return sw.fully_shard(model)


def _says(kind: type[Exception], phrase: str, function: Any, *args: Any) -> None:
    with pytest.raises(kind, match=phrase):
        function(*args)


WAYS = ("plan", "fully_shard")


def _uneven_use(policy: str) -> None:
    model = Net()
    sw.shard(model, sw.Plan.of("zero3", mesh=2, unused=policy))
    model.how = "extra" if dist.get_rank() == 0 else ""
    loss = model(_data()).sum()
    if policy == "error":
        _says(RuntimeError, r"'extra\.(bias|weight)' was used on some ranks only", loss.backward)
        return
    loss.backward()
    alone = Net()
    alone.how = "extra"
    alone(_data()).sum().backward()
    whole = model.extra.weight.grad.full_tensor()
    assert torch.allclose(whole, alone.extra.weight.grad, rtol=1e-6)


@pytest.mark.parametrize("policy", ["zeros", "error"])
def test_8_used_on_some_ranks(two: Ranks, policy: str) -> None:
    two.run(_uneven_use, policy)


def _other_method() -> None:
    model = _wrapped(Net(), "fully_shard")
    model.set_reshard_after_forward(True)
    model(_data()).sum().backward()
    phrase = r"'head\.(weight|bias)' was read.*register_fsdp_forward_method\(module, 'encode'\)"
    with pytest.raises(RuntimeError) as caught:
        model.encode(_data())
    text = str(caught.value)
    assert "'head." in text and "register_fsdp_forward_method(module, 'encode')" in text, phrase
    sw.register_fsdp_forward_method(model, "encode")
    model.zero_grad()
    model.encode(_data()).sum().backward()
    alone = Net()
    alone.encode(_data()).sum().backward()
    got = model.head.weight.grad.full_tensor()
    assert torch.allclose(got, alone.head.weight.grad, rtol=1e-6)


def _other_method_of_a_plan(name: str) -> None:
    """The model's, and those of a part that is a unit; what is none stays as it is."""
    alone, model = Net(), Net()
    sw.shard(model, sw.Plan.of(name, mesh=2))
    for each in ("encode", "no_such_method"):
        sw.register_fsdp_forward_method(model.head, each)  # no unit runs with it
    sw.register_fsdp_forward_method(model, "encode")
    with pytest.raises(ValueError, match="does not have a method no_such_method"):
        sw.register_fsdp_forward_method(model, "no_such_method")
    for _ in range(2):
        model.zero_grad()
        alone.zero_grad()
        (model.encode(_data()).sum() / 2).backward()
        alone.encode(_data()).sum().backward()
        grad = model.head.weight.grad
        got = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert torch.allclose(got, alone.head.weight.grad, rtol=1e-6)


def test_15_methods_other_than_forward(two: Ranks) -> None:
    two.run(_other_method)
    for name in ("zero3", "ddp"):
        two.run(_other_method_of_a_plan, name)


def _read_outside(way: str) -> None:
    model = _wrapped(Net(), way)
    model.how = "leak"
    _says(RuntimeError, r"(?s)mixed.*'layers\.0\.up\.weight' was read outside", model, _data())


@pytest.mark.parametrize("way", WAYS)
def test_16_read_outside_its_unit(two: Ranks, way: str) -> None:
    two.run(_read_outside, way)


def _views(way: str) -> None:
    torch.manual_seed(0)
    alone = Viewing()
    model = _wrapped(copy.deepcopy(alone), way)
    ranks = dist.get_world_size() if way == "plan" else 1
    (model(_data()).loss / ranks).backward()
    alone(_data()).loss.backward()
    for (name, parameter), reference in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        if reference.grad is None:
            assert parameter.grad is None, name
        else:
            assert torch.allclose(parameter.grad.full_tensor(), reference.grad, rtol=1e-5), name


@pytest.mark.parametrize("way", WAYS)
def test_17_18_views_changed_in_place_and_nested_answers(two: Ranks, way: str) -> None:
    two.run(_views, way)


class Wrapped(nn.Module):
    """A block that gives and takes objects of a class that nobody can look into."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Any) -> Opaque:
        return Opaque(self.block(x.y if isinstance(x, Opaque) else x))


class Hiding(Net):
    """Where its answer, or what its blocks return, hides the tensors (18)."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "blocks":
            self.layers = nn.ModuleList(Wrapped(layer) for layer in self.layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        if self.where == "blocks":
            return self.head(x.y)
        y = self.head(x)
        return (part for part in [y]) if self.where == "generator" else Opaque(y)


def _answer(model: Any, x: torch.Tensor) -> torch.Tensor:
    found = model(x)
    if isinstance(found, torch.Tensor):
        return found
    return found.y if isinstance(found, Opaque) else next(found)


def _opaque(way: str, where: str) -> None:
    alone, model = Hiding(where), Hiding(where)
    ranks = dist.get_world_size()
    if way in ("plan", "fully_shard"):
        _wrapped(model, way)
    else:
        sw.shard(model, sw.Plan.of(way, mesh=ranks))
    opts = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(3):
        batches = [_data(10 * step + rank) for rank in range(ranks)]
        for x in batches:
            (_answer(alone, x).square().mean() / ranks).backward()
        loss = _answer(model, batches[dist.get_rank()]).square().mean()
        (loss if way == "fully_shard" else loss / ranks).backward()
        with torch.no_grad():
            _answer(model, _data())
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for name, got in sw.full_state_dict(model).items():
        expected = alone.state_dict()[name]
        assert torch.allclose(got, expected, rtol=1e-5, atol=1e-7), name
    model.eval()
    with torch.no_grad():
        assert _answer(model, _data()).shape == (4, WIDTH)


@pytest.mark.parametrize("where", ["answer", "generator", "blocks"])
@pytest.mark.parametrize("way", [*WAYS, "zero2", "ddp"])
def test_18_answers_that_hide_their_tensors(two: Ranks, way: str, where: str) -> None:
    two.run(_opaque, way, where)


class Labelled(dict[str, Any]):
    """Made of more than its pairs."""

    def __init__(self, label: str, **pairs: Any) -> None:
        super().__init__(**pairs)
        self.label = label


class Row(list[Any]):
    """Made of its items one by one."""

    def __init__(self, *items: Any) -> None:
        super().__init__(items)


@dataclass(frozen=True)
class Counted:
    y: torch.Tensor
    count: int = field(default=0, init=False)


def _counted(y: torch.Tensor) -> Counted:
    made = Counted(y)
    object.__setattr__(made, "count", 3)
    return made


HELD: dict[str, tuple[Any, Any]] = {  # how a tensor is put in, and taken out with what is beside it
    "defaultdict": (
        lambda y: defaultdict(list, y=y),
        lambda held: (held["y"], held["more"] == [] and type(held) is defaultdict),
    ),
    "dict": (lambda y: Labelled("a", y=y), lambda held: (held["y"], held.label == "a")),
    "list": (lambda y: Row(y, 3), lambda held: (held[0], held[1] == 3 and type(held) is Row)),
    "set": (lambda y: {y}, lambda held: (*held, type(held) is set)),
    "dataclass": (_counted, lambda held: (held.y, held.count == 3)),
}


class Hands(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, held: Any) -> Any:
        put, take = HELD[self.kind]
        x, kept = take(held)
        assert kept
        return put(self.fc(x))


@pytest.mark.parametrize("kind", HELD)
def test_18_what_is_cast_keeps_all_else_that_its_container_holds(kind: str) -> None:
    put, take = HELD[kind]
    plan = sw.Plan.of("zero3", mesh=1, compute_dtype="bfloat16", output_dtype="float32")
    model = sw.shard(Hands(kind), plan)
    given = put(_data())
    y, kept = take(model(given))
    assert kept
    assert y.dtype == torch.float32
    assert take(given)[0].dtype == torch.float32  # the caller's own is left alone
    y.sum().backward()
    assert model.fc.weight.grad is not None


CHANGES: dict[str, tuple[Any, str]] = {
    "parameter": (
        lambda m: m.register_parameter("more", nn.Parameter(torch.zeros(3))),
        "parameter 'more' was added, removed or replaced",
    ),
    "module": (
        lambda m: m.add_module("more", nn.Linear(2, 2)),
        "module 'more' .Linear. was added, removed or replaced",
    ),
    "replaced-module": (
        lambda m: setattr(m, "head", nn.Linear(WIDTH, WIDTH)),
        "module 'head' .Linear. was added, removed or replaced",
    ),
    "replaced-parameter": (
        lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(WIDTH, WIDTH))),
        "parameter 'head.weight' was replaced after sharding by a Tensor",
    ),
    "removed-parameter": (
        lambda m: delattr(m.head, "bias"),
        "removed",
    ),
}


ADDED = ("parameter", "module")  # trained as torch does it: by each rank, with a warning


def _changed(way: str, change: str, early: bool = False) -> None:
    model = _wrapped(Net(), way)
    if not early:
        model(_data()).sum().backward()
    function, phrase = CHANGES[change]
    function(model)
    if way == "fully_shard" and change in ADDED:
        with pytest.warns(UserWarning, match="more.* each rank trains its own"):
            model(_data()).sum().backward()
        return
    _says(RuntimeError, phrase, model, _data())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", CHANGES)
def test_20_the_model_changes_after_sharding(two: Ranks, way: str, change: str) -> None:
    two.run(_changed, way, change)


def _different(way: str, mended: str) -> None:
    model = Net(seed=dist.get_rank())
    if mended == "before":
        sw.broadcast(model)
    model = _wrapped(model, way)
    if mended == "after":
        sw.broadcast(model)
    if mended == "loaded":
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
    phrase = "ranks start from different values: '[a-z.0-9]+' is not the same"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if way == "plan" and not mended:
            _says(RuntimeError, phrase, model, _data())
        else:
            model(_data())
    said = [w for w in caught if "different values" in str(w.message)]
    assert bool(said) == (way == "fully_shard" and not mended)
    if mended == "before":
        whole = sw.full_state_dict(model)["head.weight"]
        assert torch.equal(whole, Net(seed=0).head.weight)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mended", ["", "before", "after", "loaded"])
def test_21_different_initial_values(two: Ranks, way: str, mended: str) -> None:
    two.run(_different, way, mended)


def _materialized(way: str) -> None:
    with torch.device("meta"):
        model = Net()
    model = _wrapped(model, way)
    model.layers[0].up.weight.untouched = True
    missing = sw.materialize(model)
    assert missing == ["table"], missing
    assert model.layers[0].up.weight.untouched
    assert not any(p.is_meta for p in (*model.parameters(), *model.buffers()))
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert sw.materialize(model) == []
    whole = sw.full_state_dict(model)
    assert (whole["layers.0.norm.weight"] == 1).all()
    bound = WIDTH**-0.5
    assert 0 < whole["layers.1.up.weight"].abs().max() <= bound
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(_data()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(_data()).square().mean() < loss


@pytest.mark.parametrize("way", WAYS)
def test_22_meta_device(two: Ranks, way: str) -> None:
    two.run(_materialized, way)


def _tied_across() -> None:
    alone, model = Net(), Net()
    for each in (alone, model):
        each.layers[1].up.weight = each.layers[0].up.weight
    for layer in model.layers:
        sw.fully_shard(layer)
    sw.fully_shard(model)
    assert model.layers[1].up.weight is model.layers[0].up.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(3):
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            each(_data(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    whole = sw.full_state_dict(model)
    for name, value in alone.state_dict().items():
        assert torch.allclose(whole[name], value, rtol=1e-5, atol=1e-7), name
    assert torch.equal(whole["layers.0.up.weight"], whole["layers.1.up.weight"])


def test_2_a_tie_across_groups_of_fully_shard(two: Ranks) -> None:
    two.run(_tied_across)


def _kept_and_stepped() -> None:
    """torch would compute with the old parameters here."""
    alone, model = Net(), _wrapped(Net(), "fully_shard")
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(3):
        losses = []
        for each, optimizer in zip((alone, model), optimizers, strict=True):
            loss = each(_data(step)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        assert torch.allclose(*losses, rtol=1e-6), (step, losses)


def test_parameters_kept_after_backward_follow_the_optimizer(two: Ranks) -> None:
    two.run(_kept_and_stepped)


def _strided() -> None:
    alone, model = Net(), Net()
    for each in (alone, model):
        each.head.weight = nn.Parameter(each.head.weight.detach().t())
    _wrapped(model, "fully_shard")
    model(_data()).sum().backward()
    alone(_data()).sum().backward()
    got = model.head.weight.grad.full_tensor()
    assert torch.allclose(got, alone.head.weight.grad, rtol=1e-6)


def test_parameters_that_are_not_contiguous(two: Ranks) -> None:
    two.run(_strided)


def _old_gradients() -> None:
    """A gradient that somebody keeps is theirs."""
    model = _wrapped(Net(), "fully_shard")
    model(_data()).sum().backward()
    kept = model.head.weight.grad
    value = kept.full_tensor()
    model.zero_grad()
    model(_data(1)).sum().backward()
    assert model.head.weight.grad is not kept
    assert torch.equal(kept.full_tensor(), value)


def test_gradients_that_somebody_keeps(two: Ranks) -> None:
    two.run(_old_gradients)


class Half(Block):
    """A block of which a rank may use a part."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 16)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.both = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.other(y) if self.both else y


def _half_used(way: str) -> None:
    alone = Net()
    alone.layers = nn.ModuleList(Half() for _ in range(3))
    model = _wrapped(copy.deepcopy(alone), way)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(3):
        for i in range(ranks):
            for layer in alone.layers:
                layer.both = i == 0
            (alone(_data(step)).square().mean() / ranks).backward()
        for layer in model.layers:
            layer.both = rank == 0
        loss = model(_data(step)).square().mean()
        (loss / ranks if way == "plan" else loss).backward()
        for (name, parameter), reference in zip(
            model.named_parameters(), alone.parameters(), strict=True
        ):
            if reference.grad is not None:
                got = parameter.grad.full_tensor()
                assert torch.allclose(got, reference.grad, rtol=1e-5, atol=1e-8), (step, name)
        model.zero_grad()
        alone.zero_grad()


@pytest.mark.parametrize("way", WAYS)
def test_8_a_rank_uses_half_of_a_block(two: Ranks, way: str) -> None:
    two.run(_half_used, way, timeout=40)


class Skipping(Net):
    """Leaves its first block out, or runs blocks of different shapes in another order (8, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(WIDTH, 16), Block(WIDTH, 24)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.layers)
        if self.how == "skip":
            layers = layers[1:]
        if self.how == "turn":
            layers.reverse()
        for layer in layers:
            x = layer(x)
        return self.head(x)


def _another_way(way: str, how: str) -> None:
    model = _wrapped(Skipping(), way)
    model.how = how if dist.get_rank() == 1 else ""
    _says(RuntimeError, r"different units as number \d.*rank 0: .*rank 1: ", model, _data())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("how", ["skip", "turn"])
def test_8_10_ranks_run_different_units(two: Ranks, way: str, how: str) -> None:
    two.run(_another_way, way, how, timeout=40)


@pytest.mark.parametrize("change", ["parameter", "module", "replaced-module", "replaced-parameter"])
def test_20_the_model_changes_before_its_first_forward(two: Ranks, change: str) -> None:
    two.run(_changed, "fully_shard", change, True)


def _clipped_with_ignored() -> None:
    """26: sharded and whole parameters under one norm."""
    alone, model = Net(), Net()
    ignored = set(model.head.parameters())
    sw.fully_shard(model, ignored_params=ignored)
    for each in (alone, model):
        each(_data()).square().mean().backward()
    norm = sw.clip_grad_norm(model, 0.01)
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01)
    assert torch.allclose(norm, expected, rtol=1e-5)
    for (name, parameter), reference in zip(
        model.named_parameters(), alone.parameters(), strict=True
    ):
        if reference.grad is not None:
            grad = parameter.grad
            got = grad.full_tensor() if isinstance(grad, DTensor) else grad
            assert torch.allclose(got, reference.grad, rtol=1e-4), name


def test_26_clipping_with_ignored_parameters(two: Ranks) -> None:
    two.run(_clipped_with_ignored)


def _not_finite(policy: str) -> None:
    """25: one rank's loss is infinite; every rank decides the same."""
    from shardwise.trainer.config import OptimConfig
    from shardwise.trainer.loop import _take_step

    class Summing(Net):
        def forward(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return super().forward(x).square().sum() * targets

    model = sw.shard(Summing(), sw.Plan.of("zero3", mesh=2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = sw.full_state_dict(model)
    scale = torch.tensor(float("inf") if dist.get_rank() == 1 else 1.0)
    optim = OptimConfig(nonfinite=policy)
    _, norm, took = _take_step(model, optimizer, [(_data(), scale)], 8, optim)
    assert not torch.isfinite(norm)
    assert took == (policy == "error")
    if policy == "skip":
        after = sw.full_state_dict(model)
        assert all(torch.equal(before[name], after[name]) for name in before)
        _, norm, took = _take_step(model, optimizer, [(_data(), torch.tensor(1.0))], 8, optim)
        assert took and torch.isfinite(norm)


@pytest.mark.parametrize("policy", ["skip", "error"])
def test_25_gradients_that_are_not_finite(two: Ranks, policy: str) -> None:
    two.run(_not_finite, policy)
