"""Search: which Plan is the fastest that fits.

First every strategy and mesh is tried with every micro-batch size and with and without activation
checkpointing, at default settings; memory follows from the schedule's order alone, so what does not
fit is dropped before it is simulated. Then the settings of the best few are improved one at a time:
bucket bytes, what stays gathered, how far to gather ahead, how many reduces may be under way, and
when micro-batches are reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.description.workload import Workload
from shardwise.planning.cost import Costs
from shardwise.planning.plan import Plan
from shardwise.planning.schedule import works_of
from shardwise.planning.schedule_engine import EngineSchedule
from shardwise.planning.schedule_step import StepOptions
from shardwise.planning.search_models import Source, as_source
from shardwise.planning.simulate import simulate
from shardwise.timeline import Breakdown, Timeline

GB = 1e9
# Peaks are predicted to within 3 % (docs/accuracy.md): a plan must fit with that much to spare.
MEMORY_MARGIN = 0.03
REFINED = 3  # how many of the first round's best are improved
WORTH = 0.003  # a setting that saves less than this share of the step is left at its default
MIB = 2**20


@dataclass(frozen=True)
class Candidate:
    """A Plan with its workload and what it is predicted to cost."""

    plan: Plan  # resolved
    workload: Workload
    step_ms: float
    peak_bytes: int
    limit_bytes: float
    breakdown: Breakdown
    tokens_per_s: float
    by_role: dict[str, int]

    @property
    def exposed_ms(self) -> float:
        return (self.breakdown.exposed_transfer + self.breakdown.waiting_for_peers) / 1e6

    @property
    def spare_gb(self) -> float:
        return (self.limit_bytes - self.peak_bytes) / GB

    @property
    def title(self) -> str:
        mesh = f"{self.plan.replicate}x{self.plan.shard}"
        work = f"{self.workload.micro_batches} x {self.workload.micro_batch} sequences"
        again = ", recomputing" if self.workload.checkpoint != "none" else ""
        return f"{self.plan.title} on {mesh}, {work}{again}"

    def settings(self) -> dict[str, Any]:
        """The Plan's settings that are not the defaults."""
        plain = {f.name: f.default for f in dataclasses.fields(Plan)}
        hidden = ("name", "mesh", "units", "cut", "inner", "compute_dtype", "reduce_dtype")
        return {
            name: getattr(self.plan, name)
            for name, default in plain.items()
            if name not in hidden and getattr(self.plan, name) != default
        }

    def show_settings(self) -> str:
        """The same for people."""
        shown = self.settings()
        size = shown.pop("bucket_bytes", None)
        words = [f"{name}={value}" for name, value in shown.items()]
        words += [] if size is None else [f"buckets of {size / MIB:.0f} MiB"]
        return ", ".join(words) or "defaults"

    def explain(self) -> str:
        """In sentences: time, memory, and where the step goes."""
        settings = self.show_settings()
        return (
            f"{self.title}: {self.step_ms:.1f} ms a step ({self.tokens_per_s:,.0f} tokens/s), "
            f"peak {self.peak_bytes / GB:.1f} GB, {self.spare_gb:.1f} GB to spare; {settings}.\n"
            f"  {self.breakdown}"
        )


@dataclass(frozen=True)
class Rejected:
    """A combination that does not fit, and what it would need."""

    title: str
    strategy: str
    peak_bytes: int


@dataclass(frozen=True)
class Ranking(Sequence[Candidate]):
    """Candidates, the fastest first, and what was dropped for memory."""

    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    limit_bytes: float
    tried: int

    def __len__(self) -> int:
        return len(self.candidates)

    def __getitem__(self, index: Any) -> Any:
        return self.candidates[index]

    def best_of_each(self) -> list[Candidate]:
        """The best candidate of every strategy."""
        found: dict[str, Candidate] = {}
        for candidate in self.candidates:
            found.setdefault(candidate.plan.title, candidate)
        return list(found.values())

    def explain(self) -> str:
        """Why the winner wins, against the best of every other strategy."""
        if not self.candidates:
            least = min(self.rejected, key=lambda r: r.peak_bytes, default=None)
            need = "" if least is None else (
                f"; the least is {least.title} with {least.peak_bytes / GB:.1f} GB"
            )  # fmt: skip
            return (
                f"Nothing fits in {self.limit_bytes / GB:.1f} GB{need}. Use more ranks, shorter "
                "sequences, or tensor parallelism beneath it."
            )
        best = self.candidates[0]
        lines = [
            f"{best.title} is the fastest of {self.tried} tried: {best.step_ms:.1f} ms a step. It "
            f"fits with {best.spare_gb:.1f} GB to spare ({best.peak_bytes / GB:.1f} of "
            f"{self.limit_bytes / GB:.1f} GB)."
        ]
        lines += [_compare(best, other) for other in self.best_of_each()[1:]]
        fitting = {candidate.plan.title for candidate in self.candidates}
        dropped: dict[str, Rejected] = {}
        for r in sorted(self.rejected, key=lambda r: r.peak_bytes):
            if r.strategy not in fitting:
                dropped.setdefault(r.strategy, r)
        lines += [
            f"{r.strategy} does not fit: at least {r.peak_bytes / GB:.1f} GB ({r.title})."
            for r in dropped.values()
        ]
        return "\n".join(lines)


def _compare(best: Candidate, other: Candidate) -> str:
    more = other.step_ms - best.step_ms
    if more < WORTH * best.step_ms:
        difference = other.peak_bytes - best.peak_bytes
        return (
            f"{other.title} takes as long ({other.step_ms:.1f} ms) with "
            f"{abs(difference) / GB:.1f} GB {'more' if difference > 0 else 'less'}."
        )

    def gap(*parts: str) -> float:
        return sum(getattr(other.breakdown, p) - getattr(best.breakdown, p) for p in parts) / 1e6

    again = other.workload.checkpoint != "none" and best.workload.checkpoint == "none"
    units = len(other.plan.require_units())
    exposed, compute = gap("exposed_transfer", "waiting_for_peers"), gap("compute")
    host, contention = gap("host_idle"), gap("contention", "copies")
    reasons = [
        (exposed, f"{exposed:.1f} ms more of exposed communication"),
        (compute, f"{compute:.1f} ms more of compute" + (", to recompute" if again else "")),
        (contention, f"{contention:.1f} ms more of contention and copies"),
        (host, f"the device waits {host:.1f} ms longer for the host, which issues {units} units"),
    ]
    told = [text for ms, text in sorted(reasons, reverse=True)[:2] if ms > 0.1 * more]
    return f"{other.title} would add {more:.1f} ms: {' and '.join(told) or 'many small costs'}."


def search(
    model: nn.Module | ModelDescription | str,
    cluster: Cluster,
    workload: Workload,
    budget_gb: float | None = None,
    *,
    world: int | None = None,
    compute_dtype: str | None = None,
    reduce_dtype: str | None = None,
    options: StepOptions | None = None,
    checkpoints: Sequence[str] = ("none", "nonreentrant"),
    strategies: Sequence[str] = ("ddp", "zero1", "zero2", "zero3", "hsdp"),
) -> Ranking:
    """Rank Plans of `model` for `workload` on `world` ranks of `cluster` (default: one node).

    The workload's tokens per rank and step stay the same; its split into micro-batches is searched.
    `budget_gb` is the memory a rank may use, in 1e9 bytes; default: the device's. It also decides
    which units stay gathered and how deep to prefetch.
    """
    world = world or cluster.ranks_per_node or 1
    limit = cluster.device.memory_bytes if budget_gb is None else budget_gb * GB
    if limit <= 0:
        raise ValueError(f"budget_gb is {budget_gb}, expected more than 0")
    run = _Search(
        as_source(model, workload),
        cluster,
        limit,
        options or StepOptions(),
        {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype},
    )
    for plan in run.starting_plans(world, strategies):
        for split in _splits(workload, checkpoints):
            run.consider(plan, split)
    for candidate in run.best(REFINED):
        run.refine(candidate)
    return run.ranking()


def _splits(workload: Workload, checkpoints: Sequence[str]) -> Iterator[Workload]:
    """The rank's sequences of a step, as micro-batches of every power of two that divides them."""
    if workload.sizes is not None:
        for checkpoint in checkpoints:
            yield dataclasses.replace(workload, checkpoint=checkpoint)
        return
    total = workload.micro_batch * workload.micro_batches
    size = 1
    while size <= total:
        if total % size == 0:
            for checkpoint in checkpoints:
                yield dataclasses.replace(
                    workload, micro_batch=size, micro_batches=total // size, checkpoint=checkpoint
                )
        size *= 2


@dataclass
class _Search:
    source: Source
    cluster: Cluster
    limit: float
    options: StepOptions
    dtypes: dict[str, str | None]
    found: dict[tuple[Plan, Workload], Candidate] = field(default_factory=dict)
    rejected: dict[tuple[Plan, Workload], Rejected] = field(default_factory=dict)
    dropped: int = 0

    def __post_init__(self) -> None:
        self.costs = Costs.of(self.cluster)

    def starting_plans(self, world: int, strategies: Sequence[str]) -> Iterator[Plan]:
        for name in strategies:
            if name != "hsdp":
                yield Plan.of(name, world, **self.dtypes)
                continue
            shard = 2
            while shard < world:
                if world % shard == 0 and self._worth_sharding(shard, world):
                    for inner in ("zero3", "zero2"):
                        yield Plan.of("hsdp", (world // shard, shard), inner=inner, **self.dtypes)
                shard *= 2

    def _worth_sharding(self, shard: int, world: int) -> bool:
        """Of many meshes, those whose shard group is a node, a part of one, or a few nodes."""
        node = self.cluster.ranks_per_node or world
        return shard in {max(2, node // 2), node, 2 * node, 4 * node, 8 * node}

    def consider(self, plan: Plan, workload: Workload) -> Candidate | None:
        """Simulate it if it fits."""
        key = (plan, workload)
        if key in self.found or key in self.rejected:
            return self.found.get(key)
        resolved, description = self.source.at(plan, workload)
        peak = self._peak(resolved, description, workload)
        candidate_title = Candidate(
            resolved, workload, 0.0, peak, self.limit, _NOTHING, 0.0, {}
        ).title
        if peak * (1 + MEMORY_MARGIN) > self.limit:
            self.rejected[key] = Rejected(candidate_title, plan.title, peak)
            return None
        timeline = simulate(
            resolved, description, self.cluster, workload, costs=self.costs, options=self.options
        )
        self.found[key] = self._candidate(resolved, workload, timeline)
        return self.found[key]

    def _peak(self, plan: Plan, description: ModelDescription, workload: Workload) -> int:
        works = works_of(plan, description, workload)
        sizes = {
            tuple(workload.size_of(group, i) for i in range(workload.micro_batches))
            for group in range(len(workload.sizes or ((),)))
        }
        held = description.input_bytes + description.buffer_bytes
        return max(
            EngineSchedule(plan, works, self.costs, workload, self.options, held).build(s).peak()
            for s in sizes
        )

    def _candidate(self, plan: Plan, workload: Workload, timeline: Timeline) -> Candidate:
        peak = timeline.peak()
        tokens = workload.tokens_per_step(plan.world, plan.replicate)
        return Candidate(
            plan,
            workload,
            timeline.step_ms,
            peak.total,
            self.limit,
            timeline.breakdown(),
            tokens / (timeline.step_ms / 1e3),
            dict(peak.by_role),
        )

    def best(self, count: int) -> list[Candidate]:
        """The fastest, one for each strategy and mesh."""
        seen: dict[tuple[str, tuple[int, int]], Candidate] = {}
        for candidate in self._sorted():
            seen.setdefault((candidate.plan.title, candidate.plan.mesh), candidate)
        return list(seen.values())[:count]

    def refine(self, candidate: Candidate) -> None:
        """Improve one setting after the other, as long as each is worth it."""
        best = candidate
        for name, values in self._settings(candidate):
            for value in values:
                plan = dataclasses.replace(best.plan, units=None)
                changed = {name: value}
                if name == "prefetch":
                    changed = {"forward_prefetch": value, "backward_prefetch": value}
                try:
                    plan = dataclasses.replace(plan, **changed)
                except ValueError:
                    continue  # this strategy has no such setting
                tried = self.consider(plan, best.workload)
                if tried is None:
                    continue
                if tried.step_ms < best.step_ms * (1 - WORTH):
                    best = tried
                else:
                    self._forget(plan, best.workload)

    def _forget(self, plan: Plan, workload: Workload) -> None:
        """A setting that is not worth it does not belong in the ranking."""
        del self.found[plan, workload]
        self.dropped += 1

    def _settings(self, candidate: Candidate) -> list[tuple[str, tuple[Any, ...]]]:
        plan, largest = candidate.plan, max(
            sum(p.nbytes for p in unit.parameters) for unit in candidate.plan.require_units()
        )  # fmt: skip
        settings: list[tuple[str, tuple[Any, ...]]] = []
        if candidate.workload.micro_batches > 1:
            delayed = ("scatter_each_reduce_last",) if plan.replicate > 1 else ()
            settings.append(("sync", (*delayed, "last")))
        if plan.strategy.parameters == "shard":
            node = self.cluster.ranks_per_node
            pieces = (node,) if node and node < plan.shard and plan.shard % node == 0 else ()
            settings.append(("keep_after_forward", (True, *pieces)))
            settings.append(("prefetch", (2, 3)))
            settings.append(("bucket_bytes", (2 * largest, 4 * largest)))
        else:
            settings.append(("bucket_bytes", (64 * MIB, 128 * MIB, 256 * MIB)))
        settings.append(("reduce_depth", (2, 4)))
        return settings

    def _sorted(self) -> list[Candidate]:
        return sorted(self.found.values(), key=lambda c: (c.step_ms, c.peak_bytes))

    def ranking(self) -> Ranking:
        return Ranking(
            tuple(self._sorted()),
            tuple(self.rejected.values()),
            self.limit,
            len(self.found) + len(self.rejected) + self.dropped,
        )


_NOTHING = Breakdown(0, 0, 0, 0, 0, 0, 0)
