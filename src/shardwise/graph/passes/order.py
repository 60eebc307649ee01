"""What every pass needs: copies of graphs in another order, and an order built node by node."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from torch.fx import Graph, Node

from shardwise.graph.nodes import collective_of, group_of, is_compute, is_wait, kind_of


@dataclass(frozen=True)
class Part:
    """One of the collectives that a bucket joins."""

    name: str  # of its node before it was joined
    given: Node  # its input
    result: Node  # what stands for its waited output


def copy_graph(graph: Graph, order: Iterable[Node] | None = None) -> tuple[Graph, dict[Node, Node]]:
    """A copy with all that nodes know, in their order or another, and which node became which."""
    copy = Graph()
    new: dict[Node, Node] = {}
    # Inputs are given by their places: those stay.
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    others = [n for n in (graph.nodes if order is None else order) if n.op != "placeholder"]
    for node in (*inputs, *others):
        new[node] = copy.node_copy(node, new.__getitem__)
    for node in new.values():
        if "after" in node.meta:
            node.meta["after"] = tuple(new[n] for n in node.meta["after"] if n in new)
        if "parts" in node.meta:
            node.meta["parts"] = tuple(
                replace(part, given=new[part.given], result=new[part.result])
                for part in node.meta["parts"]
            )
    copy.lint()
    return copy, new


def dependencies(node: Node) -> list[Node]:
    """What has to stand in front of a node: its inputs, and what is only ordered before it."""
    return [*node.all_input_nodes, *node.meta.get("after", ())]


def stable_order(nodes: Iterable[Node], up: Callable[[Node], bool] = lambda _: False) -> list[Node]:
    """The given order, except that a node whose dependencies stand behind it comes directly after
    the last of them, as in torch's stable sort; or, where `up` says so, they come before it.
    """
    nodes = list(nodes)
    place = {node: i for i, node in enumerate(nodes)}
    order: list[Node] = []
    done: set[Node] = set()
    parked: dict[Node, list[Node]] = {}
    pending = nodes[::-1]
    while pending:
        node = pending.pop()
        if node in done:
            continue
        missing = [n for n in dependencies(node) if n not in done]
        if missing and up(node):
            pending += [node, *sorted(undone(node, done), key=place.__getitem__, reverse=True)]
        elif missing:
            parked.setdefault(missing[-1], []).append(node)
        else:
            order.append(node)
            done.add(node)
            pending += reversed(parked.pop(node, ()))
    if parked:
        raise ValueError(f"nodes of the graph depend on each other: {', '.join(map(str, parked))}")
    return order


def put_in_order(graph: Graph, order: Sequence[Node]) -> None:
    """Moves the nodes of a graph; for graphs that a pass has made itself."""
    for before, node in pairwise(order):
        before.append(node)
    graph.lint()


def undone(node: Node, done: set[Node]) -> set[Node]:
    """All that a node depends on and that is not done."""
    found: set[Node] = set()
    stack = [node]
    while stack:
        for n in dependencies(stack.pop()):
            if n not in done and n not in found:
                found.add(n)
                stack.append(n)
    return found


class Issue:
    """An order that is built compute node by compute node.

    With a compute node come the nodes that it needs and that have not come yet. A collective of
    activations or gradients comes as soon as its input is computed; a gather of parameters when as
    many compute nodes have been issued as stand in front of it in the given order; a wait only
    where its value is used.
    """

    def __init__(self, nodes: Iterable[Node], pinned: Iterable[Node] = ()) -> None:
        self.nodes = list(nodes)
        self.place = {node: i for i, node in enumerate(self.nodes)}
        self.order: list[Node] = []
        self.done: set[Node] = set()
        self.compute = [node for node in self.nodes if is_compute(node)]
        self.needs: dict[Node, int] = {}  # the compute nodes it depends on, as bits
        self.waits: dict[Node, set[Node]] = {}  # behind its compute nodes, in front of it
        self.gathers: dict[Node, set[Node]] = {}  # of parameters, likewise
        self.sources: dict[Node, int] = {}  # a gather of parameters, after how much compute
        self.driven: list[Node] = []  # other collectives that are to be issued when they can be
        self.issued: dict[Node, int] = {}  # collectives, in the order of issue
        self.arrived: dict[str, int] = {}  # the last collective of a group that was waited for
        self.computed = 0  # bits of the compute nodes in the order
        self.count = 0
        self._read(set(pinned))
        for node in self.nodes:
            if node.op == "placeholder":  # their order is the graph's signature
                self.put(node)

    def _read(self, pinned: set[Node]) -> None:
        bit = {node: 1 << i for i, node in enumerate(self.compute)}
        seen = 0
        for node in self.nodes:
            needs, waits, gathers = 0, set(), set()
            for n in dependencies(node):
                needs |= self.needs[n] | bit.get(n, 0)
                if n not in bit:
                    waits |= self.waits[n] | ({n} if is_wait(n) else set())
                    gathers |= self.gathers[n] | ({n} if n in self.sources else set())
            self.needs[node], self.waits[node], self.gathers[node] = needs, waits, gathers
            seen += node in bit
            if kind_of(node) and node not in pinned:
                if needs or waits:
                    self.driven.append(node)
                else:
                    self.sources[node] = seen
        self.bit = bit

    def put(self, node: Node) -> None:
        """The node, behind all that it depends on."""
        for n in [*sorted(undone(node, self.done), key=self.place.__getitem__), node]:
            if n not in self.done:
                self.order.append(n)
                self.done.add(n)
                self._note(n)

    def _note(self, node: Node) -> None:
        if kind_of(node):
            self.issued[node] = len(self.issued)
        elif is_wait(node) and (awaited := collective_of(node)) is not None:
            group = group_of(awaited)
            self.arrived[group] = max(self.arrived.get(group, -1), self.issued.get(awaited, -1))
        elif node in self.bit:
            self.computed |= self.bit[node]
            self.count += 1

    def compute_node(self, node: Node) -> None:
        """A compute node, and the collectives that can be issued before and after it."""
        self.gather()
        self.put(node)
        self.drive()

    def gather(self) -> None:
        for node, count in list(self.sources.items()):
            if count > self.count:
                return
            del self.sources[node]
            self.put(node)

    def drive(self) -> None:
        """Issue the collectives whose inputs are computed; those behind a wait when another one
        has been issued since the awaited.
        """
        for node in [n for n in self.driven if not self.needs[n] & ~self.computed]:
            open_waits = [collective_of(n) for n in self.waits[node] - self.done]
            latest = len(self.issued) - 1
            if node in self.done or all(
                n is None or self.has_arrived(n) or self.issued.get(n, latest) < latest
                for n in open_waits
            ):
                self.driven.remove(node)
                self.put(node)

    def has_arrived(self, collective: Node) -> bool:
        turn = self.issued.get(collective)
        return turn is not None and turn <= self.arrived.get(group_of(collective), -1)

    def stalls(self, node: Node) -> int:
        """The turn of the latest collective for which a node would have to wait; -1 if for none."""
        open_waits = (collective_of(n) for n in self.waits[node] - self.done)
        return max(
            (
                self.issued.get(n, len(self.nodes))
                for n in open_waits
                if n and not self.has_arrived(n)
            ),
            default=-1,
        )

    def is_open(self, node: Node) -> bool:
        """All compute that a node depends on has been issued."""
        return not self.needs[node] & ~self.computed

    def soonest(self, left: list[Node]) -> Node:
        """The first that needs not wait; if all have to, the one whose collective was issued
        first.
        """
        best, least = None, -1
        for node in left:
            if not self.is_open(node) or any(n in self.sources for n in self.gathers[node]):
                continue
            turn = self.stalls(node)
            if turn < 0:
                return node
            if best is None or turn < least:
                best, least = node, turn
        return best or next(node for node in left if self.is_open(node))

    def finish(self) -> list[Node]:
        """The order, with all that has not come yet at its end."""
        for node in self.nodes:
            if node.op != "output":
                self.put(node)
        self.put(self.nodes[-1])
        return self.order


def compute_before(graph: Graph) -> dict[Node, int]:
    """For every node, how many compute nodes stand in front of it."""
    seen, found = 0, {}
    for node in graph.nodes:
        found[node] = seen
        seen += is_compute(node)
    return found


def parts_of(node: Node) -> tuple[Part, ...]:
    parts: Any = node.meta.get("parts", ())
    return parts
