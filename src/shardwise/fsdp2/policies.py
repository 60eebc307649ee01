"""torch's own policy classes, so that whoever tests with `isinstance` finds them, and what they say
in the engine's words.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from shardwise.engine.attach import (
    Options,
)
from shardwise.engine.storage import Offload

try:
    from torch.distributed.fsdp import DataParallelMeshDims
except ImportError:  # an older torch

    @dataclass
    class DataParallelMeshDims:  # type: ignore[no-redef]
        """Which dims of a full mesh are data parallel: sharded over, or replicated over."""

        shard: str | tuple[str, ...] | None = None
        replicate: str | tuple[str, ...] | None = None

        def __post_init__(self) -> None:
            if self.shard is None and self.replicate is None:
                raise ValueError(
                    "At least one of shard or replicate must be set in DataParallelMeshDims"
                )

        @property
        def shard_names(self) -> tuple[str, ...]:
            return _names(self.shard)

        @property
        def replicate_names(self) -> tuple[str, ...]:
            return _names(self.replicate)


def _names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


__all__ = ["CPUOffloadPolicy", "DataParallelMeshDims", "MixedPrecisionPolicy", "OffloadPolicy"]


def make_options(
    precision: MixedPrecisionPolicy, offload: OffloadPolicy, keep: bool | int
) -> Options:
    """The options of one call. Gradients are reduced in the dtype they are computed in, unless the
    policy says another.
    """
    host = None
    if isinstance(offload, CPUOffloadPolicy):
        host = Offload(offload.pin_memory and torch.cuda.is_available())
    return Options(
        compute_dtype=precision.param_dtype,
        reduce_dtype=precision.reduce_dtype or precision.param_dtype,
        precision=precision,
        offload=host,
        keep=keep,
        stays_shown=True,
    )
