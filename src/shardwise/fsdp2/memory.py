"""Which memory the collectives of a unit use: what torch's FSDPModule lets users choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine import torch_private
from shardwise.engine.unit import Unit


@dataclass(frozen=True)
class FromGroup:
    """torch's AllGather or ReduceScatter, with memory of the process group's own allocator where it
    has one for the device.
    """

    group: dist.ProcessGroup | None
    start: Callable[..., Any]  # torch's call

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        backend = torch_private.backend_of(self.group, device) if self.group is not None else None
        if backend is None or not backend.supports_tensor_alloc(device):
            return torch.empty(*size, dtype=dtype, device=device)
        made: torch.Tensor = backend.allocate_tensor(math.prod(size), dtype=dtype, device=device)
        return made

    def __call__(
        self, output: Any, input: Any, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        return self.start(output, input, group)


def allocate_from_group(unit: Unit, enable: bool) -> None:
    options = unit.options
    for name in ("custom_gather", "custom_scatter"):
        present = getattr(options, name)
        if present is not None and not isinstance(present, FromGroup):
            raise AssertionError(
                "cannot call set_allocate_memory_from_process_group_for_comm when the "
                f"{name.removeprefix('custom_')} is custom: {type(present).__name__}"
            )
    gather = FromGroup(unit.mesh.shard.group, torch_private.all_gather)
    scatter = FromGroup(unit.mesh.scatter.group, torch_private.reduce_scatter)
    options.custom_gather, options.custom_scatter = (gather, scatter) if enable else (None, None)


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Error on every rank where torch or the process group has no symmetric memory."""
    group = unit.mesh.shard.group
    if unit.options.custom_gather is not None:
        kind = type(unit.options.custom_gather).__name__
        raise AssertionError(f"cannot use symmetric memory when the all-gather is custom: {kind}")
    found = dist.get_backend(group)
    if backend != "NCCL" or "nccl" not in found or unit.mesh.device.type != "cuda":
        raise RuntimeError(
            f"symmetric memory needs an NCCL process group and CUDA tensors; this module's group "
            f"is {found!r} on {unit.mesh.device.type}, and the backend asked for is {backend!r}"
        )
    comm = torch_private.symmetric_all_gather(group, backend)
    if comm is None:
        raise RuntimeError(
            f"torch {torch.__version__} has no all-gather from symmetric memory; a newer torch has"
        )
    unit.options.custom_gather = comm
