"""Profiles of two real gloo ranks: what was planted is what the timeline tells."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from shardwise.timeline import Timeline
from tests.parity.dropin.extensions import Cropped
from tests.parity.planted import (
    AFTER,
    BARE,
    BLOCKS,
    COMPUTE_S,
    FAULTS,
    LATENCY_S,
    SLEEP_S,
    SLOW,
    STEPS,
    read_planted,
    run_planted,
)
from tests.ranks import Ranks

NS = 1_000_000_000


@pytest.fixture
def planted(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Timeline]:
    """The timeline of a fault; each runs once."""

    def read(fault: str) -> Timeline:
        timeline = read_planted(two, tmp_path_factory.getbasetemp(), fault)
        assert "note" not in timeline.labels  # the timed step is shown, with what the trace knows
        return timeline

    return read


@pytest.mark.quiet
def test_with_prefetch_all_gathers_but_the_first_are_hidden(
    planted: Callable[[str], Timeline],
) -> None:
    timeline = planted("ahead")
    for rank in timeline.ranks:
        gathers = timeline.overlaps("all_gather", "forward", rank)
        assert [o.span.unit for o in gathers] == [f"blocks.{i}" for i in range(BLOCKS)]
        assert [o.is_hidden for o in gathers] == [False] + [True] * (BLOCKS - 1)
        assert gathers[0].exposed > 0.6 * LATENCY_S * NS


@pytest.mark.quiet
def test_without_prefetch_all_gathers_are_exposed(planted: Callable[[str], Timeline]) -> None:
    timeline = planted("late")
    for rank in timeline.ranks:
        gathers = timeline.overlaps("all_gather", "forward", rank)
        assert len(gathers) == BLOCKS
        assert all(o.exposed > 0.6 * LATENCY_S * NS for o in gathers)
        assert not any(o.is_hidden for o in gathers)
    assert timeline.labels["source"] == "emulated"


@pytest.mark.quiet
def test_a_block_that_is_not_gathered_ahead_is_exposed(
    planted: Callable[[str], Timeline],
) -> None:
    timeline = planted("exposed")
    exposed = {unit for unit, phase in timeline.exposed(0) if phase == "forward"}
    # The first gather of a step has nothing to hide under either.
    assert exposed == {"blocks.0", f"blocks.{BARE}"}
    assert timeline.exposed(0)[f"blocks.{BARE}", "forward"] > 0.6 * LATENCY_S * NS


@pytest.mark.quiet
def test_a_slow_rank_shows_as_waiting_on_the_other(planted: Callable[[str], Timeline]) -> None:
    timeline = planted("slow")
    waited = timeline.waiting(0)
    # Rank 0 goes on to the next gather, and waits there until rank 1 has slept.
    assert max(waited, key=waited.__getitem__) == (f"blocks.{SLOW + 1}", "forward")
    assert waited[f"blocks.{SLOW + 1}", "forward"] > 0.6 * SLEEP_S * NS
    assert sum(timeline.waiting(1).values()) < 0.5 * sum(waited.values())
    assert timeline.breakdown(1).host_idle > 0.8 * SLEEP_S * NS
    idle = [s for s in timeline.spans if (s.rank, s.role) == (1, "host")]
    assert max(idle, key=lambda s: s.duration).unit == f"blocks.{SLOW}"


@pytest.mark.quiet
def test_a_sleep_between_blocks_is_the_hosts(planted: Callable[[str], Timeline]) -> None:
    timeline = planted("host")
    for rank in timeline.ranks:
        idle = [s for s in timeline.spans if s.rank == rank and s.role == "host"]
        longest = max(idle, key=lambda s: s.duration)
        assert 0.98 * SLEEP_S * NS < longest.duration < 1.5 * SLEEP_S * NS
        before = [s for s in timeline.spans if s.rank == rank and s.end <= longest.start]
        ran = {s.unit for s in before if s.role == "compute"}
        assert f"blocks.{AFTER}" in ran and f"blocks.{AFTER + 1}" not in ran
        assert timeline.breakdown(rank).host_idle >= longest.duration


def test_the_parts_sum_up_and_units_compute(planted: Callable[[str], Timeline]) -> None:
    timeline = planted("host")
    assert timeline.ranks == (0, 1) and timeline.labels["steps"] == str(STEPS)
    for rank in timeline.ranks:
        parts = timeline.breakdown(rank)
        assert sum(parts.parts().values()) == parts.step
        assert parts.compute > 0.7 * BLOCKS * COMPUTE_S * NS  # a busy machine takes some of it
        for i in range(BLOCKS):
            ran = [
                s.duration
                for s in timeline.spans
                if (s.rank, s.unit, s.phase, s.role) == (rank, f"blocks.{i}", "forward", "compute")
            ]
            assert sum(ran) > 0.5 * COMPUTE_S * NS
        reduces = timeline.overlaps("reduce_scatter", "backward", rank)
        assert sorted(o.span.unit for o in reduces) == [f"blocks.{i}" for i in range(BLOCKS)]


def test_the_files_of_a_run(two: Ranks, tmp_path_factory: pytest.TempPathFactory) -> None:
    for fault in FAULTS:
        directory = run_planted(two, tmp_path_factory.getbasetemp(), fault)
        timeline = Timeline.from_json((directory / "timeline.json").read_text())
        memory = json.loads((directory / "memory.json").read_text())["ranks"]
        assert [each["rank"] for each in memory] == [0, 1]
        for each in memory:
            assert each["peak_allocated"] == max(each["allocated"])
            assert each["peak_allocated"] == timeline.peak(each["rank"]).total
            assert len(each["times"]) == len(each["allocated"])
            assert each["largest"] and each["largest"][0]["what"]
        told = json.loads((directory / "messages.json").read_text())
        assert told["cluster"] == "cpu-gloo"
        assert {m["collective"] for m in told["messages"]} == {"all_gather", "reduce_scatter"}
        assert all(m["seconds"] >= m["exposed_s"] >= 0 for m in told["messages"])
        sizes = [point["bytes"] for point in told["curve"]]
        assert min(sizes) <= min(m["bytes"] for m in told["messages"]) <= max(sizes)
        events = json.loads((directory / "trace.json").read_text())["traceEvents"]
        assert {"M", "X", "C", "s", "f"} == {event["ph"] for event in events}
        starts = [event["id"] for event in events if event["ph"] == "s"]
        assert sorted(starts) == sorted(event["id"] for event in events if event["ph"] == "f")


def _memory(strategy: str, through: str) -> dict[str, Any]:
    """Profile one strategy; the peak by role, and what the engine must hold."""
    import torch
    from torch import nn

    import shardwise as sw
    from shardwise.engine.engine import (
        engine_of,
    )

    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)])
    if through == "plan":
        sw.shard(model, sw.Plan.of(strategy, mesh=2))
    else:
        for block in (*model, model):
            sw.fully_shard(block)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    x = torch.ones(512, 256)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    step()
    with sw.profile(model, steps=1) as measured:
        step()
    engine = engine_of(model)
    curve = measured.timeline.curve(0)
    masters = sum(unit.parameters.master.nbytes for unit in engine.units)
    return {
        "masters": masters,
        "full": max(u.parameters.layout.full_numel * 4 for u in engine.units),
        "peak": dict(curve.peak().by_role),
        "most": {role: max(values) for role, values in curve.roles.items()},
        "units": [unit.name for unit in engine.units],
        "plan": measured.timeline.labels["plan"],
    }


@pytest.mark.parametrize(("strategy", "through"), [("zero3", "plan"), ("zero3", "fully_shard")])
def test_memory_by_role(two: Ranks, strategy: str, through: str) -> None:
    for found in two.run(_memory, strategy, through):
        most = found["most"]
        assert most["parameters"] == found["masters"]
        assert most["state"] >= 2 * found["masters"]  # AdamW's two moments, and its step counts
        assert most["state"] < 2.1 * found["masters"]
        assert most["gradients"] >= found["masters"]
        assert most["full"] >= found["full"]
        # The inputs of the four linear layers, 512 x 256 floats, are kept for backward.
        assert most["activations"] >= 3 * 512 * 256 * 4
        total = sum(found["peak"].values())
        assert found["peak"]["other"] <= 0.01 * total
        assert found["plan"] == ("zero3" if through == "plan" else "fully_shard")


def _foreign(kind: str) -> str:
    """Profile one of torch's own engines; the Timeline's JSON."""
    import torch
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import shardwise as sw

    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        *[nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)]
    )
    if kind == "fsdp":
        for block in (*model.children(), model):
            fully_shard(block)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(512, 256)).sum().backward()
        optimizer.step()

    step()
    with sw.profile(model, steps=3) as measured:
        for _ in range(3):
            step()
    return measured.timeline.to_json()


def test_torchs_fsdp_is_profiled_by_its_own_names(two: Ranks) -> None:
    timeline = Timeline.from_json(two.run(_foreign, "fsdp")[0])
    assert timeline.labels["engine"] == "torch" and timeline.labels["plan"] == "fully_shard"
    assert "note" not in timeline.labels
    for rank in timeline.ranks:
        parts = timeline.breakdown(rank)
        assert sum(parts.parts().values()) == parts.step
        gathered = {o.span.unit for o in timeline.overlaps("all_gather", "forward", rank)}
        reduced = {o.span.unit for o in timeline.overlaps("reduce_scatter", "backward", rank)}
        assert gathered == reduced == {"0", "1", "2", "3"}
        computed = {(s.unit, s.phase) for s in timeline.spans if s.role == "compute"}
        assert {(str(i), phase) for i in range(4) for phase in ("forward", "backward")} <= computed
    roles = timeline.curve(0).roles
    masters = 4 * (256 * 256 + 256) * 4 // 2
    assert max(roles["parameters"]) >= masters and max(roles["state"]) >= 2 * masters


def test_torchs_data_parallel_is_profiled_by_its_blocks(two: Ranks) -> None:
    timeline = Timeline.from_json(two.run(_foreign, "ddp")[0])
    assert timeline.labels["plan"] == "DistributedDataParallel"
    assert "note" not in timeline.labels
    computed = {(s.unit, s.phase) for s in timeline.spans if s.role == "compute"}
    blocks = [f"module.{i}" for i in range(4)]
    assert {(name, phase) for name in blocks for phase in ("forward", "backward")} <= computed
    assert timeline.overlaps("gloo:all_reduce")


def _own_gather() -> dict[str, list[int]]:
    """A parameter of a class that brings its own all-gather, around a plain tensor."""
    import torch
    from torch import nn

    import shardwise as sw

    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[0].weight = nn.Parameter(Cropped(model[0].weight.detach().clone()))
    for layer in model:
        sw.fully_shard(layer)
    sw.fully_shard(model)
    with sw.profile(model, steps=1) as measured:
        model(torch.ones(8, 64)).sum().backward()
        measured.step()
    return dict(measured.timeline.curve(0).roles)


def test_parameters_with_their_own_gather_are_profiled(two: Ranks) -> None:
    for roles in two.run(_own_gather):
        assert max(roles["parameters"]) >= 2 * 64 * 64 * 4 // 2
