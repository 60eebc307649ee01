"""`sw.compile` on a GPU, where messages are packed and sent on streams beside compute: two gloo
ranks on one device train to the parameters of the engine by hooks.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.description.language_model import compute_loss, draw_tokens, make_model
from shardwise.description.preset import bench_size
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import joined
from tests.ranks import Ranks


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, width)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def train(width: int, backend: str | None, plan: str, dtype: str | None) -> list[torch.Tensor]:
    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model: Any = copy.deepcopy(Net(width)).cuda()
    chosen = sw.Plan.of(plan, 2, compute_dtype=dtype, reduce_dtype="float32")
    rank = torch.distributed.get_rank()
    if backend is None:
        sw.shard(model, chosen)
    else:
        sw.compile(model, chosen, backend=backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step in range(4):
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(2 * step + rank))
        model(x.cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.cpu() for value in sw.full_state_dict(model).values()]


def differ(width: int, backend: str, plan: str, dtype: str | None) -> float:
    pairs = zip(train(width, None, plan, dtype), train(width, backend, plan, dtype), strict=True)
    return max((float((a - b).abs().max() / a.abs().max()) for a, b in pairs), default=0.0)


@pytest.mark.parametrize(
    ("width", "backend", "plan", "dtype"),
    [
        (32, "graph", "zero3", None),
        (32, "graph", "zero2", "bfloat16"),
        (33, "graph", "zero3", "bfloat16"),  # not cut evenly
        (32, "inductor", "zero3", "bfloat16"),
    ],
)
def test_graphs_train_as_hooks_do(
    two: Ranks, width: int, backend: str, plan: str, dtype: str
) -> None:
    bound = 2e-2 if backend == "inductor" and dtype else 2e-6
    for error in two.run(differ, width, backend, plan, dtype):
        assert error <= bound


SIZE = bench_size(layers=4, d_model=1024, d_ff=4096, heads=8, vocab=4096)


def gradients_of(compiled: bool) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = make_model(SIZE, "cuda")
    plan = sw.Plan.of("zero3", 8, compute_dtype="bfloat16", reduce_dtype="float32")
    sw.compile(model, plan) if compiled else sw.shard(model, plan)
    tokens, targets = draw_tokens(SIZE, 4, 512, "cuda")
    for _ in range(2):  # the second one without the compiler in it
        model.zero_grad()
        compute_loss(model, tokens, targets).backward()
    return {name: p.grad.to_local().clone() for name, p in model.named_parameters()}


def test_lanes_read_gradients_before_compute_writes_there_again() -> None:
    """One rank of 8 emulated, sizes at which compute goes on for longer than packing takes."""
    with joined(0, 8), emulate(Network()):
        engine, graph = gradients_of(compiled=False), gradients_of(compiled=True)
    for name, expected in engine.items():
        apart = float((graph[name] - expected).norm() / expected.norm())
        assert apart <= 3e-2, f"{name}: {apart}"
