"""Reduce-scatters waited for in time.

Nothing in a graph reads a scattered gradient, so an order by need has all waits for them at its
end. But a collective holds its input until it is waited for: all gradients, whole, would be there
at once.
"""

from __future__ import annotations

from collections import deque

from torch.fx import Graph, Node

from shardwise.graph.nodes import collective_of, is_wait, message_bytes
from shardwise.graph.passes.identify import sharding_scatters
from shardwise.graph.passes.order import put_in_order


def settle(graph: Graph, *, under_way_bytes: int) -> None:
    """Each reduce-scatter of gradients is waited for, at the latest, when with a new one more than
    `under_way_bytes` are not. None is waited for before the next is issued. Moves the nodes: it is
    the end of `sort` and of `cap`, which have made the graph.
    """
    scatters = set(sharding_scatters(graph))
    waits: dict[Node, list[Node]] = {node: [] for node in scatters}
    for node in graph.nodes:
        scatter = collective_of(node) if is_wait(node) else None
        if scatter is not None and scatter in waits:
            waits[scatter].append(node)
    order: list[Node] = []
    done: set[Node] = set()
    flying: deque[Node] = deque()

    def put(node: Node) -> None:
        if node not in done:
            for source in node.all_input_nodes:  # what takes a bucket's results apart
                put(source)
            order.append(node)
            done.add(node)

    for node in graph.nodes:
        put(node)
        if node in scatters:
            flying.append(node)
            while len(flying) > 1 and sum(map(message_bytes, flying)) > under_way_bytes:
                for wait in waits[flying.popleft()]:
                    put(wait)
    put_in_order(graph, order)
