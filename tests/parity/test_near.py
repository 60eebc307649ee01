"""Messages through memory that ranks share: the same values as torch's own collectives, whatever
comes in which order, and nobody waits for a rank that has gone.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.engine import collectives, near, regions
from shardwise.engine.collectives import Group
from shardwise.engine.engine import engine_of
from tests.ranks import RankError, Ranks

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux alone")


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request):
    pool = Ranks(request.param)
    yield pool
    pool.stop()


def both() -> tuple[Group, Group]:
    """All ranks through shared memory, and by torch's own calls."""
    close, plain = (Group.of("all", None, CPU, plain) for plain in (False, True))
    assert close.near is not None and plain.near is None
    return close, plain


def draw(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Other values on each rank; small whole numbers, whose sums are exact in any order."""
    generator = torch.Generator().manual_seed(numel + dist.get_rank())
    return torch.randint(-8, 8, (numel,), generator=generator).to(dtype)


def tell_numbers() -> list[bool]:
    """Between other messages under way, and more than a process's own integers."""
    answers = []
    for group in both():
        whole = draw(group.size * 4, torch.float32)
        pending = group.all_reduce(whole)
        numbers = [dist.get_rank(), 2**40 + dist.get_rank()]
        answers.append(group.tell(numbers))
        pending.wait()
    expected = [[rank, 2**40 + rank] for rank in range(dist.get_world_size())]
    return [answer == expected for answer in answers]


def test_ranks_tell_each_other_numbers(ranks: Ranks) -> None:
    assert all(map(all, ranks.run(tell_numbers)))


def compare_values(dtype: torch.dtype, part: int) -> bool:
    """Every collective, all under way at once and waited for in another order."""
    close, plain = both()
    found = []
    for group in (close, plain):
        own, whole = draw(part, dtype), draw(part * group.size, dtype)
        gathered, summed = torch.empty_like(whole), whole.clone()
        in_place = torch.empty_like(whole)
        mine = in_place.view(group.size, -1)[group.rank].copy_(own)
        scattered = torch.empty_like(own)
        sizes = (min(part, 1000), 3)
        several = [whole.new_empty(size * group.size) for size in sizes]
        parts = [draw(size, dtype) for size in sizes]
        parts[0] = several[0].view(group.size, -1)[group.rank].copy_(parts[0])
        handles = [
            group.all_gather(gathered, own),
            group.reduce_scatter(scattered, whole),
            group.all_reduce(summed),
            group.all_gather(in_place, mine),
            group.all_gather_all(several, parts),
        ]
        random.Random(part).shuffle(handles)
        for handle in handles:
            handle.wait()
            handle.wait()  # a second time does nothing
        found.append([gathered, scattered, summed, in_place, *several])
    return all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("part", [1, 7, 4096, 3 * near._BLOCK + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_values_are_those_of_torchs_collectives(ranks, dtype, part):
    assert all(ranks.run(compare_values, dtype, part))


def sum_fractions() -> list[float]:
    close, _ = both()
    torch.manual_seed(dist.get_rank())
    tensor = torch.randn(100_000)
    close.all_reduce(tensor).wait()
    return tensor.double().cumsum(0)[::997].tolist()


def test_all_ranks_have_the_same_bits_of_a_sum(ranks):
    first, *others = ranks.run(sum_fractions)
    assert all(other == first for other in others)


def send_many(count: int, numel: int) -> tuple[int, bool]:
    """More messages than there are entries, with some under way and some that nobody waits for."""
    close, _ = both()
    rank, held, right = close.rank, [], True
    for i in range(count):
        tensor = torch.full((numel + i % 5,), float(rank + i))
        handle = close.all_reduce(tensor)
        if i % 3:  # else the handle is dropped
            held.append((handle, tensor, close.size * i + sum(range(close.size))))
        del handle
        if len(held) > 7:
            handle, tensor, expected = held.pop(i % 7)
            handle.wait()
            right &= bool((tensor == expected).all())
            del handle
    for handle, *_ in held:
        handle.wait()
    del held, handle
    dist.barrier()
    close.near._reclaim()
    return len(close.near._under_way), right


def test_memory_of_messages_is_used_again(ranks):
    for left, right in ranks.run(send_many, 3 * regions.ENTRIES, 1000):
        assert right and left == 0


def resident() -> int:
    """Bytes of this rank's region that have memory."""
    close, _ = both()
    for _ in range(50):
        close.all_reduce(torch.ones(2**18)).wait()  # 1 MiB each
    dist.barrier()
    text = Path("/proc/self/smaps").read_text()
    lines = [each for each in text.split("\n") if "memfd:shardwise" in each or "Rss:" in each]
    sizes = [
        int(rss.split()[1]) * 1024
        for name, rss in itertools.pairwise(lines)
        if "memfd:shardwise" in name and "Rss:" in rss
    ]
    return max(sizes)


def test_a_region_takes_what_is_under_way_and_not_more(ranks):
    assert all(2**20 <= size < 2**24 for size in ranks.run(resident))


def call_different_things() -> str:
    close, _ = both()
    tensor = torch.ones(64)
    if close.rank == 0:
        handle = close.all_reduce(tensor)
    else:
        handle = close.all_gather(torch.empty(64 * close.size), tensor)
    with pytest.raises(RuntimeError, match="call different collectives") as error:
        handle.wait()
    dist.barrier()
    return str(error.value)


def test_different_collectives_are_an_error_on_all_ranks(ranks):
    assert all("all_reduce of 256 bytes" in text for text in ranks.run(call_different_things))


def ask_again(host: str, off: bool) -> bool:
    """Whether there would be shared memory if this rank said so of itself."""
    before, last = regions.host, dist.get_rank() == dist.get_world_size() - 1
    if last and host:
        regions.host = lambda: host
    if last and off:
        os.environ[regions.OFF] = "0"
    try:
        return Group.of("all", dist.new_group(), CPU).near is not None
    finally:
        regions.host = before
        os.environ.pop(regions.OFF, None)


def test_one_rank_elsewhere_or_without_it_is_enough_for_none(ranks):
    assert ranks.run(ask_again, "", False) == [True] * ranks.world
    assert ranks.run(ask_again, "another host", False) == [False] * ranks.world
    assert ranks.run(ask_again, "", True) == [False] * ranks.world


def leave() -> str:
    """The last rank lets go of a group; the others find that out, and what it sent is there."""
    group = Group.of("all", dist.new_group(), CPU)
    tensor = torch.ones(8)
    handle = group.all_reduce(tensor)
    if group.rank == group.size - 1:
        collectives._near._worlds.clear()
        del handle, group
        dist.barrier()
        return "left"
    dist.barrier()
    handle.wait()
    assert bool((tensor == group.size).all())
    began = time.monotonic()
    with pytest.raises(ConnectionError, match=r"closed by peer.*has left") as error:
        group.all_reduce(tensor).wait()
    assert time.monotonic() - began < 2
    return str(error.value)


def test_a_rank_that_left_is_not_waited_for(ranks):
    *others, last = ranks.run(leave)
    assert last == "left" and all(f"rank {ranks.world - 1} of a group" in text for text in others)
    ranks.stop()  # its ranks no longer agree on what they share


def fork_and_go_on() -> bool:
    """A child that ends, as a data loader's does, is not this rank."""
    close, _ = both()
    tensor = torch.ones(8)
    handle = close.all_reduce(tensor)
    child = os.fork()
    if child == 0:
        del handle
        close.near.leave()
        os._exit(0)
    os.waitpid(child, 0)
    dist.barrier()
    handle.wait()
    close.all_reduce(tensor).wait()
    return bool((tensor == close.size**2).all())


def test_a_forked_child_is_no_rank(ranks):
    assert all(ranks.run(fork_and_go_on))


def ask_while_somebody_counts() -> bool:
    """On the first rank alone."""
    own = dist.all_reduce
    if dist.get_rank() == 0:
        dist.all_reduce = lambda *args, **kwargs: own(*args, **kwargs)
    try:
        return Group.of("all", dist.new_group(), CPU).near is not None
    finally:
        dist.all_reduce = own


def test_whoever_stands_in_for_torchs_functions_is_not_passed_by(ranks):
    assert ranks.run(ask_while_somebody_counts) == [False] * ranks.world


def train(strategy: str, by_gloo: bool) -> list[float]:
    """Some steps of a Plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(3)])
    found = collectives.near_of
    try:
        if by_gloo:
            collectives.near_of = lambda *_: None
        sw.shard(model, sw.Plan.of(strategy, mesh=dist.get_world_size()))
    finally:
        collectives.near_of = found
    mesh = engine_of(model).units[0].mesh
    assert all(each.near is None for each in (mesh.shard, mesh.replicate)) == by_gloo
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        torch.manual_seed(step)
        model(torch.randn(4, 16)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(value.double().sum()) for value in sw.full_state_dict(model).values()]


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3"])
def test_a_plan_trains_to_what_it_trains_to_by_gloo(ranks, strategy):
    found, by_gloo = (ranks.run(train, strategy, alone)[0] for alone in (False, True))
    assert found == pytest.approx(by_gloo, rel=1e-6)


KILLED = """
import os, sys, time, torch, torch.distributed as dist
rank, file = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(file, 2), rank=rank, world_size=2)
from shardwise.engine.collectives import Group
group = Group.of("all", None, torch.device("cpu"))
assert group.near is not None
group.all_reduce(torch.ones(4)).wait()
if rank:
    os.kill(os.getpid(), 9)
began = time.monotonic()
try:
    group.all_reduce(torch.ones(4)).wait()
except ConnectionError as error:
    print(f"{time.monotonic() - began:.1f} {error}", flush=True)
os._exit(0)
"""


def test_a_rank_that_is_killed_is_not_waited_for(tmp_path):
    """Nobody has waited for its process yet: it has ended all the same."""
    jobs = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said, _ = jobs[0].communicate(timeout=60)
    jobs[1].wait()
    seconds, _, text = said.partition(" ")
    assert float(seconds) < 2 and "connection closed by peer: rank 1 of a group of 2" in text


def wait_in_vain() -> None:
    group = Group.of("all", dist.new_group(timeout=timedelta(seconds=1)), CPU)
    if group.rank == 0:
        group.all_reduce(torch.ones(4)).wait()
    else:
        time.sleep(3)


def test_the_groups_own_timeout_counts(ranks):
    with pytest.raises(RankError, match=r"timed out waiting for rank 1 of a group.* in 1 s"):
        ranks.run(wait_in_vain)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 5)), max_size=60))
def test_gaps_never_overlap_and_come_together_again(asked):
    gaps, taken = regions.Gaps(10, 210), []
    for nbytes, back in asked:
        start = gaps.take(nbytes)
        if start is not None:
            assert start >= 10 and start + nbytes <= 210
            assert all(start + nbytes <= s or s + n <= start for s, n in taken)
            taken.append((start, nbytes))
        for _ in range(min(back, len(taken)) // 2):
            gaps.give(*taken.pop(back % len(taken)))
    for piece in taken:
        gaps.give(*piece)
    assert gaps.take(200) == 10


def forget_in_a_cycle() -> int:
    """A message that nobody waits for and a cycle keeps, then so many that its entry is needed."""
    group = Group.of("all", dist.new_group(timeout=timedelta(seconds=20)), CPU)
    cycle: list[object] = [group.all_reduce(torch.ones(4))]
    cycle.append(cycle)
    gc.disable()
    try:
        del cycle
        numbers = torch.ones(4)
        for _ in range(near.ENTRIES + 5):
            group.all_reduce(numbers.fill_(1.0)).wait()
    finally:
        gc.enable()
    return int(numbers[0])


def test_messages_in_garbage_hold_nobody_up(ranks):
    assert ranks.run(forget_in_a_cycle, timeout=60) == [ranks.world] * ranks.world
