"""The seeds' arithmetic, counted on real ranks: calls and bytes of each collective of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.engine import collectives
from shardwise.engine.collectives import Group
from shardwise.engine.records import Record
from shardwise.planning.memory import count_sent
from shardwise.profiling.footprint import peak_on_cpu
from tests.ranks import Ranks

WIDTH, INNER = 8, 32


class FeedForward(nn.Module):
    """Seed 000's block; every dimension divides by 4, so that nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, INNER, bias=False)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Stack(nn.Module):
    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(FeedForward() for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


PARAMETERS = 4 * 3 * WIDTH * INNER
# Behind each rank's part of a reduce: a number for each parameter, in multiples of 8.
COUNTS = {1: 16, 4: 4 * 8}  # by units: ddp's one bucket of 12 parameters, four blocks of 3


def _step(name: str, mesh: Any, settings: dict[str, Any], micro_batches: int) -> tuple[Record, Any]:
    """The second step's record (the first one also finds the order), and what the Plan foretold."""
    torch.manual_seed(0)
    model = sw.shard(Stack(), sw.Plan.of(name, mesh=mesh, **settings))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        with sw.record() as log:
            for x in sw.microbatches(model, [torch.ones(2, WIDTH)] * micro_batches):
                model(x).sum().backward()
            opt.step()
            opt.zero_grad()
    return log, count_sent(sw.Plan.of(name, mesh=mesh, **settings).resolve(Stack()), micro_batches)


def _counts(sync: str) -> dict[str, int]:
    settings = {"sync": sync, "gather": "packed"}
    return _step("hsdp", (2, 2), settings, 4)[0].counts()


@pytest.mark.parametrize(
    ("sync", "all_reduces", "reduce_scatters"),
    [("each", 16, 16), ("scatter_each_reduce_last", 4, 16), ("last", 4, 4)],
)
def test_delaying_saves_all_reduces(
    four: Ranks, sync: str, all_reduces: int, reduce_scatters: int
) -> None:
    """4 blocks, 4 micro-batches, mesh 2 x 2."""
    for counts in four.run(_counts, sync):
        assert counts["all_reduce"] == all_reduces
        assert counts["reduce_scatter"] == reduce_scatters
        assert counts["all_gather"] == 2 * 4 * 4


def _sent(name: str, settings: dict[str, Any], micro_batches: int) -> tuple[float, float]:
    world = dist.get_world_size()
    mesh = (2, world // 2) if name == "hsdp" else world
    log, foretold = _step(name, mesh, settings, micro_batches)
    by_name = {c: log.sent(c) for c in ("all_gather", "reduce_scatter", "all_reduce")}
    for collective, count in by_name.items():
        assert count == getattr(foretold, collective), (collective, count, foretold)
    return log.sent(), foretold.total


@pytest.mark.parametrize("world", (2, 4))
def test_bytes_per_step_relative_to_ddp(world: int, request: pytest.FixtureRequest) -> None:
    """Seed 003: 1 for NO_SHARD, 1 for SHARD_GRAD_OP, 1.5 for FULL_SHARD."""
    ranks: Ranks = request.getfixturevalue("two" if world == 2 else "four")
    share = 4 * (world - 1) / world
    ddp = ranks.run(_sent, "ddp", {}, 1)[0][0] - 2 * COUNTS[1] * share
    assert ddp == 2 * PARAMETERS * share
    for name, units, ratio in (("zero1", 4, 1.0), ("zero2", 4, 1.0), ("zero3", 4, 1.5)):
        for sent, _ in ranks.run(_sent, name, {}, 1):
            assert (sent - world * COUNTS[units] * share) / ddp == ratio, name


@pytest.mark.parametrize("micro_batches", (1, 3))
@pytest.mark.parametrize("sync", ("each", "scatter_each_reduce_last", "last"))
@pytest.mark.parametrize("name", ("ddp", "zero1", "zero2", "zero3", "hsdp"))
def test_the_plan_foretells_every_byte(
    four: Ranks, name: str, sync: str, micro_batches: int
) -> None:
    """`_sent` compares each collective's bytes with the Plan's formula, exactly."""
    for sent, foretold in four.run(_sent, name, {"sync": sync}, micro_batches):
        assert sent == foretold > 0


def _kept_group_sent() -> bool:
    log, foretold = _step("zero3", 4, {"keep_after_forward": 2, "gather": "packed"}, 1)
    axes = {(c.axis, c.ranks) for c in log.calls if c.name == "all_gather"}
    return log.sent() == foretold.total and axes == {("shard", 4), ("keep", 2)}


def test_a_smaller_group_gathers_for_backward(four: Ranks) -> None:
    assert all(four.run(_kept_group_sent))


def _sixteen_bits() -> tuple[dict[str, float], Any]:
    settings = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    log, foretold = _step("zero3", 2, settings, 1)
    return {c: log.sent(c) for c in ("all_gather", "reduce_scatter")}, foretold


def test_gathers_are_sixteen_bit_and_reduces_are_not(two: Ranks) -> None:
    for sent, foretold in two.run(_sixteen_bits):
        assert sent["all_gather"] == 2 * PARAMETERS * 2 / 2 == foretold.all_gather
        scattered = (PARAMETERS + 2 * COUNTS[4]) * 4 / 2
        assert sent["reduce_scatter"] == scattered == foretold.reduce_scatter


def _forbidden_average() -> list[str]:
    """Case 23: every reduction asked of torch.distributed is a SUM."""
    asked: list[str] = []
    originals = {
        n: getattr(dist, n) for n in ("all_reduce", "reduce_scatter_single") if hasattr(dist, n)
    }

    def watch(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            op = kwargs.get("op", dist.ReduceOp.SUM)
            asked.append(str(op))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, watch(name))
    found, collectives.near_of = (
        collectives.near_of,
        lambda *_: None,
    )  # what they share, nobody sees
    try:
        for plan in (("ddp", 2), ("zero3", 2)):
            _step(*plan, {}, 1)
    finally:
        collectives.near_of = found
        for name, original in originals.items():
            setattr(dist, name, original)
    return asked


def test_only_sums_on_the_wire(two: Ranks) -> None:
    for asked in two.run(_forbidden_average):
        assert asked
        assert all("SUM" in op.upper() for op in asked), asked


def _peak_full() -> tuple[int, int]:
    """The most full-parameter bytes seen at any block's forward or backward, and the formula's."""
    from shardwise.engine.engine import (
        engine_of,
    )
    from shardwise.planning.memory import count_kept

    torch.manual_seed(0)
    plan = sw.Plan.of("zero3", mesh=2, gather="packed")
    model = sw.shard(Stack(6), plan)
    engine = engine_of(model)
    seen = 0

    def look(*_: Any) -> None:
        nonlocal seen
        held = [u.parameters.buffer for u in engine.units]
        seen = max(seen, sum(b.tensors[0].numel() * 4 for b in held if b.allocated))

    for layer in model.layers:
        layer.down.register_forward_hook(look)
        layer.down.register_full_backward_hook(look)
    for _ in range(2):
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    unit = 3 * WIDTH * INNER * 4
    # While a unit is copied out: itself, its staging, and the staging of the one gathered ahead.
    assert count_kept(engine.plan).full == 3 * unit
    return seen, unit


def test_one_unit_is_whole_while_it_runs(two: Ranks) -> None:
    for seen, expected in two.run(_peak_full):
        assert seen == expected


def scatter_both_ways() -> tuple[bool, bool, bool]:
    """gloo's reduce-scatter, and the sum of the parts that each rank gets, in the ranks' order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    everybody = [
        torch.randn(ranks * 1000, generator=torch.Generator().manual_seed(r)) for r in range(ranks)
    ]
    whole, found, again = everybody[rank].clone(), torch.empty(1000), torch.empty(1000)
    for plain, into in ((True, found), (False, again)):
        group = Group("shard", dist.group.WORLD, ranks, rank, None, plain)
        group.reduce_scatter(into, whole).wait()
    kept = torch.equal(whole, everybody[rank])
    expected = everybody[0].clone()
    for each in everybody[1:]:
        expected += each
    mine = expected[1000 * rank : 1000 * (rank + 1)]
    close = bool((found - again).abs().max() < 1e-6 * ranks)
    return torch.equal(again, mine), close, kept


def test_a_scatter_of_parts_gives_the_sums_in_the_order_of_the_ranks(four: Ranks) -> None:
    assert four.run(scatter_both_ways) == [(True, True, True)] * 4


class Handing(nn.Module):
    """Adds what it is handed, and hands it on: as it came, written to in place, or not at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.scale = how, nn.Linear(WIDTH, WIDTH), nn.Linear(1, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        x = torch.tanh(self.line(x)) + bias
        if self.how == "in place":
            bias.mul_(self.scale(torch.ones(1)))
        return x if self.how == "kept" else (x, bias)


class Handed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Handing(how) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.first(x)
        for layer in self.layers:
            given = layer(x, bias)
            x, bias = given if isinstance(given, tuple) else (given, bias)
        return (x + bias).square().mean()


def _hand(how: str) -> tuple[int, float]:
    """How many gathers a step has, and how far its gradients are from those of one process."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Handed(how))
    alone, model = models[0], sw.shard(models[1], sw.Plan.of("zero3", 2, units=[Handing]))
    x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
    alone(x).backward()
    for _ in range(3):
        model.zero_grad()
        with sw.record() as log:
            (model(x) / 2).backward()
    pairs = zip(alone.parameters(), model.parameters(), strict=True)
    apart = [
        float((mine.grad.full_tensor() - whole.grad).abs().max())  # type: ignore[union-attr]
        for whole, mine in pairs
        if whole.grad is not None
    ]
    return log.counts()["all_gather"], max(apart)


@pytest.mark.parametrize("how", ["on", "in place"])
def test_an_input_that_is_handed_on_brings_no_third_gather(two: Ranks, how: str) -> None:
    """Its gradient is complete when the block's backward is over: it announces no other one."""
    for (plain, _), (gathers, apart) in zip(
        two.run(_hand, "kept"), two.run(_hand, how), strict=True
    ):
        assert apart < 1e-6
        assert how == "in place" or gathers == plain


def measure_peaks(name: str) -> list[int]:
    plan = sw.Plan.of(name, mesh=dist.get_world_size(), bucket_bytes=2**18)

    def start() -> Callable[[], None]:
        torch.manual_seed(0)
        model = sw.shard(nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]), plan)
        opt = torch.optim.AdamW(model.parameters())

        def step() -> None:
            model(torch.ones(4, 256)).sum().backward()
            opt.step()
            opt.zero_grad()

        return step

    return [peak_on_cpu(start) for _ in range(6)]


@pytest.mark.parametrize("name", ["zero1", "zero2"])  # backward of zero3 gathers
def test_no_message_outlives_its_collective(two: Ranks, name: str) -> None:
    """Threads of gloo's hold tensors for a moment longer; a step takes as much every time. (What
    gloo itself copies to gather is its own.)
    """
    for peaks in two.run(measure_peaks, name):
        assert max(peaks) - min(peaks) < 0.75 * 2**18, peaks
