"""Fewer bytes on the wire, on real gloo ranks: gradients that travel as 16 bits and are added in
32, against one process that rounds as often.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parity.models import build, token_batch
from tests.parity.oracle import MAX_NORM, OPTIMIZERS, STEPS, add_gradients, difference, indices
from tests.parity.test_parity import BOUND
from tests.parity.training import train_sharded
from tests.ranks import Ranks

BF16 = torch.bfloat16
SUMS: dict[str, Any] = {"reduce_dtype": "bfloat16", "sum_dtype": "float32"}


def _rounded(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(BF16).to(tensor.dtype)


def train_rounding(
    kind: str, counts: tuple[int, ...], shard: int, last: bool, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """One process that adds what every rank would send: the gradients of each of its micro-batches,
    or their sum if it reduces at the `last`, rounded; then, among replicas of `shard` ranks, the
    sums of each rounded, and the sum of all rounded.
    """
    model = build(kind)
    opt = OPTIMIZERS["sgd"](model.parameters())
    parameters = [p for p in model.parameters() if p.requires_grad]
    for step in range(STEPS):
        total = sum(token_batch(step, i).numel() for i in indices(counts))
        groups: list[list[Any]] = [[None] * len(parameters) for _ in range(len(counts) // shard)]
        for rank in range(len(counts)):
            mine = [token_batch(step, i) for i in indices(counts, rank)]
            for batches in [mine] if last else [[tokens] for tokens in mine]:
                opt.zero_grad()
                for tokens in batches:
                    add_gradients(model, tokens, total, dtype)
                sums = groups[rank // shard]
                for i, p in enumerate(parameters):
                    if p.grad is not None:
                        # Replicas of one rank send nothing before the exchange of replicas.
                        sent = p.grad if shard == 1 else _rounded(p.grad)
                        sums[i] = sent if sums[i] is None else sums[i] + sent
        for i, p in enumerate(parameters):
            each = [sums[i] for sums in groups if sums[i] is not None]
            if len(groups) > 1 and each:
                p.grad = _rounded(torch.stack([_rounded(g) for g in each]).sum(0))
            else:
                p.grad = each[0] if each else None
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _compare_sums(kind: str) -> dict[str, float]:
    """How far each strategy is from one process that rounds as often; with 16-bit sums too."""
    world, found = dist.get_world_size(), {}
    for i, (name, sync, dtype) in enumerate(
        [
            ("zero3", "each", "bfloat16"),
            ("zero2", "last", "float32"),
            ("zero3", "each", "float32"),
            ("zero1", "each", "float32"),
            ("ddp", "last", "float32"),
            ("ddp", "each", "bfloat16"),
            ("hsdp", "scatter_each_reduce_last", "float32"),
        ]
    ):
        mesh = (2, world // 2) if name == "hsdp" else world
        shard = {"ddp": 1, "hsdp": world // 2}.get(name, world)
        # All-reduces of every micro-batch would be rounded so often.
        micro = 1 if (name, sync) == ("ddp", "each") else 2
        settings = {**SUMS, "sync": sync, "compute_dtype": dtype}
        if i % 2:
            settings["memory"] = "arena"
        counts = (micro,) * world
        got = train_sharded(kind, name, mesh, "sgd", counts, settings)
        alone = train_rounding(kind, counts, shard, sync == "last", getattr(torch, dtype))
        found[f"{name} {sync} {dtype}"] = difference(got, alone)
        gathered: list[Any] = [None] * world
        dist.all_gather_object(gathered, {k: v.double().sum().item() for k, v in got.items()})
        assert all(each == gathered[0] for each in gathered), f"{name}: ranks differ"
    return found


def test_16_bit_gradients_are_added_in_32_on_two_ranks(two: Ranks) -> None:
    for found in two.run(_compare_sums, "odd"):
        assert max(found.values()) < BOUND, found


def test_16_bit_gradients_are_added_in_32_on_four_ranks(four: Ranks) -> None:
    for found in four.run(_compare_sums, "odd"):
        assert max(found.values()) < BOUND, found
