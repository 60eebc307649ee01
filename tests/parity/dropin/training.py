"""Train parity: meshes, wrapping styles, optimizers, resharding, shapes, accumulation."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    alone_mesh,
    assert_trains_alike,
    batch,
    grid,
    line,
    mesh,
    twins,
)
from tests.parity.dropin.models import Stack, Tied, Twice, wrap


@case(2, style=("root", "blocks", "leaves", "nested", "list", "list_with_head"))
def wrapping(api: Api, style: str) -> None:
    alone, model = twins(Stack)
    wrap(api, model, style, mesh=line())
    assert_trains_alike(model, alone)


@case(2)
def children_only(api: Api) -> None:
    """No root: each wrapped child is a root of its own, the rest is the user's to reduce."""
    alone, model = twins(lambda: nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, 3)))
    api.fully_shard(model[0], mesh=line())
    api.fully_shard(model[2], mesh=line())
    assert not isinstance(model, api.FSDPModule)
    assert_trains_alike(model, alone)


@case(4, which=("default", "line", "named", "grid", "replicas_of_one", "shard_of_one"))
def meshes(api: Api, which: str) -> None:
    alone, model = twins(Stack)
    chosen: dict[str, Any] = {
        "default": lambda: {},
        "line": lambda: {"mesh": line()},
        "named": lambda: {"mesh": mesh(4, names=("dp",))},
        "grid": lambda: {"mesh": grid()},
        "replicas_of_one": lambda: {"mesh": mesh(4, 1, names=("replicate", "shard"))},
        "shard_of_one": lambda: {"mesh": mesh(1, 4, names=("replicate", "shard"))},
    }[which]()
    wrap(api, model, **chosen)
    assert_trains_alike(model, alone)


@case(2, optimizer=("sgd", "momentum", "adamw_loop", "adamw_foreach", "adamw_fused", "adagrad"))
def optimizers(api: Api, optimizer: str) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    assert_trains_alike(model, alone, optimizer=optimizer, steps=3)


@case(4, optimizer=("momentum", "adamw_fused"))
def optimizers_of_replicas(api: Api, optimizer: str) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=grid())
    assert_trains_alike(model, alone, optimizer=optimizer, steps=3)


@case(4, reshard=(True, False, None, 1, 2, 4), shape=("line",))
@case(4, reshard=(True, False), shape=("grid",))
def resharding(api: Api, reshard: Any, shape: str) -> None:
    alone, model = twins(Stack)
    on = line() if shape == "line" else grid()
    wrap(api, model, mesh=on, reshard_after_forward=reshard)
    assert_trains_alike(model, alone)


SHAPES = {"uneven": (7, 13, 5), "fewer_rows": (3, 2, 2), "one_row": (8, 1, 1)}


@case(4, shape=tuple(SHAPES), style=("root", "leaves"))
@case(2, shape=("uneven",), style=("blocks",))
def shapes(api: Api, shape: str, style: str) -> None:
    """Rows that do not divide by the ranks, and ranks left with none."""
    width, inner, out = SHAPES[shape]
    alone, model = twins(Stack, width, inner, out)
    wrap(api, model, style, mesh=line())
    assert_trains_alike(model, alone, data=lambda s, i: batch(s, i, width))


@case(4)
def uneven_replicas(api: Api) -> None:
    alone, model = twins(Stack, 7, 13, 5)
    wrap(api, model, mesh=grid())
    assert_trains_alike(model, alone, data=lambda s, i: batch(s, i, 7))


@case(2, style=("root", "blocks", "list"), reshard=(True, False))
def world_of_one(api: Api, style: str, reshard: bool) -> None:
    """The mesh has this rank only: nothing is averaged, and everything is still a DTensor."""
    alone, model = twins(Stack)
    wrap(api, model, style, mesh=alone_mesh(), reshard_after_forward=reshard)
    place = (0, 1)
    assert_trains_alike(model, alone, place=place)


@case(2, style=("root", "blocks"), reshard=(True, False))
def called_twice(api: Api, style: str, reshard: bool) -> None:
    alone, model = twins(Twice)
    wrap(api, model, style, mesh=line(), reshard_after_forward=reshard)
    assert_trains_alike(model, alone)


@case(2, style=("root", "blocks"))
@case(4, style=("blocks",))
def tied(api: Api, style: str) -> None:
    """Both uses of a matrix in one group: one parameter, one gradient, still tied afterwards."""
    alone, model = twins(Tied)
    wrap(api, model, style)
    assert model.head.weight is model.stem.weight
    assert_trains_alike(model, alone)
    assert model.head.weight is model.stem.weight
    listed = [n for n, _ in model.named_parameters()]
    doubled = [n for n, _ in model.named_parameters(remove_duplicate=False)]
    assert set(doubled) - set(listed) == {"stem.weight"}, doubled


@case(2)
def tied_in_a_list(api: Api) -> None:
    """Tied across two modules that are wrapped together."""
    alone, model = twins(Tied)
    api.fully_shard([model.stem, model.head], mesh=line())
    for layer in model.layers:
        api.fully_shard(layer, mesh=line())
    api.fully_shard(model, mesh=line())
    assert_trains_alike(model, alone)
    assert model.head.weight is model.stem.weight


@case(2)
def returns_the_module_it_was_given(api: Api) -> None:
    module = nn.Linear(WIDTH, WIDTH)
    assert api.fully_shard(module, mesh=line()) is module
    pair = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)]
    assert api.fully_shard(pair, mesh=line()) is pair
    assert all(isinstance(m, api.FSDPModule) for m in pair)


@case(2)
def two_models_side_by_side(api: Api) -> None:
    """Two roots, trained in turns, do not disturb each other."""
    alone, model = twins(Stack)
    other_alone, other = twins(Tied)
    wrap(api, model, mesh=line())
    wrap(api, other, mesh=line())
    api.share_comm_ctx([model, other])
    for _ in range(2):
        assert_trains_alike(model, alone, steps=1, optimizer="sgd")
        assert_trains_alike(other, other_alone, steps=1, optimizer="sgd")
    torch.testing.assert_close(model(batch(0, 0)), alone(batch(0, 0)), rtol=1e-5, atol=1e-6)
