"""Optimizers with a share of the state: ShardedOptimizer around any replicated model, and
sw.local's state dicts.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import shardwise as sw
from shardwise.engine import uncaught
from shardwise.errors import UserError
from tests.parity.models import build, loss_sum, token_batch
from tests.parity.oracle import difference
from tests.ranks import Ranks


class Trust(torch.optim.Optimizer):
    """Steps by a whole parameter's norm, so that rows cannot be stepped apart (as LAMB or Muon)."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("momentum", torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                p.sub_(m * (group["lr"] * p.norm() / (m.norm() + 1e-6)))


CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "sgd": (torch.optim.SGD, {"lr": 0.03, "momentum": 0.9}),
    "trust": (Trust, {"lr": 0.01}),
}


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of every state tensor that has an element per parameter element."""
    tensors = [
        t for s in optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)
    ]
    return sum(t.untyped_storage().nbytes() for t in tensors if t.dim() > 0)


def _wrap(kind: str, wrapped_by: str) -> tuple[float, int, int]:
    """Train with and without ShardedOptimizer; the difference, and both state sizes in bytes."""
    cls, settings = CLASSES[kind]
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = build("odd"), build("odd")
    forward: nn.Module = model
    if wrapped_by == "DDP":
        forward = DistributedDataParallel(model, find_unused_parameters=True)
    groups = lambda m: [  # noqa: E731
        {"params": [p for p in m.parameters() if p.dim() > 1 and p.requires_grad]},
        {"params": [p for p in m.parameters() if p.dim() <= 1 and p.requires_grad], "lr": 0.005},
    ]
    plain = cls(groups(alone), **settings)
    ours = sw.ShardedOptimizer(groups(model), cls, **settings)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (plain, ours)]
    for step in range(5):
        batches = [token_batch(step, i) for i in range(world)]
        for tokens in batches:
            (loss_sum(alone(tokens), tokens) / world).backward()
        if wrapped_by == "DDP":
            loss_sum(forward(batches[rank]), batches[rank]).backward()
        else:
            for tokens in batches:
                (loss_sum(model(tokens), tokens) / world).backward()
        for opt, scheduler in zip((plain, ours), schedulers, strict=True):
            opt.step()
            opt.zero_grad()
            scheduler.step()
    error = difference(dict(model.state_dict()), dict(alone.state_dict()))
    whole = ours.full_state_dict()
    expected = plain.state_dict()
    assert sorted(whole["state"]) == sorted(expected["state"])
    for index, state in expected["state"].items():
        for key, value in state.items():
            torch.testing.assert_close(whole["state"][index][key], value, rtol=1e-4, atol=1e-6)
    again = sw.ShardedOptimizer(groups(model), cls, **settings)
    again.load_state_dict(whole)
    assert state_bytes(again) == state_bytes(ours)
    assert again.param_groups[1]["lr"] == ours.param_groups[1]["lr"]
    return error, state_bytes(ours), state_bytes(plain)


@pytest.mark.parametrize("wrapped_by", ("DDP", "hand"))
@pytest.mark.parametrize("kind", ("adamw", "sgd"))
def test_sharded_optimizer_holds_its_share(two: Ranks, kind: str, wrapped_by: str) -> None:
    results = two.run(_wrap, kind, wrapped_by)
    for error, ours, whole in results:
        assert error < 1e-5
        assert 0.4 * whole < ours < 0.6 * whole  # odd shapes do not halve exactly
    assert sum(ours for _, ours, _ in results) == results[0][2]


def _step_by_messages(kind: str) -> tuple[list[int], int, float]:
    """How many gathers were out at each of the inner optimizer's steps; how many there were in all;
    and how far the parameters are from the plain optimizer's.
    """
    cls, settings = CLASSES[kind]
    alone, model = build("odd"), build("odd")
    plain = cls([p for p in alone.parameters() if p.requires_grad], **settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    ours = sw.ShardedOptimizer(trained, cls, message_bytes=2**8, **settings)
    seen: list[int] = []
    for step in range(3):
        tokens = token_batch(step, 0)
        for each in (alone, model):
            loss_sum(each(tokens), tokens).backward()
        seen.clear()
        with sw.record() as log:
            hook = ours.inner.register_step_post_hook(lambda *_: seen.append(len(log.calls)))
            ours.step()
            hook.remove()
        plain.step()
        assert sum(len(g["params"]) for g in ours.inner.param_groups) == len(ours.shares[ours.rank])
        for opt in (ours, plain):
            opt.zero_grad()
    error = difference(dict(model.state_dict()), dict(alone.state_dict()))
    return seen, log.counts()["all_gather"], error


def test_gathers_start_between_the_updates(two: Ranks) -> None:
    """Each group's parameters are on their way before the next group is updated."""
    for seen, gathers, error in two.run(_step_by_messages, "adamw"):
        # A rank updates nothing where a group of small parameters has no rows of its own.
        assert len(seen) > 2 and seen == sorted(set(seen)) and seen[-1] < gathers
        assert error < 1e-6
    for seen, gathers, error in two.run(_step_by_messages, "trust"):
        assert gathers > 2 and seen == [0]  # an unknown class steps once
        assert error < 1e-6


def test_sharded_optimizer_takes_any_class(four: Ranks) -> None:
    """A class that needs whole parameters gets whole ones, and the shares still add up to one
    state.
    """
    results = four.run(_wrap, "trust", "hand")
    for error, ours, whole in results:
        assert error < 1e-5
        assert ours < 0.6 * whole
    assert sum(ours for _, ours, _ in results) == results[0][2]


def _moved_and_added(kind: str) -> float:
    """Parameters that get other memory (`model.to`), and a group that comes later."""
    cls, settings = CLASSES[kind]
    pairs = []
    for make in (cls, functools.partial(sw.ShardedOptimizer, optimizer_class=cls)):
        model = build("even")
        first, *others = (p for p in model.parameters() if p.requires_grad)
        optimizer = make(others, **settings)
        for step in range(4):
            if step == 1:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            if step == 2:
                optimizer.add_param_group({"params": [first], "lr": 0.02})
            tokens = token_batch(step, 0)
            loss_sum(model(tokens), tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
        pairs.append((model, optimizer))
    (alone, plain), (model, ours) = pairs
    assert sorted(ours.full_state_dict()["state"]) == sorted(plain.state_dict()["state"])
    return difference(dict(model.state_dict()), dict(alone.state_dict()))


@pytest.mark.parametrize("kind", ("adamw", "sgd", "trust"))
def test_sharded_optimizer_follows_its_parameters(two: Ranks, kind: str) -> None:
    assert max(two.run(_moved_and_added, kind)) < 1e-6


def _refused() -> None:
    trained = list(build("even").parameters())
    with pytest.raises(TypeError, match="expected a class of optimizers"):
        sw.ShardedOptimizer(trained, "adam")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="all parameters at once"):
        sw.ShardedOptimizer(trained, torch.optim.LBFGS)
    with pytest.raises(UserError, match=r"pass model\.parameters\(\)"):
        sw.sharded_step([build("even")], torch.optim.SGD(trained, lr=0.1))  # type: ignore[list-item]


def test_what_is_no_optimizer_and_no_parameter_is_refused(two: Ranks) -> None:
    two.run(_refused)


def _plan_state(name: str) -> tuple[int, int]:
    """zero1 and zero2 through a Plan: an ordinary optimizer holds its rows only."""
    world = dist.get_world_size()
    plain = torch.optim.AdamW(build("even").parameters(), lr=0.1)
    model = sw.shard(build("even"), sw.Plan.of(name, mesh=world))
    ours = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = token_batch(0, 0)
    loss_sum(model(tokens), tokens).backward()
    ours.step()
    for group in plain.param_groups:
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    plain.step()
    held = sum(
        t.to_local().numel() * t.element_size()
        for s in ours.state.values()
        for k, t in s.items()
        if k != "step"
    )
    return held, state_bytes(plain)


@pytest.mark.parametrize("name", ("zero1", "zero2", "zero3"))
def test_a_plan_shards_the_optimizer_state(two: Ranks, name: str) -> None:
    results = two.run(_plan_state, name)
    assert sum(held for held, _ in results) == results[0][1]
    assert max(held for held, _ in results) <= 0.52 * results[0][1]


def _exchange_state(name: str, kind: str) -> None:
    """A run that moves its optimizer state between the plain and the local optimizer goes on as one
    that does not.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def train(switch: bool) -> dict[str, torch.Tensor]:
        model = sw.shard(build(kind), sw.Plan.of(name, mesh=world))
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
        ]
        opt: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=1e-2)
        for step in range(6):
            if switch and step == 2:
                opt = sw.local(opt)
            if switch and step == 4:
                state = opt.state_dict()
                opt = torch.optim.AdamW(groups, lr=1e-2)
                opt.load_state_dict(state)
            tokens = token_batch(step, rank)
            loss_sum(model(tokens), tokens).backward()
            opt.step()
            opt.zero_grad()
        return sw.full_state_dict(model)

    assert difference(train(True), train(False)) < 1e-6


@pytest.mark.parametrize("kind", ("even", "odd"))
@pytest.mark.parametrize("name", ("ddp", "zero3"))
def test_local_and_plain_state_dicts_are_the_same(two: Ranks, name: str, kind: str) -> None:
    two.run(_exchange_state, name, kind)


def _clip(name: str, max_norm: float, norm_type: float = 2.0) -> None:
    """Case 26: the norm and the clipped gradients are one process's, and torch's own clipping
    agrees.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = (2, world // 2) if name == "hsdp" else world
    alone, model = build("odd"), sw.shard(build("odd"), sw.Plan.of(name, mesh=mesh))
    for i in range(world):
        loss_sum(alone(token_batch(0, i)), token_batch(0, i)).backward()
    loss_sum(model(token_batch(0, rank)), token_batch(0, rank)).backward()
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), max_norm, norm_type)
    ours = sw.clip_grad_norm(model, max_norm, norm_type=norm_type)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    expected = {n: p.grad for n, p in alone.named_parameters()}
    for key, parameter in model.named_parameters():
        if parameter.grad is None:
            assert expected[key] is None, key
            continue
        grad = parameter.grad.full_tensor() if name != "ddp" else parameter.grad
        torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("max_norm", (0.5, 1e6))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3", "hsdp"))
def test_clipping_equals_one_process(four: Ranks, name: str, max_norm: float) -> None:
    four.run(_clip, name, max_norm)


@pytest.mark.parametrize("norm_type", (1.0, 3.0, float("inf")))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero3", "hsdp"))
def test_clipping_by_other_norms(four: Ranks, name: str, norm_type: float) -> None:
    """Some ranks have no rows of the smallest parameters, and so no largest element of them."""
    four.run(_clip, name, 0.05, norm_type)


def _clip_drop_in(norm_type: float, by_torch: bool) -> str | None:
    """Parameters with rows on rank 0 only. torch's own clipping fails there, with what to do."""
    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(4, 1), nn.Linear(1, 2))
    model = copy.deepcopy(alone)
    for module in (*model, model):
        sw.fully_shard(module)
    for m in (alone, model):
        m(torch.ones(2, 4)).square().sum().backward()
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1, norm_type)
    if by_torch:
        error: RuntimeError | None = None
        for parameter in model.parameters():
            try:
                torch.linalg.vector_norm(parameter.grad.to_local(), norm_type)  # type: ignore[union-attr]
            except RuntimeError as caught:
                error = caught
        if error is not None:
            uncaught.explain(error)
        return None if error is None else str(error)
    torch.testing.assert_close(sw.clip_grad_norm(model, 0.1, norm_type=norm_type), theirs)
    for mine, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), whole.grad)  # type: ignore[union-attr]
    return None


def test_the_largest_element_where_a_rank_has_none(two: Ranks) -> None:
    two.run(_clip_drop_in, float("inf"), False)
    first, second = two.run(_clip_drop_in, float("inf"), True)
    assert first is None and "shardwise.clip_grad_norm(model" in second


def test_clipping_by_no_norm() -> None:
    model = sw.shard(torch.nn.Linear(2, 2), sw.Plan.of("zero3", mesh=1))
    for norm_type in (0.0, -1.0, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match="norm_type"):
            sw.clip_grad_norm(model, 1.0, norm_type=norm_type)
