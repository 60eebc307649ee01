"""Several backwards make one step: with and without communication in between."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.parity.dropin.catalog import Api, case
from tests.parity.dropin.common import (
    assert_same_gradients,
    assert_same_parameters,
    average_backward,
    batch,
    grid,
    line,
    optimizers_of,
    square_loss,
    twins,
)
from tests.parity.dropin.models import Stack, wrap


def _accumulate(api: Api, model: Any, alone: Any, micro: int, before: Any, steps: int = 2) -> None:
    """`before(index, last)` sets the model up for each backward."""
    rank, world = dist.get_rank(), dist.get_world_size()
    opts = optimizers_of("adamw", model, alone)
    for step in range(steps):
        batches = [batch(step, i) for i in range(micro * world)]
        average_backward(alone, batches, share=world)
        for index in range(micro):
            before(index, index == micro - 1)
            square_loss(model, batches[rank * micro + index]).backward()
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2, micro=(2, 3), reshard=(True, False))
def accumulation_without_sync(api: Api, micro: int, reshard: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    _accumulate(api, model, alone, micro, lambda i, last: model.set_requires_gradient_sync(last))


@case(2)
def accumulation_hides_gradients_until_sync(api: Api) -> None:
    _, model = twins(Stack)
    wrap(api, model, mesh=line())
    model.set_requires_gradient_sync(False)
    square_loss(model, batch(0, 0)).backward()
    assert all(p.grad is None for p in model.parameters()), "an unsynced gradient is visible"
    model.set_requires_gradient_sync(True)
    square_loss(model, batch(0, 1)).backward()
    assert all(p.grad is not None for p in model.parameters())


@case(2)
def accumulation_of_reduced_gradients(api: Api) -> None:
    """Nothing set: each backward reduces, and the sharded gradients add up."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    _accumulate(api, model, alone, 3, lambda i, last: None)


@case(2)
def accumulation_of_some_modules(api: Api) -> None:
    """`recurse=False`: the root waits, the blocks reduce each time."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    _accumulate(
        api,
        model,
        alone,
        2,
        lambda i, last: model.set_requires_gradient_sync(last, recurse=False),
    )


@case(4, setter=("set_requires_all_reduce", "set_requires_gradient_sync"))
def accumulation_of_replicas(api: Api, setter: str) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=grid())
    _accumulate(api, model, alone, 3, lambda i, last: getattr(model, setter)(last))


@case(4)
def accumulation_of_replicas_in_both_ways(api: Api) -> None:
    """First without any communication, then scattered, then reduced across replicas."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=grid())

    def before(index: int, last: bool) -> None:
        model.set_requires_gradient_sync(index > 0)
        model.set_requires_all_reduce(last)

    _accumulate(api, model, alone, 3, before)


@case(2, reshard=(True, False))
def accumulation_with_parameters_kept(api: Api, reshard: bool) -> None:
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)

    def before(index: int, last: bool) -> None:
        model.set_is_last_backward(last)
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)

    _accumulate(api, model, alone, 3, before)


@case(2)
def accumulation_with_last_backward_told(api: Api) -> None:
    """Reduced each time, but only the last backward waits for it."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line())
    _accumulate(api, model, alone, 3, lambda i, last: model.set_is_last_backward(last))


@case(2, apart=(True, False), reshard=(True, False))
def several_forwards(api: Api, apart: bool, reshard: bool) -> None:
    """Two forwards before any backward; then one backward, or one each."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    opts = optimizers_of("adamw", model, alone)
    for step in range(2):
        batches = [batch(step, i) for i in range(2 * world)]
        average_backward(alone, batches, share=world)
        losses = [square_loss(model, x) for x in batches[2 * rank : 2 * rank + 2]]
        if apart:
            for index, loss in enumerate(losses):
                model.set_is_last_backward(index == 1)
                loss.backward()
        else:
            sum(losses).backward()
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)


@case(2, frozen_at=(0, 1), reshard=(True, False))
def accumulation_while_parameters_are_frozen_and_thawed(
    api: Api, frozen_at: int, reshard: bool
) -> None:
    """What waits for the step's last backward is that of the parameters trained until then."""
    alone, model = twins(Stack)
    wrap(api, model, mesh=line(), reshard_after_forward=reshard)
    rank, world, micro = dist.get_rank(), dist.get_world_size(), 3
    opts = optimizers_of("adamw", model, alone)
    for step in range(3):
        batches = [batch(step, i) for i in range(micro * world)]
        for index in range(micro):
            model.set_requires_gradient_sync(index == micro - 1)
            mine = [batches[r * micro + index] for r in range(world)]
            average_backward(alone, mine, share=world)
            square_loss(model, mine[rank]).backward()
            if index == frozen_at:
                for made in (model, alone):
                    made.layers[0].requires_grad_(step % 2 == 1)
                    made.layers[1].up.weight.requires_grad_(step % 2 == 1)
        assert_same_gradients(model, alone)
        for opt in opts:
            opt.step()
            opt.zero_grad()
    assert_same_parameters(model, alone)
