"""No long run of compute between reduce-scatters.

`snapshot` remembers where compute nodes and reduce-scatters stood before anything was scheduled.
`cap` goes through the scheduled order and follows it as long as the next reduce-scatter can still
come in time and as long as nothing is far ahead of its turn; else it follows the remembered one.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch.fx import Graph, Node

from shardwise.graph.nodes import is_compute
from shardwise.graph.passes.bucket import split, tidy
from shardwise.graph.passes.identify import identify
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


def snapshot(graph: Graph, *, group: str) -> Interleaving:
    """Where the group's reduce-scatters stand, and from where on they could."""
    scatters = set(identify(graph, group=group).scatters)
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
    points = _plan(before, max_consecutive)
    made, _ = copy_graph(graph)
    _cut(made, group, points)
    tidy(made)
    scatters = {name: node for node in _scatters(made, group) for name in _names(node)}
    _follow(made, before, points, scatters, max_consecutive)
    return made


@dataclass
class _Point:
    """Where reduce-scatters are issued: behind so many of the remembered compute nodes."""

    place: int
    names: list[str]


def _plan(before: Interleaving, most: int) -> list[_Point]:
    """Reduce-scatters together as long as their run does not get longer than `most`; where a run
    is longer, the next one is pulled forward as far as its gradient allows.
    """
    points: list[_Point] = []
    held: list[str] = []
    since = last = 0  # where the last ones were issued, and where the last held one is due
    for name, place, ready in before.scatters:
        if held and place - since > most:
            # Later than due, if that lets the next one come in time.
            last = max(last, min(since + most, ready - most))
            points.append(_Point(last, held))
            since, held = last, []
        if place - since > most:
            place = max(ready, min(place, since + most))
        last = max(place, last)
        held.append(name)
    if held:
        points.append(_Point(last, held))
    return points


def _names(scatter: Node) -> list[str]:
    return [part.name for part in parts_of(scatter)] or [scatter.name]


def _scatters(graph: Graph, group: str) -> tuple[Node, ...]:
    return identify(graph, group=group).scatters


def _cut(graph: Graph, group: str, points: list[_Point]) -> None:
    """Buckets so that every one is issued as a whole."""
    point = {name: i for i, one in enumerate(points) for name in one.names}
    for node in _scatters(graph, group):
        groups: dict[int, list[str]] = {}
        for name in _names(node):
            groups.setdefault(point[name], []).append(name)
        if len(groups) > 1:
            split(graph, node, list(groups.values()))


def _follow(
    graph: Graph,
    before: Interleaving,
    points: list[_Point],
    scatters: dict[str, Node],
    most: int,
) -> None:
    """The scheduled order where it may be followed, else the remembered; moves the nodes."""
    issue = Issue(graph.nodes, pinned=set(scatters.values()))
    named = {node.name: node for node in issue.compute}
    turn = {named[name]: i for i, name in enumerate(before.compute)}
    remembered, scheduled = list(turn), list(issue.compute)
    first = wanted = since = 0  # the first that is not done: remembered, scheduled; the run so far
    while first < len(turn) or points:
        place = points[0].place if points else 0
        missing = sum(node not in issue.done for node in remembered[first:place])
        jumps = wanted < len(turn) and turn[scheduled[wanted]] != first
        may_jump = jumps and (not points or (since + missing < most and issue.count - first < most))
        if points and not missing and not may_jump:
            for name in points.pop(0).names:
                issue.put(scatters[name])
            since = 0
            continue
        issue.compute_node(scheduled[wanted] if may_jump else remembered[first])
        since += 1
        while first < len(turn) and remembered[first] in issue.done:
            first += 1
        while wanted < len(turn) and scheduled[wanted] in issue.done:
            wanted += 1
    put_in_order(graph, issue.finish())


def restore_order(graph: Graph, *, before: Interleaving) -> Graph:
    """All compute nodes in the order that they had in `before`; buckets stay as they are."""
    issue = Issue(graph.nodes)
    named = {node.name: node for node in issue.compute}
    for name in before.compute:
        issue.compute_node(named[name])
    return copy_graph(graph, issue.finish())[0]
