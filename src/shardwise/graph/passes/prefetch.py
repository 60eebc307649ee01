"""Gathers issued before they are needed."""

from __future__ import annotations

from torch.fx import Graph, Node

from shardwise.graph.nodes import is_compute, message_bytes
from shardwise.graph.passes.identify import sharding_gathers
from shardwise.graph.passes.order import compute_before, copy_graph, dependencies, undone


def prefetch(graph: Graph, *, window: int, in_flight_bytes: int) -> Graph:
    """Each gather of parameters up to `window` compute nodes in front of the first one that needs
    it, as long as no more than `in_flight_bytes` are on their way; none is issued later than it
    was, and all in the order in which they are needed. Of all groups: a norm's small gather on
    another group, left where it is used, would hold back the layer that it belongs to.
    """
    gathers = tuple(sharding_gathers(graph))
    places = _places(graph, gathers, window, in_flight_bytes)
    order: list[Node] = []
    done: set[Node] = set()
    rank = {node: i for i, node in enumerate(graph.nodes)}

    def put(node: Node) -> None:
        for n in [*sorted(undone(node, done), key=rank.__getitem__), node]:
            if n not in done:
                order.append(n)
                done.add(n)

    counted, ahead = 0, sorted(gathers, key=lambda n: (places[n], rank[n]))
    for node in graph.nodes:
        while ahead and places[ahead[0]] <= counted and node.op != "placeholder":
            put(ahead.pop(0))
        put(node)
        counted += is_compute(node)
    return copy_graph(graph, order)[0]


def _places(
    graph: Graph, gathers: tuple[Node, ...], window: int, in_flight_bytes: int
) -> dict[Node, int]:
    """Behind how many compute nodes each gather is to stand."""
    before, needed = compute_before(graph), first_needed(graph, gathers)
    places: dict[Node, int] = {}
    flying: list[tuple[int, int]] = []  # needed when, and bytes
    earliest = 0
    for node in sorted(gathers, key=lambda n: (needed[n], before[n])):
        size, place = message_bytes(node), max(earliest, needed[node] - window)
        while place < before[node]:
            if size + sum(s for when, s in flying if when >= place) <= in_flight_bytes:
                break
            place = min([when + 1 for when, _ in flying if when >= place], default=before[node])
        place = max(0, min(place, before[node]))
        places[node] = earliest = place
        flying.append((needed[node], size))
    return places


def first_needed(graph: Graph, gathers: tuple[Node, ...]) -> dict[Node, int]:
    """How many compute nodes stand in front of the first one that depends on a gather."""
    bit = {node: 1 << i for i, node in enumerate(gathers)}
    needs: dict[Node, int] = {}
    found: dict[Node, int] = {}
    seen = 0
    for node in graph.nodes:
        own = 0
        for n in dependencies(node):
            own |= needs[n] | bit.get(n, 0)
        if is_compute(node):
            for gather, its in bit.items():
                if own & its and gather not in found:
                    found[gather] = seen
            seen, own = seen + 1, 0  # what follows it follows those gathers anyway
        needs[node] = own
    return {node: found.get(node, seen) for node in gathers}
