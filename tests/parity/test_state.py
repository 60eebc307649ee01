"""Whole state dicts, broadcasts, and odd parameters: cases 5, 6 and 7."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard

import shardwise as sw
from tests.parity.models import build, loss_sum, token_batch
from tests.ranks import Ranks


def _state(name: str, inner: dict[str, str]) -> None:
    """Names, shapes, dtypes and values are the unsharded model's; ties stay ties."""
    world = dist.get_world_size()
    alone = build("odd")
    alone.register_buffer("ticks", torch.arange(4))
    model = build("odd")
    model.register_buffer("ticks", torch.arange(4))
    mesh = (2, world // 2) if name == "hsdp" else world
    sw.shard(model, sw.Plan.of(name, mesh=mesh, **inner))
    got, expected = sw.full_state_dict(model), alone.state_dict()
    assert list(got) == list(expected)
    for key, value in expected.items():
        assert torch.equal(got[key], value), key
        assert got[key].dtype == value.dtype
    assert got["head.weight"] is got["embed.weight"]
    assert model.head.weight is model.embed.weight
    only = sw.full_state_dict(model, rank0_only=True, device="cpu")
    assert list(only) == (list(expected) if dist.get_rank() == 0 else [])


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3", "hsdp"))
def test_full_state_dict_is_the_unsharded_one(four: Ranks, name: str) -> None:
    four.run(_state, name, {"inner": "zero2"} if name == "hsdp" else {})


class Counted(nn.Linear):
    """With a state that is no tensor."""

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"seen": 3}


def _turn(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """The state dict of old: another name, and the transposed weight."""
    state[prefix + "old"] = state.pop(prefix + "weight").detach().mT


def _renamed() -> None:
    """A wrapper that takes its prefix out of names, a hook that changes names and values, and a
    state that is no tensor.
    """

    def make() -> nn.Sequential:
        torch.manual_seed(3)
        hooked = nn.Linear(6, 5)
        hooked._register_state_dict_hook(_turn)
        return nn.Sequential(checkpoint_wrapper(nn.Linear(7, 6)), hooked, Counted(5, 3))

    expected = make().state_dict()
    assert "1.old" in expected and "0.weight" in expected
    model = sw.shard(make(), sw.Plan.of("zero3", mesh=dist.get_world_size()))
    for got in (sw.full_state_dict(model), sw.full_state_dict(model, rank0_only=True)):
        if got or dist.get_rank() == 0:
            assert set(got) == set(expected)
            assert got.pop("2._extra_state") == {"seen": 3}
            assert all(torch.equal(value, expected[key]) for key, value in got.items())
            assert not any(isinstance(value, DTensor) for value in got.values())


def test_names_and_values_that_hooks_change_are_whole(two: Ranks) -> None:
    two.run(_renamed)


def _whole_is_loaded(name: str, settings: dict[str, Any]) -> None:
    """What an unsharded model's `state_dict` gives, as a checkpoint of torch's has it."""
    torch.manual_seed(5)
    other = build("odd")
    with torch.no_grad():
        for parameter in filter(torch.is_floating_point, other.parameters()):
            parameter.normal_()
    tokens = token_batch(0, dist.get_rank())
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=dist.get_world_size()))
    for loading in (model, copy.deepcopy(model)):
        loss_sum(loading(tokens), tokens).backward()
        assert not any(loading.load_state_dict(other.state_dict(), **settings))
        got = sw.full_state_dict(loading)
        assert all(torch.equal(got[key], value) for key, value in other.state_dict().items())
    short = other.state_dict() | {"head.weight": torch.ones(2, 7)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        model.load_state_dict(short)


@pytest.mark.parametrize("settings", ({}, {"assign": True}), ids=("copied", "assigned"))
@pytest.mark.parametrize("name", ("ddp", "zero2", "zero3"))
def test_whole_states_are_loaded(two: Ranks, name: str, settings: dict[str, Any]) -> None:
    two.run(_whole_is_loaded, name, settings)


def _placements(name: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = (2, world // 2) if name == "hsdp" else world
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=mesh))
    n = world // 2 if name == "hsdp" else world
    tokens = token_batch(0, rank)
    loss_sum(model(tokens), tokens).backward()
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), key
        inner = Replicate() if parameter.dim() == 0 else Shard(0)
        assert parameter.placements == ((Replicate(), inner) if name == "hsdp" else (inner,)), key
        whole = torch.empty(parameter.shape, device="meta")
        if parameter.dim():
            chunks = list(whole.chunk(n)) + [whole[:0]] * n
            assert parameter.to_local().shape == chunks[rank % n].shape, key
        if parameter.requires_grad and "idle" not in key:
            assert isinstance(parameter.grad, DTensor), key
            assert parameter.grad.placements == parameter.placements
            assert parameter.grad.to_local().shape == parameter.to_local().shape
        else:
            assert parameter.grad is None, key  # frozen, integer, or used on no rank (case 9)


@pytest.mark.parametrize("name", ("zero3", "hsdp"))
def test_parameters_and_gradients_are_dtensors(four: Ranks, name: str) -> None:
    four.run(_placements, name)


class Strange(nn.Module):
    """0-d, empty, single-row, integer, boolean and 8-bit parameters, and no block to cut by."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.row = nn.Parameter(torch.ones(1, 5))
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True, True]), requires_grad=False)
        code = torch.arange(5).to(torch.float8_e4m3fn)  # of a dtype that gloo moves none of
        self.code = nn.Parameter(code, requires_grad=False)
        self.fc = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.fc(x * self.row * self.mask * self.scale + self.code.float()) + self.table[2]
        return y.sum() + self.nothing.sum()


def _strange(name: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    alone = Strange()
    torch.manual_seed(0)
    model = sw.shard(Strange(), sw.Plan.of(name, mesh=world))
    opts = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (alone, model)]
    for step in range(4):
        xs = [
            torch.randn(2, 5, generator=torch.Generator().manual_seed(9 * step + r))
            for r in range(world)
        ]
        for x in xs:
            alone(x).backward()
        model(xs[rank]).backward()
        ours = sw.clip_grad_norm(model, 0.7)
        theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.7)
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    got = sw.full_state_dict(model)
    for key, value in alone.state_dict().items():
        assert got[key].shape == value.shape and got[key].dtype == value.dtype
        torch.testing.assert_close(got[key].double(), value.double(), rtol=1e-5, atol=1e-6)
    sw.broadcast(model)
    assert torch.equal(sw.full_state_dict(model)["code"].float(), alone.code.float())


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_strange_parameters_train(four: Ranks, name: str) -> None:
    """Cases 5, 6 and 7: 0-d, fewer rows than ranks, empty, integer."""
    four.run(_strange, name)


def _broadcast(name: str, sharded: bool) -> None:
    """Different initial values per rank; afterwards all ranks hold the same."""
    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = (2, world // 2) if name == "hsdp" else world
    model = build("odd", seed=rank)
    model.register_buffer("ticks", torch.full((3,), float(rank)))
    model.layers[0].gate.data.fill_(float(rank))
    if sharded:
        sw.shard(model, sw.Plan.of(name, mesh=mesh))
        sw.broadcast(model)
    else:
        sw.broadcast(model)
        sw.shard(model, sw.Plan.of(name, mesh=mesh))
    state = sw.full_state_dict(model)
    assert state["ticks"].tolist() == [0.0] * 3
    assert state["layers.0.gate"].item() == 0.0
    if not sharded:
        first = build("odd", seed=0).state_dict()
        assert torch.equal(state["embed.weight"], first["embed.weight"])
    for key, value in state.items():
        everyone = [torch.empty_like(value) for _ in range(world)]
        dist.all_gather(everyone, value.contiguous())
        assert all(torch.equal(value, other) for other in everyone), key


@pytest.mark.parametrize("sharded", (False, True))
@pytest.mark.parametrize("name", ("ddp", "zero3", "hsdp"))
def test_broadcast_gives_everyone_the_same(four: Ranks, name: str, sharded: bool) -> None:
    four.run(_broadcast, name, sharded)


def _partly_frozen() -> tuple[int, int]:
    """Case 4: frozen parameters take no gradient memory."""
    from shardwise.engine.engine import (
        engine_of,
    )

    model = build("even")
    model.layers[0].up.weight.requires_grad_(False)
    sw.shard(model, sw.Plan.of("zero3", mesh=2))
    loss_sum(model(token_batch(0, 0)), token_batch(0, 0)).backward()
    units = {unit.name: unit for unit in engine_of(model).units}
    sizes = [units[n].gradients.flat.nbytes for n in ("layers.0", "layers.1")]
    return sizes[0], sizes[1]


def test_frozen_parameters_take_no_gradient_memory(two: Ranks) -> None:
    for partly, wholly in two.run(_partly_frozen):
        assert wholly - partly == 8 * 16 * 4 // 2


def _memory_comes_and_goes() -> dict[str, list[int]]:
    """Bytes of full parameters and gradients, before, after forward, after backward, after step."""
    from shardwise.engine.engine import (
        engine_of,
    )

    model = sw.shard(build("even"), sw.Plan.of("zero3", mesh=2))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    units = engine_of(model).units
    seen: dict[str, list[int]] = {"full": [], "gradients": []}

    def look() -> None:
        seen["full"].append(sum(u.parameters.full.untyped_storage().nbytes() for u in units))
        held = [u.gradients.flat for u in units if u.gradients.flat is not None]
        seen["gradients"].append(sum(flat.nbytes for flat in held))

    tokens = token_batch(0, 0)
    look()
    loss = loss_sum(model(tokens), tokens)
    look()
    loss.backward()
    look()
    opt.step()
    opt.zero_grad()
    model(tokens)
    look()
    return seen


def test_memory_is_there_only_while_needed(two: Ranks) -> None:
    root = 4 * (11 * 8 + (11 + 1) * 8)  # embedding and head; the head's 11 rows padded to 12
    root += 4 * 8  # as is the embedding
    shards = 4 * (root // 8 + 3 * (2 * 8 + 2 * 8 * 16 + 16 + 8) // 2)
    for seen in two.run(_memory_comes_and_goes):
        assert seen["full"] == [0, root, 0, root]
        assert seen["gradients"] == [0, 0, shards, 0]
