"""A topological order over data and order-only dependencies."""

from __future__ import annotations

from torch.fx import Graph, Node

from shardwise.graph.passes.order import Issue, copy_graph, stable_order


def sort(graph: Graph, *, ready_first: bool = True) -> Graph:
    """The graph in an order in which everything stands behind its inputs and its `meta["after"]`.

    With `ready_first`, the next compute node is the first that needs not wait for a collective;
    if all of them have to, the one whose collective was issued first. Gathers of parameters stay
    behind as many compute nodes as they are given behind; other collectives are issued as soon as
    they can be. Without it, nodes stay where they are unless something that they need stands
    behind them: torch's `stable_topological_sort`.
    """
    order = stable_order(graph.nodes)
    return copy_graph(graph, _ready_first(order) if ready_first else order)[0]


def _ready_first(nodes: list[Node]) -> list[Node]:
    issue = Issue(nodes)
    left = list(issue.compute)
    while left:
        issue.gather()
        node = issue.soonest(left)
        left.remove(node)
        issue.compute_node(node)
    return issue.finish()
