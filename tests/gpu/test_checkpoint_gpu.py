"""Checkpoints of a model on a CUDA device: copies to pinned memory, its random state, where the
optimizer's counts are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardwise as sw


def _make(seed: int, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 96), nn.Dropout(0.5), nn.Linear(96, 7)).cuda()
    sw.shard(model, sw.Plan.of("zero3", mesh=1, compute_dtype="bfloat16"))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, **settings)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.randn(8, 64, device="cuda")).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _values(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    found = []
    for parameter in model.parameters():
        for value in (parameter, *optimizer.state[parameter].values()):
            found.append(
                (value.to_local() if isinstance(value, DTensor) else value).detach().clone()
            )
    return found


@pytest.mark.parametrize("settings", ({}, {"fused": True}, {"capturable": True}), ids=str)
@pytest.mark.parametrize("asynchronous", (False, True))
def test_training_goes_on_bit_for_bit(
    tmp_path: Path, asynchronous: bool, settings: dict[str, Any], no_group: None
) -> None:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    model, optimizer = _make(0, **settings)
    _train(model, optimizer, 3)
    saving = sw.save(tmp_path, model, optimizer, step=3, asynchronous=asynchronous)
    _train(model, optimizer, 2)
    saving.wait()
    again, other = _make(1, **settings)
    assert sw.load(tmp_path, again, other).step == 3
    kept = next(iter(other.state.values()))
    assert kept["step"].device.type == ("cuda" if settings else "cpu")
    assert kept["exp_avg"].to_local().is_cuda
    _train(again, other, 2)  # with the same dropout, and the same inputs
    ours, theirs = _values(model, optimizer), _values(again, other)
    assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))
