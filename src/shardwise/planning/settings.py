"""The settings of a Plan as `Plan.of` takes them, with types, for editors and type checkers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import torch

from shardwise.planning.units import Cut


class Settings(TypedDict, total=False):
    """What each means: `Plan.of`. A test compares these with Plan's own fields."""

    inner: str
    units: Cut | int | str | type | Sequence[str | type] | set[type] | dict[str, Any] | None
    bucket_bytes: int | None
    compute_dtype: str | torch.dtype | None
    reduce_dtype: str | torch.dtype | None
    output_dtype: str | torch.dtype | None
    reduce: str
    sync: str
    forward_prefetch: int
    backward_prefetch: int
    reduce_depth: int
    keep_after_forward: bool | int | None
    unused: str
    average: bool
    whole: str | Sequence[str]
    whole_below: int
    gather: str
