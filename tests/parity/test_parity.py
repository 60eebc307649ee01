"""Every strategy, sync policy, dtype and optimizer trains to one process's parameters, on 2 and 4
real ranks.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.parity.training import compare_many
from tests.ranks import Ranks

STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "ddp-naive": ("ddp", {"reduce": "naive"}),
    "ddp-flat": ("ddp", {"reduce": "flat"}),
    "ddp-overlap": ("ddp", {"reduce": "overlap"}),
    "ddp-bucketed": ("ddp", {"reduce": "bucketed", "bucket_bytes": 1024}),
    "zero1": ("zero1", {}),
    "zero2": ("zero2", {}),
    "zero3": ("zero3", {}),
    "hsdp-zero2": ("hsdp", {"inner": "zero2"}),
    "hsdp-zero3": ("hsdp", {"inner": "zero3"}),
}
SYNCS = ("each", "scatter_each_reduce_last", "last")
DTYPES = ("float32", "bfloat16")
OPTIMIZERS = ("sgd", "adamw")
# Relative, per tensor, after 5 steps. In bf16 the oracle does the same bf16 arithmetic, so the
# bound is the same.
BOUND = 1e-6


@pytest.mark.parametrize("world", (2, 4))
@pytest.mark.parametrize("sync", SYNCS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_trains_to_one_process(
    strategy: str, sync: str, world: int, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue("two" if world == 2 else "four")
    name, settings = STRATEGIES[strategy]
    mesh = (2, world // 2) if name == "hsdp" else world
    kinds = [(kind, dtype, opt) for kind in ("odd",) for dtype in DTYPES for opt in OPTIMIZERS]
    kinds.append(("even", "float32", "adamw"))
    cases = [
        ((kind, name, mesh, opt, (2,) * world, dtype), {"settings": {**settings, "sync": sync}})
        for kind, dtype, opt in kinds
    ]
    for rank, errors in enumerate(ranks.run(compare_many, cases)):
        for case, error in zip(kinds, errors, strict=True):
            assert error <= BOUND, f"rank {rank}, {case}: {error}"
