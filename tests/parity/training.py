"""One parity case, as it runs on every rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import shardwise as sw
from tests.parity.models import build, loss_sum, token_batch
from tests.parity.oracle import MAX_NORM, OPTIMIZERS, STEPS, difference, indices, train_alone


def train_sharded(
    kind: str,
    name: str,
    mesh: Any,
    optimizer: str,
    counts: tuple[int, ...],
    settings: dict[str, Any],
    *,
    by_torch: bool = False,
    device: str = "cpu",
) -> dict[str, torch.Tensor]:
    """Train with a Plan on this rank's micro-batches; the whole parameters afterwards."""
    model = sw.shard(build(kind).to(device), sw.Plan.of(name, mesh=mesh, **settings))
    rank = dist.get_rank()
    opt = OPTIMIZERS[optimizer](model.parameters())
    if by_torch:  # a hook makes it step on the parameters themselves
        opt.register_step_pre_hook(lambda *_: None)
    for step in range(STEPS):
        everyone = [token_batch(step, i).to(device) for i in indices(counts)]
        total = sum(tokens.numel() for tokens in everyone)
        mine = [everyone[i] for i in indices(counts, rank)]
        for tokens in sw.microbatches(model, mine):
            (loss_sum(model(tokens), tokens) / total).backward()
        sw.clip_grad_norm(model, MAX_NORM)
        opt.step()
        opt.zero_grad()
    return sw.full_state_dict(model)


def compare(
    kind: str,
    name: str,
    mesh: Any,
    optimizer: str,
    counts: tuple[int, ...],
    dtype: str,
    **more: Any,
) -> float:
    """How far a Plan's training is from one process."""
    settings = dict(more.pop("settings", {}))
    if dtype != "float32":
        settings["compute_dtype"] = dtype
    got = train_sharded(kind, name, mesh, optimizer, counts, settings, **more)
    device = more.get("device", "cpu")
    return difference(got, train_alone(kind, dtype, optimizer, counts, device))


def compare_many(cases: list[tuple[tuple[Any, ...], dict[str, Any]]]) -> list[float]:
    return [compare(*args, **kwargs) for args, kwargs in cases]
