"""One gather per group and unshard, one scatter per group and synced backward, and no more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    WIDTH,
    assert_trains_alike,
    batch,
    counting,
    grid,
    line,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap

BLOCKS = 3
GROUPS = BLOCKS + 1


def _model(api: Api, style: str = "blocks", **settings: Any) -> Any:
    return wrap(api, Stack(blocks=BLOCKS), style, **{"mesh": line(), **settings})


def _halves(model: Any, step: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Gathers, scatters and reduces of forward, and of backward."""
    with counting() as forward:
        loss = square_loss(model, batch(step, 0))
    with counting() as backward:
        loss.backward()
    return forward.all, backward.all


@case(2, reshard=(True, False, None))
def a_step(api: Api, reshard: Any) -> None:
    model = _model(api, reshard_after_forward=reshard)
    again = {True: GROUPS, False: 0, None: BLOCKS}[reshard]
    for step in range(3):
        assert _halves(model, step) == ((GROUPS, 0, 0), (again, GROUPS, 0)), step


@case(2, style=("root", "list", "leaves"))
def groups_decide(api: Api, style: str) -> None:
    """A list is one group; a root alone is one group; a leaf each, and nothing for the root."""
    model = wrap(api, Stack(), style, mesh=line(), reshard_after_forward=True)
    expected = {"root": 1, "list": 2, "leaves": 7}[style]
    for step in range(2):
        assert _halves(model, step) == ((expected, 0, 0), (expected, expected, 0))


@case(4)
def replicas(api: Api) -> None:
    model = _model(api, mesh=grid())
    for step in range(2):
        assert _halves(model, step) == ((GROUPS, 0, 0), (BLOCKS, GROUPS, GROUPS))
    with counting() as counted:
        square_loss(model, batch(0, 0)).backward()
    assert {ranks for _, ranks, _ in counted.calls} == {2}


@case(4)
def smaller_group_for_backward(api: Api) -> None:
    model = _model(api, reshard_after_forward=2)
    for _ in range(2):
        with counting() as forward:
            loss = square_loss(model, batch(0, 0))
        with counting() as backward:
            loss.backward()
    assert [ranks for _, ranks, _ in forward.of("gather")] == [4] * GROUPS
    assert [ranks for _, ranks, _ in backward.of("gather")] == [2] * GROUPS
    assert [ranks for _, ranks, _ in backward.of("scatter")] == [4] * GROUPS


@case(2)
def nothing_is_reduced_without_sync(api: Api) -> None:
    model = _model(api)
    model.set_requires_gradient_sync(False)
    for step in range(2):
        assert _halves(model, step) == ((GROUPS, 0, 0), (BLOCKS, 0, 0))
    model.set_requires_gradient_sync(True)
    assert _halves(model) == ((GROUPS, 0, 0), (BLOCKS, GROUPS, 0))


@case(4)
def replicas_without_all_reduce(api: Api) -> None:
    model = _model(api, mesh=grid())
    model.set_requires_all_reduce(False)
    assert _halves(model)[1] == (BLOCKS, GROUPS, 0)
    model.set_requires_all_reduce(True)
    assert _halves(model)[1] == (BLOCKS, GROUPS, GROUPS)
    model.set_requires_gradient_sync(False)
    assert _halves(model)[1] == (BLOCKS, 0, 0)


@case(2)
def parameters_kept_after_backward(api: Api) -> None:
    model = _model(api, reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    assert _halves(model) == ((GROUPS, 0, 0), (0, GROUPS, 0))
    model.set_reshard_after_backward(True)
    assert _halves(model) == ((0, 0, 0), (0, GROUPS, 0))
    assert _halves(model) == ((GROUPS, 0, 0), (0, GROUPS, 0))


@case(2)
def evaluation(api: Api) -> None:
    """Under no_grad nothing is scattered; what forward keeps is not gathered a second time."""
    model = _model(api)
    with torch.no_grad():
        for expected in (GROUPS, BLOCKS):
            with counting() as counted:
                model(batch(0, 0))
            assert counted.all == (expected, 0, 0), counted.all
        model.set_reshard_after_forward(False)
        for expected in (BLOCKS, 0):
            with counting() as counted:
                model(batch(0, 0))
            assert counted.all == (expected, 0, 0), counted.all


@case(2)
def unshard_and_reshard(api: Api) -> None:
    """One gather for the asked module only; forward uses it; reshard drops it."""
    model = _model(api)
    square_loss(model, batch(0, 0)).backward()
    with counting() as counted:
        model.layers[0].unshard()
        model.layers[0].unshard()
        model.unshard()
    assert counted.all == (2, 0, 0)
    with counting() as counted:
        square_loss(model, batch(0, 0))
    assert counted.all == (GROUPS - 2, 0, 0)
    model.reshard()
    with counting() as counted:
        model.unshard()
        model.reshard()
        model.reshard()
    assert counted.all == (1, 0, 0)


@case(2, direction=("forward", "backward"), depth=(1, 2))
def prefetching_moves_but_does_not_add(api: Api, direction: str, depth: int) -> None:
    alone, model = twins(Stack, blocks=BLOCKS)
    wrap(api, model, mesh=line())
    layers = list(model.layers)
    for index, layer in enumerate(layers):
        if direction == "forward":
            layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + depth])
        else:
            before = layers[max(0, index - depth) : index]
            layer.set_modules_to_backward_prefetch(list(reversed(before)))
    for step in range(2):
        assert _halves(model, step) == ((GROUPS, 0, 0), (BLOCKS, GROUPS, 0))
    model.zero_grad()
    assert_trains_alike(model, alone)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.embed(x))


@case(2)
def no_gather_in_backward(api: Api) -> None:
    """`set_unshard_in_backward(False)`: an embedding's backward needs no weights."""
    alone, model = twins(Embedded)
    for part in (model.embed, model.body, model):
        api.fully_shard(part, mesh=line(), reshard_after_forward=True)
    tokens = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(0))
    # The root's own group is empty.
    for enabled, gathers in ((True, 2), (False, 1)):
        model.embed.set_unshard_in_backward(enabled)
        loss = square_loss(model, tokens)
        with counting() as counted:
            loss.backward()
        assert counted.all == (gathers, 2, 0), counted.all
    model.zero_grad()
    assert_trains_alike(model, alone, data=lambda s, i: tokens + 0 * (s + i))


@case(2)
def frozen_groups_are_not_scattered(api: Api) -> None:
    model = Stack(blocks=BLOCKS)
    model.layers[0].requires_grad_(False)
    wrap(api, model, mesh=line())
    for step in range(2):
        forward, backward = _halves(model, step)
        assert forward == (GROUPS, 0, 0)
        assert backward[1:] == (GROUPS - 1, 0)


@case(2, low=(True, False))
def bytes_follow_the_policy(api: Api, low: bool) -> None:
    """Gathered in the compute dtype, scattered in the reduce dtype; nothing is padded here."""
    dtype = torch.bfloat16 if low else None
    policy = api.MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    model = _model(api, mp_policy=policy, reshard_after_forward=True)
    numel = sum(p.numel() for p in model.parameters())
    with counting() as counted:
        square_loss(model, batch(0, 0)).backward()
    assert sum(n for _, _, n in counted.of("gather")) == 2 * numel * (2 if low else 4)
    # Ours: with 8 numbers more for each rank and group, which say who produced a gradient.
    counts = 2 * GROUPS * 8 if api.engine == "shardwise" else 0
    assert sum(n for _, _, n in counted.of("scatter")) == (numel + counts) * 4


@case(2)
def a_group_of_its_own_for_scatters(api: Api) -> None:
    """`set_separate_reduce_scatter_group`: gathers and scatters no longer share a group."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    for enable in (True, False):
        model.set_separate_reduce_scatter_group(enable)
        with counting() as counted:
            square_loss(model, batch(0, 0)).backward()
        gathers = {id(g) for kind, g in counted.groups if kind == "gather"}
        scatters = {id(g) for kind, g in counted.groups if kind == "scatter"}
        assert len(gathers) == len(scatters) == 1
        assert (gathers != scatters) is enable
        assert all(ranks == 2 for _, ranks, _ in counted.calls)
    model.set_separate_reduce_scatter_group()
    model.zero_grad()
    assert_trains_alike(model, alone)


@case(2)
def several_backwards(api: Api) -> None:
    """Each synced backward scatters each group once."""
    model = _model(api)
    losses = [square_loss(model, batch(0, i)) for i in range(2)]
    with counting() as counted:
        losses[0].backward()
    assert counted.all[1:] == (GROUPS, 0)
    with counting() as counted:
        losses[1].backward()
    assert counted.all[1:] == (GROUPS, 0)
