"""Meshes, data, the single-process oracle, and comparisons that all scenarios share."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.func import functional_call

from shardwise.engine.torch_private import ALL_GATHER, REDUCE_SCATTER

try:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
except ImportError:
    ShardPlacementResult = None
MESHES_BY_PARAMETER = ShardPlacementResult is not None  # torch 2.11 has none

BOUND = 1e-5  # relative, per tensor
WIDTH = 8

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw_loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


# Meshes: made once per pool of ranks, since each makes process groups.


@functools.cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def line() -> DeviceMesh:
    """All ranks on one axis."""
    return mesh(dist.get_world_size())


def grid() -> DeviceMesh:
    """2 replicas of half the ranks."""
    return mesh(2, dist.get_world_size() // 2, names=("replicate", "shard"))


def alone_mesh() -> DeviceMesh:
    """This rank by itself."""
    return mesh(dist.get_world_size(), 1, names=("all", "one"))["one"]


# Data and models: a pure function of their numbers, the same on every rank.


def batch(step: int, index: int, width: int = WIDTH, rows: int = 4) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(rows, width, generator=generator)


def twins(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The same model twice: one for the oracle, one to wrap."""
    made = []
    for _ in range(2):
        torch.manual_seed(7)
        made.append(make(*args, **kwargs))
    return made[0], made[1]


def square_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


# The oracle.


def average_backward(
    alone: nn.Module,
    batches: list[torch.Tensor],
    loss: Callable[[Any, Any], torch.Tensor] = square_loss,
    share: int | None = None,
) -> None:
    """The gradients of all batches, divided by `share` (by their number if not given)."""
    for x in batches:
        (loss(alone, x) / (share or len(batches))).backward()


def lowered_backward(
    alone: nn.Module, batches: list[torch.Tensor], dtype: torch.dtype, reduce: torch.dtype
) -> None:
    """What mixed precision means: each batch's gradients on `dtype` copies of the parameters,
    summed and divided in `reduce`, kept in the parameter's own dtype.
    """
    names = dict(alone.named_parameters())
    sums: dict[str, torch.Tensor] = {}
    for x in batches:
        copies = {n: p.detach().to(dtype).requires_grad_() for n, p in names.items()}
        functional_call(alone, copies, (x.to(dtype),)).float().square().mean().backward()
        for name, copy in copies.items():
            grad = copy.grad.to(reduce)
            sums[name] = sums[name] + grad if name in sums else grad
    for name, parameter in names.items():
        grad = (sums[name] / len(batches)).to(parameter.dtype)
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad


# Comparisons.


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The full value on this rank; a collective for DTensors, so every rank must ask."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def assert_close(
    got: torch.Tensor, expected: torch.Tensor, what: str, bound: float = BOUND
) -> None:
    """Every rank compares its own rows of a DTensor with those of the whole expected value."""
    assert got.shape == expected.shape, f"{what}: {got.shape}, expected {expected.shape}"
    scale = expected.detach().double().norm().clamp(min=1e-12)
    got, expected = got.detach(), expected.detach()
    if isinstance(got, DTensor):
        expected, got = local_part(expected, got), got.to_local()
        assert got.shape == expected.shape, f"{what}: {got.shape} here, expected {expected.shape}"
    error = ((got.double() - expected.double()).norm() / scale).item()
    assert error <= bound, f"{what}: relative difference {error}, allowed {bound}"


def local_part(value: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a whole tensor, by the placements of `like`; no communication."""
    on = like.device_mesh
    if any(not (p.is_replicate() or p.is_shard()) for p in like.placements):
        return distribute_tensor(value, on, like.placements, src_data_rank=None).to_local()
    for axis, placement in enumerate(like.placements):
        if isinstance(placement, Shard):
            parts = list(value.chunk(on.size(axis), dim=placement.dim))
            parts += [value.narrow(placement.dim, 0, 0)] * (on.size(axis) - len(parts))
            value = parts[on.get_local_rank(axis)]
    return value


def assert_same_gradients(model: nn.Module, alone: nn.Module, bound: float = BOUND) -> None:
    expected = dict(alone.named_parameters())
    assert [n for n, _ in model.named_parameters()] == list(expected)
    compared = 0
    for name, parameter in model.named_parameters():
        reference = expected[name].grad
        if reference is None:
            assert parameter.grad is None, f"{name}: has a gradient, expected none"
            continue
        assert parameter.grad is not None, f"{name}: no gradient"
        assert_close(parameter.grad, reference, f"gradient of {name}", bound)
        compared += 1
    assert compared, "no gradient was compared"


def assert_same_parameters(model: nn.Module, alone: nn.Module, bound: float = BOUND) -> None:
    expected = dict(alone.named_parameters())
    got = dict(model.named_parameters())
    assert list(got) == list(expected), f"names differ: {set(got) ^ set(expected)}"
    for name, parameter in got.items():
        assert_close(parameter, expected[name], name, bound)


def optimizers_of(name: str, *models: nn.Module) -> list[torch.optim.Optimizer]:
    return [OPTIMIZERS[name](m.parameters()) for m in models]


def assert_trains_alike(
    model: nn.Module,
    alone: nn.Module,
    *,
    steps: int = 2,
    optimizer: str | list[torch.optim.Optimizer] = "adamw",
    loss: Callable[[Any, Any], torch.Tensor] = square_loss,
    data: Callable[[int, int], torch.Tensor] = batch,
    place: tuple[int, int] | None = None,
    bound: float = BOUND,
) -> None:
    """Every rank trains on its own batch, the oracle on all of them: gradients after each backward
    and parameters at the end agree. `place` is this rank among the data-parallel ones; `optimizer`
    a name, or those of model and oracle made earlier.
    """
    rank, ranks = place or (dist.get_rank(), dist.get_world_size())
    if isinstance(optimizer, str):
        optimizer = optimizers_of(optimizer, model, alone)
    before = [p.detach().clone() for p in alone.parameters()]
    for step in range(steps):
        batches = [data(step, i) for i in range(ranks)]
        average_backward(alone, batches, loss)
        loss(model, batches[rank]).backward()
        assert_same_gradients(model, alone, bound)
        for each in optimizer:
            each.step()
            each.zero_grad()
    assert_same_parameters(model, alone, bound)
    moved = [not torch.equal(a, b) for a, b in zip(before, alone.parameters(), strict=True)]
    assert any(moved), "training changed nothing"


@contextmanager
def raises(kind: type[BaseException] | tuple[type[BaseException], ...], phrase: str) -> Iterator:
    """The body must raise `kind`, and its message must have `phrase` (a regular expression)."""
    try:
        yield
    except kind as error:
        assert re.search(phrase, str(error), re.DOTALL), f"{error!r} does not say {phrase!r}"
    else:
        raise AssertionError(f"nothing was raised; expected {kind} saying {phrase!r}")


@dataclass
class Counted:
    """Collectives in order, as asked of torch.distributed by either engine."""

    calls: list[tuple[str, int, int]] = field(default_factory=list)  # kind, ranks, bytes
    groups: list[tuple[str, Any]] = field(default_factory=list)  # kind, process group

    def of(self, kind: str) -> list[tuple[str, int, int]]:
        return [call for call in self.calls if call[0] == kind]

    @property
    def all(self) -> tuple[int, int, int]:
        """How many gathers, scatters and reduces."""
        return len(self.of("gather")), len(self.of("scatter")), len(self.of("reduce"))


@contextmanager
def counting() -> Iterator[Counted]:
    counted = Counted()
    kinds = {ALL_GATHER: "gather", REDUCE_SCATTER: "scatter", "all_reduce": "reduce"}
    originals = {name: getattr(dist, name) for name in kinds}

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            # The larger tensor is the whole message: a gather's output, a scatter's input.
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            nbytes = max(t.numel() * t.itemsize for t in tensors)
            counted.calls.append((kinds[name], group.size(), nbytes))
            counted.groups.append((kinds[name], group))
            return originals[name](*args, **kwargs)

        return call

    for name in kinds:
        setattr(dist, name, watch(name))
    try:
        yield counted
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
