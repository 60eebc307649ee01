"""The Plan for a model on the ranks that are there: searched for on rank 0, tried on all."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise.calibration.calibrate import memory_of_rank
from shardwise.calibration.search import Tell, measured, not_measured
from shardwise.calibration.together import Attempt, Ranks, untouched
from shardwise.calibration.trial import Program
from shardwise.description.cluster import Cluster
from shardwise.description.tracing.trace import check_arguments
from shardwise.description.workload import Workload
from shardwise.engine.mesh import start_alone
from shardwise.errors import UserError, nearest
from shardwise.planning.plan import DTYPES, Plan
from shardwise.predict import search as predicted
from shardwise.predict.foresight import Foresight
from shardwise.predict.sources import as_example, workload_of
from shardwise.predict.step import StepOptions
from shardwise.profiling.timing import no_garbage_collection
from shardwise.profiling.write import choose_cluster

_LIKE = "h100x8"  # whose rates a GPU is thought to have that no packaged file knows


@dataclass(frozen=True)
class Question:
    """For what a Plan is chosen: one step of a rank, and what it may take."""

    example: Any
    loss: Callable[..., Any] | None = None
    micro_batches: int = 1
    compute_dtype: str | None = None
    reduce_dtype: str | None = None
    budget_gb: float | None = None

    def check(self, model: nn.Module) -> None:
        """Wrong input is told before anything is searched."""
        if self.example is None:
            raise UserError(
                "sw.shard(model, 'auto') tries plans, and needs example inputs of one micro-batch: "
                "example=batch (a tensor, a tuple, a dict, (tuple, dict), or a function)"
            )
        example = as_example(self.example, model)
        assert example is not None
        check_arguments(model, *example.sized(example.samples))
        count = self.micro_batches
        if type(count) is not int or count < 1:
            raise UserError(f"micro_batches is {count!r}, expected a whole number of at least 1")
        for name in ("compute_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise UserError(f"{name} is {value!r}{nearest(str(value), DTYPES)}")

    def program(self, model: nn.Module) -> Program:
        return Program.of(model, as_example(self.example, model), self.loss)

    def settings(self, model: nn.Module) -> dict[str, Any]:
        """For a search: the split of the work is the program's, and so is what is computed in."""
        example = as_example(self.example, model)
        assert example is not None
        one = workload_of(example)
        sizes = ((one.micro_batch,) * self.micro_batches,)
        return {
            "workload": Workload.uneven(one.sequence, sizes, of=one.of),
            "inputs": example,
            "loss": self.loss,
            "compute_dtype": self.compute_dtype or _own_dtype(model),
            "reduce_dtype": self.reduce_dtype,
            "budget_gb": self.budget_gb,
            "checkpoints": ("none",),
        }


def _own_dtype(model: nn.Module) -> str:
    """What most of the model's numbers are in."""
    counts = dict.fromkeys(DTYPES, 0)
    for parameter in model.parameters():
        name = str(parameter.dtype).removeprefix("torch.")
        if name in counts:
            counts[name] += parameter.numel()
    return max(counts, key=lambda name: counts[name])


def choose(
    model: nn.Module, question: Question, prepare: Callable[[], torch.device], say: Tell
) -> tuple[Plan, Foresight]:
    """All ranks call it, and get the same: the Plan, without units, and what is said of it. `say`
    is called on rank 0. An error on one rank is one on all.
    """

    def begin() -> torch.device:
        device = prepare()
        question.check(model)
        return device

    return choose_for(begin, lambda: question.program(model), lambda: question.settings(model), say)


def choose_for(
    begin: Callable[[], torch.device],
    program: Callable[[], Program],
    settings: Callable[[], dict[str, Any]],
    say: Tell,
    options: StepOptions | None = None,
) -> tuple[Plan, Foresight]:
    """The same of any program; the three are called in their order, `settings` on rank 0 only."""
    ranks = Ranks()
    doing = "no plan can be chosen"
    # The device of the ranks, and what each will run.
    mine: list[Any] = []

    def ready() -> str:
        mine[:] = [begin(), program()]
        if not dist.is_initialized():
            start_alone()  # as sharding by the Plan will
        return str(mine[0].type)

    kinds = ranks.agree(doing, ready)
    if len(set(kinds)) > 1:
        raise UserError(f"{doing}: the model is on {' and '.join(sorted(set(kinds)))} of ranks")
    ranks.device, tried = mine
    cluster = cluster_here(ranks)

    def search(attempt: Attempt) -> tuple[Plan, Foresight]:
        say(f"searching a plan for {ranks.world} {ranks.device.type} rank{'s'[: ranks.world > 1]}")
        asked = settings()
        if ranks.world == 1:  # strategies differ in what ranks share, and there is one
            asked |= {"strategies": ("ddp",)}
        with no_garbage_collection(), untouched(ranks.device):
            ranking = predicted.search(
                tried.model, cluster, world=ranks.world, options=options, **asked
            )
            if not ranking:
                raise UserError(ranking.explain())
            if ranks.fake and ranks.device.type == "cpu":
                ranking = not_measured(ranking, "in a fake group of a CPU nothing is sent")
            else:
                ranking = measured(ranking, tried, cluster, say, attempt=attempt)
        foresight = Foresight.of(ranking)
        notes, cores = list(ranking.notes), os.cpu_count() or 1
        if ranking[0].captured is not None:
            notes.append(
                f"{ranking[0].show_captured()} ms: the device would not wait for its host "
                "(shardwise train: run.capture=true)"
            )
        if ranks.device.type == "cpu" and foresight.load > cores + 1:
            notes.append(
                f"this machine is busy ({foresight.load:.1f} processes want {cores} cores), so "
                "steps may take another time than they did when they were tried"
            )
        for line in (*foresight.why, *(f"note: {note}" for note in notes)):
            say(line)
        return dataclasses.replace(ranking[0].plan, units=None), foresight

    return ranks.lead(tried, cluster, search)


def cluster_here(ranks: Ranks) -> Cluster:
    """The packaged cluster that is most like this machine, with as many ranks on a host and as much
    memory as there are: trials say the rest.
    """
    local = ranks.count_local()
    if ranks.device.type == "cpu":
        cluster, memory = Cluster.load("cpu-gloo"), memory_of_rank("cpu", local)
    else:
        name = torch.cuda.get_device_name(ranks.device)
        found = choose_cluster(name) or _LIKE
        cluster = Cluster.load(f"{found}-measured" if found == "h200x8" else found)
        memory = float(torch.cuda.get_device_properties(ranks.device).total_memory)
        first, *others = cluster.levels
        if others and not ranks.fake and local < ranks.world:
            levels = (dataclasses.replace(first, ranks=local), *others)
            cluster = dataclasses.replace(cluster, levels=levels)
    device = dataclasses.replace(cluster.device, memory_bytes=memory)
    return dataclasses.replace(cluster, device=device)
