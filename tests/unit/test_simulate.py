"""The simulator against hand-made cases, the engine's own formulas, and its speed."""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shardwise.description.cluster import Cluster, Device, Host, Level, MatmulRate, Protocol
from shardwise.description.cluster_toml import load_cluster
from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    PassFacts,
    UnitDescription,
    UnitSegment,
)
from shardwise.description.parameters import ParameterSpec
from shardwise.description.workload import Workload
from shardwise.engine.api import shard
from shardwise.engine.gradients import Gradients
from shardwise.planning.memory import count_kept
from shardwise.planning.plan import Plan
from shardwise.planning.strategies import SYNCS
from shardwise.predict.cost import Costs
from shardwise.predict.describe import describe
from shardwise.predict.events import Rank, run
from shardwise.predict.program import Op, Program
from shardwise.predict.simulate import fold, mesh_axes, simulate
from shardwise.predict.sources import checkpointed, cut_described
from shardwise.predict.step import EngineStep, StepOptions
from shardwise.timeline import COMPUTE, Timeline
from tests.parity.models import build

MS = 1e-3
# A unit is 8 MB; the link moves 1 GB/s, so a gather over 2 ranks takes 4 ms.
DEVICE = Device("d", 1e9, 1e15, 1.0, 0.0, (MatmulRate("float32", 1e12, 1.0),))
LINK = Level("link", None, 1e9, (Protocol("p", 0.0, 0.0),))
CLUSTER = Cluster("c", DEVICE, (LINK,), Host(0.0, 0.0, 0.0))


def model(blocks: int = 4, forward_s: float = 10 * MS, backward_s: float = 20 * MS) -> ModelDescription:  # fmt: skip  # noqa: E501
    def part(seconds: float, peak: int, net: int) -> PassFacts:
        flops = seconds * 1e12
        return PassFacts((KernelFact("matmul", flops, 0.0, "float32", (8, 8, 8)),), peak, net)

    units = tuple(
        UnitDescription(
            f"layers.{i}",
            (f"layers.{i}",),
            (ParameterSpec(f"layers.{i}.w", (1000, 2000), "float32"),),
            (
                UnitSegment(
                    i,
                    part(forward_s, 3_000_000, 2_000_000),
                    part(backward_s, 1_000_000, -2_000_000),
                    2_000_000,
                    500_000,
                ),
            ),
        )
        for i in range(blocks)
    )
    return ModelDescription("m", units)


def resolved(plan: Plan, description: ModelDescription) -> Plan:
    return dataclasses.replace(plan, units=cut_described(plan, description))


def step(plan: Plan, description: ModelDescription, **more: object) -> Timeline:
    workload = more.pop("workload", Workload(8))
    options = more.pop("options", StepOptions(optimizer=False))
    cluster = more.pop("cluster", CLUSTER)
    return simulate(
        resolved(plan, description), description, cluster, workload, options=options, **more
    )  # type: ignore[arg-type]


def test_with_prefetch_all_but_the_first_gather_are_hidden() -> None:
    timeline = step(Plan.of("zero3", 2), model())
    gathers = timeline.overlaps("all_gather", "forward")
    assert [g.is_hidden for g in gathers] == [False, True, True, True]
    assert timeline.exposed()["layers.0", "forward"] == 4_000_000
    # First gather, 4 forwards, the gather of the last block for backward, 4 backwards, last reduce.
    assert timeline.step_ms == pytest.approx(4 + 40 + 4 + 80 + 4, abs=0.01)


def test_without_prefetch_every_gather_is_exposed() -> None:
    plan = Plan.of("zero3", 2, forward_prefetch=0, backward_prefetch=0)
    gathers = step(plan, model()).overlaps("all_gather")
    assert len(gathers) == 8 and not any(g.is_hidden for g in gathers)


def test_kept_parameters_are_gathered_once() -> None:
    for plan in (Plan.of("zero3", 2, keep_after_forward=True), Plan.of("zero2", 2, bucket_bytes=1)):
        assert len(step(plan, model()).overlaps("all_gather")) == 4


def test_ddp_reduces_behind_backward() -> None:
    plan = Plan.of("ddp", 2, bucket_bytes=1)
    timeline = step(plan, model())
    assert timeline.step_ms == pytest.approx(120 + 8, abs=0.01)
    naive = step(dataclasses.replace(plan, reduce="naive"), model())
    assert naive.step_ms == pytest.approx(120 + 4 * 8, abs=0.01)


def test_the_identity_holds_for_every_rank() -> None:
    workload = Workload(8, 2, 2, sizes=((1, 2), (2, 1)))
    timeline = step(
        Plan.of("hsdp", (2, 2)), model(), workload=workload, slow={3: 1.3},
        cluster=dataclasses.replace(CLUSTER, communication_share_of_compute=0.2),
    )  # fmt: skip
    for rank in timeline.ranks:
        parts = timeline.breakdown(rank)
        assert parts.step == sum(parts.parts().values())
    assert timeline.breakdown(0).waiting_for_peers > 0


def test_a_slow_rank_holds_up_its_peers() -> None:
    even, slow = (step(Plan.of("zero3", 4), model(), slow=s) for s in ({}, {2: 1.5}))
    assert slow.step_ms > 1.4 * even.step_ms
    fast = next(rank for rank in slow.ranks if rank != 2)
    assert slow.breakdown(fast).waiting_for_peers > 0.25 * even.step
    assert sum(slow.stands_for.values()) == 4


def test_contention_slows_compute_also_while_waiting() -> None:
    cluster = dataclasses.replace(CLUSTER, communication_share_of_compute=0.25)
    workload = Workload(8, 2, 2, sizes=((1, 2), (2, 1)))
    plan = Plan.of("hsdp", (2, 1), sync="scatter_each_reduce_last", reduce_depth=8)
    free, taken = (step(plan, model(8), workload=workload, cluster=c) for c in (CLUSTER, cluster))
    assert taken.breakdown().contention > 0.05 * free.step


def test_transfers_over_one_link_share_it() -> None:
    def op(axis: str) -> Op:
        return Op("all_reduce", "u", "backward", "transfer", axis, 1.0, group=axis, link="nvlink")

    program = Program((op("a"), op("b")), ())
    both = run([Rank(0, program, {"a": (0,), "b": (0,)})])
    assert both.step == 2_000_000_000


def test_a_collective_waits_for_its_last_member() -> None:
    def program(seconds: float) -> Program:
        return Program(
            (
                Op("forward", "u", "forward", "compute", COMPUTE, seconds),
                Op("all_reduce", "u", "backward", "transfer", "a", 0.5, after=(0,), group="a"),
            ),
            (),
        )

    timeline = run([Rank(r, program(1.0 + r), {"a": (0, 1)}) for r in range(2)])
    assert {timeline.end(0), timeline.end(1)} == {2_500_000_000}
    assert timeline.breakdown(0).waiting_for_peers == 1_000_000_000


def test_ranks_that_disagree_are_named() -> None:
    one = Program((Op("all_reduce", "u", "backward", "transfer", "a", 1.0, group="a"),), ())
    ranks = [Rank(0, one, {"a": (0, 1)}), Rank(1, Program((), ()), {"a": (0, 1)})]
    with pytest.raises(RuntimeError, match="rank 0 never ends all_reduce"):
        run(ranks)


def test_the_host_can_be_the_slowest() -> None:
    slow_host = dataclasses.replace(CLUSTER, host=Host(0.1, 0.0, 0.0))
    timeline = step(Plan.of("zero3", 1), model(), cluster=slow_host)
    assert timeline.step_ms == pytest.approx(8 * 100, rel=0.01)
    assert timeline.breakdown().host_idle > 0.8 * timeline.step


def test_alike_ranks_are_folded() -> None:
    plan = Plan.of("hsdp", (4, 4))
    classes = fold(16, lambda rank: rank // 4 % 2, mesh_axes(plan))
    assert [(c.first, c.count) for c in classes] == [(0, 8), (4, 8)]
    assert classes[0].groups == {"shard": (0,), "replicate": (0, 4)}
    assert len(fold(16, lambda rank: 0, mesh_axes(plan))) == 1
    assert len(fold(16, lambda rank: rank, mesh_axes(plan))) == 16


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_memory_agrees_with_the_formulas(strategy: str) -> None:
    description = model()
    plan = resolved(Plan.of(strategy, 4), description)
    peak = simulate(plan, description, CLUSTER, Workload(8)).curve()
    kept = count_kept(plan)
    assert max(peak.roles["parameters"]) == pytest.approx(kept.master, abs=4096)
    assert max(peak.roles["state"]) == pytest.approx(kept.state, abs=8192)
    # Units of one parameter need no staging, so the formula's bound is met or not reached.
    assert max(peak.roles["full"]) <= kept.full
    assert peak.totals[-1] < peak.peak().total


@pytest.mark.parametrize(
    ("strategy", "mesh", "more"),
    [
        ("ddp", 4, {}), ("ddp", 4, {"reduce": "naive"}), ("ddp", 4, {"reduce": "flat"}),
        ("zero1", 4, {}), ("zero2", 4, {}), ("zero3", 4, {}), ("hsdp", (2, 2), {}),
        ("hsdp", (2, 2), {"inner": "zero1"}), ("hsdp", (2, 2), {"inner": "zero2"}),
        ("hsdp", (2, 1), {}),
    ],
)  # fmt: skip
def test_explain_counts_the_slots_that_the_simulator_holds(
    strategy: str, mesh: Any, more: dict[str, Any]
) -> None:
    """For a device with streams and for a CPU, whatever the settings."""
    description = model(6)
    for dtype, sync, depth, batches, streams in itertools.product(
        (None, "bfloat16"), SYNCS, (1, 3), (1, 2), (True, False)
    ):
        settings = {"reduce_dtype": dtype, "sync": sync, "reduce_depth": depth, **more}
        plan = resolved(Plan.of(strategy, mesh, bucket_bytes=8_000_000, **settings), description)
        costs, options = Costs(CLUSTER, streams=streams), StepOptions(optimizer=False)
        timeline = simulate(
            plan, description, CLUSTER, Workload(8, 1, batches), costs=costs, options=options
        )
        held = max(timeline.curve().roles.get("slots", (0,)))
        kept = count_kept(plan, batches)
        told = kept.slots if streams else kept.host_slots
        told += kept.accumulators if batches > 1 else 0
        assert held == pytest.approx(told, rel=0.001), (settings, batches, streams)


def test_accumulation_and_checkpointing_move_memory() -> None:
    workload = Workload(8, 1, 2)
    each, last = (
        step(Plan.of("zero3", 4, sync=sync), model(), workload=workload)
        for sync in ("each", "last")
    )
    assert max(last.curve().roles["slots"]) > max(each.curve().roles["slots"])
    plain, again = model(), checkpointed(model())
    plan = Plan.of("zero3", 4)
    assert step(plan, again).peak().total < step(plan, plain).peak().total
    assert step(plan, again).step_ms > step(plan, plain).step_ms + 35


def test_the_order_alone_gives_the_peak() -> None:
    from shardwise.predict.program import works_of

    description = model()
    plan = resolved(Plan.of("zero3", 4), description)
    works = works_of(plan, description, Workload(8))
    peak = EngineStep(plan, works, Costs.of(CLUSTER), Workload(8)).peak((1,))
    assert peak == simulate(plan, description, CLUSTER, Workload(8)).peak().total


def test_a_host_without_streams_computes_and_waits_itself() -> None:
    host = dataclasses.replace(CLUSTER, host=Host(0.0, 1 * MS, 0.0, communicates=True))
    timeline = step(Plan.of("zero3", 2), model(), cluster=host)
    assert set(timeline.streams(0)) == {COMPUTE, "shard"}
    assert timeline.breakdown().host_idle > 0


@pytest.mark.parametrize("engine", ["shardwise", "fsdp2"])
def test_both_engines_move_the_same_bytes(engine: str) -> None:
    timeline = step(Plan.of("zero3", 2), model(), engine=engine)
    assert len(timeline.overlaps("all_gather")) == 8
    assert len(timeline.overlaps("reduce_scatter")) == 4


def test_wrong_questions_are_answered_with_what_to_do() -> None:
    description = model()
    plan = resolved(Plan.of("zero3", 2), description)
    with pytest.raises(ValueError, match="engine is 'x'"):
        simulate(plan, description, CLUSTER, Workload(8), engine="x")
    with pytest.raises(ValueError, match="slow names ranks"):
        simulate(plan, description, CLUSTER, Workload(8), slow={9: 2.0})
    with pytest.raises(ValueError, match="in no unit of the Plan"):
        simulate(dataclasses.replace(plan, units=()), description, CLUSTER, Workload(8))
    with pytest.raises(ValueError, match="no description"):
        uneven = Workload(8, 2, 2, sizes=((1, 2),))
        simulate(plan, {1: description}, CLUSTER, uneven)
    with pytest.raises(ValueError, match="fully_shard has no"):
        ddp = resolved(Plan.of("ddp", 2), description)
        simulate(ddp, description, CLUSTER, Workload(8), engine="fsdp2")


def test_it_is_quick() -> None:
    """126 blocks on 1,024 folded ranks, and on 64 ranks of which no two are alike; in CPU time,
    because other work on the machine is not the simulator's.
    """
    description = model(126)
    began = time.process_time()
    timeline = step(Plan.of("hsdp", (128, 8)), description)
    timeline.breakdown()
    assert time.process_time() - began < 2
    assert (len(timeline.ranks), timeline.world) == (1, 1024)
    sizes = tuple((1 + (g % 3), 4 - (g % 3)) for g in range(8))
    workload = Workload(8, 4, 2, sizes=sizes)
    began = time.process_time()
    distinct = step(
        Plan.of("hsdp", (8, 8)), description, workload=workload,
        slow={rank: 1 + rank / 100 for rank in range(64)},
    )  # fmt: skip
    assert time.process_time() - began < 10
    assert len(distinct.ranks) == 64


def test_parameters_kept_whole_are_all_reduced_by_everybody() -> None:
    """Through a model's own description: the units that travel apart run with their modules."""
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    options, cluster = StepOptions(optimizer=False), load_cluster("cpu-gloo")
    for name, mesh in (("zero3", 4), ("hsdp", (2, 2))):
        plan = Plan.of(name, mesh, whole=["*.norm.*", "head.*"], average=True).resolve(
            build("even")
        )
        description = describe(build("even"), tokens, plan, device="cpu")
        for streams in (True, False):
            costs = Costs(cluster, streams=streams)
            workload = Workload(5, 2, 2)
            found = simulate(plan, description, cluster, workload, costs=costs, options=options)
            sums = [span for span in found.spans if span.stream == "all" and span.rank == 0]
            kept = [unit.name for unit in plan.require_units() if unit.whole]
            assert [(s.name, s.unit) for s in sums] == [("all_reduce", u) for u in kept] * 2
            # Complete with the first block's backward, where the first norm's gradient arrives.
            spans = [s for s in found.spans if s.name == "backward" and s.rank == 0]
            assert sums[-1].start >= max(s.end for s in spans if s.unit == "layers.0")
            divided = [s for s in found.spans if s.name == "divide" and s.rank == 0]
            assert len(divided) == 2 * len(plan.require_units())
    with pytest.raises(ValueError, match="fully_shard keeps no parameters whole"):
        simulate(plan, description, CLUSTER, Workload(5, 2), engine="fsdp2")


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_a_cpu_holds_the_slots_that_explain_counts(
    strategy: str, no_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine itself: two slots of zero1, one of a sharded gradient's, and beside each what
    gloo's ranks receive (a fake group receives nothing).
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    blocks = [nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(6)]
    model, plan = nn.Sequential(*blocks), Plan.of(strategy, 4, bucket_bytes=1)
    told = count_kept(plan.resolve(model)).host_slots
    slots: list[weakref.ref[torch.Tensor]] = []
    live: list[int] = []
    pack = Gradients.pack

    def watched(self: Gradients, *args: Any, **settings: Any) -> torch.Tensor:
        slot = pack(self, *args, **settings)
        slots.append(weakref.ref(slot))
        live.append(sum(held.nbytes for ref in slots if (held := ref()) is not None))
        return slot

    monkeypatch.setattr(Gradients, "pack", watched)
    sharded = shard(model, plan)
    sharded(torch.randn(4, 64)).sum().backward()
    assert len(live) == 6 and max(live) == told // 2
    assert max(live) == (2 if strategy == "zero1" else 1) * min(live)
