"""What the schedules issue: the engine's reduces, and the graph-level variants."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.description.workload import Workload
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.program import Program, lay_work, rounded, scaled, works_of
from shardwise.predict.simulate import simulate
from shardwise.predict.step import EngineStep, StepOptions
from tests.unit.test_simulate import CLUSTER, model, resolved


def program(plan: Plan, micro_batches: int = 1, streams: bool = True) -> Program:
    description = model()
    plan = resolved(plan, description)
    workload = Workload(8, 1, micro_batches)
    works = works_of(plan, description, workload)
    costs = Costs(CLUSTER, streams=streams)
    schedule = EngineStep(plan, works, costs, workload, StepOptions(optimizer=False))
    return schedule.build((1,) * micro_batches)


def count(found: Program, name: str) -> int:
    return sum(op.name == name for op in found.ops)


@pytest.mark.parametrize(
    ("sync", "scatters", "reduces"),
    [("each", 12, 12), ("scatter_each_reduce_last", 12, 4), ("last", 4, 4)],
)
@pytest.mark.parametrize("streams", [True, False])
def test_sync_policies_issue_the_engine_s_collectives(
    sync: str, scatters: int, reduces: int, streams: bool
) -> None:
    found = program(Plan.of("hsdp", (2, 2), sync=sync), 3, streams)
    assert count(found, "reduce_scatter") == scatters
    assert count(found, "all_reduce") == reduces
    assert count(found, "all_gather") == 3 * 8


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("sync", ["each", "last"])
def test_memory_comes_and_goes_in_balance(strategy: str, streams: bool, sync: str) -> None:
    """At a step's end only what stays is left: parameters, gradients, replicated parameters."""
    found = program(Plan.of(strategy, 4, sync=sync), 2, streams)
    left: dict[str, int] = {}
    for change in found.changes:
        left[change.role] = left.get(change.role, 0) + change.nbytes
        assert left[change.role] >= 0, change
    for role in ("slots", "activations", "temporary"):
        assert left.get(role, 0) == 0
    shard = 4 * rounded(8_000_000 / (1 if strategy == "ddp" else 4))
    assert left["gradients"] == pytest.approx(shard, abs=4096)
    assert left.get("full", 0) == (32_000_000 if strategy == "zero1" else 0)


@pytest.mark.parametrize(
    "plan",
    [
        Plan.of("zero3", 4, keep_after_forward=2),
        Plan.of("zero3", 4, keep_after_forward=True),
        Plan.of("zero3", 4, keep_after_forward=False, forward_prefetch=3, reduce_depth=3),
        Plan.of("hsdp", (2, 2), inner="zero2"),
        Plan.of("hsdp", (2, 2), sync="scatter_each_reduce_last", compute_dtype="bfloat16"),
        Plan.of("hsdp", (2, 2), sync="scatter_each_reduce_last", reduce_dtype="bfloat16"),
        Plan.of("hsdp", (2, 2), sync="scatter_each_reduce_last", average=True),
    ],
)
@pytest.mark.parametrize("streams", [True, False])
def test_every_setting_gives_back_what_it_took(plan: Plan, streams: bool) -> None:
    left: dict[str, int] = {}
    for change in program(plan, 2, streams).changes:
        left[change.role] = left.get(change.role, 0) + change.nbytes
        assert left[change.role] >= 0, change
    for role in ("slots", "activations", "temporary", "full"):
        assert left.get(role, 0) == 0, role


@pytest.mark.parametrize("sync", ["each", "scatter_each_reduce_last"])
def test_compute_waits_for_no_all_reduce_before_the_end_of_backward(sync: str) -> None:
    """Whatever the depth: only the scattered rows stay for it, half of a unit on two shards."""
    plan = Plan.of("hsdp", (2, 2), sync=sync, reduce_dtype="bfloat16")
    found = program(plan, 2)
    ends = [i for i, op in enumerate(found.ops) if op.name in ("all_reduce", "add")]
    backwards = [op for op in found.ops if op.name == "backward"]
    last = [i for i, op in enumerate(found.ops) if op.name == "forward"][-1]
    for op in backwards[-4:]:
        assert not [i for i in op.after if i in ends and i > last]
    held = most = 0
    for change in found.changes:
        held += change.nbytes if change.role == "slots" else 0
        most = max(most, held)
    rows, slot = rounded(2_000_000), rounded(4_000_000)
    passing = rows if sync == "scatter_each_reduce_last" else 0
    assert most == 4 * rows + slot + passing


def test_a_late_replica_costs_nothing_at_any_depth() -> None:
    """Delayed, with uneven work: the step is the same from depth 1 on."""
    description = model()
    workload = Workload(8, 2, 2, sizes=((1, 2), (2, 1)))
    plan = Plan.of("hsdp", (2, 2), sync="scatter_each_reduce_last")
    steps = [
        simulate(
            resolved(dataclasses.replace(plan, reduce_depth=depth), description), description,
            CLUSTER, workload, options=StepOptions(optimizer=False),
        ).step_ms
        for depth in (1, 4)
    ]  # fmt: skip
    assert steps[0] == pytest.approx(steps[1], rel=0.001)


def test_buckets_may_cut_otherwise_than_the_description() -> None:
    description = model()
    merged = resolved(Plan.of("zero2", 2, bucket_bytes=16_000_000), description)
    work = lay_work(merged, description)
    assert work.uses == ((0,), (0,), (1,), (1,))
    half = scaled(description, 0.5)
    assert half.forward_flops == pytest.approx(description.forward_flops / 2)
    assert half.saved_bytes == description.saved_bytes // 2


@pytest.mark.parametrize("loss_inside", [True, False])
def test_measured_passes_are_taken_for_every_segment(loss_inside: bool) -> None:
    description = model()
    plan = resolved(Plan.of("zero3", 2), description)
    works = works_of(plan, description, Workload(8))
    costs = Costs(CLUSTER)
    parts = [p for _, s in description.segments for p in (s.forward, s.backward)]
    costs.set_passes((part, 0.125) for part in parts)
    options = StepOptions(optimizer=False, loss_inside=loss_inside)
    ops = EngineStep(plan, works, costs, Workload(8), options).build((1,)).ops
    assert [op.seconds for op in ops if op.role == "compute"] == [0.125] * 8


def test_an_emulated_collective_copies_and_then_waits() -> None:
    description = model()
    plan = resolved(Plan.of("zero3", 2), description)
    works = works_of(plan, description, Workload(8))
    costs = Costs(CLUSTER, emulated=True, copy_rates={"all_gather copy": 8e9})
    ops = EngineStep(plan, works, costs, Workload(8)).build((1,)).ops
    at = next(i for i, op in enumerate(ops) if op.name == "all_gather copy")
    copy, wait = ops[at], ops[at + 1]
    assert copy.share == 1.0 and copy.stream == wait.stream == "shard"
    assert copy.seconds + wait.seconds == pytest.approx(4e-3)


def test_options_of_a_step_check_themselves() -> None:
    with pytest.raises(ValueError, match="update"):
        StepOptions(update="slow")
