"""Two models trained alternately, as a GAN's are, by ranks that run different numbers of
micro-batches; one process is the oracle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from tests.ranks import RankError, Ranks

Loop = Callable[[nn.Module, list[Any]], Iterable[Any]]
Optimizers = dict[nn.Module, torch.optim.Optimizer]


class Parts(nn.Module):
    """Both as parts of one model."""

    def __init__(self, maker: nn.Module, judge: nn.Module) -> None:
        super().__init__()
        self.maker, self.judge = maker, judge

    def forward(self, x: torch.Tensor, noise: torch.Tensor, trained: nn.Module) -> torch.Tensor:
        made = self.maker(noise)
        if trained is self.maker:
            return _miss(self.judge(made), 1.0)
        return _miss(self.judge(x), 1.0) + _miss(self.judge(made.detach()), 0.0)


def _models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    maker = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 6))
    judge = nn.Sequential(nn.Linear(6, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
    return maker, judge


def _batch(step: int, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + at)
    rows = 2 + (step + at) % 2
    return torch.randn(rows, 6, generator=generator), torch.randn(rows, 4, generator=generator)


def _miss(found: torch.Tensor, wanted: float) -> torch.Tensor:
    targets = torch.full_like(found, wanted)
    return nn.functional.binary_cross_entropy_with_logits(found, targets, reduction="sum")


def _in_turn(
    way: str, maker: nn.Module, judge: nn.Module, opts: Optimizers, loop: Loop, mine: Any, rows: int
) -> None:
    """The judge's loop, then the maker's."""
    if way == "frozen":
        judge.requires_grad_(True)
    for x, noise in loop(judge, mine):
        with torch.no_grad() if way == "no_grad" else nullcontext():
            made = maker(noise).detach()
        ((_miss(judge(x), 1.0) + _miss(judge(made), 0.0)) / rows).backward()
    opts[judge].step()
    if way == "frozen":
        judge.requires_grad_(False)
    for _, noise in loop(maker, mine):
        (_miss(judge(maker(noise)), 1.0) / rows).backward()
    opts[maker].step()


def _together(
    way: str, maker: nn.Module, judge: nn.Module, opts: Optimizers, loop: Loop, mine: Any, rows: int
) -> None:
    """One loop in which both are trained, or two at once."""
    loops = [loop(judge, mine)] if way == "one loop" else [loop(judge, mine), loop(maker, mine)]
    for batches in zip(*loops, strict=False):
        x, noise = batches[0][0], batches[-1][1]
        made = maker(noise)
        ((_miss(judge(x), 1.0) + _miss(judge(made.detach()), 0.0)) / rows).backward()
        (_miss(judge(made), 1.0) / rows).backward()
    opts[judge].step()
    opts[maker].step()


def _parts(
    way: str, maker: nn.Module, judge: nn.Module, opts: Optimizers, loop: Loop, mine: Any, rows: int
) -> None:
    """A loop over the model of both for each of them; the other one is frozen."""
    model: Any = maker.whole
    for trained, other in ((judge, maker), (maker, judge)):
        trained.requires_grad_(True)
        other.requires_grad_(False)
        for x, noise in loop(model, mine):
            (model(x, noise, trained) / rows).backward()
        opts[trained].step()


WAYS = {"in turn": _in_turn, "frozen": _in_turn, "no_grad": _in_turn, "one loop": _together}
WAYS |= {"zip": _together, "parts": _parts}


def _train(
    way: str, models: tuple[nn.Module, nn.Module], loop: Loop, counts: tuple[int, ...], rank: int
) -> dict[str, torch.Tensor]:
    """Rank -1 is one process, with everybody's micro-batches."""
    maker, judge = models
    opts = {model: torch.optim.Adam(model.parameters(), lr=1e-2) for model in models}
    first = sum(counts[:rank]) if rank >= 0 else 0
    own = counts[rank] if rank >= 0 else sum(counts)
    for step in range(4):
        everybody = [_batch(step, i) for i in range(sum(counts))]
        rows = sum(len(x) for x, _ in everybody)
        WAYS[way](way, maker, judge, opts, loop, everybody[first : first + own], rows)
        for opt in opts.values():
            opt.zero_grad()
    parts = models if way != "parts" else (maker.whole,)
    return {
        f"{i}.{name}": value
        for i, model in enumerate(parts)
        for name, value in (model.state_dict() if rank < 0 else sw.full_state_dict(model)).items()
    }


def _made(way: str, plan: sw.Plan | None) -> tuple[nn.Module, nn.Module]:
    models = maker, judge = _models()
    if way == "parts":
        whole = Parts(maker, judge)
        maker.__dict__["whole"] = whole
        models = (whole,)  # type: ignore[assignment]
    for model in models if plan is not None else ():
        sw.shard(model, plan)
    return maker, judge


def _differ(ways: list[str], name: str, sync: str, counts: tuple[int, ...]) -> None:
    mesh = (2, dist.get_world_size() // 2) if name == "hsdp" else dist.get_world_size()
    for way in ways:
        plan = sw.Plan.of(name, mesh=mesh, sync=sync)
        got = _train(way, _made(way, plan), sw.microbatches, counts, dist.get_rank())
        alone = _train(way, _made(way, None), lambda _, items: items, counts, -1)
        for key, expected in alone.items():
            assert torch.allclose(got[key], expected, atol=1e-6), f"{way}: {key}"


@pytest.mark.parametrize("counts", [(2, 2), (0, 2), (2, 1)])
@pytest.mark.parametrize("sync", ["last", "scatter_each_reduce_last"])
def test_replicas_train_two_models(two: Ranks, counts: tuple[int, ...], sync: str) -> None:
    two.run(_differ, list(WAYS), "ddp", sync, counts)


@pytest.mark.parametrize("name", ["zero1", "zero2", "zero3"])
def test_a_shard_group_trains_two_models(two: Ranks, name: str) -> None:
    two.run(_differ, list(WAYS), name, "last", (2, 2))


@pytest.mark.parametrize("counts", [(2, 2, 0, 0), (1, 1, 3, 3)])
def test_hybrid_replicas_train_two_models(four: Ranks, counts: tuple[int, ...]) -> None:
    for sync in ("last", "scatter_each_reduce_last"):
        four.run(_differ, list(WAYS), "hsdp", sync, counts)


def _even_after_uneven() -> None:
    """What was frozen where only some ranks saw it; then steps without a loop."""
    rank = dist.get_rank()
    pair, alone = _made("", sw.Plan.of("ddp", mesh=2, sync="last")), _made("", None)
    for models in (pair, alone):
        loop: Any = sw.microbatches if models is pair else lambda _, items: items
        (maker, judge), opts = models, [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
        for step in range(6):
            judge.requires_grad_(step % 2 == 0)
            batches = [_batch(step, 0)] if models is alone or rank == 1 else []
            if step < 4:
                for _, noise in loop(maker, batches):
                    _miss(judge(maker(noise)), 1.0).backward()
            else:
                share = 2 if models is pair else 1
                (_miss(judge(maker(_batch(step, 0)[1])), 1.0) / share).backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
    for model, plain in zip(pair, alone, strict=True):
        for key, value in sw.full_state_dict(model).items():
            assert torch.allclose(value, plain.state_dict()[key], atol=1e-6), key


def test_even_steps_after_uneven_ones(two: Ranks) -> None:
    two.run(_even_after_uneven)


def _gathered_inside() -> None:
    maker, judge = _models()
    sw.shard(maker, sw.Plan.of("ddp", mesh=2, sync="last"))
    sw.shard(judge, sw.Plan.of("zero3", mesh=2))
    counts = (2, 1)
    for _, noise in sw.microbatches(maker, [_batch(0, i) for i in range(counts[dist.get_rank()])]):
        _miss(judge(maker(noise)), 1.0).backward()


def test_a_model_that_uneven_ranks_would_gather_is_named(two: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        two.run(_gathered_inside)
    for error in caught.value.errors:
        assert error is not None and "gathered on ranks that run other numbers" in error
