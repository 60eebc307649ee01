"""Several gathers as one message, several reduce-scatters as one."""

from __future__ import annotations

from torch.fx import Graph

from shardwise.graph.passes.identify import Sharding  # noqa: F401


def bucket(
    graph: Graph,
    *,
    group: str,
    bucket_bytes: int,
    adjacent_only: bool = False,
    coalesced: bool = True,
    max_span: int | None = None,
) -> Graph:
    """Join the primary group's collectives up to `bucket_bytes`, and over at most `max_span`
    compute nodes.
    """
    raise NotImplementedError
