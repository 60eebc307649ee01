"""Checkpoints of real ranks that train: every kind of program, other worlds, damage, errors."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import storage
from tests.parity.checkpoint_programs import (
    KINDS,
    assert_same,
    build_small,
    fit_for_torch,
    make,
    state_of,
)
from tests.parity.models import build, loss_sum, token_batch
from tests.ranks import RankError, Ranks


def _every_kind(root: str, steps_ahead: int) -> int:
    """Each kind continues from its own checkpoint bit for bit; others load it, bit for bit."""
    saved = []
    for number, kind in enumerate(KINDS):
        program = make(kind)
        for step in range(2):
            program.step(step)
        before = state_of(program)
        path = sw.save(root, program.model, program.optimizer, step=number).path
        program.step(2)
        after = state_of(program)
        again = make(kind, seed=1)
        sw.load(path, again.model, again.optimizer)
        assert_same(state_of(again), before, kind)
        again.step(2)
        assert_same(state_of(again), after, f"{kind} continued")
        saved.append((kind, path, before))
    pairs = 0
    for number, (kind, path, before) in enumerate(saved):
        other = KINDS[(number + steps_ahead) % len(KINDS)]
        program = make(other, seed=1)
        sw.load(path, program.model, program.optimizer)
        assert_same(state_of(program), before, f"{other} from {kind}")
        pairs += 1
    return pairs


def test_every_kind_of_program_saves_and_loads(two: Ranks, tmp_path: Path) -> None:
    assert two.run(_every_kind, str(tmp_path), 5) == [len(KINDS)] * 2


# Other worlds (case 29)

LAYOUTS = [
    ("zero1", 1), ("zero3", 1), ("zero1", 2), ("zero3", 2), ("zero1", 3), ("zero3", 3),
    ("hsdp", 4), ("zero1", 4), ("zero3", 4),
]  # fmt: skip


def _join(world: int, meeting: str) -> bool:
    """Leave the group, and join one of this size, if this rank is in it, over the file `meeting`: a
    port that was free may be somebody else's by now.
    """
    rank = int(os.environ["POOL_RANK"])
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank < world:
        where = f"file://{meeting}"
        dist.init_process_group("gloo", init_method=where, rank=rank, world_size=world)
    return rank < world


def _build(name: str, world: int, seed: int, number: int) -> tuple[nn.Module, Any]:
    compute = "bfloat16" if number % 2 else None
    mesh = (2, 2) if name == "hsdp" else world
    model = sw.shard(build_small(seed), sw.Plan.of(name, mesh=mesh, compute_dtype=compute))
    if number // 2 % 2:
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _save_all(root: str) -> None:
    """Every layout trains and saves; rank 0 keeps the whole state beside."""
    os.environ["POOL_RANK"] = str(dist.get_rank())
    for number, (name, world) in enumerate(LAYOUTS):
        if _join(world, f"{root}/saves-{number}"):
            for kind in (number // 2 % 2,):  # of dtype and optimizer
                model, optimizer = _build(name, world, 0, number + 2 * kind)
                for step in range(2):
                    tokens = token_batch(step, dist.get_rank())
                    loss_sum(model(tokens), tokens).backward()
                    optimizer.step()
                    optimizer.zero_grad()
                folder = f"{root}/{number}-{kind}"
                sw.save(folder, model, optimizer, step=number)
                whole = _whole(model, optimizer)
                if dist.get_rank() == 0:
                    torch.save(whole, f"{folder}/whole.pt")


def _whole(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = parameter.full_tensor()
        for key, value in optimizer.state.get(parameter, {}).items():
            found[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def _load_all(root: str) -> int:
    """Every layout loads every second one's checkpoint, over values that are not its own."""
    pairs = 0
    for number, (name, world) in enumerate(LAYOUTS):
        if not _join(world, f"{root}/loads-{number}"):
            continue
        built = {}
        for source in range(number % 2, len(LAYOUTS), 2):
            kind = source // 2 % 2
            variant = (source + 2 * kind) % 4
            if variant not in built:
                built[variant] = _build(name, world, 1, variant)
            model, optimizer = built[variant]
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().zero_()
            optimizer.state.clear()
            folder = f"{root}/{source}-{kind}"
            assert sw.load(folder, model, optimizer).step == source
            _check_rows(model, optimizer, torch.load(f"{folder}/whole.pt", weights_only=True))
            pairs += 1
    return pairs


def _check_rows(model: nn.Module, optimizer: Any, whole: dict[str, torch.Tensor]) -> None:
    seen = set()
    for name, parameter in model.named_parameters():
        values = {name: parameter}
        for key, value in optimizer.state.get(parameter, {}).items():
            values[f"{name} {key}"] = value
        for key, value in values.items():
            expected = whole[key]
            if isinstance(value, DTensor):
                for axis, placement in enumerate(value.placements):
                    if isinstance(placement, Shard):
                        n = value.device_mesh.size(axis)
                        chunks = [*expected.chunk(n), *([expected[:0]] * n)]
                        expected = chunks[value.device_mesh.get_local_rank(axis)]
                value = value.to_local()
            assert torch.equal(value, expected) and value.dtype == expected.dtype, key
            seen.add(key)
    assert seen == whole.keys()


def test_real_worlds_load_what_others_saved(tmp_path: Path) -> None:
    """41 pairs of layouts on 1 to 4 ranks, trained. Of a 0-d parameter rank 0's copy is the one
    that counts, for a checkpoint as for forward.
    """
    ranks = Ranks(4)
    try:
        ranks.run(_save_all, str(tmp_path), timeout=240)
        pairs = ranks.run(_load_all, str(tmp_path), timeout=240)
    finally:
        ranks.stop()
    assert pairs[0] >= 40


# Damage and errors: the same on every rank, before anything changes (cases 30, 31)


def _values(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    tensors = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
    for parameter in model.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            tensors.append(value.to_local() if isinstance(value, DTensor) else value)
    return [tensor.detach().clone() for tensor in tensors]


def _refused(action: Any, model: nn.Module, optimizer: Any) -> str:
    """The error that `action` raises on this rank; nothing may have changed."""
    before, generator = _values(model, optimizer), torch.get_rng_state()
    with pytest.raises(sw.CheckpointError) as raised:
        action()
    after = _values(model, optimizer)
    assert all(map(torch.equal, before, after)) and len(before) == len(after)
    assert torch.equal(generator, torch.get_rng_state())
    return str(raised.value)


def _flipped(root: str) -> list[str]:
    """One byte of each file flipped, at several places: each is found, by all, in time."""
    program = make("zero3")
    program.step(0)
    model, optimizer = program.model, program.optimizer
    extra = {"table": torch.arange(50) + dist.get_rank(), "name": "x"}
    path = Path(sw.save(root, model, optimizer, step=1, extra=extra).path)
    told = []
    for file in sorted(path.iterdir()):
        size = file.stat().st_size
        for at in (3, 8, size // 2, size - 1):
            dist.barrier()
            if dist.get_rank() == 0:
                with file.open("r+b") as stream:
                    stream.seek(at)
                    byte = stream.read(1)[0]
                    stream.seek(at)
                    stream.write(bytes([byte ^ 4]))
            dist.barrier()
            text = _refused(lambda: sw.load(root, model, optimizer), model, optimizer)
            assert file.name in text, (file.name, at, text)
            told.append(text)
            dist.barrier()
            if dist.get_rank() == 0:
                assert checkpoint.verify(path), (file, at)
                with file.open("r+b") as stream:
                    stream.seek(at)
                    stream.write(bytes([byte]))
    dist.barrier()
    sw.load(root, model, optimizer)
    return told


def test_one_flipped_byte_is_found_by_all_before_anything_changes(
    two: Ranks, tmp_path: Path
) -> None:
    first, second = two.run(_flipped, str(tmp_path))
    assert first == second and len(first) == 4 * 3


def _misfits(root: str) -> dict[str, str]:
    program = make("zero3")
    program.step(0)
    model, optimizer = program.model, program.optimizer
    path = Path(sw.save(root, model, optimizer, step=1).path)
    told = {}

    def refuse(name: str, other: nn.Module, opt: Any = None, **how: Any) -> None:
        holder = opt or torch.optim.SGD(other.parameters())
        told[name] = _refused(lambda: sw.load(path, other, opt, **how), other, holder)

    more = fit_for_torch(build_small())
    more.extra = nn.Linear(2, 2)
    sw.shard(more, sw.Plan.of("zero3", mesh=2))
    refuse("more", more)
    plain = make("plain").model
    plain.embed = nn.Embedding(12, 7)
    refuse("shape", plain)
    refuse("dtype", make("plain").model.half())
    refuse("class", model, torch.optim.SGD(model.parameters(), lr=0.1))
    told["nothing"] = _refused(lambda: sw.load(f"{root}/no", model), model, optimizer)
    told["deleted"] = ""
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "rank-00001.safetensors").rename(path / "away")
    dist.barrier()
    told["deleted"] = _refused(lambda: sw.load(path, model, optimizer), model, optimizer)
    dist.barrier()
    if dist.get_rank() == 0:
        (path / "away").rename(path / "rank-00001.safetensors")
    dist.barrier()
    half = make("plain", seed=1).model.half()
    loaded = sw.load(path, half, strict=False)
    assert loaded.missing == [] and half.embed.weight.dtype == torch.float16
    assert loaded.unexpected == []
    # Told differently, rank by rank.
    told["order"] = _refused(lambda: sw.save(root, model, step=dist.get_rank()), model, optimizer)
    told["extra"] = _refused(
        lambda: sw.save(root, model, extra={"f": print} if dist.get_rank() else {}),
        model,
        optimizer,
    )
    return told


def test_what_does_not_fit_is_a_table_and_changes_nothing(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(_misfits, str(tmp_path))
    assert first == second
    assert "model/extra.weight: not in the checkpoint" in first["more"]
    assert "model/embed.weight: shape [11, 7] in the checkpoint, [12, 7] here" in first["shape"]
    assert "model/embed.weight: float32 in the checkpoint, float16 here" in first["dtype"]
    assert "optimizer: AdamW in the checkpoint, SGD here" in first["class"]
    assert "rank-00001.safetensors is not there" in first["deleted"]
    assert "has no checkpoint" in first["nothing"]
    assert "rank 1 was told to save" in first["order"]
    assert "rank 1: extra/1/f is a builtins.builtin_function_or_method" in first["extra"]


def _full_disk(root: str, victim: int, operation: str, asynchronous: bool) -> str:
    program = make("zero1")
    program.step(0)
    first = sw.save(root, program.model, program.optimizer, step=1).path
    program.step(1)

    def full(seen: str, path: str) -> None:
        if seen == operation and dist.get_rank() == victim and "step-00000002" in path:
            raise OSError(28, "No space left on device", path)

    storage.watchers.append(full)
    try:
        with pytest.raises(sw.CheckpointError) as raised:
            sw.save(
                root, program.model, program.optimizer, step=2, asynchronous=asynchronous
            ).wait()
    finally:
        storage.watchers.remove(full)
    dist.barrier()
    assert checkpoint.all_of(root) == [first]
    dist.barrier()
    second = sw.save(root, program.model, program.optimizer, step=2).path
    assert checkpoint.newest(root) == second and checkpoint.verify(root) == []
    assert sorted(os.listdir(root)) == ["latest", "step-00000001", "step-00000002"]
    return str(raised.value)


@pytest.mark.parametrize(
    ("victim", "operation", "file"),
    ((1, "write", "rank-00001.safetensors"), (0, "fsync", "rank-00000"), (0, "rename", "step-")),
)
@pytest.mark.parametrize("asynchronous", (False, True))
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_the_old(
    two: Ranks, tmp_path: Path, victim: int, operation: str, file: str, asynchronous: bool
) -> None:
    first, second = two.run(_full_disk, str(tmp_path), victim, operation, asynchronous)
    assert first == second
    assert f"rank {victim}: No space left on device" in first and file in first


# What else comes back


def _meta(root: str, how: str) -> None:
    program = make("zero3")
    program.step(0)
    path = sw.save(root, program.model, program.optimizer, step=1).path
    with torch.device("meta"):
        model = fit_for_torch(build_small())
    if how == "shard":
        sw.shard(model, sw.Plan.of("zero3", mesh=2))
    else:
        for layer in model.layers:
            sw.fully_shard(layer)
        sw.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sw.load(path, model, optimizer)
    assert not any(p.to_local().is_meta for p in model.parameters())
    ours = type(program)(model, optimizer)
    assert_same(state_of(ours), state_of(program))
    if how == "shard":
        for each in (program, ours):
            each.step(1)
        assert_same(state_of(ours), state_of(program), "continued")


@pytest.mark.parametrize("how", ("shard", "drop-in"))
def test_a_model_on_meta_loads_straight_into_its_shards(
    two: Ranks, tmp_path: Path, how: str
) -> None:
    two.run(_meta, str(tmp_path), how)


class Position:
    """A data loader's place, another on every rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "left": torch.arange(self.at)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert state["left"].tolist() == list(range(state["at"]))
        self.at = state["at"]


def _beside(root: str) -> None:
    """Random state of every kind and rank, schedulers, positions, a rate that is a tensor."""
    rank = dist.get_rank()
    program = make(
        "zero1", optimizer=lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False)
    )
    scheduler = torch.optim.lr_scheduler.MultiStepLR(program.optimizer, [2, 2, 5], gamma=0.5)
    for step in range(3):
        program.step(step)
        scheduler.step()
    random.seed(rank)
    np.random.seed(rank)
    torch.manual_seed(rank)
    beside = {"scheduler": scheduler, "data": Position(10 + rank), "epoch": 3, "inf": float("inf")}
    sw.save(root, program.model, program.optimizer, step=3, extra=beside)
    expected = random.random(), np.random.rand(), torch.rand(3)
    rate = program.optimizer.param_groups[0]["lr"].clone()
    again = make("zero1", 1, lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.5), foreach=False))
    other = torch.optim.lr_scheduler.MultiStepLR(again.optimizer, [9])
    data = Position(0)
    loaded = sw.load(root, again.model, again.optimizer, extra={"scheduler": other, "data": data})
    assert loaded.extra["epoch"] == 3 and loaded.extra["inf"] == float("inf")
    assert data.at == 10 + rank
    assert (random.random(), np.random.rand()) == expected[:2]
    assert torch.equal(torch.rand(3), expected[2])
    assert torch.equal(again.optimizer.param_groups[0]["lr"], rate)
    assert other.state_dict() == scheduler.state_dict()
    for each, steps in ((program, scheduler), (again, other)):
        for step in range(3, 6):
            each.step(step)
            steps.step()
    assert_same(state_of(program), state_of(again))
    assert program.optimizer.param_groups[0]["lr"] == again.optimizer.param_groups[0]["lr"]


def test_random_state_schedulers_and_positions_come_back(two: Ranks, tmp_path: Path) -> None:
    two.run(_beside, str(tmp_path))


def _in_the_background(root: str) -> None:
    """What is saved is what was there at the call, whatever training did since."""
    program = make("zero3")
    program.step(0)
    before = state_of(program)
    saving = sw.save(root, program.model, program.optimizer, step=1, asynchronous=True)
    for step in range(1, 4):
        program.step(step)
    again_path = sw.save(root, program.model, program.optimizer, step=4, asynchronous=True)
    assert saving.done  # a second save waits for the first
    assert checkpoint.Manifest.read(saving.wait()).step == 1
    again = make("zero3", 1)
    sw.load(saving.path, again.model, again.optimizer)
    assert_same(state_of(again), before)
    assert sw.load(root, again.model, again.optimizer).path == again_path.wait()
    assert_same(state_of(again), state_of(program))


def test_an_asynchronous_save_has_the_state_of_its_call(two: Ranks, tmp_path: Path) -> None:
    two.run(_in_the_background, str(tmp_path))


def test_ranks_that_only_one_loads_get_its_error(two: Ranks, tmp_path: Path) -> None:
    """Nobody waits for a rank that raised: `agree` tells all."""
    with pytest.raises(RankError) as raised:
        two.run(_load_nothing, str(tmp_path))
    assert all("has no checkpoint" in str(error) for error in raised.value.errors)


def _load_nothing(root: str) -> None:
    sw.load(root, build("even"))
