"""`sw.compile` beside the engine: the same Plan as compiled graphs trains to the same parameters."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.engine.engine import engine_of
from tests.parity.models import VOCABULARY, Block
from tests.ranks import Ranks

STEPS = 5


class Net(nn.Module):
    """Blocks behind an embedding that is also the head; parameters of odd sizes, one that nobody
    uses, a frozen one.
    """

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(Block(8, 12) for _ in range(3))
        self.layers[1].spare = nn.Parameter(torch.ones(5))
        self.layers[2].up.weight.requires_grad_(False)
        self.head = nn.Linear(8, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.odd = nn.Parameter(torch.ones(7))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        return self.head(x * self.scale + self.odd.sum() * 0.1)


@dataclass(frozen=True)
class GraphCase:
    plan: str
    mesh: Any
    micro: tuple[int, ...] = (1,)  # micro-batches of each replica
    recompute: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    compile: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [self.plan, *map(str, self.micro), *map(str, self.settings.values())]
        return "-".join(
            [*words, *(["recompute"] if self.recompute else []), *map(str, self.compile)]
        )


BF16 = {"compute_dtype": "bfloat16", "reduce_dtype": "float32"}
PASSES = ("bucket", "prefetch", "sort", "cap")
ON_TWO = [
    GraphCase("ddp", 2),
    GraphCase("ddp", 2, (3,), settings={"sync": "last"}),
    GraphCase("ddp", 2, settings=BF16),
    GraphCase("zero1", 2, (2,)),
    GraphCase("zero2", 2, (3,), settings={"average": True}),
    GraphCase("zero2", 2, (2,), settings={"sync": "last", **BF16}),
    GraphCase("zero3", 2),
    GraphCase("zero3", 2, (3,), recompute=True),
    GraphCase("zero3", 2, (2,), settings={"sync": "last"}),
    GraphCase("zero3", 2, settings={"keep_after_forward": True, **BF16}),
    GraphCase("zero3", 2, recompute=True, settings={"keep_after_forward": False, **BF16}),
    GraphCase("zero3", 2, settings={"whole": ("*.bias",)}),
    GraphCase("zero3", 2, compile={"passes": ()}),
    GraphCase("zero3", 2, (2,), recompute=True, compile={"passes": PASSES}),
]
ON_FOUR = [
    GraphCase("hsdp", (2, 2)),
    GraphCase("hsdp", (2, 2), (2, 3), settings={"sync": "scatter_each_reduce_last"}),
    GraphCase("hsdp", (2, 2), (3, 1), recompute=True, settings={"sync": "last", **BF16}),
    GraphCase("hsdp", (2, 2), (2, 0), settings={"sync": "last"}),
    GraphCase("hsdp", (2, 2), settings=BF16, compile={"passes": PASSES}),
    GraphCase("zero3", 4, settings={"average": True}),
]


def train(case: GraphCase, compiled: bool) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Parameters after some steps, and the losses of this rank."""
    torch.manual_seed(0)
    model: nn.Module = Net(case.recompute)
    units = {} if case.plan == "ddp" else {"units": ("layers.*",)}
    plan = sw.Plan.of(case.plan, mesh=case.mesh, **units, **case.settings)
    if compiled:
        sw.compile(model, plan, backend="graph", **case.compile)
    else:
        sw.shard(model, plan)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    replica = engine_of(model).mesh.replicate.rank if len(case.micro) > 1 else 0
    draw = torch.Generator().manual_seed(1 + dist.get_rank())
    losses = []
    for _ in range(STEPS):
        batches = [
            torch.randint(0, VOCABULARY, (2, 4), generator=draw) for _ in range(case.micro[replica])
        ]
        for tokens in sw.microbatches(model, batches):
            logits = model(tokens).float()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
        sw.clip_grad_norm(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses.append(model(torch.arange(4).view(1, 4)).float().sum().item())
    return sw.full_state_dict(model), losses


def compare(case: GraphCase) -> float:
    """The largest difference of a parameter or a loss, in parts of it."""
    torch.compiler.reset()
    expected, losses = train(case, compiled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # falling back is one
        found, its_losses = train(case, compiled=True)
    assert found.keys() == expected.keys()
    worst = [
        float((found[name] - value).abs().max() / (value.abs().max() + 1e-12))
        for name, value in expected.items()
    ]
    pairs = zip(losses, its_losses, strict=True)
    return max([*worst, *(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)], default=0.0)


@pytest.mark.parametrize("case", ON_TWO, ids=str)
def test_graphs_train_as_the_engine_does(two: Ranks, case: GraphCase) -> None:
    assert max(two.run(compare, case)) <= 1e-6


@pytest.mark.parametrize("case", ON_FOUR, ids=str)
def test_graphs_train_as_the_engine_does_on_four(four: Ranks, case: GraphCase) -> None:
    assert max(four.run(compare, case)) <= 1e-6
