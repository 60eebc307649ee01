"""One schedule, told twice: a real step on gloo ranks and the predictor's, over the same Plan.

Compared one for one: every collective with its axis, ranks and bytes (`sw.record()` against the
predicted operations), and every verb that the schedule spoke to the engine's executor and to the
predictor's, with the unit it was about.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.description.cluster_toml import load_cluster
from shardwise.description.workload import Workload
from shardwise.engine.engine import (
    engine_of,
)
from shardwise.predict.cost import Costs
from shardwise.predict.fsdp2 import Fsdp2Step
from shardwise.predict.program import works_of
from shardwise.predict.step import EngineStep, StepOptions
from tests.parity.models import VOCABULARY, Block
from tests.ranks import Ranks

VERBS = (
    "gather", "wait", "free", "shrink", "forget_piece", "open", "pack", "zeros", "scatter",
    "all_reduce", "add", "add_to_sums", "join", "hold", "retire", "finish", "drop",
)  # fmt: skip
KINDS = ("plain", "checkpointed", "tied", "frozen", "unused")
SYNCS = ("each", "scatter_each_reduce_last", "last")
TOKENS = torch.arange(6).view(2, 3) % VOCABULARY


class Net(nn.Module):
    """Embedding, four blocks, head. `frozen`: embedding, first block and half of the second;
    `unused`: a block that nobody calls, and a parameter in a block that is called.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Block(8, 12) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            for module in (self.embed, self.layers[0], self.layers[1].up):
                module.requires_grad_(False)
        if kind == "unused":
            self.layers[2].spare = nn.Parameter(torch.ones(8))

    def forward(self, tokens: torch.Tensor, recompute: bool = True) -> torch.Tensor:
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            if self.kind == "unused" and i == 1:
                continue
            if self.kind == "checkpointed" and recompute:
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.head(x).float().sum()


@dataclass(frozen=True)
class ProofCase:
    name: str
    kind: str
    counts: tuple[int, ...]  # micro-batches of each replica, in turn
    settings: tuple[tuple[str, Any], ...]

    @property
    def plan(self) -> sw.Plan:
        world = dist.get_world_size()
        mesh = (2, world // 2) if self.name == "hsdp" else world
        return sw.Plan.of(self.name, mesh=mesh, **dict(self.settings))


def trace_verbs(executor: Any) -> list[tuple[str, str]]:
    """From now on, note each verb that the executor is asked for, and whose."""
    spoken: list[tuple[str, str]] = []

    def traced(verb: str, method: Any) -> Any:
        def call(*args: Any) -> Any:
            unit = getattr(args[0], "unit", args[0]) if args else None
            spoken.append((verb, getattr(unit, "name", "")))
            return method(*args)

        return call

    for verb in VERBS:
        setattr(executor, verb, traced(verb, getattr(executor, verb)))
    return spoken


def run_really(case: ProofCase, plan: sw.Plan, count: int) -> tuple[list[Any], list[Any]]:
    """The second step: the first one finds the order."""
    torch.manual_seed(0)
    model = sw.shard(Net(case.kind), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spoken = trace_verbs(engine_of(model).executor)
    for _ in range(2):
        spoken.clear()
        with sw.record() as log:
            for tokens in sw.microbatches(model, [TOKENS] * count):
                model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [(c.name, c.axis, c.nbytes, c.ranks) for c in log.calls], list(spoken)


@cache
def described(kind: str, name: str, mesh: tuple[int, int]) -> Any:
    """By the units of a Plan, which its other settings leave as they are."""
    with torch.device("meta"):
        model = Net(kind)
        plan = sw.Plan.of(name, mesh).resolve(model)
    given = "nonreentrant" if kind == "checkpointed" else None
    inputs = {"tokens": TOKENS.to("meta"), "recompute": False}
    return sw.describe(model, inputs, plan, device="cpu", checkpoint=given)


def predict(case: ProofCase, plan: sw.Plan, count: int) -> tuple[list[Any], list[Any]]:
    spoken: list[tuple[str, str]] = []

    class Traced(EngineStep):
        def begin(self) -> None:
            super().begin()
            nonlocal spoken
            spoken = trace_verbs(self.schedule.executor)

    workload = Workload(sequence=3, micro_batch=2, micro_batches=max(count, 1))
    works = works_of(plan, described(case.kind, plan.name, plan.mesh), workload)
    costs = Costs.of(load_cluster("cpu-gloo"))
    options = StepOptions(optimizer=False)
    step = Traced(plan, works, costs, workload, options, agreed=0 not in case.counts)
    program = step.build((2,) * count)
    calls = [(op.name, op.group, op.nbytes, op.ranks) for op in program.ops if op.group]
    return [call for call in calls if call[3] > 1], spoken


def compare(cases: Sequence[ProofCase]) -> list[str]:
    """Where a real step of this rank and the predicted one part."""
    told = []
    for case in cases:
        plan = case.plan
        replica = dist.get_rank() // plan.shard
        count = case.counts[replica % len(case.counts)]
        with torch.device("meta"):
            resolved = plan.resolve(Net(case.kind))
        really, predicted = run_really(case, plan, count), predict(case, resolved, count)
        for what, ours, foretold in zip(("calls", "verbs"), really, predicted, strict=True):
            if ours == foretold:
                continue
            pairs = itertools.zip_longest(ours, foretold)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            told.append(
                f"{case}: {what} part at {at}\n  real      {ours[max(0, at - 3) : at + 4]}\n"
                f"  predicted {foretold[max(0, at - 3) : at + 4]}"
            )
    return told


def cases_of(name: str, world: int) -> list[ProofCase]:
    """Every sync, micro-batch count and kind of model; the other settings take turns, so that each
    meets each.
    """
    replicas = name in ("ddp", "hsdp")
    shard = world // 2 if name == "hsdp" else world
    keeps: list[Any] = [None, True, False] if name in ("zero3", "hsdp") else [None]
    if name == "zero3" and shard == 4:
        keeps.append(2)
    rest = list(itertools.product(keeps, (0, 1, 2), (1, 2, 4)))
    turn = itertools.cycle(rest[:: 2 if len(rest) % 2 else 1] + rest[1::2])
    cases = []
    for sync, kind in itertools.product(SYNCS, KINDS):
        counts: list[tuple[int, ...]] = [(1,), (3,)]
        if replicas and sync != "each":
            counts += [(1, 3), (2, 0)]
        for each in counts:
            keep, prefetch, depth = next(turn)
            settings = {
                "sync": sync, "keep_after_forward": keep, "reduce_depth": depth,
                "forward_prefetch": prefetch, "backward_prefetch": prefetch,
            }  # fmt: skip
            if len(cases) % 3 == 1:
                settings |= {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}
            if len(keeps) > 1 and len(cases) % 4 == 1:
                settings["gather_dtype"] = "int8"
            if len(keeps) > 1 and not keep and len(cases) % 2:
                settings["keep_last"] = 2
            cases.append(ProofCase(name, kind, each, tuple(settings.items())))
    return cases


@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3"])
def test_two_ranks_do_what_was_predicted(two: Ranks, name: str) -> None:
    for told in two.run(compare, cases_of(name, 2), timeout=240):
        assert not told, "\n".join(told)


@pytest.mark.parametrize("name", ["zero3", "hsdp"])  # the others know no more of four than of two
def test_four_ranks_do_what_was_predicted(four: Ranks, name: str) -> None:
    for told in four.run(compare, cases_of(name, 4), timeout=240):
        assert not told, "\n".join(told)


# torch's engine


@contextmanager
def torch_calls() -> Iterator[list[tuple[str, int, int]]]:
    """Every collective of torch's engine: its kind, the bytes of the whole message, the ranks."""
    names = {
        "all_gather_single": ("all_gather", 0), "all_gather_into_tensor": ("all_gather", 0),
        "reduce_scatter_single": ("reduce_scatter", 1),
        "reduce_scatter_tensor": ("reduce_scatter", 1), "all_reduce": ("all_reduce", 0),
    }  # fmt: skip
    originals = {name: getattr(dist, name) for name in names if hasattr(dist, name)}
    calls: list[tuple[str, int, int]] = []
    inside = False

    def wrapped(name: str, original: Any) -> Any:
        kind, position = names[name]
        keyword = ("output_tensor", "input")[position] if kind != "all_reduce" else "tensor"

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            if inside:  # one name of a collective calls the other
                return original(*args, **kwargs)
            tensor = args[position] if len(args) > position else kwargs[keyword]
            calls.append((kind, tensor.nbytes, dist.get_world_size(kwargs["group"])))
            inside = True
            try:
                return original(*args, **kwargs)
            finally:
                inside = False

        return call

    for name, original in originals.items():
        setattr(dist, name, wrapped(name, original))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


@cache
def torch_mesh(shape: tuple[int, ...]) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def run_torch(case: ProofCase, plan: sw.Plan, count: int) -> list[tuple[str, int, int]]:
    torch.manual_seed(0)
    model = Net(case.kind)
    mesh = torch_mesh(plan.mesh if plan.replicate > 1 else (plan.shard,))
    reshards = plan.strategy.parameters == "shard"
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for _ in range(2):
        with torch_calls() as calls:
            for i in range(count):
                last = i == count - 1
                model.set_requires_gradient_sync(last or plan.sync != "last")
                model.set_requires_all_reduce(last or plan.sync == "each")
                model.set_reshard_after_backward(reshards or last)
                model(TOKENS).backward()
        for parameter in model.parameters():
            parameter.grad = None
    return calls


def compare_torch(cases: Sequence[ProofCase]) -> list[str]:
    told = []
    for case in cases:
        plan, count = case.plan, case.counts[0]
        with torch.device("meta"):
            resolved = plan.resolve(Net(case.kind))
        workload = Workload(sequence=3, micro_batch=2, micro_batches=count)
        works = works_of(resolved, described(case.kind, plan.name, plan.mesh), workload)
        options = StepOptions(optimizer=False)
        costs = Costs.of(load_cluster("cpu-gloo"))
        program = Fsdp2Step(resolved, works, costs, workload, options).build((2,) * count)
        foretold = [(op.name, op.nbytes, op.ranks) for op in program.ops if op.group]
        really = run_torch(case, plan, count)
        if really != foretold:
            pairs = itertools.zip_longest(really, foretold)
            at = next(i for i, (a, b) in enumerate(pairs) if a != b)
            told.append(
                f"{case}: part at {at} of {len(really)}, {len(foretold)}\n"
                f"  real      {really[max(0, at - 3) : at + 6]}\n"
                f"  predicted {foretold[max(0, at - 3) : at + 6]}"
            )
    return told


@pytest.mark.parametrize("name", ["zero2", "zero3", "hsdp"])
def test_torch_does_what_was_predicted_of_it(request: pytest.FixtureRequest, name: str) -> None:
    ranks: Ranks = request.getfixturevalue("four" if name == "hsdp" else "two")
    cases = [
        ProofCase(name, kind, (count,), (("sync", sync), ("bucket_bytes", 1)))
        for sync, kind, count in itertools.product(SYNCS, KINDS, (1, 3))
    ]
    for told in ranks.run(compare_torch, cases, timeout=240):
        assert not told, "\n".join(told)
