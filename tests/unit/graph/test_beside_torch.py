"""torch's own buckets beside ours, on the same graph; `-s` prints both."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.fx_passes import bucketing, fsdp
from torch.fx import GraphModule, Node

from shardwise.graph.nodes import group_of, message_bytes
from shardwise.graph.passes import identify
from shardwise.graph.passes.bucket import choose
from shardwise.graph.passes.identify import sharding_gathers, sharding_scatters
from tests.unit.graph.graphs import GROUP, backward_of

ONE = 512


def torchs(kind: str, fits: int) -> list[list[Node]]:
    """torch's greedy buckets; it leaves out those of one."""
    module = GraphModule({}, backward_of(6)[0])
    megabytes = fits * ONE / 2**20
    if kind == "gathers":
        wait = fsdp.is_fsdp_all_gather_wait
        return bucketing.bucket_all_gather_by_mb(module, lambda _: megabytes, wait)
    wait = fsdp.is_fsdp_reduce_scatter_wait
    return bucketing.bucket_reduce_scatter_by_mb(module, lambda _: megabytes, wait)


def ours(kind: str, fits: int, adjacent_only: bool) -> list[list[Node]]:
    graph = backward_of(6)[0]
    found = sharding_gathers(graph) if kind == "gathers" else sharding_scatters(graph)
    mine = [node for node in found if group_of(node) == GROUP]
    among = found if adjacent_only else mine
    return choose(graph, mine, among=among, bucket_bytes=fits * ONE)


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch joined others before")
@pytest.mark.parametrize("fits", [2, 4, 100])
@pytest.mark.parametrize("kind", ["gathers", "scatters"])
def test_adjacent_buckets_are_torchs_and_others_are_fewer(kind: str, fits: int) -> None:
    adjacent = ours(kind, fits, adjacent_only=True)
    anywhere = ours(kind, fits, adjacent_only=False)
    names = [[n.name for n in nodes] for nodes in torchs(kind, fits)]
    assert [[n.name for n in nodes] for nodes in adjacent if len(nodes) > 1] == names
    everyone = identify(backward_of(6)[0], group=GROUP)
    total = len(everyone.gathers if kind == "gathers" else everyone.scatters)
    alone = total - sum(map(len, names))
    print(f"\n{kind} up to {fits}: torch {len(names) + alone}, ours {len(anywhere)} messages")
    assert len(anywhere) <= len(names) + alone
    assert sum(message_bytes(n) for nodes in anywhere for n in nodes) == total * ONE
