"""A plain optimizer over sharded parameters: its step runs on local rows, and nobody can tell."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.engine import local_step
from shardwise.engine.parameter_runs import ELEMENTWISE
from tests.ranks import Ranks

KINDS = {kind.__name__: kind for kind in ELEMENTWISE}
SETTINGS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.01, "momentum": 0.9},
    "ASGD": {"lr": 0.01, "t0": 1},
}
SWITCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
    "fused": {"fused": True},
}
FUSED = ("Adam", "AdamW")
# What torch 2.13 cannot do with DTensors (no sharding rule), but anybody can with rows.
BEYOND_TORCH = (("SGD", "fused"), ("Adagrad", "fused"), ("Rprop", "default"))


def make() -> nn.Module:
    """Uneven rows: the second rank has fewer of each, and none of some."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1))


def shard_by(api: Any, model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model, model):
        api.fully_shard(module, mesh=mesh)
    return model


def loss_of(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 5, generator=draw)).pow(2).mean()


def train(model: nn.Module, optimizer: Any, steps: int, unused: bool = False) -> None:
    for step in range(steps):
        loss_of(model, step, dist.get_rank()).backward()
        if unused and step % 2:
            model[1].bias.grad = None
        optimizer.step()
        optimizer.zero_grad()


def took(optimizer: Any) -> bool:
    """Whether the steps of this optimizer ran on local rows."""
    known = optimizer.__dict__.get(local_step._KEY)
    return known is not None and any(group.runs for group in known.groups)


def same_everywhere(ours: Any, theirs: Any, where: str) -> None:
    """Equal bit for bit, of the same kind, with the same placements."""
    assert type(ours) is type(theirs), f"{where}: {type(ours)} against {type(theirs)}"
    if isinstance(theirs, DTensor):
        assert ours.placements == theirs.placements, where
        assert ours.shape == theirs.shape, where
        ours, theirs = ours.to_local(), theirs.to_local()
    if isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, msg=lambda m: f"{where}: {m}")
    else:
        assert ours == theirs, where


def same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        assert list(ours["state"][index]) == list(state), index
        for key, value in state.items():
            same_everywhere(ours["state"][index][key], value, f"state {index} {key}")
    assert ours["param_groups"] == theirs["param_groups"]


def pair(kind: str, switch: str = "default") -> list[tuple[nn.Module, torch.optim.Optimizer]]:
    """The same model and optimizer under shardwise and under torch."""
    models = [shard_by(api, make()) for api in (sw, fsdp)]
    settings = SETTINGS.get(kind, {}) | SWITCHES[switch]
    return [(model, KINDS[kind](model.parameters(), **settings)) for model in models]


def _trains_alike(kind: str) -> None:
    for switch in SWITCHES:
        if switch != "fused" or kind in FUSED:
            _compare(kind, switch)


def _beside_one_process(kind: str, switch: str) -> None:
    alone, ours = make(), shard_by(sw, make())
    settings = SETTINGS.get(kind, {}) | SWITCHES[switch]
    plain, mine = (KINDS[kind](m.parameters(), **settings) for m in (alone, ours))
    train(ours, mine, 4)
    for step in range(4):
        for rank in range(dist.get_world_size()):
            (loss_of(alone, step, rank) / dist.get_world_size()).backward()
        plain.step()
        plain.zero_grad()
    assert took(mine)
    for (name, p), q in zip(ours.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q, msg=lambda m, n=name: f"{n}: {m}")


def _compare(kind: str, switch: str) -> None:
    """Parameters and state, bit for bit, with a gradient missing at times and a state dict loaded
    half way.
    """
    both = pair(kind, switch)
    for model, optimizer in both:
        train(model, optimizer, 3, unused=True)
        saved = copy.deepcopy(optimizer.state_dict())
        train(model, optimizer, 1)
        optimizer.load_state_dict(saved)
        train(model, optimizer, 2)
    (ours, mine), (theirs, other) = both
    assert took(mine)
    assert not took(other)
    same_state(mine.state_dict(), other.state_dict())
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same_everywhere(p.detach(), q.detach(), name)
        assert mine.state[p].keys() == other.state[q].keys()


def _follows_the_program(change: str) -> None:
    """What a program may do to its optimizer between steps counts in the next one."""
    both = pair("AdamW", "fused")
    for model, optimizer in both:
        train(model, optimizer, 2)
        first = next(iter(model.parameters()))
        if change == "state":
            optimizer.state[first]["exp_avg"] = torch.zeros_like(first)
        elif change == "in place":
            optimizer.state[first]["exp_avg_sq"].mul_(4.0)
        elif change == "dropped":
            del optimizer.state[first]
        elif change == "group":
            last = optimizer.param_groups[0]["params"].pop()
            optimizer.add_param_group({"params": [last], "lr": 0.1})
        elif change == "rate":
            optimizer.param_groups[0]["lr"] = 0.1
        elif change == "plain":
            extra = nn.Parameter(torch.ones(3))
            extra.grad = torch.ones(3)
            optimizer.add_param_group({"params": [extra]})
        elif change == "memory":
            model._apply(torch.clone)
        train(model, optimizer, 2)
    (ours, mine), (theirs, other) = both
    assert took(mine)
    same_state(mine.state_dict(), other.state_dict())
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same_everywhere(p.detach(), q.detach(), name)


def _leaves_alone(why: str) -> None:
    """Hooks, closures and other optimizers take torch's own way, with the same result."""
    both = pair("AdamW", "fused")
    for model, optimizer in both:
        seen: list[int] = []

        def look(optimizer: Any, *_: Any, seen: list[int] = seen) -> None:
            seen.append(len(optimizer.param_groups[0]["params"]))

        if why == "pre hook":
            optimizer.register_step_pre_hook(look)
        elif why == "post hook":
            optimizer.register_step_post_hook(look)
        train(model, optimizer, 2)
        if why == "closure":
            loss = optimizer.step(lambda m=model: m(torch.ones(2, 5)).sum())
            assert loss is not None
            optimizer.zero_grad()
        else:
            assert seen == [6, 6]
        train(model, optimizer, 1)
    (ours, mine), (theirs, other) = both
    assert took(mine) == (why == "closure")
    same_state(mine.state_dict(), other.state_dict())
    for (name, p), q in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        same_everywhere(p.detach(), q.detach(), name)


def _survives_an_error() -> None:
    """A step that fails leaves the optimizer with its parameters and state."""
    model = shard_by(sw, make())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    train(model, optimizer, 2)
    before = list(optimizer.param_groups[0]["params"])
    model(torch.ones(2, 5)).sum().backward()
    optimizer.param_groups[0]["betas"] = ("nonsense", None)
    with pytest.raises((TypeError, ValueError, RuntimeError)):
        optimizer.step()
    assert all(a is b for a, b in zip(optimizer.param_groups[0]["params"], before, strict=True))
    assert all(isinstance(v["exp_avg"], DTensor) for v in optimizer.state.values())
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert took(optimizer)


def _seen_by_the_next_forward() -> None:
    """A unit whose full parameters stay gathered over a step is gathered again after it, also when
    only its last parameter was stepped.
    """
    model = make()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    sw.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    last = model[2].weight
    optimizer = torch.optim.SGD([last], lr=1.0)
    before = model(torch.ones(1, 5)).detach().clone()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    assert took(optimizer)
    assert not torch.equal(model(torch.ones(1, 5)).detach(), before)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "Rprop"])
def test_trains_as_under_torch(kind: str, two: Ranks) -> None:
    two.run(_trains_alike, kind)


@pytest.mark.parametrize(("kind", "switch"), BEYOND_TORCH)
def test_trains_where_torch_cannot(kind: str, switch: str, two: Ranks) -> None:
    two.run(_beside_one_process, kind, switch)


@pytest.mark.parametrize(
    "change", ["state", "in place", "dropped", "group", "rate", "plain", "memory"]
)
def test_follows_the_program(change: str, two: Ranks) -> None:
    two.run(_follows_the_program, change)


@pytest.mark.parametrize("why", ["pre hook", "post hook", "closure"])
def test_leaves_alone(why: str, two: Ranks) -> None:
    two.run(_leaves_alone, why)


def test_survives_an_error(two: Ranks) -> None:
    two.run(_survives_an_error)


def test_seen_by_the_next_forward(two: Ranks) -> None:
    two.run(_seen_by_the_next_forward)
