"""A discrete-event simulation of one step over all ranks.

Every rank runs its Program. An operation starts when what it depends on has ended and the host has
issued it; a collective starts when its last member has arrived; while a collective or a copy is on
a rank, compute there goes on at what is left of the device; transfers over one link share it.

Ranks that do the same are simulated once. Two ranks are alike when they have the same work and
speed and their groups have alike members; the coarsest such classes are found by refinement, and a
group of ranks becomes a group of classes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.description.workload import Workload, row_of
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.predict.events import Rank, run
from shardwise.predict.fsdp2 import Fsdp2Step
from shardwise.predict.program import Program, works_of
from shardwise.predict.step import EngineStep, Step, StepOptions
from shardwise.timeline import Timeline

ENGINES: dict[str, type[Step]] = {"shardwise": EngineStep, "fsdp2": Fsdp2Step}


def simulate(
    plan: Plan,
    description: ModelDescription | Mapping[int, ModelDescription],
    cluster: Cluster,
    workload: Workload,
    *,
    costs: Costs | None = None,
    engine: str = "shardwise",
    options: StepOptions | None = None,
    slow: Mapping[int, float] | None = None,
    base_bytes: int = 0,
) -> Timeline:
    """Predict one step of `plan` (resolved: it has units) as a Timeline.

    `description` is of one micro-batch of `workload.micro_batch` sequences, or one for each size.
    `slow` gives ranks whose kernels take longer by a factor. `base_bytes` is what a rank holds
    beside the training itself (libraries' workspaces).
    """
    if engine not in ENGINES:
        raise ValueError(f"engine is {engine!r}, expected one of {sorted(ENGINES)}")
    costs = costs or Costs.of(cluster)
    options = options or StepOptions()
    works = works_of(plan, description, workload)
    some = description if isinstance(description, ModelDescription) else description[max(works)]
    held = base_bytes + some.input_bytes + some.buffer_bytes

    rows = [
        tuple(filter(None, (workload.size_of(row, i) for i in range(workload.micro_batches))))
        for row in range(len(workload.sizes or ((),)))
    ]

    def sizes_of(rank: int) -> tuple[int, ...]:
        return rows[row_of(rank, plan.mesh, len(rows))]

    agreed = all(sizes_of(rank) for rank in range(0, plan.world, plan.shard))
    programs: dict[tuple[int, ...], Program] = {}

    def program_of(rank: int) -> Program:
        sizes = sizes_of(rank)
        if sizes not in programs:
            schedule = ENGINES[engine](plan, works, costs, workload, options, held, agreed)
            programs[sizes] = schedule.build(sizes)
        return programs[sizes]

    speeds = {rank: factor for rank, factor in (slow or {}).items() if factor != 1}
    outside = sorted(set(speeds) - set(range(plan.world)))
    if outside:
        raise ValueError(f"slow names ranks {outside}, but the mesh {plan.mesh} has {plan.world}")
    # Rows that are the same have one number.
    numbers, axes = _number(rows), mesh_axes(plan)
    if not any(numbers) and not speeds:
        classes = [RankClass(0, plan.world, {axis: (0,) for axis in axes})]
    else:
        classes = fold(
            plan.world,
            lambda rank: (numbers[row_of(rank, plan.mesh, len(rows))], speeds.get(rank, 1.0)),
            axes,
        )
    timeline = run(
        [
            Rank(c.first, program_of(c.first), c.groups, speeds.get(c.first, 1.0), c.count)
            for c in classes
        ]
    )
    labels = {"plan": plan.title, "mesh": "x".join(map(str, plan.mesh)), "cluster": cluster.name}
    return replace(timeline, labels=labels)


# Folding


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same: the first of them, how many, and for each axis the classes of the
    group they are in.
    """

    first: int
    count: int
    groups: Mapping[str, tuple[int, ...]]


def mesh_axes(plan: Plan) -> dict[str, Callable[[int], Sequence[int]]]:
    """For each axis, the ranks that share a group with a rank."""
    n, world = plan.shard, plan.world
    axes: dict[str, Callable[[int], Sequence[int]]] = {
        "shard": lambda rank: range(rank // n * n, rank // n * n + n),
        "replicate": lambda rank: range(rank % n, world, n),
    }
    if any(unit.whole for unit in plan.units or ()):
        axes["all"] = lambda rank: range(world)
    keep = plan.keep_after_forward
    if keep is not None and not isinstance(keep, bool):
        axes["keep"] = lambda rank: range(rank // keep * keep, rank // keep * keep + keep)
    return axes


def fold(
    world: int,
    kind_of: Callable[[int], Hashable],
    axes: Mapping[str, Callable[[int], Sequence[int]]],
) -> list[RankClass]:
    """The coarsest classes of ranks that cannot be told apart."""
    colors = _number([kind_of(rank) for rank in range(world)])
    while True:
        if len(set(colors)) == 1:
            break
        seen: list[Hashable] = []
        for rank in range(world):
            around = tuple(
                frozenset(colors[other] for other in members(rank)) for members in axes.values()
            )
            seen.append((colors[rank], around))
        finer = _number(seen)
        if len(set(finer)) == len(set(colors)):
            break
        colors = finer
    firsts: dict[int, int] = {}
    counts: dict[int, int] = defaultdict(int)
    for rank, color in enumerate(colors):
        firsts.setdefault(color, rank)
        counts[color] += 1
    return [
        RankClass(
            first,
            counts[color],
            {
                axis: tuple(sorted({firsts[colors[other]] for other in members(first)}))
                for axis, members in axes.items()
            },
        )
        for color, first in firsts.items()
    ]


def _number(values: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(value, len(numbers)) for value in values]
