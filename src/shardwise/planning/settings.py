"""What `Plan.of` takes: the settings with their types, for editors and type checkers, and a mesh as
people write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardwise.planning.units import Cut


class Settings(TypedDict, total=False):
    """What each means: `Plan.of`. A test compares these with Plan's own fields."""

    inner: str
    units: Cut | int | str | type | Sequence[str | type] | set[type] | dict[str, Any] | None
    bucket_bytes: int | None
    compute_dtype: str | torch.dtype | None
    reduce_dtype: str | torch.dtype | None
    sum_dtype: str | torch.dtype | None
    output_dtype: str | torch.dtype | None
    reduce: str
    sync: str
    forward_prefetch: int
    backward_prefetch: int
    reduce_depth: int
    keep_after_forward: bool | int | None
    keep_last: int
    unused: str
    average: bool
    whole: str | Sequence[str]
    whole_below: int | None
    gather: str
    gather_dtype: str | torch.dtype | None
    memory: str


def parse_mesh(name: str, mesh: int | str | tuple[int, ...] | DeviceMesh) -> tuple[int, int]:
    """(replicate, shard) of what `Plan.of` was given for the strategy `name`."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 2:
            raise ValueError(
                f"the mesh {mesh} has {mesh.ndim} axes; a Plan takes one, or (replicate, shard): "
                "give the two that are data parallel, or use shardwise.fully_shard"
            )
        mesh = mesh.size() if mesh.ndim == 1 else tuple(mesh.shape)
    if isinstance(mesh, str):
        parts = mesh.lower().replace(",", "x").split("x")
        if not all(part.strip().isdigit() for part in parts):
            raise ValueError(f"mesh {mesh!r}: expected a number or REPLICATExSHARD, such as 2x4")
        numbers = tuple(int(part) for part in parts)
        mesh = numbers[0] if len(numbers) == 1 else numbers
    if isinstance(mesh, int):
        if name == "hsdp":
            raise ValueError(
                f"hsdp needs mesh=(replicate, shard), got {mesh}; for example mesh=(2, {mesh})"
            )
        return (mesh, 1) if name == "ddp" else (1, mesh)
    pair = tuple(mesh)
    if len(pair) != 2:
        raise ValueError(f"mesh {mesh!r}: expected (replicate, shard)")
    return pair[0], pair[1]
