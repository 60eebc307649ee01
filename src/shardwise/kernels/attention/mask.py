"""Which queries see which keys."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Mask(NamedTuple):
    """Which pairs count, and how scores are scaled.

    causal: query m sees the keys n <= m, counted from the start of both (so with M != N the mask is
    aligned top-left). window: it sees the keys fewer than `window` away. Segment ids are int32,
    (B, M) and (B, N): it sees the keys of its own id.
    """

    causal: bool
    scale: float
    window: int | None = None
    q_ids: Tensor | None = None
    k_ids: Tensor | None = None

    @property
    def plain(self) -> bool:
        return self.window is None and self.q_ids is None


def visible_pairs(m: Tensor, n: Tensor, mask: Mask) -> Tensor:
    """Whether the queries m see the keys n: (M, N), or (B, 1, 1, M, N) with segment ids."""
    apart = m[:, None] - n[None, :]
    seen = apart >= 0 if mask.causal else torch.ones_like(apart, dtype=torch.bool)
    if mask.window is not None:
        seen = seen & (apart.abs() < mask.window)
    if mask.q_ids is not None and mask.k_ids is not None:
        q_ids, k_ids = mask.q_ids[:, m], mask.k_ids[:, n]
        seen = seen & (q_ids[:, None, None, :, None] == k_ids[:, None, None, None, :])
    return seen
