"""Every world loads what every other saved, bit for bit (case 29).

Virtual ranks stand for real ones: a model sharded in a fake group of that size, whose values are
set, not trained. What a rank should hold is cut from the whole by torch.chunk's rule, not by the
code that is tested. `test_checkpoint.py` has real ranks that train.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.checkpoint.collect import Share, collect
from shardwise.checkpoint.loading import Loading
from shardwise.checkpoint.read import Checkpoint
from shardwise.checkpoint.saving import Order, Said, assign_pieces, begin, make_manifest
from shardwise.checkpoint.storage import storage_of
from shardwise.checkpoint.talk import Talk
from shardwise.checkpoint.write import find_sources, write_part

WORLDS = (1, 2, 3, 4, 6, 8)
STATES = {"sgd": ("momentum_buffer",), "adamw": ("exp_avg", "exp_avg_sq")}


def save_shares(root: Path, shares: Sequence[Share], step: int) -> str:
    """A checkpoint of every rank's share, written by this process alone; its folder."""
    storage, order = storage_of(root), Order(str(root), step, None, False)
    said = [Said(order, share.table, replace(share, held=[])) for share in shares]
    assignment, begun = assign_pieces(said), begin(storage, step)
    written = [
        write_part(storage, begun.temporary, rank, find_sources(share, assignment, rank))
        for rank, share in enumerate(shares)
    ]
    manifest = make_manifest(said, assignment, written, begun.serial)
    return storage.join(storage.commit(begun.temporary, begun.name, manifest.to_text().encode()))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 13)  # prime
        self.gate = nn.Parameter(torch.tensor(0.5))  # 0-d
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(7, 5), requires_grad=False)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight  # tied
        self.register_buffer("ticks", torch.arange(3))


@dataclass(frozen=True)
class Layout:
    name: str
    mesh: tuple[int, int]
    dtype: str  # that modules compute in; the masters are fp32
    optimizer: str

    @property
    def world(self) -> int:
        return self.mesh[0] * self.mesh[1]


def layouts(dtype: str, optimizer: str) -> list[Layout]:
    flat = [Layout(name, (1, n), dtype, optimizer) for n in WORLDS for name in ("zero1", "zero3")]
    halves = [(2, n // 2) for n in WORLDS if n > 2 and n % 2 == 0] + [(3, 2), (4, 2)]
    return flat + [Layout("hsdp", mesh, dtype, optimizer) for mesh in halves]


@dataclass
class VirtualRank:
    layout: Layout
    rank: int
    model: nn.Module
    optimizer: torch.optim.Optimizer

    def cut(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This rank's rows of a whole tensor that is placed as `like`."""
        if not isinstance(like, DTensor) or not any(isinstance(p, Shard) for p in like.placements):
            return value.clone()
        ranks = self.layout.mesh[1]
        chunks = [*value.chunk(ranks), *([value[:0]] * ranks)]
        return chunks[self.rank % ranks].clone()

    def fill(self, right: bool) -> None:
        """With the values of the checkpoint, or with none of them."""
        self.optimizer.state.clear()
        with torch.no_grad():
            for name, tensor in named(self.model):
                whole = reference(name, tuple(tensor.shape), tensor.dtype)
                local(tensor).copy_(self.cut(whole if right else whole * 0 - 1, tensor))
        for group in self.optimizer.param_groups:
            group["lr"] = 0.125 if right else 7.0
        for name, parameter in self.model.named_parameters() if right else ():
            if parameter.requires_grad:
                state = self.optimizer.state[parameter]
                for key in STATES[self.layout.optimizer]:
                    whole = reference(f"{name} {key}", tuple(parameter.shape), parameter.dtype)
                    state[key] = wrap(self.cut(whole, parameter), parameter)
                if self.layout.optimizer == "adamw":
                    state["step"] = torch.tensor(3.0)

    def check(self) -> None:
        for name, tensor in named(self.model):
            whole = reference(name, tuple(tensor.shape), tensor.dtype)
            assert torch.equal(local(tensor), self.cut(whole, tensor)), name
        assert self.optimizer.param_groups[0]["lr"] == 0.125
        for name, parameter in self.model.named_parameters():
            state = self.optimizer.state.get(parameter, {})
            steps = {"step"} if self.layout.optimizer == "adamw" else set()
            wanted = {*STATES[self.layout.optimizer], *steps} if parameter.requires_grad else set()
            assert state.keys() == wanted, name
            for key, value in state.items():
                if key == "step":
                    assert value.item() == 3.0 and type(value) is torch.Tensor
                    continue
                whole = reference(f"{name} {key}", tuple(parameter.shape), parameter.dtype)
                assert torch.equal(local(value), self.cut(whole, parameter)), (name, key)
                assert value.placements == parameter.placements


def named(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from itertools.chain(model.named_parameters(), model.named_buffers())


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def wrap(rows: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    assert isinstance(like, DTensor)
    return DTensor.from_local(
        rows, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
    )


@cache
def reference(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def build(layout: Layout) -> list[VirtualRank]:
    ranks = []
    for rank in range(layout.world):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
        try:
            compute = None if layout.dtype == "float32" else layout.dtype
            mesh = layout.mesh if layout.name == "hsdp" else layout.world
            model = sw.shard(Odd(), sw.Plan.of(layout.name, mesh=mesh, compute_dtype=compute))
            if layout.optimizer == "sgd":
                made: torch.optim.Optimizer = torch.optim.SGD(
                    model.parameters(), lr=0.1, momentum=0.9
                )
            else:
                made = torch.optim.AdamW(model.parameters(), lr=0.1)
            ranks.append(VirtualRank(layout, rank, model, made))
        finally:
            dist.destroy_process_group()
    return ranks


COMBINATIONS = tuple(itertools.product(("float32", "bfloat16"), STATES))
# All pairs of all layouts with every dtype and optimizer: a minute of one core instead of ten
# seconds.
FULL = bool(os.environ.get("SHARDWISE_FULL_MATRIX"))


def test_every_layout_loads_what_every_other_saved(tmp_path: Path, no_group: None) -> None:
    """Worlds {1,2,3,4,6,8} squared by {zero1, zero3, hsdp} squared: the same bits, wherever they
    were. Dtypes and optimizers go round.
    """
    met: Counter[tuple[str, str]] = Counter()
    for c, (dtype, optimizer) in enumerate(COMBINATIONS):
        built = {layout: build(layout) for layout in layouts(dtype, optimizer)}
        for i, (source, savers) in enumerate(built.items()):
            checkpoint = save_virtually(tmp_path / f"{dtype}-{optimizer}", source, savers)
            for j, loaders in enumerate(built.values()):
                if FULL or (i + j) % len(COMBINATIONS) == c:
                    for each in loaders:
                        load_virtually(checkpoint, each)
                    met[dtype, optimizer] += 1
    pairs = len(built) ** 2
    assert sum(met.values()) == (pairs * len(COMBINATIONS) if FULL else pairs) >= 200
    assert all(met[each] >= pairs // len(COMBINATIONS) for each in COMBINATIONS)


def save_virtually(root: Path, source: Layout, savers: list[VirtualRank]) -> Checkpoint:
    for each in savers:
        each.fill(right=True)
    shares = [collect(v.model, v.optimizer, random=False, rank=v.rank) for v in savers]
    checkpoint = Checkpoint.open(save_shares(root, shares, source.world))
    tensors = checkpoint.manifest.tensors
    assert "model/head.weight" not in tensors and "model/embed.weight" in tensors
    return checkpoint


def load_virtually(checkpoint: Checkpoint, loader: VirtualRank) -> None:
    loader.fill(right=False)
    talk = Talk(None, loader.rank, loader.layout.world)
    loading = Loading(checkpoint, loader.model, loader.optimizer, {}, False, talk)
    assert loading.compare("test", strict=True) == ([], [])
    loading.read()
    loading.apply()
    loader.check()
