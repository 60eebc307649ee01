"""Under a Plan, what `tests/parity/dropin/` asks of the drop-in: what is kept stays, what is
deleted goes, exceptions end a step and nothing more, unused parameters get no gradient, ties are
followed.
"""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine.engine import engine_of
from shardwise.engine.words import Control, control_of
from shardwise.schedule.unit import State
from tests.parity.dropin.afterwards import Language
from tests.parity.dropin.common import WIDTH, assert_close, batch, square_loss, twins
from tests.parity.dropin.lifetimes import (
    OF_GRADIENTS,
    Wrapped,
    assert_kept,
    keep,
    nothing_stays,
)
from tests.parity.dropin.models import Stack
from tests.parity.dropin.unused import STEPS, Moody
from tests.ranks import Ranks

PLAIN: dict[str, Any] = {
    "gradient": lambda p: p.grad,
    "detached": lambda p: p.grad.detach(),
    "data": lambda p: p.grad.data,
    "view": lambda p: p.grad[:1],
    "numpy": lambda p: p.grad.numpy(),
}
ALL = ("ddp", "zero1", "zero2", "zero3", "hsdp")


def _mesh(name: str) -> Any:
    world = dist.get_world_size()
    return (2, world // 2) if name == "hsdp" else world


def _keep_gradients() -> None:
    for name in ALL[:4]:
        for settings in ({}, {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}):
            plan = sw.Plan.of(name, mesh=dist.get_world_size(), **settings)
            torch.manual_seed(0)
            model = sw.shard(Stack(), plan)
            opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
            kept: dict[str, Any] = {}
            for step in range(3):
                for x in sw.microbatches(model, [batch(step, 0), batch(step, 1)]):
                    square_loss(model, x).backward()
                now = keep(model, PLAIN if name == "ddp" else OF_GRADIENTS)
                opt.step()
                opt.zero_grad()
                kept.update({f"{name}, step {step}: {k}": value for k, value in now.items()})
                assert_kept(kept)


def test_kept_gradients_stay(two: Ranks) -> None:
    two.run(_keep_gradients)


def _deleted(kind: str, end: str) -> None:
    for name in ("zero3", "ddp"):
        torch.manual_seed(0)
        model = Wrapped() if kind == "closures" else Stack()
        sw.shard(model, sw.Plan.of(name, mesh=2))
        loss, *references = nothing_stays(model, end)
        del model
        gc.collect()
        # A graph keeps the leaves that it ends in; under ddp with n = 1 and no cast they are those
        # that users see.
        wanted = references[:3] if name == "ddp" or end == "backward" else references
        left = [type(r()).__name__ for r in wanted if r() is not None]
        assert not left, f"{name}: still there: {left}"
        assert loss.requires_grad


@pytest.mark.parametrize(
    ("kind", "end"),
    [
        *[("plain", end) for end in ("", "forward", "backward", "profile")],
        *[("closures", end) for end in ("", "forward", "profile")],
    ],
)
def test_a_deleted_model_is_gone(two: Ranks, kind: str, end: str) -> None:
    two.run(_deleted, kind, end)


def _held_bytes() -> int:
    """Bytes of every tensor that Python knows."""
    gc.collect()
    found = {}
    for each in gc.get_objects():
        if type(each) in (torch.Tensor, nn.Parameter):
            storage = each.untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())


def _bytes_after() -> None:
    for through in ("plan", "fully_shard"):
        torch.manual_seed(0)
        before = _held_bytes()
        model: nn.Module = Stack(width=WIDTH, inner=4096)
        if through == "plan":
            sw.shard(model, sw.Plan.of("zero3", mesh=2))
        else:
            for layer in model.layers:
                sw.fully_shard(layer)
            sw.fully_shard(model)
            del layer
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(2):
            square_loss(model, batch(step, 0)).backward()
            opt.step()
            opt.zero_grad()
        during = _held_bytes()
        del model, opt
        after = _held_bytes()
        assert during - before > 4 * 4096 * WIDTH, "nothing was held"
        assert after - before < 4096, f"{through}: {after - before} bytes stay"


def test_no_bytes_stay(two: Ranks) -> None:
    two.run(_bytes_after)


def _raising(place: str, sync: str) -> None:
    """One step of four raises in the second micro-batch; one process leaves that step out."""
    alone, model = twins(Stack)
    sw.shard(model, sw.Plan.of("zero3", mesh=2, sync=sync, average=True))
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(4):
        fails = step in (0, 2)
        try:
            for at, x in enumerate(sw.microbatches(model, [batch(step, rank), batch(step, 2)])):
                if fails and at == 1:
                    if place == "user":
                        raise KeyError("planted")
                    if place == "forward":
                        handle = model.layers[1].register_forward_hook(_raise)
                    else:
                        handle = model.layers[0].register_full_backward_hook(_raise)
                square_loss(model, x).backward()
        except KeyError:
            assert fails
            if place != "user":
                handle.remove()
            assert all(p.grad is None for p in model.parameters())
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore" if place == "user" else "error")
                assert torch.allclose(model(batch(9, 0)), alone(batch(9, 0)), atol=1e-5)
            opts[0].step()  # has nothing to do
            opts[0].zero_grad()
            continue
        assert not fails
        for i in range(ranks):
            for x in (batch(step, i), batch(step, 2)):
                (square_loss(alone, x) / ranks).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    _same(model, alone)


def _skipping(name: str, sync: str, at: int, everywhere: bool) -> None:
    """A micro-batch of three whose forward raises, on one rank or on all, is left out of the step;
    one process leaves it out too.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    alone, model = twins(Stack)
    mesh = (2, ranks // 2) if name == "hsdp" else ranks
    sw.shard(model, sw.Plan.of(name, mesh=mesh, sync=sync, average=True))
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
    for step in range(3):
        mine = [batch(step, 3 * rank + j) for j in range(3)]
        for i, x in enumerate(sw.microbatches(model, mine)):
            fails = i == at and (everywhere or rank == 0)
            handle = model.head.register_forward_hook(_raise) if fails else None
            try:
                square_loss(model, x).backward()
            except KeyError:
                assert handle is not None
                handle.remove()
        for r in range(ranks):
            for j in range(3):
                if j != at or not (everywhere or r == 0):
                    (square_loss(alone, batch(step, 3 * r + j)) / ranks).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    _same(model, alone)


@pytest.mark.parametrize("sync", ("each", "scatter_each_reduce_last", "last"))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3"))
def test_a_micro_batch_whose_forward_raises_is_left_out(two: Ranks, name: str, sync: str) -> None:
    for at in range(3):
        two.run(_skipping, name, sync, at, True)
        if name == "ddp":
            two.run(_skipping, name, sync, at, False)


def test_replicas_leave_a_micro_batch_out(four: Ranks) -> None:
    for sync in ("each", "scatter_each_reduce_last", "last"):
        four.run(_skipping, "hsdp", sync, 1, True)


def _raise(*_: Any) -> None:
    raise KeyError("planted")


def _same(model: nn.Module, alone: nn.Module, what: str = "") -> None:
    state = sw.full_state_dict(model)
    for name, value in alone.state_dict().items():
        assert_close(state[name], value, f"{what}{name}")


@pytest.mark.parametrize("place", ("user", "forward", "backward"))
@pytest.mark.parametrize("sync", ("each", "last"))
def test_an_exception_ends_a_step_and_nothing_more(two: Ranks, place: str, sync: str) -> None:
    two.run(_raising, place, sync)


def _unused(names: tuple[str, ...], sync: str) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for name in names:
        alone, model = twins(Moody)
        plan = sw.Plan.of(name, mesh=_mesh(name), sync=sync, units=["a", "b", "gate"])
        if name == "ddp":
            plan = sw.Plan.of(name, mesh=_mesh(name), sync=sync)
        sw.shard(model, plan)
        opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
        for step, how in enumerate((*STEPS, "parameter")):
            passes = (how, how) if step % 2 else (how, "")
            batches = [[batch(step, 2 * at + i) for at in range(2)] for i in range(ranks)]
            for i in range(ranks):
                for at, x in enumerate(batches[i]):
                    (alone(x, passes[at]).square().mean() / ranks).backward()
            for at, x in enumerate(sw.microbatches(model, batches[rank])):
                (model(x, passes[at]).square().mean() / ranks).backward()
            for (key, ours), theirs in zip(
                model.named_parameters(), alone.parameters(), strict=True
            ):
                told = f"{name}, step {step} {how!r}: {key}"
                assert (ours.grad is None) == (theirs.grad is None), told
            for opt in opts:
                opt.step()
                opt.zero_grad()
        _same(model, alone, f"{name}: ")


@pytest.mark.parametrize("sync", ("each", "scatter_each_reduce_last", "last"))
def test_unused_parameters_get_no_gradient(two: Ranks, sync: str) -> None:
    two.run(_unused, ALL[:4], sync)


def test_unused_parameters_get_no_gradient_on_replicas(four: Ranks) -> None:
    four.run(_unused, ("hsdp", "ddp"), "each")


def _tied() -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for name in ALL[:4]:
        for when in (0, 2):
            alone, model = twins(Language, 11)
            sw.shard(model, sw.Plan.of(name, mesh=2, units=["embed", "block"]))
            opts: list[torch.optim.Optimizer] = []
            for step in range(4):
                if step in (0, when):
                    if step == when:
                        for each in (model, alone):
                            each.head.weight = each.embed.weight
                    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, alone)]
                for i in range(ranks):
                    (square_loss(alone, batch(step, i)) / ranks).backward()
                (square_loss(model, batch(step, rank)) / ranks).backward()
                norms = [
                    sw.clip_grad_norm(model, 0.1),
                    torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1),
                ]
                assert torch.allclose(*norms, rtol=1e-5), (name, when, step, norms)
                for opt in opts:
                    opt.step()
                    opt.zero_grad()
            _same(model, alone, f"{name}, tied at {when}: ")


def test_a_tie_after_sharding_is_followed(two: Ranks) -> None:
    two.run(_tied)


def _untied() -> None:
    alone = Language(12)
    alone.head.weight = alone.embed.weight
    model = sw.shard(alone, sw.Plan.of("zero3", mesh=2))
    square_loss(model, batch(0, 0)).backward()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"'head.weight' was tied to 'embed.weight'"):
        square_loss(model, batch(0, 0))


def test_an_untied_weight_is_named(two: Ranks) -> None:
    two.run(_untied)


def _clip_a_replaced_gradient() -> None:
    alone, model = twins(Stack)
    sw.shard(model, sw.Plan.of("zero3", mesh=2, average=True))
    for step in range(2):
        for each in (model, alone):
            square_loss(each, batch(step, 0)).backward()
            each.head.weight.grad = each.head.weight.grad * 2
            each.layers[0].up.bias.grad = None
        ours = sw.clip_grad_norm(model, 0.1)
        theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        assert torch.allclose(ours, theirs, rtol=1e-5)
        for (name, p), q in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if q.grad is not None:
                assert_close(p.grad, q.grad, name)


def test_clipping_a_replaced_gradient(two: Ranks) -> None:
    two.run(_clip_a_replaced_gradient)


def _leave_a_block_out() -> None:
    """What was sent for a block that is gathered ahead and does not run is read all the same: its
    senders keep it until then, and have no memory for more when there is too much of it.
    """
    for name, settings in (("zero1", {}), ("zero2", {}), ("zero3", {"keep_after_forward": True})):
        torch.manual_seed(0)
        model = sw.shard(Moody(), sw.Plan.of(name, mesh=2, units=[nn.Linear], **settings))
        opt = torch.optim.SGD(model.parameters(), lr=1e-2)
        for how in ("", "", "block", "block"):
            loss = model(batch(0, 0), how).square().mean()
            assert all(u.state is not State.GATHERING for u in engine_of(model).units), name
            loss.backward()
            assert all(u.state is not State.GATHERING for u in engine_of(model).units), name
            opt.step()
            opt.zero_grad()
            with torch.no_grad():
                model(batch(0, 0), how)
            assert all(u.state is not State.GATHERING for u in engine_of(model).units), name


def test_what_is_gathered_in_vain_is_read(two: Ranks) -> None:
    two.run(_leave_a_block_out)


def _another_world() -> None:
    """A second and a third world, with models of both engines before and after."""
    store = dist.distributed_c10d._get_default_store()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for world in range(3):
        torch.manual_seed(0)
        ours = sw.shard(Stack(), sw.Plan.of("zero3", mesh=ranks))
        theirs = Stack()
        sw.fully_shard(theirs, reshard_after_forward=True)
        theirs.set_separate_reduce_scatter_group(True)
        for _ in range(2):
            square_loss(ours, batch(0, rank)).backward()
            square_loss(theirs, batch(0, rank)).backward()
        control = control_of(dist.group.WORLD)
        assert control is not None
        assert control.exchange((world, rank)) == [(world, r) for r in range(ranks)]
        dist.barrier()
        dist.destroy_process_group()
        # (gloo itself would find the addresses of before under the names of before.)
        again = dist.PrefixStore(f"again{world}", store)
        dist.init_process_group("gloo", store=again, rank=rank, world_size=ranks)


def test_another_world(two: Ranks) -> None:
    two.run(_another_world)
    two.stop()


def test_what_ranks_tell_each_other_over_a_store_that_outlives_a_world() -> None:
    store = dist.HashStore()
    for world in range(3):
        controls = [Control(store, (0, 1, 2), rank) for rank in range(3)]
        with ThreadPoolExecutor(3) as threads:
            for turn in range(3):
                said = [(world, turn, rank if turn else None) for rank in range(3)]
                pairs = zip(controls, said, strict=True)
                waiting = [threads.submit(control.exchange, value) for control, value in pairs]
                assert [each.result(timeout=20) for each in waiting] == [said] * 3
    left = store.num_keys()
    assert left <= 1 + 3, f"{left} keys stay: more than one count, and one answer of each world"
