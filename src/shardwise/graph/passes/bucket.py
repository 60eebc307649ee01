"""Several gathers as one message, several reduce-scatters as one."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch.fx import Graph, Node

from shardwise.graph.nodes import (
    ALL_GATHER,
    ALL_GATHERS,
    REDUCE_SCATTER,
    REDUCE_SCATTERS,
    WAIT,
    group_of,
    is_wait,
    kind_of,
    message_bytes,
)
from shardwise.graph.passes.identify import sharding_gathers, sharding_scatters
from shardwise.graph.passes.order import (
    Part,
    compute_before,
    copy_graph,
    dependencies,
    parts_of,
    put_in_order,
    stable_order,
)

aten = torch.ops.aten


def bucket(
    graph: Graph,
    *,
    group: str,
    bucket_bytes: int,
    adjacent_only: bool = False,
    coalesced: bool = True,
    max_span: int | None = None,
) -> Graph:
    """Join the group's gathers of parameters, and its reduce-scatters of gradients, of one dtype
    up to `bucket_bytes` and over at most `max_span` compute nodes.

    A bucket of gathers stands where its first one stood, its waits where theirs did; a bucket of
    reduce-scatters where the last one's gradient is ready. With `adjacent_only`, a collective of
    another group or dtype ends a bucket, as in torch's greedy choice. `coalesced` buckets are one
    call with a list of tensors; others are packed into one tensor and copied out of it.
    """
    made, _ = copy_graph(graph)
    for everyone in (sharding_gathers(made), sharding_scatters(made)):
        ours = [node for node in everyone if group_of(node) == group and _can_be_joined(node)]
        for members in choose(
            made,
            ours,
            among=everyone if adjacent_only else ours,
            bucket_bytes=bucket_bytes,
            max_span=max_span,
        ):
            if len(members) > 1:
                join(made, [_part_of(node) for node in members], members[0], coalesced=coalesced)
    tidy(made)
    return made


def tidy(graph: Graph) -> None:
    """An order in which new buckets are valid: a gather's inputs before it, all else behind."""
    put_in_order(graph, stable_order(graph.nodes, up=lambda n: kind_of(n) == "all_gather"))


def choose(
    graph: Graph,
    collectives: Sequence[Node],
    *,
    among: Sequence[Node],
    bucket_bytes: int,
    max_span: int | None = None,
) -> list[list[Node]]:
    """Which collectives go together: in their order, never two of which one needs the other, not
    even through buckets made before.
    """
    before, apart = compute_before(graph), _Needs(graph, collectives)
    buckets: list[list[Node]] = []
    last: dict[object, list[Node]] = {}  # the bucket of each key that may grow
    ours, previous = set(collectives), None
    for node in among:
        key = _key(node)
        if among is not collectives and key != previous:
            last.pop(key, None)
        previous = key
        if node not in ours:
            continue
        grown = last.get(key)
        if (
            grown
            and sum(map(message_bytes, grown)) + message_bytes(node) <= bucket_bytes
            and (max_span is None or before[node] - before[grown[0]] <= max_span)
            and apart.allows(grown, node)
        ):
            grown.append(node)
            apart.join(grown)
        else:
            last[key] = [node]
            buckets.append(last[key])
    return buckets


def _key(node: Node) -> object:
    """What collectives have in common that can be joined: all arguments but the tensor, a dtype."""
    return kind_of(node), *node.args[1:], node.meta["val"].dtype


def _can_be_joined(node: Node) -> bool:
    single = node.target in (ALL_GATHER, REDUCE_SCATTER)
    return single and len(node.users) == 1 and is_wait(next(iter(node.users)))


def _part_of(node: Node) -> Part:
    given: Any = node.args[0]
    return Part(node.name, given, next(iter(node.users)))


class _Needs:
    """Which of some collectives depend on which, as buckets are made of them."""

    def __init__(self, graph: Graph, collectives: Iterable[Node]) -> None:
        self.bit = {node: 1 << i for i, node in enumerate(collectives)}
        needs: dict[Node, int] = {}
        for node in graph.nodes:
            needs[node] = 0
            for n in dependencies(node):
                needs[node] |= needs.get(n, 0) | self.bit.get(n, 0)
        self.needs = {node: needs[node] for node in self.bit}

    def allows(self, members: Sequence[Node], node: Node) -> bool:
        together = sum(self.bit[n] for n in members)
        needed = any(self.needs[n] & self.bit[node] for n in members)
        return not needed and not self.needs[node] & together

    def join(self, members: Sequence[Node]) -> None:
        """Who needs one of them needs all, and what they need."""
        together = sum(self.bit[n] for n in members)
        needed = 0
        for node in members:
            needed |= self.needs[node]
        for node in self.bit:
            if node in members:
                self.needs[node] = needed
            elif self.needs[node] & together:
                self.needs[node] |= together | needed


# -- one collective instead of several ----------------------------------------------------------


def join(graph: Graph, parts: Sequence[Part], like: Node, *, coalesced: bool) -> Node:
    """One collective for the parts, with the arguments of `like`, in the place of the first; what
    used their results uses its. Its place may be in front of what it needs.
    """
    gathers = kind_of(like) == "all_gather"
    rest: tuple[Any, ...] = like.args[1:]
    size = rest[0] if gathers else rest[1]
    first = parts[0].result.args[0] if coalesced or is_wait(parts[0].result) else like
    with graph.inserting_before(first if isinstance(first, Node) else like):
        if coalesced:
            node, results = _coalesce(graph, parts, rest, gathers)
        elif gathers:
            node, results = _pack_gathers(graph, parts, rest, size)
        else:
            node, results = _pack_scatters(graph, parts, rest, size)
    node.meta["parts"] = tuple(
        Part(part.name, part.given, result) for part, result in zip(parts, results, strict=True)
    )
    for part, result in zip(parts, results, strict=True):
        if part.result is not result:
            part.result.replace_all_uses_with(result)
            _erase(graph, part.result)
    return node


def _erase(graph: Graph, node: Node) -> None:
    """The node, and what only it has used, up to collectives and what they are given."""
    inputs = node.all_input_nodes
    was_collective = bool(kind_of(node))
    graph.erase_node(node)
    if not was_collective:
        for n in inputs:
            if not n.users:
                _erase(graph, n)


def _coalesce(
    graph: Graph, parts: Sequence[Part], rest: tuple[Any, ...], gathers: bool
) -> tuple[Node, list[Node]]:
    target = ALL_GATHERS if gathers else REDUCE_SCATTERS
    examples = [part.result.meta["val"] for part in parts]
    node = _call(graph, target, ([part.given for part in parts], *rest), lambda: examples)
    results = []
    for i, part in enumerate(parts):
        one = _call(graph, operator.getitem, (node, i), partial(examples.__getitem__, i))
        with graph.inserting_before(part.result):
            results.append(_call(graph, WAIT, (one,), partial(examples.__getitem__, i)))
    return node, results


def _pack_gathers(
    graph: Graph, parts: Sequence[Part], rest: tuple[Any, ...], size: int
) -> tuple[Node, list[Node]]:
    """Flat shards one after the other; each rank's part then holds a piece of every parameter."""
    flat = [_reshaped(graph, part.given, [-1]) for part in parts]
    packed = _call(graph, aten.cat.default, (flat,))
    lengths = [part.given.meta["val"].numel() for part in parts]
    full = packed.meta["val"].new_empty(sum(lengths) * size)
    node = _call(graph, ALL_GATHER, (packed, *rest), lambda: full)
    with graph.inserting_before(parts[0].result):
        waited = _call(graph, WAIT, (node,), lambda: full)
        rows = _call(graph, aten.view.default, (waited, [size, sum(lengths)]))
        pieces = _call(graph, aten.split_with_sizes.default, (rows, lengths, 1))
    results = []
    for i, part in enumerate(parts):
        with graph.inserting_before(part.result):
            piece = _call(graph, operator.getitem, (pieces, i))
            results.append(_reshaped(graph, piece, list(part.result.meta["val"].shape)))
    return node, results


def _pack_scatters(
    graph: Graph, parts: Sequence[Part], rest: tuple[Any, ...], size: int
) -> tuple[Node, list[Node]]:
    """Rank after rank, each with its piece of every gradient."""
    rows = [_reshaped(graph, part.given, [size, -1]) for part in parts]
    lengths = [math.prod(part.result.meta["val"].shape) for part in parts]
    packed = _call(graph, aten.cat.default, (rows, 1))
    own = packed.meta["val"].new_empty(1, sum(lengths))
    node = _call(graph, REDUCE_SCATTER, (packed, *rest), lambda: own)
    waited = _call(graph, WAIT, (node,), lambda: own)
    flat = _call(graph, aten.view.default, (waited, [sum(lengths)]))
    pieces = _call(graph, aten.split_with_sizes.default, (flat, lengths))
    results = []
    for i, part in enumerate(parts):
        piece = _call(graph, operator.getitem, (pieces, i))
        results.append(_reshaped(graph, piece, list(part.result.meta["val"].shape)))
    return node, results


def _reshaped(graph: Graph, node: Node, shape: list[int]) -> Node:
    if not node.meta["val"].is_contiguous():
        contiguous = {"memory_format": torch.contiguous_format}
        node = _call(graph, aten.clone.default, (node,), kwargs=contiguous)
    return _call(graph, aten.view.default, (node, shape))


def _call(
    graph: Graph,
    target: Callable[..., Any],
    args: tuple[Any, ...],
    example: Callable[[], Any] | None = None,
    kwargs: dict[str, Any] | None = None,
) -> Node:
    """A node with its example value: the given one, or what the target makes of its inputs'."""
    node = graph.call_function(target, args, kwargs or {})
    if example is None:
        given = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*given, **(kwargs or {}))
    else:
        node.meta["val"] = example()
    return node


# -- and back --------------------------------------------------------------------------------


def split(graph: Graph, node: Node, groups: Sequence[Sequence[str]]) -> list[Node]:
    """A bucket as several, one for each group of its parts' names; changes the graph."""
    parts = {part.name: part for part in parts_of(node)}
    coalesced = node.target in (ALL_GATHERS, REDUCE_SCATTERS)
    made = []
    for names in groups:
        made.append(join(graph, [parts[n] for n in names], node, coalesced=coalesced))
    return made
