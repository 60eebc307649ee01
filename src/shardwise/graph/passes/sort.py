"""A topological order over data and order-only dependencies."""

from __future__ import annotations

from torch.fx import Graph


def sort(graph: Graph) -> Graph:
    """Dependencies are a node's inputs and `meta["after"]`, a tuple of nodes."""
    raise NotImplementedError
