"""Bad input and misuse: a clear error on every rank, and never a wait. Numbers are those of the
cases.
"""

from __future__ import annotations

import copy
import io
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardwise as sw
from shardwise.engine import uncaught
from tests.parity.models import Model, build, loss_sum, token_batch
from tests.parity.oracle import MAX_NORM, STEPS, difference, train_alone
from tests.ranks import RankError, Ranks


def _raises(ranks: Ranks, function: Any, *args: Any, match: str) -> list[str]:
    """Every rank must raise an error that matches, within seconds."""
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks.run(function, *args, timeout=20)
    assert time.monotonic() - began < 15
    errors = [text or "" for text in caught.value.errors]
    for rank, text in enumerate(errors):
        assert re.search(match, text), f"rank {rank} said: {text[-600:]}"
    return errors


def _shard(name: str, mesh: Any, **settings: Any) -> nn.Module:
    return sw.shard(build("even"), sw.Plan.of(name, mesh=mesh, **settings))


@pytest.mark.parametrize("mesh", (4, (2, 2), 3))
def test_a_mesh_that_does_not_match_the_world(two: Ranks, mesh: Any) -> None:
    """Case 35."""
    name = "hsdp" if isinstance(mesh, tuple) else "zero3"
    _raises(two, _shard, name, mesh, match=r"mesh .* ranks, but 2 are running .*product is 2")


def _other_plan(setting: str) -> None:
    odd = dist.get_rank() == dist.get_world_size() - 1
    name = "zero1" if odd and setting == "name" else "zero3"
    more = {"forward_prefetch": 2} if odd and setting == "forward_prefetch" else {}
    _shard(name, dist.get_world_size(), **more)


def test_ranks_with_different_plans(two: Ranks, four: Ranks) -> None:
    told = r"rank 1 shards by another plan than rank 0: Plan.name is 'zero1' there, 'zero3' on"
    _raises(two, _other_plan, "name", match=told)
    told = "rank 3 shards by another plan than rank 0: Plan.forward_prefetch is 2 there, 1 on"
    _raises(four, _other_plan, "forward_prefetch", match=told)


def _sparse_gradient(name: str) -> None:
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 2))
    sw.shard(model, sw.Plan.of(name, mesh=dist.get_world_size()))
    model(torch.arange(4)).sum().backward()


@pytest.mark.parametrize("name", ("ddp", "zero1", "zero3"))
def test_a_sparse_gradient_is_named(two: Ranks, name: str) -> None:
    _raises(two, _sparse_gradient, name, match="gradient of parameter '0.weight' is sparse.*=False")


def _uneven_in_a_group(name: str, sync: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = (2, world // 2) if name == "hsdp" else world
    model = _shard(name, mesh, sync=sync)
    for tokens in sw.microbatches(model, [token_batch(0, i) for i in range(1 + rank % 2)]):
        loss_sum(model(tokens), tokens).backward()


def test_a_shard_group_that_disagrees(two: Ranks, four: Ranks) -> None:
    told = "different numbers of micro-batches .*rank 0: 1, rank 1: 2"
    _raises(two, _uneven_in_a_group, "zero3", "last", match=told)
    _raises(four, _uneven_in_a_group, "hsdp", "scatter_each_reduce_last", match=told)


def test_uneven_replicas_need_another_sync(two: Ranks) -> None:
    _raises(two, _uneven_in_a_group, "ddp", "each", match=r"replicas run \[1, 2\].*scatter_each")


def _leave_early(then: str) -> None:
    model = _shard("zero3", 2)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, tokens in enumerate(sw.microbatches(model, [token_batch(0, i) for i in range(4)])):
        if i == 2:
            break
        loss_sum(model(tokens), tokens).backward()
    if then == "step":
        opt.step()
    elif then == "clip":
        sw.clip_grad_norm(model, 1.0)
    else:
        model(token_batch(0, 0))


@pytest.mark.parametrize("then", ("step", "clip"))
def test_a_loop_left_early(two: Ranks, then: str) -> None:
    """Case 34."""
    _raises(two, _leave_early, then, match="2 of 4 micro-batches ran; gradients are not reduced")


def _left_for_another_step() -> None:
    with pytest.warns(UserWarning, match="2 of 4 micro-batches ran; gradients are not reduced"):
        _leave_early("forward")


def test_a_loop_left_early_for_another_step(two: Ranks) -> None:
    two.run(_left_for_another_step)


class Wandering(Model):
    """Runs its blocks in the order it is told."""

    order = (0, 1, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for i in self.order:
            x = self.layers[i](x)
        return self.head(x)


def _wander(name: str, from_step: int) -> None:
    settings = {"forward_prefetch": 0, "backward_prefetch": 0, "bucket_bytes": 1}
    model = sw.shard(Wandering(), sw.Plan.of(name, mesh=2, **settings))
    for step in range(3):
        if step >= from_step and dist.get_rank() == 1:
            model.order = (0, 2, 1)
        for tokens in sw.microbatches(model, [token_batch(step, 0)]):
            loss_sum(model(tokens), tokens).backward()


@pytest.mark.parametrize(("name", "from_step"), [("zero3", 0), ("zero2", 0), ("zero2", 1)])
def test_units_in_another_order_on_some_rank(two: Ranks, name: str, from_step: int) -> None:
    """Case 10: before the first backward, or when the step after begins."""
    told = r"different units as number 3 .*rank 0: layers.1, rank 1: layers.2"
    _raises(two, _wander, name, from_step, match=told)


def _no_backward() -> None:
    model = _shard("zero3", 2)
    for tokens in sw.microbatches(model, [token_batch(0, 0)]):
        model(tokens)


def test_a_micro_batch_without_backward(two: Ranks) -> None:
    _raises(two, _no_backward, match="micro-batch 1 of 1 ran no backward")


def _optimizer_first(name: str) -> None:
    model = build("even")
    opt = torch.optim.AdamW(model.parameters(), lr=0.1)
    sw.shard(model, sw.Plan.of(name, mesh=2))
    loss_sum(model(token_batch(0, 0)), token_batch(0, 0)).backward()
    before = sw.full_state_dict(model)["head.weight"]
    opt.step()
    changed = not torch.equal(sw.full_state_dict(model)["head.weight"], before)
    assert changed, "trained nothing in silence"


@pytest.mark.parametrize("name", ("zero1", "zero2", "zero3"))
def test_an_optimizer_built_before_sharding(two: Ranks, name: str) -> None:
    """Case 19."""
    told = "AdamW was built before sharding and holds the old parameter 'embed.weight'"
    _raises(two, _optimizer_first, name, match=told)


def test_ddp_keeps_an_earlier_optimizer(two: Ranks) -> None:
    """Replicated parameters stay the same objects, so an earlier optimizer still trains them."""
    two.run(_optimizer_first, "ddp")


def _wrong_device() -> None:
    """Case 24: a group that moves CUDA tensors only, a model on the CPU."""
    from unittest import mock

    with mock.patch("shardwise.engine.mesh.supported_devices", return_value={"cuda"}):
        _shard("zero3", 2)


def test_a_backend_that_cannot_move_the_model(two: Ranks) -> None:
    """Case 24."""
    _raises(two, _wrong_device, match=r"the model is on cpu, but .* moves \['cuda'\] tensors only")


def _twice() -> None:
    plan = sw.Plan.of("zero3", mesh=2)
    for name in ("zero3", "ddp"):
        model = _shard(name, 2)
        for then in (lambda m: sw.shard(m, plan), sw.fully_shard):
            for whole in (model, nn.Sequential(model)):
                with pytest.raises(ValueError, match="is sharded already, by a Plan"):
                    then(whole)
            with pytest.raises(ValueError, match=r"is sharded already, by a Plan|DTensor"):
                then(model.layers[0])
    model = build("even")
    sw.fully_shard(model.layers[0])
    with pytest.raises(ValueError, match=r"\(layers.0\) is sharded already, by fully_shard"):
        sw.shard(model, plan)
    sw.fully_shard(model)
    with pytest.raises(ValueError, match="Model is sharded already, by fully_shard"):
        sw.shard(model, plan)
    for name in ("ddp", "zero1", "zero3"):
        first, second = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))
        second[0].weight = first.weight
        sw.shard(first, sw.Plan.of(name, mesh=2))
        with pytest.raises(
            ValueError, match=r"parameter '0.weight' of Sequential (is|was) sharded"
        ):
            sw.shard(second, sw.Plan.of(name, mesh=2))


def test_sharding_twice(two: Ranks) -> None:
    """By a Plan and by fully_shard, in either order; the whole, a part, and what contains it."""
    two.run(_twice)


def _other_layers(way: str, what: str) -> None:
    rank = dist.get_rank()
    layers = {"layers": 2 + rank, "width": 2}[what]
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers)))
    if what == "width" and rank:
        model[1] = nn.Linear(8, 6)
    if way == "plan":
        sw.shard(model, sw.Plan.of("zero3", mesh=2))
    else:
        sw.fully_shard(model)
    model(torch.ones(2, 8))


@pytest.mark.parametrize("way", ("plan", "fully_shard"))
def test_other_layers_on_some_rank(two: Ranks, way: str) -> None:
    told = "ranks have different models: '{}' .*rank 0: {}, rank 1: {};"
    lacks = told.format("2.bias", "none", r"\(8,\)")
    _raises(two, _other_layers, way, "layers", match=lacks)
    narrow = told.format("1.bias", r"\(8,\)", r"\(6,\)")
    _raises(two, _other_layers, way, "width", match=narrow)


def test_no_process_group() -> None:
    with pytest.raises((RuntimeError, ValueError), match=r"mesh \(1, 2\)"):
        _shard("zero3", 2)


def test_two_parameters_over_the_same_memory() -> None:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))
    model[1].weight.data = model[0].weight.data
    for name in ("ddp", "zero3"):
        with pytest.raises(ValueError, match=r"'0.weight' and '1.weight' are two, over the same"):
            sw.shard(model, sw.Plan.of(name, mesh=1))


def test_parameters_without_memory_are_not_taken_for_one() -> None:
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match="is a FakeTensor; sharding by a Plan starts from plain"):
        sw.shard(model, sw.Plan.of("zero3", mesh=1))


def _meta() -> None:
    with torch.device("meta"):
        model = build("even")
    sw.shard(model, sw.Plan.of("zero3", mesh=2))
    model(token_batch(0, 0))


def test_parameters_without_memory(two: Ranks) -> None:
    """Case 22."""
    _raises(two, _meta, match=r"still on meta device: \['embed.weight'")


def _other_model() -> None:
    plan = sw.Plan.of("zero3", mesh=2).resolve(build("odd"))
    sw.shard(build("even"), plan)


def test_a_plan_made_for_another_model(two: Ranks) -> None:
    _raises(two, _other_model, match="the Plan was made for another model")


def _not_elementwise() -> None:
    model = _shard("zero3", 2)

    class Norms(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

    sw.local(Norms(model.parameters()))


def test_local_needs_an_elementwise_optimizer(two: Ranks) -> None:
    _raises(two, _not_elementwise, match="treat every element alike .* got Norms")


def _not_finite() -> None:
    model = _shard("zero3", 2)
    tokens = token_batch(0, 0)
    (loss_sum(model(tokens), tokens) * (float("inf") if dist.get_rank() else 1.0)).backward()
    sw.clip_grad_norm(model, 1.0, error_if_nonfinite=True)


def test_one_ranks_infinity_is_everybodys_error(two: Ranks) -> None:
    _raises(two, _not_finite, match="global gradient norm is (nan|inf)")


def _call_parts(name: str, regularised: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.ModuleDict({"maker": nn.Linear(4, 4), "judge": nn.Linear(4, 1)})
    if regularised:  # a loss of parameters alone is the same on every rank
        model = nn.Sequential(*model.values())  # type: ignore[assignment]
    sw.shard(model, sw.Plan.of(name, mesh=world, average=True))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.full((2, 4), float(rank))
    for _ in range(2):
        if regularised:
            penalty = sum(p.square().sum() for p in model.parameters())
            (model(x).square().sum() + penalty).backward()
        else:
            model["judge"](model["maker"](x)).sum().backward()
        opt.step()
        opt.zero_grad()


def test_parts_of_a_replicated_model_that_are_called_by_themselves(two: Ranks) -> None:
    """Their gradients are in no message: ranks would train apart in silence."""
    two.run(_call_parts, "ddp", True)
    with pytest.raises(RankError) as caught:
        two.run(_call_parts, "ddp", False)
    for error in caught.value.errors:
        assert error is not None and "Call the model itself, not its parts" in error


def _writing(name: str, how: str) -> None:
    class Bounded(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                bounded = self.weight.clamp(-0.1, 0.1)
                if how == "in place":
                    self.weight.copy_(bounded)
                elif how == "other memory":
                    self.weight.data = bounded
                else:
                    self.weight.data.copy_(bounded)
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), Bounded(8, 4))
    sw.shard(model, sw.Plan.of(name, mesh=dist.get_world_size()))
    model(torch.ones(2, 4)).sum().backward()


@pytest.mark.parametrize("how", ["in place", "through data", "other memory"])
def test_a_forward_that_writes_to_gathered_parameters(two: Ranks, how: str) -> None:
    """What it writes would be lost, in silence."""
    for name in ("zero1", "zero2", "zero3"):
        _raises(two, _writing, name, how, match="forward of Bounded wrote .* unit .*'1.weight'")
    if how == "other memory":
        _raises(two, _writing, "ddp", how, match=r"wrote .* unit .*\('1.weight'\)")
    else:
        two.run(_writing, "ddp", how)  # there it stays


def _loops_inside_each_other(name: str) -> None:
    model = _shard(name, 2)
    tokens = token_batch(0, dist.get_rank())
    with pytest.raises(RuntimeError, match=r"another loop .* began in micro-batch 1 of 2"):
        for _ in sw.microbatches(model, [0, 1]):
            for _ in sw.microbatches(model, [0, 1]):
                loss_sum(model(tokens), tokens).backward()


def _loop_that_an_exception_keeps(name: str) -> float:
    """Its end comes with the exception's, in the midst of a later step, and does nothing to it."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = _shard(name, world)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    kept: Exception | None = None

    def leave() -> None:
        for _ in sw.microbatches(model, [0, 1]):
            loss_sum(model(token_batch(9, rank)), token_batch(9, rank)).backward()
            raise ArithmeticError("planted")

    for step in range(STEPS):
        try:
            leave()
        except ArithmeticError as error:
            kept = error
        batches = [token_batch(step, i) for i in range(2 * world)]
        total = sum(tokens.numel() for tokens in batches)
        for tokens in sw.microbatches(model, batches[2 * rank : 2 * rank + 2]):
            loss_sum(model(tokens), tokens).div(total).backward()
            if kept is not None:
                kept.__traceback__ = kept = None
        sw.clip_grad_norm(model, MAX_NORM)
        opt.step()
        opt.zero_grad()
    expected = train_alone("even", "float32", "adamw", (2,) * world)
    return difference(sw.full_state_dict(model), expected)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3"])
def test_loops_over_micro_batches_that_overlap(two: Ranks, name: str) -> None:
    two.run(_loops_inside_each_other, name)
    assert max(two.run(_loop_that_an_exception_keeps, name)) <= 1e-6


def _frozen_here(name: str) -> None:
    model = build("even")
    model.head.weight.requires_grad_(dist.get_rank() == 0)
    sw.shard(model, sw.Plan.of(name, mesh=2))
    tokens = token_batch(0, 0)
    with pytest.raises(RuntimeError, match=r"'head.weight' has requires_grad=False .* \(\[1\]\)"):
        loss_sum(model(tokens), tokens).backward()


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_a_parameter_frozen_on_some_ranks(two: Ranks, name: str) -> None:
    two.run(_frozen_here, name)


def _part_of_a_number(way: str) -> None:
    model = _shard(way, 2)
    loss_sum(model(token_batch(0, 0)), token_batch(0, 0)).backward()
    gradient = model.embed.weight.grad
    for ask in (float, bool, torch.Tensor.item):
        with pytest.raises(RuntimeError, match=r"its own part .*Ask for the whole on all ranks"):
            ask(gradient.norm())
    whole = [p.grad.full_tensor().norm() for p in model.parameters()]
    assert gradient.norm().full_tensor().item() == pytest.approx(whole[0].item())
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True) > 0
    with pytest.raises(RuntimeError, match="Adafactor takes norms of whole matrices"):
        torch.optim.Adafactor(model.parameters()).step()


@pytest.mark.parametrize("way", ("zero1", "zero3"))
def test_a_number_of_which_a_rank_has_a_part(two: Ranks, way: str) -> None:
    two.run(_part_of_a_number, way)


def _used_as_a_plain_model(way: str) -> None:
    model = _shard(way, 2)
    with pytest.raises(TypeError, match=r"Model is sharded and cannot be pickled.* sw.save"):
        torch.save(model, io.BytesIO())
    copy.deepcopy(model)
    weight = model.embed.weight
    with pytest.raises(RuntimeError, match="got mixed") as caught:
        weight - torch.zeros(weight.shape)
    uncaught.explain(caught.value)
    assert "full_tensor(), which all ranks call" in str(caught.value)


def test_a_sharded_model_used_as_a_plain_one(two: Ranks) -> None:
    two.run(_used_as_a_plain_model, "zero3")
