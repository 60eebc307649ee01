"""Ranks that are threads of one process: torch's threaded backend, a process group written in
Python, with which torch's own FSDP2 tests run. Whatever the engine keeps per process it must keep
per rank.
"""

from __future__ import annotations

import copy
import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg as threaded

import shardwise as sw
from shardwise.engine.engine import (
    engine_of,
)
from tests.parity.dropin.catalog import ENGINES, Api
from tests.parity.dropin.common import assert_trains_alike, batch, square_loss
from tests.parity.dropin.models import Stack, wrap

building = threading.Lock()  # the seed is the process's


def _run(world: int, function: Callable[..., None], *args: Any) -> None:
    """`function(*args)` on `world` threads, each a rank; the first error of any."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    threaded._install_threaded_pg()
    threaded.ProcessLocalGroup.reset()
    store, errors = dist.HashStore(), {}

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            function(*args)
        except BaseException as error:
            errors[rank] = traceback.format_exc()
            threaded.ProcessLocalGroup.exception_handle(error)
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()

    try:
        ranks = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(60)
        hung = [i for i, rank in enumerate(ranks) if rank.is_alive()]
    finally:
        threaded._uninstall_threaded_pg()
        isolate(False)
    told = [text for text in errors.values() if "Test termination event" not in text]
    assert not told and not hung, "\n".join([*told, f"hung: {hung}"])


def _twins() -> tuple[nn.Module, Any]:
    with building:
        torch.manual_seed(7)
        alone = Stack()
    return alone, copy.deepcopy(alone)


def _train(api: Api) -> None:
    """A mesh of the process group's own, one by hand, replicas, and a group only for scatters."""
    world = dist.get_world_size()
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    for settings in ({}, {"mesh": init_device_mesh("cpu", (world,))}, {"mesh": grid}):
        alone, model = _twins()
        wrap(api, model, **settings)
        if hasattr(model, "set_separate_reduce_scatter_group"):
            model.set_separate_reduce_scatter_group(True)
        assert_trains_alike(model, alone)
        square_loss(copy.deepcopy(model) if api.engine == "shardwise" else model, batch(0, 0))
        model.unshard()
        model.reshard()


@pytest.mark.parametrize("engine", ENGINES)
def test_fully_shard_on_threads(engine: str) -> None:
    """Twice: nothing may be left of the first world."""
    for _ in range(2):
        _run(4, _train, Api(engine))


def _train_by_plan(strategy: str) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    alone, model = _twins()
    sw.shard(model, sw.Plan.of(strategy, mesh=world, compute_dtype=None))
    opts = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (alone, model)]
    for step in range(3):
        for i in range(world):
            (square_loss(alone, batch(step, i)) / world).backward()
        with sw.record() as log:
            (square_loss(model, batch(step, rank)) / world).backward()
        counts = log.counts()
        for opt in opts:
            opt.step()
            opt.zero_grad()
    # Each rank counts its own calls.
    reduces = counts.get("reduce_scatter", 0) + counts.get("all_reduce", 0)
    assert reduces == len(engine_of(model).units), counts
    whole = sw.full_state_dict(model)
    for name, parameter in alone.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ("ddp", "zero3"))
def test_a_plan_on_threads(strategy: str) -> None:
    _run(2, _train_by_plan, strategy)
