"""The strategies, as data. A new strategy is a new row here, not a new class anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# replicate: every rank always holds all of it. step: sharded between steps, whole from the first
# gather of a step to the end of its backward. shard: every rank holds its rows; whole only around
# the moment of use.
Kept = Literal["replicate", "step", "shard"]


@dataclass(frozen=True)
class Strategy:
    """What one rank of a shard group holds of the parameters, the gradients and the optimizer
    state.
    """

    parameters: Kept
    gradients: Literal["replicate", "shard"]
    state: Literal["replicate", "shard"]


STRATEGIES: dict[str, Strategy] = {
    "ddp": Strategy("replicate", "replicate", "replicate"),
    "zero1": Strategy("replicate", "replicate", "shard"),
    "zero2": Strategy("step", "shard", "shard"),
    "zero3": Strategy("shard", "shard", "shard"),
}

NAMES = (*STRATEGIES, "hsdp")

# When gradients are reduced, over the micro-batches of a step.
SYNCS = ("each", "scatter_each_reduce_last", "last")


@dataclass(frozen=True)
class Reduce:
    """One of data parallel's ways to group the all-reduces, and whether they overlap the backward
    pass.
    """

    group: Literal["parameter", "bytes", "all"]
    during_backward: bool


REDUCES: dict[str, Reduce] = {
    "naive": Reduce("parameter", during_backward=False),
    "flat": Reduce("all", during_backward=False),
    "overlap": Reduce("parameter", during_backward=True),
    "bucketed": Reduce("bytes", during_backward=True),
}

# How a gather writes each parameter to its place: one message and one copy-out, one grouped call,
# or one call each.
GATHERS = ("auto", "packed", "grouped", "each")

# From this mean size of a tensor on, gathering straight into place pays. gloo, measured on 2 ranks
# (`shardwise bench gather`), one call each: 1.8 times the packed step at 256 KiB, 0.78 at 1 MiB. On
# an H200 a step with grouped gathers of some 10 MiB each takes 0.98 to 0.99 of the packed one.
IN_PLACE_FROM_BYTES = 2**20


def choose_gather(asked: str, tensors: int, nbytes: float, streams: bool = False) -> str:
    """What a gather of so many tensors and bytes is: one tensor goes straight into place. `auto`
    packs small tensors; large ones, whose copy-out costs more than that saves, go into place too:
    in one grouped call on a device with streams, in a call each on a host.
    """
    if tensors <= 1:
        return "each"
    if asked != "auto":
        return asked
    if nbytes / tensors < IN_PLACE_FROM_BYTES:
        return "packed"
    return "grouped" if streams else "each"
