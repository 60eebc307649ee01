"""What editors and type checkers know of the public names: `make lint` checks this file, and an
ignored error that is none is an error there.
"""

from typing import assert_type

import torch
from torch import nn

import shardwise as sw


def wrap(model: nn.Module, blocks: list[nn.Module]) -> None:
    assert_type(sw.fully_shard(model, reshard_after_forward=2), sw.FSDPModule)
    assert_type(sw.fully_shard(blocks), list[sw.FSDPModule])
    sw.fully_shard(model).set_requires_gradient_sync(False)
    sw.fully_shard(model, reshard=True)  # type: ignore[call-overload]


def plan() -> sw.Plan:
    sw.Plan.of("zero3", mesh=2, compute_dtype=torch.bfloat16, units=[nn.Linear], sync="last")
    sw.Plan.of("zero3", reduce_depth="2")  # type: ignore[arg-type]
    sw.Plan.of("zero3", compute_dtyp="bfloat16")  # type: ignore[call-arg]
    made = sw.Plan.of("hsdp", mesh=(2, 4), inner="zero2", reduce_depth=2)
    assert_type(made, sw.Plan)
    return made
