"""Which collectives of a graph shard parameters: gathers of one parameter, scatters of a gradient."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, Node


@dataclass(frozen=True)
class Sharding:
    """The gathers and reduce-scatters of the primary group, in the graph's order."""

    group: str
    gathers: tuple[Node, ...]
    scatters: tuple[Node, ...]


def identify(graph: Graph, *, group: str | None = None) -> Sharding:
    """The group with most gathers of single parameters, or the one that is given."""
    raise NotImplementedError
