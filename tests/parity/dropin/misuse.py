"""Wrong use: the same kind of exception as torch's, saying the same thing, on every rank."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import DeviceMesh, Replicate, Shard, distribute_tensor

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    MESHES_BY_PARAMETER,
    WIDTH,
    ShardPlacementResult,
    batch,
    grid,
    line,
    mesh,
    raises,
)
from tests.parity.dropin.models import Stack, wrap
from tests.parity.dropin.setters import CountingGather
from tests.parity.models import Block


def _linear(api: Api, **settings: Any) -> Any:
    return api.fully_shard(nn.Linear(WIDTH, WIDTH), **{"mesh": line(), **settings})


@case(2, kind=("ModuleList", "ModuleDict"))
def containers(api: Api, kind: str) -> None:
    part = nn.Linear(WIDTH, WIDTH)
    container = nn.ModuleList([part]) if kind == "ModuleList" else nn.ModuleDict({"a": part})
    with raises(ValueError, "containers that do not implement forward"):
        api.fully_shard(container, mesh=line())


@case(2, part=("layer", "list"))
def children_after_parents(api: Api, part: str) -> None:
    """torch's message is an invariant of its own. Nothing is changed by the refused call."""
    model = api.fully_shard(Stack(), mesh=line())
    kind = TypeError if api.engine == "torch" else ValueError
    said = "value was None" if api.engine == "torch" else "before and took.*children first"
    with raises(kind, said):
        api.fully_shard(model.layers[0] if part == "layer" else list(model.layers), mesh=line())
    assert type(model.layers[0]) is Block
    model(batch(0, 0)).sum().backward()


@case(2)
def three_dimensional_mesh(api: Api) -> None:
    with raises(ValueError, "1D or 2D"):
        _linear(api, mesh=mesh(1, 1, 2, names=("a", "b", "c")))


@case(4)
def unnamed_grid(api: Api) -> None:
    with raises(AssertionError, "mesh_dim_names"):
        _linear(api, mesh=mesh(2, 2))


@case(4, value=(0, 3, 8, -1))
def reshard_to_a_size_that_does_not_divide(api: Api, value: int) -> None:
    with raises(ValueError, f"factor of 4, not {value}"):
        _linear(api, reshard_after_forward=value)


@case(2, value=("yes", 1.5))
def reshard_of_another_type(api: Api, value: Any) -> None:
    with raises(ValueError, "reshard_after_forward should be a bool or an int"):
        _linear(api, reshard_after_forward=value)


@case(2, value=(None, 1, "no"))
def reshard_set_to_another_type(api: Api, value: Any) -> None:
    with raises(ValueError, "reshard_after_forward should be a bool"):
        _linear(api).set_reshard_after_forward(value)


@case(2, value=(0, -2))
def too_few_buffers(api: Api, value: int) -> None:
    with raises(ValueError, f"positive int, got {value}"):
        _linear(api).set_reduce_scatter_max_input_buffers(value)


@case(2, value=(True, 2.0, "2"))
def buffers_of_another_type(api: Api, value: Any) -> None:
    with raises(TypeError, f"must be an int, got {type(value).__name__}"):
        _linear(api).set_reduce_scatter_max_input_buffers(value)


@case(2, direction=("forward", "backward"))
def prefetching_an_unwrapped_module(api: Api, direction: str) -> None:
    with raises(ValueError, "Expects FSDPModule but got.*Linear"):
        getattr(_linear(api), f"set_modules_to_{direction}_prefetch")([nn.Linear(2, 2)])


@case(2)
def sharing_with_an_unwrapped_module(api: Api) -> None:
    with raises(ValueError, "list of FSDPModules"):
        api.share_comm_ctx([_linear(api), nn.Linear(2, 2)])
    assert api.share_comm_ctx([]) is None


@case(2)
def uneven_other_dim(api: Api) -> None:
    with raises(NotImplementedError, "uneven sharding on dim 1"):
        api.fully_shard(
            nn.Linear(7, 4, bias=False), mesh=line(), shard_placement_fn=lambda p: Shard(1)
        )


@case(2)
def a_dim_that_is_not_there(api: Api) -> None:
    with raises(AssertionError, "(?i)shard dim 3.*2D"):
        api.fully_shard(
            nn.Linear(4, 4, bias=False), mesh=line(), shard_placement_fn=lambda p: Shard(3)
        )


@case(2)
def a_placement_that_is_none(api: Api) -> None:
    with raises(ValueError, "Invalid shard_placement_fn result"):
        _linear(api, shard_placement_fn=lambda p: "rows")


@case(2)
def an_unknown_method(api: Api) -> None:
    with raises(ValueError, "does not have a method nothing_like_it"):
        api.register_fsdp_forward_method(_linear(api), "nothing_like_it")


@case(2)
def child_before_root(api: Api) -> None:
    """The first forward decides who the root is."""
    model = wrap(api, Stack(), mesh=line())
    model.layers[0](batch(0, 0))
    with raises(RuntimeError, "already been lazily initialized for layers.0"):
        model(batch(0, 0))


@case(2)
def a_list_as_root(api: Api) -> None:
    parts = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    api.fully_shard(parts, mesh=line())
    with raises(RuntimeError, "single root module"):
        parts[0](batch(0, 0))


@case(2)
def twice(api: Api) -> None:
    model = _linear(api)
    with raises(AssertionError, "fully_shard has already been applied"):
        api.fully_shard(model, mesh=line())


@case(2)
def part_of_a_group(api: Api) -> None:
    """Calling a module whose parameters are sharded with its parent's, outside its forward."""
    model = wrap(api, Stack(), mesh=line())
    model(batch(0, 0)).sum().backward()
    with raises(RuntimeError, "DTensor"):
        model.head(batch(0, 0))


@case(
    4,
    there=MESHES_BY_PARAMETER,
    setter=("set_custom_all_gather", "set_custom_reduce_scatter", "set_all_reduce_hook"),
)
def one_setting_for_several_meshes(api: Api, setter: str) -> None:
    model = nn.Linear(WIDTH, WIDTH)
    pairs = FSDPMeshInfo(mesh(2, 2, names=("far", "near"))["near"], shard_mesh_dim=0)
    weight = model.weight
    api.fully_shard(
        model,
        mesh=line(),
        shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), pairs) if p is weight else None,
    )
    with raises(ValueError, f"{setter} is not supported with multiple param groups"):
        getattr(model, setter)(CountingGather())


@case(4, there=MESHES_BY_PARAMETER)
def two_descriptions_of_one_mesh(api: Api) -> None:
    near = mesh(2, 2, names=("far", "near"))["near"]
    with raises(ValueError, "must use the same FSDPMeshInfo"):
        _linear(
            api,
            shard_placement_fn=lambda p: ShardPlacementResult(
                Shard(0), FSDPMeshInfo(near, shard_mesh_dim=0)
            ),
        )


@case(4)
def a_stream_for_native_replicas(api: Api) -> None:
    model = _linear(api, mesh=grid())
    with raises(ValueError, "stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(lambda t: None, stream=object())


@case(2)
def dims_that_name_nothing(api: Api) -> None:
    with raises(ValueError, "At least one of shard or replicate"):
        api.DataParallelMeshDims()


def _spmd(on: DeviceMesh, placements: list[Any]) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    module.weight = nn.Parameter(distribute_tensor(module.weight.detach(), on, placements))
    return module


@case(4, what=("unnamed", "unknown", "plain", "not_replicated", "other_mesh", "int_reshard"))
def named_dims(api: Api, what: str) -> None:
    on = mesh(2, 2, names=("x", "y"))
    dims = api.DataParallelMeshDims(shard="x")
    module = _spmd(on, [Replicate(), Replicate()])
    settings: dict[str, Any] = {"mesh": on, "dp_mesh_dims": dims}
    if what == "unnamed":
        settings["mesh"] = mesh(2, 2)
        kind, phrase = ValueError, "must have mesh_dim_names"
    elif what == "unknown":
        settings["dp_mesh_dims"] = api.DataParallelMeshDims(shard="z")
        kind, phrase = ValueError, "'z' not found"
    elif what == "plain":
        module = nn.Linear(WIDTH, WIDTH)
        kind, phrase = ValueError, "must be DTensors.*weight"
    elif what == "not_replicated":
        module = _spmd(on, [Shard(0), Replicate()])
        kind, phrase = ValueError, r"Expected Replicate\(\) on DP shard dim 'x'"
    elif what == "other_mesh":
        module = _spmd(mesh(2, 2, names=("x", "other")), [Replicate(), Replicate()])
        kind, phrase = ValueError, "different mesh"
    else:
        settings["reshard_after_forward"] = 2
        kind, phrase = NotImplementedError, "not yet supported"
    with raises(kind, phrase):
        api.fully_shard(module, **settings)


@case(2)
def a_failed_call_can_be_repeated(api: Api) -> None:
    """After an error about the arguments the module is still unwrapped and can be wrapped."""
    model = nn.Linear(WIDTH, WIDTH)
    with raises(ValueError, "reshard_after_forward"):
        api.fully_shard(model, mesh=line(), reshard_after_forward="yes")
    assert type(model.weight) is nn.Parameter
    assert torch.equal(model(torch.zeros(1, WIDTH))[0], model.bias)


@case(2)
def parameters_of_a_scripted_module(api: Api) -> None:
    with warnings.catch_warnings(action="ignore"):  # torch.jit is deprecated
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), torch.jit.script(nn.Linear(WIDTH, 2)))
    with raises((RuntimeError, ValueError), "scripted Linear|ScriptModules"):
        api.fully_shard(model, mesh=line())


@case(2)
def parameters_without_a_shape(api: Api) -> None:
    """The example that gives them one has to come first."""
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, 2))
    with raises(RuntimeError, "'weight' of a LazyLinear has no shape yet|uninitialized parameter"):
        api.fully_shard(model, mesh=line())
        model(torch.ones(2, 3))
    model = nn.Sequential(nn.LazyLinear(WIDTH), nn.Linear(WIDTH, 2))
    model(torch.ones(2, 3))
    api.fully_shard(model, mesh=line())
    model(torch.ones(2, 3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
