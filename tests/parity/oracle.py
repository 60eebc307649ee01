"""The oracle: one process does the same arithmetic, and every rank compares itself with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import nn
from torch.func import functional_call

from tests.parity.models import build, loss_sum, token_batch

STEPS = 5
MAX_NORM = 1.0
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.03, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


@cache
def train_alone(
    kind: str, dtype: str, optimizer: str, counts: tuple[int, ...], device: str = "cpu"
) -> dict[str, torch.Tensor]:
    """Parameters after training in one process on everybody's micro-batches; `counts[i]` are rank
    i's.

    In bf16 the arithmetic is the engine's: bf16 copies of fp32 masters, gradients of each
    micro-batch taken in bf16 and summed in fp32.
    """
    model = build(kind).to(device)
    opt = OPTIMIZERS[optimizer](model.parameters())
    for step in range(STEPS):
        batches = [token_batch(step, i).to(device) for i in indices(counts)]
        total = sum(b.numel() for b in batches)
        opt.zero_grad()
        for tokens in batches:
            add_gradients(model, tokens, total, getattr(torch, dtype))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        opt.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def indices(counts: Sequence[int], rank: int | None = None) -> list[int]:
    """The global numbers of one rank's micro-batches, or of all."""
    starts = [sum(counts[:r]) for r in range(len(counts))]
    ranks = range(len(counts)) if rank is None else [rank]
    return [starts[r] + i for r in ranks for i in range(counts[r])]


def add_gradients(model: nn.Module, tokens: torch.Tensor, total: int, dtype: torch.dtype) -> None:
    """Add the gradients of one micro-batch, computed on `dtype` copies of the parameters, to
    `.grad`.
    """
    names = dict(model.named_parameters())
    copies = {
        name: p.detach()
        .to(dtype if p.is_floating_point() else p.dtype)
        .requires_grad_(p.requires_grad)
        for name, p in names.items()
    }
    tied = {
        other: copies[name]
        for other, p in model.named_parameters(remove_duplicate=False)
        for name, q in names.items()
        if p is q
    }
    (loss_sum(functional_call(model, tied, (tokens,)), tokens) / total).backward()
    for name, parameter in names.items():
        grad = copies[name].grad
        if grad is not None:
            grad = grad.to(parameter.dtype)
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """The largest relative difference of any tensor."""
    assert list(ours) == list(theirs), f"names differ: {set(ours) ^ set(theirs)}"
    worst = 0.0
    for name, expected in theirs.items():
        got = ours[name]
        assert got.shape == expected.shape, f"{name}: {got.shape} against {expected.shape}"
        assert got.dtype == expected.dtype, f"{name}: {got.dtype} against {expected.dtype}"
        error = (got.double() - expected.double()).norm() / expected.double().norm().clamp(
            min=1e-12
        )
        assert torch.isfinite(error), name
        worst = max(worst, error.item())
    return worst
