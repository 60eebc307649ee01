"""Search: which Plan is the fastest that fits.

First every strategy and mesh is tried with every micro-batch size and with and without activation
checkpointing, at default settings; memory follows from the schedule's order alone, so what does not
fit is dropped before it is simulated. Then no more is recomputed than the memory asks for, where
that may come first. Then the settings of each strategy's best are improved one at
a time: bucket bytes, what stays gathered, how far to gather ahead, how many reduces may be under
way, and when micro-batches are reduced.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.description.tracing.real_run import tell
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.planning.memory import explain_padding
from shardwise.planning.plan import Plan
from shardwise.planning.units import MIB
from shardwise.predict.cost import Costs
from shardwise.predict.program import scaled, works_of
from shardwise.predict.ranking import (
    GB,
    WORTH,
    Candidate,
    Ranking,
    Rejected,
    Room,
    title_of,
)
from shardwise.predict.simulate import simulate
from shardwise.predict.sources import Source, as_example, as_source, workload_of
from shardwise.predict.step import EngineStep, StepOptions

SIMULATED = 3  # micro-batches, of twice as many and more
NOTHING, EVERYTHING = "none", "nonreentrant"  # are recomputed
# Recomputing every block adds one forward to a forward and a backward of two: at most this share.
RECOMPUTED_SHARE = 0.25
LESS_TRIED = 1  # strategies for which less recomputation is looked for
# Where a smaller share than this of what recomputing frees could be kept, that gains a percent.
WORTH_KEEPING = 0.06
USUAL_SHARDS = 512  # ranks of a shard group
# What a smaller micro-batch foretells is not described when it exceeds the limit by so much.
SURELY_TOO_MUCH = 1.15


def search(
    model: nn.Module | ModelDescription | str,
    cluster: Cluster,
    workload: Workload | Any = None,
    budget_gb: float | None = None,
    *,
    inputs: Any = None,
    loss: Callable[..., Any] | None = None,
    trace_on: str = "auto",
    world: int | None = None,
    compute_dtype: str | None = None,
    reduce_dtype: str | None = None,
    options: StepOptions | None = None,
    checkpoints: Sequence[str] | None = None,
    strategies: Sequence[str] = ("ddp", "zero1", "zero2", "zero3", "hsdp"),
) -> Ranking:
    """Rank Plans of `model` for `workload` on `world` ranks of `cluster` (default: one node).

    model: any nn.Module (sharded by nobody, on any device), a preset's name, FILE.py:FUNCTION,
        hf:CONFIG.json, or a description.
    inputs: example inputs of a model that is not of tokens alone: a tensor, a tuple of positional
        arguments, a dict of keyword ones, (tuple, dict), or a function of the number of samples
        that gives these. Dim 0 is the samples. Without a workload they are one rank's step, and
        may stand in its place.
    loss: a function of the output, or of the output and the inputs; default: the output's `loss`,
        the output if it is one number, else the mean of its float tensors.
    trace_on: see `describe`.

    The workload's tokens per rank and step stay the same; its split into micro-batches is searched.
    `budget_gb` is the memory a rank may use, in 1e9 bytes, with what its context, NCCL and the
    allocator's fragments take (the cluster file says how much); default: the device's. It decides
    which units stay gathered and how deep to prefetch. `compute_dtype` is by default what the
    device is quickest in: bfloat16, on a CPU float32; a description has been made in one already.
    `reduce_dtype` is by default float32. `checkpoints` are the ways to recompute that are tried
    (`Recomputing`); default: none, every block, and what is between.
    """
    world = cluster.ranks_per_node or 1 if world is None else world
    if world < 1:
        raise ValueError(f"world is {world}, expected at least 1 rank")
    limit = cluster.device.memory_bytes if budget_gb is None else budget_gb * GB
    if not (limit > 0 and math.isfinite(limit)):
        raise ValueError(f"budget_gb is {budget_gb}, expected more than 0")
    example = as_example(inputs if workload is None or inputs is not None else None, model)
    if workload is not None and not isinstance(workload, Workload):
        if inputs is not None:
            raise UserError("two example inputs: give a Workload in the third place, or leave it")
        example, workload = as_example(workload, model), None
    if workload is None:
        if example is None:
            raise UserError("search needs a Workload, or example inputs (inputs=)")
        workload = workload_of(example)
    elif example is not None and example.sequence not in (None, workload.sequence):
        raise UserError(
            f"the example inputs' sequences have {example.sequence} tokens, and the workload's "
            f"{workload.sequence}: give equal ones"
        )
    source = as_source(
        model,
        workload,
        inputs=example,
        loss=loss,
        trace_on=trace_on,
        device="cpu" if cluster.host.communicates else "cuda",
    )
    made_in = source.compute_dtype
    if made_in is not None and compute_dtype not in (None, made_in):
        raise ValueError(
            f"compute_dtype is {compute_dtype!r}, but {source.name} was described in {made_in}: "
            f"describe it with a Plan that computes in {compute_dtype}"
        )
    run = _Search(
        source,
        cluster,
        limit,
        options or StepOptions(),
        {
            "compute_dtype": compute_dtype or made_in or cluster.device.compute_dtype,
            "reduce_dtype": reduce_dtype or "float32",
        },
    )
    plans = list(run.starting_plans(world, strategies))
    if not plans:
        raise ValueError(
            f"{', '.join(strategies) or 'no strategy'} has no mesh on {world} ranks: hsdp needs a "
            "number of ranks that divides into groups; use zero3, or another number of ranks"
        )
    for plan in plans:
        for split in _splits(workload, checkpoints or (NOTHING, EVERYTHING)):
            run.consider(plan, split)
    run.check_some_ran()
    if checkpoints is None:
        run.recompute_less()
    for candidate in run.ranking().best_of_each():
        run.refine(candidate)
    return run.ranking()


def _splits(workload: Workload, checkpoints: Sequence[str]) -> Iterator[Workload]:
    """The rank's sequences of a step, as micro-batches of 1, of sizes that divide them and at least
    double, and of all of them.
    """
    if workload.sizes is not None:
        for checkpoint in checkpoints:
            yield dataclasses.replace(workload, checkpoint=checkpoint)
        return
    total = workload.micro_batch * workload.micro_batches
    sizes = [1]
    for size in _divisors(total):
        if size >= 2 * sizes[-1]:
            sizes.append(size)
    for size in sizes:
        for checkpoint in checkpoints:
            yield dataclasses.replace(
                workload, micro_batch=size, micro_batches=total // size, checkpoint=checkpoint
            )


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


@dataclass
class _Search:
    source: Source
    cluster: Cluster
    limit: float
    options: StepOptions
    dtypes: dict[str, Any]
    found: dict[tuple[Plan, Workload], Candidate] = field(default_factory=dict)
    rejected: dict[tuple[Plan, Workload], Rejected] = field(default_factory=dict)
    dropped: int = 0
    # Ways to split the work in which the model does not run, and why.
    failed: dict[tuple[str, str], tuple[Workload, UserError]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.costs = Costs.of(self.cluster)
        # Of each Plan and way of checkpointing, the last description: its micro-batch's size.
        self._described: dict[tuple[Plan, str], tuple[int, Plan, ModelDescription]] = {}
        # The smallest of several micro-batches that is surely too large, and its peak.
        self._too_large: dict[tuple[Plan, str], float] = {}

    def _describe(self, plan: Plan, workload: Workload) -> tuple[Plan, ModelDescription] | None:
        """None where the model does not run so: one with batch norms may need two samples, a block
        that keeps something may not bear to run twice.
        """
        key = (workload.split, workload.checkpoint)
        if key in self.failed:
            return None
        try:
            return self.source.at(plan, workload)
        except UserError as error:
            self.failed[key] = workload, error
            return None

    def check_some_ran(self) -> None:
        """The model's own error if it ran in no way."""
        if self.failed and not self.found and not self.rejected:
            raise [error for _, error in self.failed.values()][-1]

    def _tell_failed(self) -> list[str]:
        reasons: dict[str, list[str]] = {}
        for split, why in self.failed.values():
            said = tell(why.__cause__) if why.__cause__ else str(why)
            reasons.setdefault(said, []).append(f"{split.split} {split.of}{split.again}")
        return [f"not tried: {', '.join(s)}: {why}" for why, s in reasons.items()]

    def starting_plans(self, world: int, strategies: Sequence[str]) -> Iterator[Plan]:
        for name in strategies:
            if name != "hsdp":
                yield Plan.of(name, world, **self.dtypes)
                continue
            for shard in self._shard_groups(world):
                for inner in ("zero3", "zero2"):
                    yield Plan.of("hsdp", (world // shard, shard), inner=inner, **self.dtypes)

    def _shard_groups(self, world: int) -> list[int]:
        """Shard groups worth trying: a node, the largest even part of one, or several nodes, up to
        half the world.
        """
        node = self.cluster.ranks_per_node or world
        node = world if world <= node else math.gcd(world, node)
        part = max((n for n in _divisors(node) if n < node), default=1)
        doubled = [node << times for times in range((world // node).bit_length())]
        # Beyond what is usual one more halves little: every second will do.
        usual = [shard for shard in doubled if shard <= USUAL_SHARDS]
        tried = sorted({part, *usual, *doubled[len(usual) + 1 :: 2]})
        return [shard for shard in tried if 1 < shard < world and world % shard == 0]

    def consider(self, plan: Plan, workload: Workload) -> Candidate | None:
        """Simulate it if it fits."""
        key = (plan, workload)
        if key in self.found or key in self.rejected:
            return self.found.get(key)
        peak: float = self._estimate(plan, workload)
        room, note = self._room(plan), ""
        if peak <= room.most * SURELY_TOO_MUCH:
            made = self._describe(plan, workload)
            if made is None:
                return None
            resolved, description = made
            about = (workload.micro_batch, resolved, description)
            self._described[plan, workload.checkpoint] = about
            peak = self._peak(resolved, description, workload)
            note = explain_padding(resolved) if peak > room.most else ""
        if peak > room.most:
            title, needed = title_of(plan, workload), room.needed(peak)
            self.rejected[key] = Rejected(title, plan.title, int(peak), needed, note)
            return None
        self.found[key] = self._predict(resolved, description, workload)
        return self.found[key]

    def _room(self, plan: Plan) -> Room:
        return Room.of(self.cluster.device, plan, self.limit)

    def _predict(self, plan: Plan, description: ModelDescription, workload: Workload) -> Candidate:
        """From the Timeline of the step. Of many equal micro-batches a few are simulated: what one
        more adds, all the others add too.
        """

        def simulated(count: int) -> Candidate:
            part = dataclasses.replace(workload, micro_batches=count)
            timeline = simulate(
                plan, description, self.cluster, part, costs=self.costs, options=self.options
            )
            return Candidate.of(plan, part, timeline, self._room(plan), self.cluster)

        more = workload.micro_batches - SIMULATED
        if workload.uneven_sizes or more <= SIMULATED:
            return simulated(workload.micro_batches)
        return simulated(SIMULATED).extended(simulated(SIMULATED - 1), workload, more)

    def _estimate(self, plan: Plan, workload: Workload) -> float:
        """The peak in proportion to that of a smaller micro-batch, which is known to a few percent
        without describing the model again; 0 where none was tried.
        """
        key = (plan, workload.checkpoint)
        known = self._described.get(key)
        if known is None or workload.sizes is not None or known[0] >= workload.micro_batch:
            return 0.0
        # Only the last one, which is alone, holds no sums of others while it runs.
        several = workload.micro_batches > 1
        if several and key in self._too_large:
            return self._too_large[key]
        size, resolved, description = known
        grown = scaled(description, workload.micro_batch / size, kernels=False)
        peak = self._peak(resolved, grown, workload)
        if several and peak > self._room(plan).most * SURELY_TOO_MUCH:
            self._too_large[key] = peak
        return peak

    def recompute_less(self) -> None:
        """Where every block was recomputed because nothing less would fit: the first few alone, and
        all but attention and every other product. Looked for where that may come first.

        The first blocks are as good as every second or third: it is the same work, and the peak is
        lower, since the last block is not made again while what all others keep is still there.
        """
        ranking = self.ranking()
        if not ranking:
            return
        fastest = ranking[0].step_ms
        best: dict[str, Candidate] = {}
        for c in ranking:
            if c.workload.checkpoint == EVERYTHING:
                best.setdefault(c.plan.title, c)
        for whole in list(best.values())[:LESS_TRIED]:
            plan = dataclasses.replace(whole.plan, units=None)
            all_kept = dataclasses.replace(whole.workload, checkpoint=NOTHING)
            if (plan, all_kept) in self.found or whole.step_ms * (1 - RECOMPUTED_SHARE) > fastest:
                continue
            most = self._foretold(plan, all_kept)
            room = self._room(plan).most - whole.peak_bytes
            if most is None or room < WORTH_KEEPING * (most - whole.peak_bytes):
                continue
            self._recompute_first(plan, all_kept, "first", most, whole.peak_bytes)
            if self.source.tells_operators:
                kept = self.consider(plan, dataclasses.replace(all_kept, checkpoint="op"))
                if kept is not None:
                    self._recompute_first(plan, all_kept, "op-first", most, kept.peak_bytes)

    def _recompute_first(
        self, plan: Plan, workload: Workload, word: str, none_peak: float, all_peak: float
    ) -> None:
        """As few of the first blocks as will fit: what is kept grows evenly with those left out."""
        blocks, room = self.source.block_count, self._room(plan).most
        if none_peak <= all_peak:
            return
        least = math.ceil(blocks * (none_peak - room) / (none_peak - all_peak))
        for more in (0, 1, max(2, blocks // 8)):
            count = max(1, least) + more
            if count >= blocks:
                return
            work = dataclasses.replace(workload, checkpoint=f"{word}-{count}")
            if self.consider(plan, work) is not None:
                return

    def _foretold(self, plan: Plan, workload: Workload) -> float | None:
        """The peak in proportion to the last micro-batch that was described; None without one."""
        known = self._described.get((plan, workload.checkpoint))
        if known is None:
            return None
        size, resolved, description = known
        grown = scaled(description, workload.micro_batch / size, kernels=False)
        return self._peak(resolved, grown, workload)

    def _peak(self, plan: Plan, description: ModelDescription, workload: Workload) -> int:
        works = works_of(plan, description, workload)
        count = workload.micro_batches
        if not workload.uneven_sizes:
            # Those between the first and the last do as the second does.
            count = min(count, 3)
        sizes = {
            tuple(workload.size_of(group, i) for i in range(count))
            for group in range(len(workload.sizes or ((),)))
        }
        held = description.input_bytes + description.buffer_bytes
        return max(
            EngineStep(plan, works, self.costs, workload, self.options, held).peak(s) for s in sizes
        )

    def refine(self, candidate: Candidate) -> None:
        """Improve one setting after the other, as long as each is worth it."""
        best, all_fit = candidate, False
        for name, values in self._settings(candidate):
            for value in values:
                if name == "keep_last" and all_fit:
                    break  # more of them fit, and were judged
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
                all_fit |= value is True or name == "keep_last"
                if tried.step_ms < best.step_ms * (1 - WORTH):
                    best = tried
                else:  # not worth it, so it does not belong in the ranking
                    del self.found[plan, best.workload]
                    self.dropped += 1

    def _settings(self, candidate: Candidate) -> list[tuple[str, tuple[Any, ...]]]:
        plan = candidate.plan
        largest = max(unit.parameter_bytes for unit in plan.require_units())
        settings: list[tuple[str, tuple[Any, ...]]] = []
        if candidate.workload.micro_batches > 1:
            delayed = ("scatter_each_reduce_last",) if plan.replicate > 1 else ()
            settings.append(("sync", (*delayed, "last")))
        if plan.strategy.parameters == "shard":
            node = self.cluster.ranks_per_node
            pieces = (node,) if node and node < plan.shard and plan.shard % node == 0 else ()
            settings.append(("keep_after_forward", (True, *pieces)))
            # From many to few: of those that the memory left allows the first is the best.
            count = len(plan.freed_units)
            some = sorted({count * eighths // 8 for eighths in range(1, 8)} - {0}, reverse=True)
            settings.append(("keep_last", tuple(some)))
            settings.append(("prefetch", (2, 3)))
            settings.append(("bucket_bytes", (2 * largest, 4 * largest)))
        else:
            settings.append(("bucket_bytes", (64 * MIB, 128 * MIB, 256 * MIB)))
        settings.append(("reduce_depth", (2, 4)))
        return settings

    def ranking(self) -> Ranking:
        return Ranking(
            tuple(sorted(self.found.values(), key=lambda c: c.order)),
            tuple(self.rejected.values()),
            self.limit,
            len(self.found) + len(self.rejected) + self.dropped,
            (*self.source.notes, *self._tell_failed()),
        )
