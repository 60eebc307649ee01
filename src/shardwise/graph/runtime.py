"""How a compiled graph sends: the engine's own groups, one call for each message.

torch's collectives of traced graphs wait for one tensor at a time, and each costs tens of
microseconds of Python; a gather of a whole block would be ten of them. So before a graph is
compiled its collectives of parameters and gradients become these operators: many tensors in one
message, one wait for all. They go through `Group`, as the engine's do: what is recorded, emulated
or not grouped by a backend is so for both.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwise.engine.collectives import Group, Handle
from shardwise.engine.torch_private import chunk_cat, foreach_copy_
from shardwise.graph.nodes import (
    ALL_GATHERS,
    ALL_REDUCES,
    KINDS,
    REDUCE_SCATTERS,
    group_of,
    is_wait,
)
from shardwise.graph.passes.order import copy_graph

_library = torch.library.Library("shardwise_sends", "DEF")
# Parts are cast on their way into the memory that the gather fills.
_library.define("gather(Tensor[] parts, int ranks, str group, ScalarType dtype) -> Tensor[]")
# Gradients are cast, padded and laid rank after rank by one kernel; each rank gets `rows` elements.
_library.define(
    "scatter(Tensor[] gradients, int[] rows, int ranks, str group, ScalarType dtype) -> Tensor[]"
)
_library.define("add_up(Tensor[] sums, str group, ScalarType dtype) -> Tensor[]")
# Nothing is written; but whoever reads them afterwards must come afterwards.
_library.define("arrive(Tensor(a!)[] sent) -> ()")

GATHER = torch.ops.shardwise_sends.gather.default
SCATTER = torch.ops.shardwise_sends.scatter.default
ADD_UP = torch.ops.shardwise_sends.add_up.default
ARRIVE = torch.ops.shardwise_sends.arrive.default

groups: dict[str, Group] = {}  # by the names that torch.distributed gives them


@dataclass(eq=False)
class _Sent:
    """A message under way, and the memory that it reads."""

    handle: Handle
    reads: Tensor | None = None


_under_way: dict[int, _Sent] = {}  # by the memory that the first tensor fills


def _gather(parts: list[Tensor], ranks: int, name: str, dtype: torch.dtype) -> list[Tensor]:
    group = groups[name]
    flat = parts[0].new_empty(sum(p.numel() for p in parts) * ranks, dtype=dtype)
    outputs = list(flat.split([part.numel() * ranks for part in parts]))
    own = [output.view(ranks, -1)[group.rank] for output in outputs]
    foreach_copy_(own, parts)
    _under_way[flat.data_ptr()] = _Sent(group.all_gather_all(outputs, own))
    return outputs


def _scatter(
    gradients: list[Tensor], rows: list[int], ranks: int, name: str, dtype: torch.dtype
) -> list[Tensor]:
    slot = gradients[0].new_empty((ranks, sum(rows)), dtype=dtype)
    chunk_cat([g.expand(ranks) if g.dim() == 0 else g for g in gradients], ranks, slot)
    mine = slot.new_empty(sum(rows))
    handle = groups[name].reduce_scatter(mine, slot.view(-1))
    _under_way[mine.data_ptr()] = _Sent(handle, slot)
    return list(mine.split(rows))


def _add_up(sums: list[Tensor], name: str, dtype: torch.dtype) -> list[Tensor]:
    flat = sums[0].new_empty((1, sum(each.numel() for each in sums)), dtype=dtype)
    chunk_cat([each.view(1) if each.dim() == 0 else each for each in sums], 1, flat)
    flat = flat.view(-1)
    _under_way[flat.data_ptr()] = _Sent(groups[name].all_reduce(flat))
    pieces = flat.split([each.numel() for each in sums])
    return [piece.view(each.shape) for piece, each in zip(pieces, sums, strict=True)]


def _arrive(sent: list[Tensor]) -> None:
    found = _under_way.pop(sent[0].data_ptr(), None)
    if found is not None:
        found.handle.wait()


for _name, _kernel in (
    ("gather", _gather), ("scatter", _scatter), ("add_up", _add_up), ("arrive", _arrive)
):  # fmt: skip
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _device)


@torch.library.register_fake("shardwise_sends::gather", lib=_library)
def _(parts: list[Tensor], ranks: int, group: str, dtype: torch.dtype) -> list[Tensor]:
    return [part.new_empty(part.numel() * ranks, dtype=dtype) for part in parts]


@torch.library.register_fake("shardwise_sends::scatter", lib=_library)
def _(
    gradients: list[Tensor], rows: list[int], ranks: int, group: str, dtype: torch.dtype
) -> list[Tensor]:
    return [gradients[0].new_empty(each, dtype=dtype) for each in rows]


@torch.library.register_fake("shardwise_sends::add_up", lib=_library)
def _(sums: list[Tensor], group: str, dtype: torch.dtype) -> list[Tensor]:
    return [each.new_empty(each.shape, dtype=dtype) for each in sums]


@torch.library.register_fake("shardwise_sends::arrive", lib=_library)
def _(sent: list[Tensor]) -> None:
    return None


_SENDS = {"all_gather": GATHER, "reduce_scatter": SCATTER, "all_reduce": ADD_UP}


def send_by_groups(graph: Graph) -> Graph:
    """A copy in which collectives over known groups are one operator a message, and one wait."""
    graph, _ = copy_graph(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in KINDS and group_of(node) in groups:
            _replace(graph, node)
    graph.lint()
    return graph


def _replace(graph: Graph, node: Node) -> None:
    kind, name = KINDS[node.target], group_of(node)
    several = node.target in (ALL_GATHERS, REDUCE_SCATTERS, ALL_REDUCES)
    given: Any = node.args[0]
    inputs = list(given) if several else [given]
    values = node.meta["val"] if several else [node.meta["val"]]
    ranks, dtype = groups[name].size, values[0].dtype
    args: tuple[Any, ...] = (inputs, name, dtype)
    if kind == "all_gather":
        args = (inputs, ranks, name, dtype)
    elif kind == "reduce_scatter":
        args = (inputs, [value.numel() for value in values], ranks, name, dtype)
    with graph.inserting_before(node):
        sent = graph.call_function(_SENDS[kind], args)
        sent.meta["val"] = list(values)
        tensors = []
        for i, value in enumerate(values):
            tensor = graph.call_function(operator.getitem, (sent, i))
            tensor.meta["val"] = value
            tensors.append(tensor)
    waits: list[tuple[Node, int]] = []
    each: dict[Node, Any] = {u: u.args[1] for u in node.users} if several else {node: 0}
    for source, i in each.items():
        waits += [(user, i) for user in source.users if is_wait(user)]
    places = {n: at for at, n in enumerate(graph.nodes)}
    first = min((wait for wait, _ in waits), key=places.__getitem__)
    with graph.inserting_before(first):
        graph.call_function(ARRIVE, (tensors,)).meta["val"] = None
    for wait, i in waits:
        wait.replace_all_uses_with(tensors[i])
        graph.erase_node(wait)
    for source in list(each) if several else ():
        graph.erase_node(source)
    graph.erase_node(node)
