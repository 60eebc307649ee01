"""Rows 19 to 26 of docs/cases.md, for fsdp2_cases.py: set-up, optimizers and clipping."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from tests.parity.fsdp2_cases import (
    WIDTH,
    Net,
    api,
    batch,
    build,
    case,
    judge,
    off,
    shard,
    square,
    whole,
)


def step_twice(model: Any) -> None:
    """Two whole steps: an engine may notice only at a later forward or at the optimizer."""
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(2):
        opt.zero_grad()
        square(model, batch(dist.get_rank(), step)).backward()
        opt.step()


def differ(tensor: torch.Tensor) -> bool:
    """Whether this rank's tensor is not the other rank's."""
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, tensor.detach())
    return not torch.equal(*everyone)


@case(19, "optimizer built before sharding")
def optimizer_first() -> str:
    model = build(Net)
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    shard(model)
    square(model, batch(0)).backward()
    before = whole(model.head.weight).clone()
    opt.step()
    trained = not torch.equal(before, whole(model.head.weight))
    return "works" if trained else "wrong: step changes nothing, no error"


@case(20, "a submodule replaced after sharding")
def replaced_module() -> str:
    model = shard(build(Net))
    model.layers[0].up = build(lambda: nn.Linear(WIDTH, 16))
    step_twice(model)
    weight = model.layers[0].up.weight
    if isinstance(weight, DTensor) or not differ(weight.grad):
        return "works"
    return "wrong: the new module is left alone, its gradient differs between ranks, no error"


@case(20, "a parameter replaced after sharding")
def replaced_parameter() -> str:
    model = shard(build(Net))
    step_twice(model)
    model.layers[0].up.weight = nn.Parameter(torch.zeros(16, WIDTH))
    step_twice(model)
    # One step from zero at this rate stays near zero; the old values are far from it.
    old = float(whole(model.layers[0].up.weight).abs().max()) > 0.1
    return "wrong: the old values come back, no error" if old else "works"


@case(20, "a parameter added after sharding")
def added_parameter() -> str:
    model = shard(build(Net))
    model.layers[0].shift = nn.Parameter(torch.zeros(WIDTH))
    model.layers[0].register_forward_hook(lambda m, _a, y: y + m.shift)
    step_twice(model)
    if not differ(model.layers[0].shift.grad):
        return "works"
    return "wrong: it stays whole, its gradient differs between ranks, no error"


@case(21, "different initial values per rank")
def different_values() -> str:
    model = shard(build(Net, seed=dist.get_rank()))
    mine = off(model, build(Net, seed=0)), off(model, build(Net, seed=1))
    step_twice(model)
    if min(mine) < 1e-6:
        return "works"
    return "wrong: a mixture of both ranks' rows, no error"


class Buffered(Net):
    """A buffer that no state dict carries, as rotary frequencies are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rates", torch.arange(1.0, WIDTH + 1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.rates)


def on_meta() -> Any:
    with torch.device("meta"):
        return shard(build(Buffered))


@case(22, "forward while still on the meta device")
def never_materialised() -> str:
    square(on_meta(), batch(0)).backward()
    return "works"


@case(22, "to_empty, parameters set, a non-persistent buffer forgotten")
def non_persistent_buffer() -> str:
    # Freed memory that is not zero, so that what to_empty returns is not zero by luck.
    dirty = [torch.full((WIDTH,), 7.0) for _ in range(64)]
    model = on_meta()
    del dirty
    model.to_empty(device="cpu")
    for p in model.parameters():
        nn.init.zeros_(p)
    step_twice(model)
    right = torch.equal(model.rates, torch.arange(1.0, WIDTH + 1))
    return "works" if right else "wrong: the buffer has not its values, no error"


@case(22, "to_empty where one parameter has its values already")
def partly_on_meta() -> str:
    with torch.device("meta"):
        model = build(Net)
    model.head = nn.Linear(WIDTH, 4)
    nn.init.ones_(model.head.weight)
    shard(model).to_empty(device="cpu")
    for layer in model.layers:
        for p in layer.parameters():
            nn.init.zeros_(p)
    with torch.no_grad():
        model(batch(0))
    kept = torch.equal(whole(model.head.weight), torch.ones(4, WIDTH))
    return "works" if kept else "wrong: values that were there are lost, no error"


@case(24, "a group that moves CUDA tensors only, a model on the CPU")
def other_backend() -> str:
    group = dist.new_group(backend="cuda:gloo")
    model = shard(build(Net), mesh=DeviceMesh.from_group(group, "cpu"))
    square(model, batch(0)).backward()
    return "works"


@case(24, "a mesh of CUDA devices where there are none")
def other_device() -> str:
    square(shard(build(Net), mesh=init_device_mesh("cuda", (2,))), batch(0)).backward()
    return "works"


@case(25, "infinite loss on rank 1, clip, step")
def infinite_gradient() -> str:
    model = shard(build(Net))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    (square(model, batch(0)) * (float("inf") if dist.get_rank() else 1.0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    opt.step()
    finite = all(whole(p).isfinite().all() for p in model.parameters())
    return "works" if finite else "wrong: the parameters of both ranks are NaN, no error"


@case(25, "GradScaler, one infinite element in rank 0's rows")
def scaled_gradient() -> str:
    model = shard(build(Net))
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(square(model, batch(0))).backward()
    if dist.get_rank() == 0:
        model.head.weight.grad.to_local()[0, 0] = float("inf")
    local = model.head.weight.to_local().clone()
    scaler.step(opt)
    scaler.update()
    skipped = [None, None]
    dist.all_gather_object(skipped, torch.equal(local, model.head.weight.to_local()))
    return "works" if all(skipped) else f"wrong: ranks that skip the step: {skipped}, no error"


def clip(model: Any) -> str:
    alone = build(Net)
    for rank in range(2):
        (square(alone, batch(rank)) / 2).backward()
    square(model, batch(dist.get_rank())).backward()
    theirs = torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    ours = whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    pairs = zip(model.parameters(), alone.parameters(), strict=True)
    error = max(float((whole(p.grad) - q.grad).norm() / q.grad.norm()) for p, q in pairs)
    return judge(max(error, abs(float(ours / theirs) - 1)), what="clipped gradients")


@case(26, "clip_grad_norm_ over sharded parameters")
def clip_sharded() -> str:
    return clip(shard(build(Net)))


@case(26, "over sharded and ignored (replicated, averaged by hand) parameters")
def clip_mixed() -> str:
    model = build(Net)
    head = set(model.head.parameters())
    for p in head:
        p.register_hook(lambda grad: _average(grad))
    return clip(shard(model, ignored_params=head))


def _average(grad: torch.Tensor) -> torch.Tensor:
    grad = grad.clone()
    dist.all_reduce(grad)
    return grad / 2


@case(26, "over parameters of two meshes")
def clip_two_meshes() -> str:
    model = build(Net)
    hybrid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for layer in model.layers:
        api.fully_shard(layer, mesh=hybrid)
    return clip(api.fully_shard(model, mesh=init_device_mesh("cpu", (2,))))
