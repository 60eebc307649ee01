"""What a Plan can say beside its strategy: averages, parameters kept whole, the caller's own mesh;
and copies of its models.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import shardwise as sw
from shardwise.description.cluster_toml import load_cluster
from shardwise.description.workload import Workload
from shardwise.engine.engine import (
    engine_of,
)
from shardwise.planning.memory import count_kept, count_sent
from shardwise.predict.cost import Costs
from shardwise.predict.program import works_of
from shardwise.predict.step import EngineStep, StepOptions
from tests.parity.models import build, loss_sum, token_batch
from tests.parity.oracle import MAX_NORM, OPTIMIZERS, STEPS, difference, indices, train_alone
from tests.parity.test_parity import BOUND, STRATEGIES, SYNCS
from tests.parity.training import compare
from tests.ranks import Ranks

WHOLE = {"whole": ("layers.*.norm.*", "*.gate", "*.idle", "*.mix", "*.steps"), "whole_below": 40}


def _mesh(name: str) -> Any:
    world = dist.get_world_size()
    return (2, world // 2) if name == "hsdp" else world


def _train(
    kind: str, name: str, optimizer: str, counts: tuple[int, ...], settings: dict[str, Any]
) -> float:
    """How far training with averages is from one process: the loss is multiplied by the ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sw.shard(build(kind), sw.Plan.of(name, mesh=_mesh(name), average=True, **settings))
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        everyone = [token_batch(step, i) for i in indices(counts)]
        total = sum(tokens.numel() for tokens in everyone)
        for tokens in sw.microbatches(model, [everyone[i] for i in indices(counts, rank)]):
            (loss_sum(model(tokens), tokens) / total * world).backward()
        sw.clip_grad_norm(model, MAX_NORM)
        opt.step()
        opt.zero_grad()
    dtype = settings.get("compute_dtype", "float32")
    return difference(sw.full_state_dict(model), train_alone(kind, dtype, optimizer, counts))


def _uneven(name: str, sync: str) -> tuple[int, ...]:
    """Micro-batches of each rank; one replica has none where the policy allows it."""
    world = dist.get_world_size()
    if sync == "each" or name.startswith("zero"):
        return (2,) * world
    if name == "ddp":
        return (0, 3, 1, 2)[:world]
    return tuple(0 if rank < world // 2 else 2 for rank in range(world))


def _averages(first: int) -> dict[str, float]:
    errors = {}
    for i, (label, (name, settings)) in enumerate(STRATEGIES.items()):
        sync = SYNCS[(first + i) % len(SYNCS)]
        whole = WHOLE if i % 2 else {}
        dtype = {"compute_dtype": "bfloat16"} if i % 3 == 0 else {}
        settings = {**settings, **whole, **dtype, "sync": sync}
        errors[f"{label} {sync}"] = _train("odd", name, "sgd", _uneven(name, sync), settings)
    return errors


def test_averages_divide_by_ranks(two: Ranks, four: Ranks) -> None:
    """In every strategy and, between the two worlds, with several policies and uneven work."""
    for ranks, first in ((two, 0), (four, 1)):
        for errors in ranks.run(_averages, first):
            assert all(error <= BOUND for error in errors.values()), errors


def _small_range() -> None:
    """fp16 sums are divided about their square root before they would leave the range."""
    for name in ("ddp", "zero3", "hsdp"):
        model = nn.Linear(4, 8, bias=False)
        plan = sw.Plan.of(name, mesh=_mesh(name), average=True, reduce_dtype="float16")
        sw.shard(model, plan)
        (model(torch.ones(1, 4)).sum() * 30_000).backward()
        grad = model.weight.grad
        whole = grad.full_tensor() if isinstance(grad, DTensor) else grad
        assert torch.equal(whole, torch.full((8, 4), 30_000.0)), name


def test_averages_stay_in_the_range_of_fp16(four: Ranks) -> None:
    four.run(_small_range)


def _whole_parity(first: int) -> dict[str, float]:
    errors = {}
    counts = (2,) * dist.get_world_size()
    cases = {**STRATEGIES, "zero3-not-kept": ("zero3", {"keep_after_forward": False})}
    if len(counts) == 4:
        cases["zero3-kept-by-two"] = ("zero3", {"keep_after_forward": 2})
    for i, (label, (name, settings)) in enumerate(cases.items()):
        sync = SYNCS[(first + i) % len(SYNCS)]
        settings = {**settings, **WHOLE, "sync": sync}
        dtype = ("float32", "bfloat16")[(first + i) % 2]
        by_torch = i % 4 < 2  # else the flat step
        args = ("odd", name, _mesh(name), "adamw", counts, dtype)
        errors[f"{label} {sync}"] = compare(*args, settings=settings, by_torch=by_torch)
    return errors


def test_whole_parameters_train_to_one_process(two: Ranks, four: Ranks) -> None:
    """Norms, 0-d, unused, frozen, integer and small parameters, in every strategy."""
    for ranks, first in ((two, 0), (four, 1)):
        for errors in ranks.run(_whole_parity, first):
            assert all(error <= BOUND for error in errors.values()), errors


def _whole_looks(name: str) -> None:
    """What users see of whole parameters: DTensors `Replicate()` on the mesh of the others, so that
    torch's own functions take both; whole state, the unsharded state dict, one broadcast.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    plan = sw.Plan.of(name, mesh=_mesh(name), whole="layers.*.norm.*", whole_below=20)
    alone, model = build("odd"), sw.shard(build("odd"), plan)
    kept = [u for u in plan.resolve(build("odd")).require_units() if u.whole]
    names = {p.name for unit in kept for p in unit.parameters}
    assert {"layers.0.norm.weight", "layers.2.gate"} <= names
    assert not names & {"layers.0.up.weight", "embed.weight"}
    batches = [token_batch(0, r) for r in range(world)]
    for tokens in batches:
        loss_sum(alone(tokens), tokens).backward()
    loss_sum(model(batches[rank]), batches[rank]).backward()
    theirs = dict(alone.named_parameters())
    for key, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        whole = all(p.is_replicate() for p in parameter.placements)
        assert whole == (key in names or parameter.dim() == 0), key
        if key in names:
            assert torch.equal(parameter.to_local(), theirs[key]), key
        grad = theirs[key].grad
        assert (parameter.grad is None) == (grad is None), key
        if grad is not None:
            assert parameter.grad.placements == parameter.placements
            torch.testing.assert_close(parameter.grad.full_tensor(), grad, rtol=1e-4, atol=1e-5)
    ours = sw.clip_grad_norm(model, 1e9)
    by_torch = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(by_torch, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(sw.clip_grad_norm(model, 1.0), torch.tensor(0.5), rtol=1e-4, atol=0)
    opt = torch.optim.AdamW(model.parameters())
    opt.step()
    sizes = {key: opt.state[p]["exp_avg"].to_local().numel() for key, p in model.named_parameters()
             if p in opt.state}  # fmt: skip
    assert sizes["layers.0.norm.weight"] == 7 and sizes["layers.0.up.weight"] < 13 * 7
    full, saved = sw.full_state_dict(model), model.state_dict()
    assert list(full) == list(saved) == list(alone.state_dict())
    for key in names:
        assert torch.equal(full[key], saved[key].full_tensor())
    different = build("odd", seed=rank)
    sw.shard(different, plan)
    sw.broadcast(different)
    for key in names:
        assert torch.equal(sw.full_state_dict(different)[key], build("odd").state_dict()[key]), key
    with torch.device("meta"):
        later = sw.shard(build("even"), plan)
    torch.manual_seed(rank)
    sw.materialize(later)
    sw.broadcast(later)
    loss_sum(later(batches[0]), batches[0]).backward()
    assert later.layers[0].norm.weight.to_local().shape == (8,)
    assert later.layers[0].norm.weight.grad.to_local().any()


def _whole_looks_everywhere() -> None:
    for name in ("zero1", "zero2", "zero3", "hsdp"):
        _whole_looks(name)


def test_whole_parameters_are_replicated_dtensors(four: Ranks) -> None:
    four.run(_whole_looks_everywhere)


def _foretold(name: str, settings: dict[str, Any]) -> None:
    """What a step sends of each collective, in bytes and in calls: the Plan's formulas and the
    simulator's schedule against real ranks.
    """
    plan = sw.Plan.of(name, mesh=_mesh(name), gather="packed", **settings)
    tokens, micro_batches = token_batch(0, dist.get_rank()), 2
    model = sw.shard(build("odd"), plan)
    for _ in range(2):  # the first step finds the order
        with sw.record() as log:
            for each in sw.microbatches(model, [tokens] * micro_batches):
                loss_sum(model(each), each).backward()
            model.zero_grad()
    resolved = plan.resolve(build("odd"))
    units, kept = engine_of(model).units, count_kept(resolved)
    assert kept.master == sum(unit.parameters.master.nbytes for unit in units)
    trained = [unit.gradients for unit in units if unit.gradients is not None]
    assert kept.gradients == sum(each.nbytes for each in trained)
    sent = count_sent(resolved, micro_batches)
    for collective in ("all_gather", "reduce_scatter", "all_reduce"):
        assert log.sent(collective) == getattr(sent, collective), (name, settings, collective)
    described = sw.describe(build("odd"), tokens, plan, device="cpu")
    workload = Workload(5, 1, micro_batches)
    works = works_of(resolved, described, workload)
    costs = Costs(load_cluster("cpu-gloo"), streams=False)
    found = EngineStep(resolved, works, costs, workload, StepOptions(optimizer=False))
    program = found.build((1,) * micro_batches)
    foretold = Counter((op.name, op.group) for op in program.ops if op.group)
    assert foretold == Counter((call.name, call.axis) for call in log.calls), (name, settings)


def _foretold_everywhere() -> None:
    for name in ("ddp", "zero1", "zero2", "zero3", "hsdp"):
        for sync in SYNCS:
            dtype = "bfloat16" if sync != "each" else None
            _foretold(name, {**WHOLE, "sync": sync, "compute_dtype": dtype})


def test_the_plan_foretells_whole_parameters(four: Ranks) -> None:
    four.run(_foretold_everywhere)


def _own_mesh() -> None:
    """The caller's DeviceMesh: its groups move the data, its shape is the Plan's."""
    world = dist.get_world_size()
    line = init_device_mesh("cpu", (world,))
    plane = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "fsdp"))
    for name, mesh, settings in (
        ("ddp", line, {}),
        ("zero3", line, WHOLE),
        ("zero3", line, {"keep_after_forward": 2} if world > 2 else {}),
        ("hsdp", plane, WHOLE),
        ("hsdp", plane, {"inner": "zero2", "sync": "last"}),
    ):
        plan = sw.Plan.of(name, mesh=mesh, **settings)
        assert plan == sw.Plan.of(name, mesh=_mesh(name), **settings)
        assert sw.Plan.from_json(plan.to_json()) == plan
        error = compare("odd", name, mesh, "adamw", (2,) * world, "float32", settings=settings)
        assert error <= BOUND, (name, settings)
        model = sw.shard(build("odd"), plan)
        mine = engine_of(model).mesh
        axis = mine.replicate if name == "ddp" else mine.shard
        assert axis.group is mesh.get_group(mesh.ndim - 1)
        if name != "ddp":
            assert model.embed.weight.device_mesh is mesh
    backwards = DeviceMesh("cpu", list(reversed(range(world))))
    for mesh, told in ((backwards, "another order"), (line, None)):
        try:
            sw.shard(build("odd"), sw.Plan.of("zero3", mesh=mesh))
        except ValueError as error:
            assert told and told in str(error)
        else:
            assert told is None


def test_a_callers_device_mesh(two: Ranks, four: Ranks) -> None:
    two.run(_own_mesh)
    four.run(_own_mesh)


def _load_whole() -> None:
    """torch's own way to load whole weights: from every rank, or from rank 0 alone."""
    full = build("odd", seed=3).state_dict()
    for name, settings in (("ddp", {}), ("zero3", {}), ("zero3", WHOLE), ("hsdp", WHOLE)):
        for broadcast in (False, True):
            model = sw.shard(build("odd"), sw.Plan.of(name, mesh=_mesh(name), **settings))
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
            given = {key: value.clone() for key, value in full.items()}
            if broadcast and dist.get_rank():
                given = {}
            set_model_state_dict(model, given, options=options)
            got = sw.full_state_dict(model)
            for key, value in full.items():
                assert torch.equal(got[key], value), (name, key, broadcast)
            tokens = token_batch(0, 0)
            theirs = build("odd", seed=3)(tokens)
            torch.testing.assert_close(model(tokens), theirs)


def test_whole_weights_load_through_torch(four: Ranks) -> None:
    four.run(_load_whole)


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _copies(name: str, settings: dict[str, Any]) -> None:
    """A copy trains by itself from where it was made; the original goes on undisturbed."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone = build("odd")
    model = sw.shard(build("odd"), sw.Plan.of(name, mesh=_mesh(name), **settings))
    averages = []
    for each in (alone, model):
        averages.append(torch.optim.swa_utils.AveragedModel(each))
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model)]

    def step(models: list[Any], opts: list[Any], at: int) -> None:
        batches = [token_batch(at, r) for r in range(world)]
        for tokens in batches:
            loss_sum(models[0](tokens), tokens).backward()
        loss_sum(models[1](batches[rank]), batches[rank]).backward()
        for opt in opts:
            opt.step()
            opt.zero_grad()

    def same(ours: Any, theirs: Any) -> None:
        assert difference(sw.full_state_dict(ours), dict(theirs.state_dict())) <= 1e-5

    step([alone, model], opts, 0)
    tokens = token_batch(0, rank)
    loss_sum(model(tokens), tokens).backward()
    before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    loss = loss_sum(model(tokens), tokens)
    copy.deepcopy(model)  # between forward and backward
    loss.backward()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        for parameter, grad in zip(each.parameters(), before, strict=True):
            if isinstance(parameter, DTensor):  # torch copies no gradient of a plain parameter
                assert (parameter.grad is None) == (grad is None)
            if parameter.grad is not None:
                assert torch.equal(_local(parameter.grad), _local(grad))
    assert sw.full_state_dict(twin).keys() == sw.full_state_dict(model).keys()
    for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert type(ours) is type(theirs) and ours is not theirs, key
        assert ours.requires_grad == theirs.requires_grad
    if name != "ddp":
        with pytest.raises(RuntimeError, match="copy the model"):
            copy.deepcopy(model.layers)
    model.zero_grad()
    twin.zero_grad()
    other = copy.deepcopy(alone)
    theirs = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (other, twin)]
    for at in (1, 2):
        step([alone, model], opts, at)
        step([other, twin], theirs, at + 5)
        for average, source in zip(averages, (alone, model), strict=True):
            average.update_parameters(source)
    same(model, alone)
    same(twin, other)
    same(averages[1].module, averages[0].module)
    for each in averages:
        each.eval()
    torch.testing.assert_close(averages[1](tokens), averages[0](tokens))


def _copies_of_all() -> None:
    for name, settings in STRATEGIES.values():
        if settings.get("reduce") in (None, "bucketed"):
            _copies(name, {**settings, **(WHOLE if name != "zero1" else {})})


def test_copies_of_a_model_train(two: Ranks) -> None:
    two.run(_copies_of_all)


class FewRows(nn.Linear):
    """Its parameters have fewer rows than there are ranks: most of what is sent is padding."""

    def __init__(self, scaled: bool) -> None:
        super().__init__(6, 1)
        self.scale = nn.Parameter(torch.tensor(0.5)) if scaled else 0.5  # 0-d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.scale * super().forward(x).tanh()


def _few_rows(scaled: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(FewRows(scaled) for _ in range(3)))


def _train_few_rows(shard: str, gather: str) -> None:
    """Steps, an evaluation that writes to the shown parameters between them, and the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.randn(4, world, 6, generator=torch.Generator().manual_seed(1))
    ours, alone = (_few_rows(scaled=shard == "plan") for _ in range(2))
    if shard == "plan":
        sw.shard(ours, sw.Plan.of("zero3", mesh=world, gather=gather, keep_after_forward=True))
    else:
        for module in (*ours, ours):
            sw.fully_shard(module)
    share = 1 if shard == "plan" else world  # fully_shard averages
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (ours, alone)]
    for step in data:
        (ours(step[rank]).square().sum() * share).backward()
        alone(step).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            assert torch.allclose(ours(step[rank]), alone(step[rank]), atol=1e-5)
    found = {name: p.full_tensor() for name, p in ours.named_parameters()}
    for name, parameter in alone.named_parameters():
        assert torch.allclose(found[name], parameter, atol=1e-5), name


def test_parameters_of_few_rows_train_to_one_process(four: Ranks) -> None:
    """A host packs and copies out the rows and leaves the padding."""
    for shard, gather in (("plan", "packed"), ("plan", "each"), ("fully_shard", "auto")):
        four.run(_train_few_rows, shard, gather)
