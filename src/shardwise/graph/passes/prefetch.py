"""Gathers issued before they are needed."""

from __future__ import annotations

from torch.fx import Graph


def prefetch(graph: Graph, *, group: str, window: int, in_flight_bytes: int) -> Graph:
    """Each gather of the group at most `window` compute nodes before its first wait, as long as no
    more than `in_flight_bytes` of them are on their way.
    """
    raise NotImplementedError
