"""No long run of compute between reduce-scatters."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph


@dataclass(frozen=True)
class Interleaving:
    """The names of compute nodes and reduce-scatters in the order before scheduling."""

    order: tuple[str, ...]


def snapshot(graph: Graph) -> Interleaving:
    raise NotImplementedError


def cap(graph: Graph, *, before: Interleaving, max_consecutive: int = 8) -> Graph:
    """At most `max_consecutive` compute nodes between two reduce-scatters where `before` had so."""
    raise NotImplementedError


def restore_order(graph: Graph, *, before: Interleaving) -> Graph:
    """All compute nodes in the order that they had in `before`."""
    raise NotImplementedError
