"""The micro-batches of one step: the engine knows which is the last, so there is no flag to set or
invert.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn

from shardwise.engine.api import engine_of

Item = TypeVar("Item")


def microbatches(model: nn.Module, batches: Iterable[Item]) -> Iterator[Item]:
    """Yield each micro-batch of a step; run one forward and one backward for each.

    First the ranks compare how many they run: ranks of one shard group must agree, replicas may
    differ (also zero) unless sync is 'each'. A rank without micro-batches joins the others with
    zeros. Leaving the loop early drops the step's gradients, and clipping or stepping with them is
    an error; after an exception in a forward or backward they are dropped without one.
    """
    engine = engine_of(model)
    engine.forget_interrupted()
    items = list(batches)
    total = len(items)
    engine.agreement.check_counts(total, engine.schedule.forward_order.names)
    engine.agreement.check_values(engine.units)
    if total == 0:
        engine.run_nothing()
        return
    ran = 0
    try:
        for i, item in enumerate(items):
            engine.schedule.micro = (i, total)
            before = engine.backwards
            yield item
            if engine.backwards == before:
                raise RuntimeError(
                    f"micro-batch {i + 1} of {total} ran no backward; every micro-batch needs one "
                    "(a loss of zero is fine), or its peers wait for this rank's gradients"
                )
            ran += 1
    finally:
        engine.schedule.micro = None
        if ran < total:
            engine.interrupt(
                f"{ran} of {total} micro-batches ran; gradients are not reduced, and were dropped. "
                "The loop over sw.microbatches was left early (break, return or an exception); run "
                "every micro-batch, or begin the step again"
            )
