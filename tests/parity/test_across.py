"""All-reduces of several hosts with several ranks on each. Names of hosts stand for hosts."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.engine.collectives import Group
from shardwise.engine.engine import engine_of
from shardwise.engine.words import PerWorld
from tests.parity.dropin.common import batch, square_loss
from tests.parity.dropin.models import Stack
from tests.ranks import RankError, Ranks, on_host

CPU = torch.device("cpu")


def group_on(name: object) -> Group:
    """A group of all ranks, new each time."""
    with on_host(name):
        return Group.of("all", dist.new_group(), CPU)


def _sums(neighbours: bool) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    group = group_on(rank // 2 if neighbours else rank % 2)
    assert group.near is None and group.across is not None
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        draw = torch.Generator().manual_seed(0)
        # More elements than a block, fewer than ranks, and what is no multiple of them.
        everybody = [
            torch.randint(-8, 8, (size, numel), generator=draw).to(dtype)
            for numel in (1, 2, 3, 17, 70_001, 2**18)
        ]
        tensors = [each[rank].clone() for each in everybody]
        handles = [group.all_reduce(tensor) for tensor in tensors]
        for handle in handles[::-1]:  # in whatever order they are waited for
            handle.wait()
        for each, tensor in zip(everybody, tensors, strict=True):
            assert torch.equal(tensor, each.sum(0, dtype=dtype))
    part = torch.full((6,), float(rank))
    group.all_reduce(part[1:4]).wait()
    assert part.tolist() == [rank, *[size * (size - 1) / 2] * 3, rank, rank]


@pytest.mark.parametrize("neighbours", [True, False])
def test_sums_are_those_of_all_ranks(four: Ranks, neighbours: bool) -> None:
    four.run(_sums, neighbours)


def _finds(names: list[object]) -> tuple[bool, bool]:
    group = group_on(names[dist.get_rank()])
    tensor = torch.ones(5)
    group.all_reduce(tensor).wait()
    assert tensor.tolist() == [4.0] * 5
    return group.near is not None, group.across is not None


@pytest.mark.parametrize(
    ("names", "near", "across"),
    [("aaaa", True, False), ("aabb", False, True), ("aaab", False, False), ("abcd", False, False)],
)
def test_hosts_that_have_as_many_ranks(four: Ranks, names: str, near: bool, across: bool) -> None:
    assert four.run(_finds, list(names)) == [(near, across)] * 4


def _trains(settings: dict[str, Any]) -> bool:
    """Whether two hosts train as one does."""
    found = []
    for hosts in (1, 2):
        with on_host(f"{hosts} {settings} {dist.get_rank() * hosts // 4}"):
            torch.manual_seed(0)
            PerWorld.forget(dist.group.WORLD)  # type: ignore[arg-type]  # hosts are others now
            model = sw.shard(Stack(), sw.Plan.of("ddp", mesh=4, **settings))
            group = engine_of(model).mesh.replicate
            assert (group.across is not None) == (hosts == 2)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                for micro in sw.microbatches(
                    model, [batch(step, dist.get_rank() + i) for i in (0, 4)]
                ):
                    square_loss(model, micro).backward()
                sw.clip_grad_norm(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
            found.append(sw.full_state_dict(model))
    return all(torch.allclose(found[0][k], found[1][k], rtol=1e-6, atol=1e-7) for k in found[0])


@pytest.mark.parametrize("sync", ["each", "last"])
def test_data_parallel_on_two_hosts_trains_as_on_one(four: Ranks, sync: str) -> None:
    assert all(four.run(_trains, {"sync": sync}))


def _threads_end() -> int:
    """How many threads of Python's are left over when a world is forgotten."""
    PerWorld.forget(dist.group.WORLD)  # type: ignore[arg-type]
    gc.collect()
    before = threading.active_count()
    group = group_on(dist.get_rank() // 2)
    group.all_reduce(torch.ones(3)).wait()
    assert threading.active_count() == before + 2
    del group
    PerWorld.forget(dist.group.WORLD)  # type: ignore[arg-type]
    gc.collect()
    return threading.active_count() - before


def test_threads_end_with_the_world(four: Ranks) -> None:
    assert four.run(_threads_end) == [0] * 4


def _differ() -> None:
    rank = dist.get_rank()
    group = group_on(rank // 2)
    group.all_reduce(torch.ones(8 if rank else 4)).wait()


def test_messages_that_differ_are_an_error(four: Ranks) -> None:
    with pytest.raises(RankError) as caught:
        four.run(_differ, timeout=15)
    assert "ranks of one group call different collectives" in str(caught.value.errors[0])
    assert "add_part of 32 bytes" in str(caught.value.errors[1])


PROGRAM = """
import sys
import torch
import torch.distributed as dist
from tests.parity.test_across import group_on

rank = int(sys.argv[1])
dist.init_process_group("gloo", f"file://{sys.argv[2]}", world_size=4, rank=rank)
group = group_on(rank // 2)
for _ in range(3):
    group.all_reduce(torch.ones(1000)).wait()
dist.destroy_process_group()
"""


def test_a_program_that_is_over_ends(tmp_path: Path) -> None:
    """What it still holds is for the interpreter to drop."""
    words = [sys.executable, "-c", PROGRAM]
    ranks = [
        subprocess.Popen([*words, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(4)
    ]
    said = [each.communicate(timeout=100)[1].decode() for each in ranks]
    assert [each.returncode for each in ranks] == [0] * 4, said
