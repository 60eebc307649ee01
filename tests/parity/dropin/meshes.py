"""Other dims, other meshes per parameter, tensor parallel underneath, and named SPMD meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    MESHES_BY_PARAMETER,
    WIDTH,
    ShardPlacementResult,
    assert_close,
    assert_trains_alike,
    average_backward,
    batch,
    counting,
    grid,
    line,
    mesh,
    optimizers_of,
    square_loss,
    twins,
    whole,
)
from tests.parity.dropin.models import Stack, wrap

BF16 = torch.bfloat16


def _last_dim(parameter: nn.Parameter) -> Shard | None:
    return Shard(parameter.ndim - 1) if parameter.ndim > 1 else None


def _negative(parameter: nn.Parameter) -> Shard | None:
    return Shard(-1)


@case(2, way=("last", "negative"), style=("root", "blocks"))
def other_dims(api: Api, way: str, style: str) -> None:
    alone, model = twins(Stack)
    chosen = _last_dim if way == "last" else _negative
    wrap(api, model, style, mesh=line(), shard_placement_fn=chosen)
    for name, parameter in model.named_parameters():
        expected = (Shard(parameter.ndim - 1),)
        assert parameter.placements == expected, f"{name}: {parameter.placements}"
        assert parameter.to_local().shape[-1] == parameter.shape[-1] // 2, name
        assert torch.equal(whole(parameter), alone.get_parameter(name)), name
    assert_trains_alike(model, alone, steps=3)


@case(4, shape=("line", "grid"), reshard=(True, False))
def other_dims_on_meshes(api: Api, shape: str, reshard: bool) -> None:
    alone, model = twins(Stack)
    on = line() if shape == "line" else grid()
    wrap(api, model, mesh=on, shard_placement_fn=_last_dim, reshard_after_forward=reshard)
    assert model.head.weight.placements[-1] == Shard(1)
    assert model.head.bias.placements[-1] == Shard(0)
    assert_trains_alike(model, alone)


@case(2)
def other_dims_of_convolutions(api: Api) -> None:
    """Shard(1) and Shard(2) of a 3-d weight, mixed precision on top."""
    alone, model = twins(lambda: nn.Sequential(nn.Conv1d(4, 6, 2), nn.Conv1d(6, 4, 2)))
    dims = {6: Shard(1), 4: Shard(2)}
    api.fully_shard(
        model, mesh=line(), shard_placement_fn=lambda p: dims[p.shape[0]] if p.ndim == 3 else None
    )
    assert model[0].weight.placements == (Shard(1),)
    assert model[1].weight.placements == (Shard(2),)
    assert_trains_alike(model, alone, data=lambda s, i: batch(s, i, 8, 4).unsqueeze(0))


def _two_meshes(model: nn.Module) -> tuple[Any, Any]:
    """Matrices of the first block over pairs of ranks, everything else over all ranks."""
    pairs = FSDPMeshInfo(mesh(2, 2, names=("far", "near"))["near"], shard_mesh_dim=0)
    chosen = {model.layers[0].up.weight, model.layers[0].down.weight}

    def place(parameter: nn.Parameter) -> Any:
        return ShardPlacementResult(Shard(0), pairs) if parameter in chosen else None

    return pairs, place


@case(4, there=MESHES_BY_PARAMETER, reshard=(True, False))
def meshes_per_parameter(api: Api, reshard: bool) -> None:
    """Gradients are averaged over the parameter's own mesh."""
    rank = dist.get_rank()
    alone, model = twins(Stack)
    pairs, place = _two_meshes(model)
    wrap(
        api,
        model,
        mesh=line(),
        shard_placement_fn=place,
        reshard_after_forward=reshard,
    )
    assert model.layers[0].up.weight.device_mesh == pairs.mesh
    assert model.layers[0].up.weight.to_local().shape[0] == 16 // 2
    assert model.layers[0].up.bias.device_mesh == line()
    assert model.layers[0].up.bias.to_local().shape[0] == 16 // 4
    near, _ = twins(Stack)
    for step in range(2):
        batches = [batch(step, i) for i in range(4)]
        alone.zero_grad()
        near.zero_grad()
        model.zero_grad()
        average_backward(alone, batches)
        average_backward(near, batches[rank // 2 * 2 : rank // 2 * 2 + 2])
        square_loss(model, batches[rank]).backward()
        for name, parameter in model.named_parameters():
            own = parameter.device_mesh == pairs.mesh
            expected = (near if own else alone).get_parameter(name).grad
            assert_close(parameter.grad, expected, f"gradient of {name}")


@case(4, there=MESHES_BY_PARAMETER)
def meshes_per_parameter_are_groups(api: Api) -> None:
    """One gather and one scatter for each mesh of a module, over its own ranks."""
    model = Stack()
    _, place = _two_meshes(model)
    wrap(api, model, mesh=line(), shard_placement_fn=place)
    for _ in range(2):
        with counting() as counted:
            square_loss(model, batch(0, 0)).backward()
    assert sorted(ranks for _, ranks, _ in counted.of("scatter")) == [2, 4, 4, 4]
    # The root keeps its parameters, the blocks gather twice.
    assert sorted(ranks for _, ranks, _ in counted.of("gather")) == [2, 2, 4, 4, 4, 4, 4]


# Tensor parallel: parameters are DTensors on "tp" before they are sharded on "dp".


def _tensor_parallel(model: nn.Module, on: Any) -> None:
    for layer in model.layers:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer, on, plan)


def _dp_tp() -> Any:
    return mesh(2, 2, names=("dp", "tp"))


@case(4)
def tensor_parallel_placements(api: Api) -> None:
    alone, model = twins(Stack)
    both = _dp_tp()
    _tensor_parallel(model, both["tp"])
    wrap(api, model, mesh=both["dp"])
    expected = {
        "layers.0.norm.weight": (Shard(0),),
        "layers.0.up.weight": (_StridedShard(0, split_factor=2), Shard(0)),
        "layers.0.up.bias": (_StridedShard(0, split_factor=2), Shard(0)),
        "layers.0.down.weight": (Shard(0), Shard(1)),
        "layers.0.down.bias": (Shard(0), Replicate()),
        "head.weight": (Shard(0),),
    }
    for name, placements in expected.items():
        parameter = model.get_parameter(name)
        assert tuple(parameter.placements) == placements, f"{name}: {parameter.placements}"
        names = ("dp", "tp") if len(placements) == 2 else ("dp",)
        assert parameter.device_mesh.mesh_dim_names == names, parameter.device_mesh
        assert parameter.shape == alone.get_parameter(name).shape
    assert model.layers[0].up.weight.to_local().shape == (4, WIDTH)
    assert model.layers[0].down.weight.to_local().shape == (4, 8)
    square_loss(model, batch(0, both["dp"].get_local_rank())).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        assert parameter.grad.device_mesh == parameter.device_mesh, name


@case(4, reshard=(True, False), optimizer=("adamw", "momentum"))
def tensor_parallel_training(api: Api, reshard: bool, optimizer: str) -> None:
    alone, model = twins(Stack)
    both = _dp_tp()
    _tensor_parallel(model, both["tp"])
    wrap(api, model, mesh=both["dp"], reshard_after_forward=reshard)
    place = (both["dp"].get_local_rank(), 2)
    opts = optimizers_of(optimizer, model, alone)
    for step in range(2):
        batches = [batch(step, i) for i in range(2)]
        average_backward(alone, batches)
        square_loss(model, batches[place[0]]).backward()
        for name, parameter in model.named_parameters():
            assert_close(whole(parameter.grad), alone.get_parameter(name).grad, name)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter), alone.get_parameter(name), name)


@case(4)
def tensor_parallel_inside_forward(api: Api) -> None:
    """While the block runs its parameters are DTensors on "tp" again, in the compute dtype."""
    model = Stack()
    both = _dp_tp()
    _tensor_parallel(model, both["tp"])
    wrap(api, model, mesh=both["dp"], mp_policy=api.MixedPrecisionPolicy(param_dtype=BF16))
    seen: list[Any] = []

    def look(module: nn.Module, args: Any) -> None:
        weight = module.weight
        seen.append((type(weight.data), weight.placements, weight.dtype, tuple(weight.shape)))

    model.layers[0].up.register_forward_pre_hook(look)
    square_loss(model, batch(0, both["dp"].get_local_rank())).backward()
    assert seen == [(DTensor, (Shard(0),), BF16, (16, WIDTH))], seen


@case(4)
def tensor_parallel_accumulation(api: Api) -> None:
    alone, model = twins(Stack)
    both = _dp_tp()
    _tensor_parallel(model, both["tp"])
    wrap(api, model, mesh=both["dp"])
    rank = both["dp"].get_local_rank()
    batches = [batch(0, i) for i in range(4)]
    average_backward(alone, batches, share=2)
    for index in range(2):
        model.set_requires_gradient_sync(index == 1)
        square_loss(model, batches[2 * rank + index]).backward()
    for name, parameter in model.named_parameters():
        assert_close(whole(parameter.grad), alone.get_parameter(name).grad, name)


@case(4, shape=((2, 1, 2), (1, 2, 2)))
def tensor_parallel_with_replicas(api: Api, shape: tuple[int, int, int]) -> None:
    """Three axes: replicas, shards, tensor parallel."""
    alone, model = twins(Stack)
    every = mesh(*shape, names=("far", "near", "tp"))
    _tensor_parallel(model, every["tp"])
    data = every["far", "near"]
    wrap(api, model, mesh=data)
    up = model.layers[0].up.weight
    assert up.device_mesh.mesh_dim_names == ("far", "near", "tp")
    assert tuple(up.placements) == (Replicate(), _StridedShard(0, split_factor=2), Shard(0))
    assert tuple(model.head.weight.placements) == (Replicate(), Shard(0))
    batches = [batch(0, i) for i in range(2)]
    average_backward(alone, batches)
    far, near = data.get_local_rank("far"), data.get_local_rank("near")
    square_loss(model, batches[far * shape[1] + near]).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.placements == parameter.placements, name
        assert_close(whole(parameter.grad), alone.get_parameter(name).grad, name)


# One mesh for everything, with the data-parallel axes named.


def _replicated(module: nn.Module, on: Any) -> nn.Module:
    return distribute_module(module, on)


@case(4, dims=("shard", "shard_of_two", "replicas"))
def named_dims(api: Api, dims: str) -> None:
    """Parameters are DTensors on the full mesh; the named axes are sharded or replicated."""
    names = ("x", "y")
    on = mesh(2, 2, names=names)
    alone, model = twins(Stack)
    _replicated(model, on)
    dp = {
        "shard": api.DataParallelMeshDims(shard="x"),
        "shard_of_two": api.DataParallelMeshDims(shard=("x", "y")),
        "replicas": api.DataParallelMeshDims(shard="y", replicate="x"),
    }[dims]
    wrap(api, model, mesh=on, dp_mesh_dims=dp)
    expected = {
        "shard": (Shard(0), Replicate()),
        "shard_of_two": (Shard(0),),
        "replicas": (Replicate(), Shard(0)),
    }[dims]
    for name, parameter in model.named_parameters():
        assert parameter.placements == expected, f"{name}: {parameter.placements}"
        assert torch.equal(whole(parameter), alone.get_parameter(name)), name
    rank = dist.get_rank()
    count = 2 if dims == "shard" else 4
    index = rank // 2 if dims == "shard" else rank

    def loss(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m is model:
            x = DTensor.from_local(x, on, [Replicate(), Replicate()], run_check=False)
            return m(x).to_local().square().mean()
        return m(x).square().mean()

    assert_trains_alike(model, alone, loss=loss, place=(index, count), optimizer="sgd")


@case(4)
def named_dims_with_tensor_parallel(api: Api) -> None:
    """A matrix split on "tp" and sharded on "dp": strided, as torch writes it."""
    on = _dp_tp()
    module = nn.Linear(WIDTH, 8, bias=False)
    value = module.weight.detach().clone()
    module.weight = nn.Parameter(distribute_tensor(value, on, [Replicate(), Shard(0)]))
    api.fully_shard(module, mesh=on, dp_mesh_dims=api.DataParallelMeshDims(shard="dp"))
    weight = module.weight
    assert tuple(weight.placements) == (_StridedShard(0, split_factor=2), Shard(0))
    assert weight.to_local().shape == (2, WIDTH)
    value = distribute_tensor(value, on, [Replicate(), Replicate()]).to_local()  # rank 0's
    assert torch.equal(whole(weight), value)


@case(2)
def named_dims_describe_themselves(api: Api) -> None:
    dims = api.DataParallelMeshDims(shard=("a", "b"), replicate="c")
    assert dims.shard_names == ("a", "b") and dims.replicate_names == ("c",)
    assert api.DataParallelMeshDims(replicate="c").shard_names == ()
    assert api.DataParallelMeshDims(shard="a") == api.DataParallelMeshDims(shard="a")
