"""Which way a gather goes, by what is gathered and over what."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.engine.collectives import Group
from shardwise.planning.strategies import IN_PLACE_FROM_BYTES, choose_gather

LARGE = 4 * IN_PLACE_FROM_BYTES
CUDA = torch.device("cuda", 0)


def test_large_tensors_go_into_place_and_small_ones_travel_together() -> None:
    for streams, in_place in ((True, "grouped"), (False, "each")):
        assert choose_gather("auto", 4, LARGE, streams) == in_place
        assert choose_gather("auto", 4, LARGE - 1, streams) == "packed"
        assert choose_gather("auto", 1, 64, streams) == "each"
        for asked in ("packed", "grouped", "each"):
            assert choose_gather(asked, 4, LARGE, streams) == asked
            assert choose_gather(asked, 1, LARGE, streams) == "each"


@pytest.mark.usefixtures("no_group")
@pytest.mark.parametrize(
    ("backend", "on_cuda"), [("gloo", False), ("cpu:gloo,cuda:fake", True), ("fake", True)]
)
def test_gloo_gets_no_grouped_call_for_a_gpu(backend: str, on_cuda: bool) -> None:
    """Its own, unlike its other calls, would read the GPU's addresses as the host's."""
    store = FakeStore() if backend == "fake" else dist.HashStore()
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        group = Group("shard", dist.group.WORLD, 1, 0, None)
        assert group.groups_calls(CUDA) is on_cuda
        assert group.groups_calls(torch.device("cpu"))
    finally:
        dist.destroy_process_group()
