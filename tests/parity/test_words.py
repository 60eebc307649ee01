"""What ranks tell each other beside tensors: over stores of every kind, on one host and several."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shardwise as sw
from shardwise.engine import words
from shardwise.engine.engine import engine_of
from shardwise.engine.torch_private import default_store
from shardwise.engine.words import Control
from tests.parity.dropin.common import batch, square_loss
from tests.parity.dropin.models import Stack
from tests.ranks import Ranks, on_host


class Counted:
    """A store that counts what is asked of it; `joins`: whether it takes `append`."""

    def __init__(self, store: Any, joins: bool = True) -> None:
        self.store, self.joins, self.asked = store, joins, Counter[str]()

    def has_extended_api(self) -> bool:
        return self.joins

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self.store, name)


def _turns(stores: list[Counted], turns: int) -> list[list[Any]]:
    """What each of the ranks heard in each turn: all say another value but in the last."""
    ranks = range(len(stores))
    controls = [Control(store, tuple(ranks), rank) for rank, store in enumerate(stores)]

    def talk(rank: int) -> list[Any]:
        said = [(turn, rank, "x" * rank) for turn in range(turns - 1)]
        heard = [controls[rank].exchange(value) for value in [*said, None]]
        controls[rank].part()
        return heard

    with ThreadPoolExecutor(len(stores)) as threads:
        return [each.result(timeout=60) for each in [threads.submit(talk, rank) for rank in ranks]]


@pytest.mark.parametrize("joins", [True, False])
def test_everybody_hears_everybody(joins: bool) -> None:
    home = dist.HashStore()
    stores = [Counted(home, joins) for _ in range(5)]
    heard = _turns(stores, 4)
    said = [[(turn, rank, "x" * rank) for rank in range(5)] for turn in range(3)]
    assert heard == [[*said, [None] * 5]] * 5
    assert all(("append" in store.asked) == joins for store in stores)
    assert home.num_keys() <= 1 + 1  # a count of worlds, and the last answer


@pytest.mark.parametrize("size", [2, 32])
def test_a_rank_asks_no_more_of_the_store_in_a_larger_world(size: int) -> None:
    home = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=60))
    stores = [Counted(home.clone()) for _ in range(size)]
    _turns(stores, 6)
    # Whoever is the last of a turn asks seven times; a count of worlds before, three when leaving.
    assert max(store.asked.total() for store in stores) <= 6 * 7 + 4


def _tell_on_hosts(count: int) -> int:
    """Numbers among ranks on `count` hosts, neighbours on different ones; in how many of the turns
    after the first this rank went to the store.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    with on_host(rank % count):
        store = Counted(default_store())
        control = Control(store, tuple(range(size)), rank, f"{count} hosts/", watch=False)
        assert control.tell([rank, 7]) == [[r, 7] for r in range(size)]
        asked = store.asked["append"]
        for turn in range(5):
            with torch.device("meta"):  # a program's default device is none of theirs
                heard = control.tell([rank * 10**10, -turn, 3])
            assert heard == [[r * 10**10, -turn, 3] for r in range(size)]
        return store.asked["append"] - asked


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_numbers_between_hosts_are_told_by_the_first_rank_of_each(four: Ranks, count: int) -> None:
    leads = [5 * (count > 1)] * count + [0] * (4 - count)
    assert four.run(_tell_on_hosts, count) == leads


def _tell_without_memory() -> None:
    found, words.meet = words.meet, lambda *_: None
    try:
        ranks = tuple(range(dist.get_world_size()))
        control = Control(default_store(), ranks, dist.get_rank(), "no memory/", watch=False)
        for turn in range(3):
            assert control.tell([turn]) == [[turn] for _ in ranks]
    finally:
        words.meet = found


def test_ranks_that_may_not_share_memory_tell_numbers_over_the_store(two: Ranks) -> None:
    two.run(_tell_without_memory)


def _step_on_two_hosts() -> None:
    """Steps of hsdp where each replica is a host, also one that replicas may not run."""
    rank = dist.get_rank()
    with on_host(rank // 2):
        torch.manual_seed(0)
        model = sw.shard(Stack(), sw.Plan.of("hsdp", mesh=(2, 2), sync="each"))
        for step in range(2):
            for micro in sw.microbatches(model, [batch(step, rank), batch(step + 5, rank)]):
                square_loss(model, micro).backward()
        agreement = engine_of(model).agreement
        assert agreement.tell([rank, 7]) == [[r, 7] for r in range(4)]
        assert agreement.everybody(rank) == [0, 1, 2, 3]  # in the same order
        with pytest.raises(RuntimeError, match=r"replicas run \[2, 1\] of them"):
            for _ in sw.microbatches(model, [batch(0, rank)] * (2 - rank // 2)):
                pass


def test_a_step_on_two_hosts_compares_its_micro_batches(four: Ranks) -> None:
    four.run(_step_on_two_hosts)
