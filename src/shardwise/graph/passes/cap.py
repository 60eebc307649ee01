"""No long run of compute between reduce-scatters.

`snapshot` remembers where compute nodes and reduce-scatters stood before anything was scheduled.
`cap` goes through the scheduled order and follows it as long as the next reduce-scatter can still
come in time and as long as nothing is far ahead of its turn; else it follows the remembered one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from itertools import pairwise, takewhile

from torch.fx import Graph, Node

from shardwise.graph.nodes import is_compute
from shardwise.graph.passes.bucket import split, tidy
from shardwise.graph.passes.identify import Sharding, identify
from shardwise.graph.passes.order import Issue, copy_graph, dependencies, parts_of, put_in_order


@dataclass(frozen=True)
class Interleaving:
    """The order before scheduling, by names."""

    compute: tuple[str, ...]
    scatters: tuple[tuple[str, int, int], ...]  # its name; compute before it; compute it needs

    def runs(self) -> list[int]:
        """Compute nodes in front of each reduce-scatter, and behind the last."""
        places = [0, *(place for _, place, _ in self.scatters), len(self.compute)]
        return [b - a for a, b in pairwise(places)]


def snapshot(graph: Graph, *, group: str, known: Sharding | None = None) -> Interleaving:
    """Where the group's reduce-scatters stand, and from where on they could."""
    scatters = set((known or identify(graph, group=group)).scatters)
    ready: dict[Node, int] = {}  # behind how many compute nodes all that it needs has come
    compute, found = [], []
    for node in graph.nodes:
        ready[node] = max((ready[n] for n in dependencies(node)), default=0)
        if is_compute(node):
            compute.append(node.name)
            ready[node] = len(compute)
        elif node in scatters:
            found.append((node.name, len(compute), ready[node]))
    return Interleaving(tuple(compute), tuple(found))


def longest_run(graph: Graph, *, group: str) -> int:
    """The most compute nodes between two reduce-scatters of the group, or before the first; what
    follows the last counts for nothing, as no gradient waits for it.
    """
    return max(snapshot(graph, group=group).runs()[:-1], default=0)


def cap(graph: Graph, *, group: str, before: Interleaving, max_consecutive: int = 8) -> Graph:
    """At most `max_consecutive` compute nodes between two reduce-scatters wherever `before` had no
    more, and at most as many ahead of their turn in it. A bucket of reduce-scatters that would
    hold one of them back for longer is cut.
    """
    if longest_run(graph, group=group) <= max_consecutive:
        return copy_graph(graph)[0]
    order = _choose(_cut(graph, group, lambda name: name), group, before, max_consecutive)
    turn = {name: i for i, one in enumerate(order) for name in one}
    made = _cut(graph, group, turn.__getitem__)
    named = {node.name: node for node in made.nodes if is_compute(node)}
    named |= {name: node for node in _scatters(made, group) for name in _names(node)}
    issue = Issue(made.nodes, pinned=_scatters(made, group))
    for names in order:
        for name in names:
            issue.compute_node(named[name]) if is_compute(named[name]) else issue.put(named[name])
    put_in_order(made, issue.finish())
    return made


def _names(scatter: Node) -> list[str]:
    return [part.name for part in parts_of(scatter)] or [scatter.name]


def _scatters(graph: Graph, group: str) -> tuple[Node, ...]:
    return identify(graph, group=group).scatters


def _cut(graph: Graph, group: str, part_of: Callable[[str], Hashable]) -> Graph:
    """A copy whose buckets of reduce-scatters are cut: those with one answer stay together."""
    made, _ = copy_graph(graph)
    for node in _scatters(made, group):
        groups: dict[Hashable, list[str]] = {}
        for name in _names(node):
            groups.setdefault(part_of(name), []).append(name)
        if len(groups) > 1:
            split(made, node, list(groups.values()))
    tidy(made)
    return made


def _choose(graph: Graph, group: str, before: Interleaving, most: int) -> list[tuple[str, ...]]:
    """Compute nodes one by one in the remembered order, with another one in the place of one that
    would have to wait; and reduce-scatters, all that are ready, before a run is too long.
    """
    issue = Issue(graph.nodes, pinned=_scatters(graph, group))
    scatters = {name: node for node in _scatters(graph, group) for name in _names(node)}
    named = {node.name: node for node in issue.compute}
    left = [named[name] for name in before.compute]
    place = {node: i for i, node in enumerate(left)}
    coming = sorted(before.scatters, key=lambda one: one[2])
    held: list[str] = []
    order: list[tuple[str, ...]] = []
    since = 0  # compute nodes since the last reduce-scatter
    while left or held or coming:
        first = place[left[0]] if left else len(place)
        while coming and coming[0][2] <= first:
            held.append(coming.pop(0)[0])
        if held and (since >= most or not left):
            # One is kept for the next run, if nothing else could come in time to end it.
            ends = held if len(held) == 1 or _until(coming, left, place) <= most else held[:-1]
            for name in ends:
                issue.put(scatters[name])
            order.append(tuple(ends))
            held, since = held[len(ends) :], 0
            continue
        issue.gather()
        node = left[0]
        until = 0 if held else _until(coming, left, place)
        if issue.count - first < most and since + until < most:
            node = issue.soonest(left)
        left.remove(node)
        issue.compute_node(node)
        order.append((node.name,))
        since += 1
    return order


def _until(coming: list[tuple[str, int, int]], left: list[Node], place: dict[Node, int]) -> int:
    """Compute nodes that have to come before the next reduce-scatter can."""
    if not coming:
        return 0
    return sum(1 for _ in takewhile(lambda node: place[node] < coming[0][2], left))


def restore_order(graph: Graph, *, before: Interleaving) -> Graph:
    """All compute nodes in the order that they had in `before`; buckets stay as they are."""
    issue = Issue(graph.nodes)
    named = {node.name: node for node in issue.compute}
    for name in before.compute:
        issue.compute_node(named[name])
    return copy_graph(graph, issue.finish())[0]
