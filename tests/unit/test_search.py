"""The search: what fits, what wins, and why."""

from __future__ import annotations

import dataclasses

import pytest

from shardwise.description.cluster import Cluster
from shardwise.description.workload import Workload
from shardwise.planning.describe import describe_preset
from shardwise.planning.plan import Plan
from shardwise.planning.ranking import GB, MEMORY_MARGIN
from shardwise.planning.schedule_step import StepOptions
from shardwise.planning.search import _Search, _splits, plan, search
from shardwise.planning.search_models import as_source, checkpointed, cut_described
from shardwise.planning.simulate import simulate

CLUSTER = Cluster.load("h100x8")
WORKLOAD = Workload(256, 4)


@pytest.fixture(scope="module")
def ranking():
    return search("tiny", CLUSTER, WORKLOAD, compute_dtype="bfloat16", reduce_dtype="float32")


def test_the_fastest_comes_first_and_all_fit(ranking) -> None:
    steps = [candidate.step_ms for candidate in ranking]
    assert steps == sorted(steps) and len(steps) > 10
    for candidate in ranking:
        assert candidate.peak_bytes * (1 + MEMORY_MARGIN) <= ranking.limit_bytes
        assert candidate.breakdown.step == sum(candidate.breakdown.parts().values())
        tokens = candidate.workload.tokens_per_step(8, candidate.plan.replicate)
        assert tokens == 8 * 4 * 256
    assert {c.plan.name for c in ranking} == {"ddp", "zero1", "zero2", "zero3", "hsdp"}


def test_the_winner_is_explained_in_sentences(ranking) -> None:
    text = ranking.explain()
    assert text.startswith(f"{ranking[0].title} is the fastest of {ranking.tried} tried")
    assert "to spare" in text
    for other in ranking.best_of_each()[1:]:
        assert other.title in text
    assert "peak" in ranking[0].explain() and "step" in ranking[0].explain()


def test_a_plan_is_the_first_of_the_ranking(ranking) -> None:
    dtypes = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert plan("tiny", CLUSTER, WORKLOAD, **dtypes) == ranking[0].plan
    with pytest.raises(ValueError, match="Nothing fits"):
        plan("tiny", CLUSTER, WORKLOAD, budget_gb=1e-6, strategies=("zero3",))


def test_a_budget_leaves_less_and_less(ranking) -> None:
    most = max(c.peak_bytes for c in ranking)
    least = min(c.peak_bytes for c in ranking)
    tight = search(
        "tiny", CLUSTER, WORKLOAD, budget_gb=(least * 1.1) / GB, compute_dtype="bfloat16",
        reduce_dtype="float32",
    )  # fmt: skip
    assert 0 < len(tight) < len(ranking) and tight.rejected
    assert all(c.peak_bytes < most for c in tight)
    assert tight[0].step_ms >= ranking[0].step_ms * 0.999
    assert "does not fit: at least" in tight.explain() or tight.best_of_each()
    none = search("tiny", CLUSTER, WORKLOAD, budget_gb=1e-6, strategies=("zero3",))
    assert len(none) == 0 and "Nothing fits" in none.explain()
    with pytest.raises(ValueError, match="budget_gb"):
        search("tiny", CLUSTER, WORKLOAD, budget_gb=-1)


def test_memory_decides_what_stays_gathered() -> None:
    """On a slow link keeping units gathered pays, where there is room for them."""
    slow = dataclasses.replace(
        CLUSTER,
        levels=tuple(
            dataclasses.replace(level, bandwidth_bytes_per_s=2e9, points=())
            for level in CLUSTER.levels
        ),
    )
    roomy = search("small", slow, Workload(256, 1), strategies=("zero3",), checkpoints=("none",))
    assert roomy[0].plan.keep_after_forward is True
    freed = [c for c in roomy if c.plan.keep_after_forward is None]
    between = (roomy[0].peak_bytes + min(c.peak_bytes for c in freed)) / 2
    tight = search(
        "small", slow, Workload(256, 1), between * (1 + MEMORY_MARGIN) / GB,
        strategies=("zero3",), checkpoints=("none",),
    )  # fmt: skip
    assert tight[0].plan.keep_after_forward is not True


def test_a_description_alone_is_enough() -> None:
    description = describe_preset("tiny", WORKLOAD)
    found = search(description, CLUSTER, WORKLOAD, world=4)
    assert len(found) > 5 and all(c.plan.world == 4 for c in found)
    with pytest.raises(ValueError, match="describe the model again"):
        as_source(description, WORKLOAD).at(Plan.of("zero3", 4), Workload(128))


@pytest.mark.parametrize("plan", [Plan.of("zero2", 4), Plan.of("zero3", 4), Plan.of("ddp", 4)])
def test_units_from_a_description_are_the_model_s(plan: Plan) -> None:
    description = describe_preset("tiny", WORKLOAD)
    resolved, _ = as_source("tiny", WORKLOAD).at(plan, WORKLOAD)
    cut = cut_described(plan, description)
    assert [len(u.parameters) for u in cut] == [len(u.parameters) for u in resolved.require_units()]
    assert {p.name for u in cut for p in u.parameters} == {
        p.name for u in resolved.require_units() for p in u.parameters
    }


def test_checkpointing_a_description_is_close_to_tracing_it() -> None:
    plan = Plan.of("zero3", 8)
    again = dataclasses.replace(WORKLOAD, checkpoint="nonreentrant")
    derived = checkpointed(describe_preset("tiny", WORKLOAD, plan))
    traced = describe_preset("tiny", again, plan)
    resolved, _ = as_source("tiny", WORKLOAD).at(plan, WORKLOAD)
    ours, theirs = (
        simulate(resolved, d, CLUSTER, WORKLOAD).peak().total for d in (derived, traced)
    )
    assert ours == pytest.approx(theirs, rel=0.1)


@pytest.mark.parametrize(
    ("world", "meshes"),
    [
        (1, set()),
        (4, {(2, 2)}),
        (6, {(2, 3)}),
        (7, set()),
        (12, {(6, 2), (3, 4)}),
        (24, {(6, 4), (3, 8)}),
        (1000, {(250, 4), (125, 8)}),
    ],
)
def test_hybrid_meshes_of_odd_worlds(world: int, meshes: set[tuple[int, int]]) -> None:
    run = _Search(as_source("tiny", Workload(64)), CLUSTER, 8e10, StepOptions(), {})
    assert {plan.mesh for plan in run.starting_plans(world, ["hsdp"])} == meshes


def test_micro_batches_of_odd_totals() -> None:
    def sizes(total: int) -> list[int]:
        return [w.micro_batch for w in _splits(Workload(64, total), ["none"])]

    assert [sizes(n) for n in (1, 3, 8, 35)] == [[1], [1, 3], [1, 2, 4, 8], [1, 5, 35]]
    assert sizes(48) == [1, 2, 4, 8, 16, 48]


@pytest.mark.parametrize(("budget", "world"), [(float("nan"), 8), (0.0, 8), (80.0, 0)])
def test_a_search_of_nothing_is_an_error(budget: float, world: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        search("tiny", CLUSTER, Workload(64), budget, world=world)
