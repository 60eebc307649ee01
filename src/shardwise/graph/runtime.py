"""How a compiled graph sends: the engine's own groups, one call for each message.

torch's collectives of traced graphs wait for one tensor at a time, and each costs tens of
microseconds of Python; a gather of a whole block would be ten of them. So before a graph is
compiled its collectives of parameters and gradients become these operators: many tensors in one
message, one wait for all. They go through `Group`, as the engine's do: what is recorded, emulated
or not grouped by a backend is so for both.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from shardwise.engine.collectives import Group, Handle
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
_library.define("gather(Tensor[] parts, int ranks, str group) -> Tensor[]")
_library.define("scatter(Tensor[] wholes, int ranks, str group) -> Tensor[]")
_library.define("add_up(Tensor[] rows, str group) -> Tensor[]")
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
    inputs: Sequence[Tensor]


_under_way: dict[int, _Sent] = {}  # by the memory that the first tensor fills


def _start(outputs: list[Tensor], inputs: Sequence[Tensor], handle: Handle) -> list[Tensor]:
    _under_way[outputs[0].data_ptr()] = _Sent(handle, inputs)
    return outputs


def _gather(parts: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    outputs = [part.new_empty(part.numel() * ranks) for part in parts]
    return _start(outputs, parts, groups[group].all_gather_all(outputs, parts))


def _scatter(wholes: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    outputs = [whole.new_empty(whole.numel() // ranks) for whole in wholes]
    return _start(outputs, wholes, groups[group].reduce_scatter_all(outputs, wholes))


def _add_up(rows: list[Tensor], group: str) -> list[Tensor]:
    outputs = [each.clone() for each in rows]
    return _start(outputs, (), groups[group].all_reduce_all(outputs))


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
def _(parts: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    return [part.new_empty(part.numel() * ranks) for part in parts]


@torch.library.register_fake("shardwise_sends::scatter", lib=_library)
def _(wholes: list[Tensor], ranks: int, group: str) -> list[Tensor]:
    return [whole.new_empty(whole.numel() // ranks) for whole in wholes]


@torch.library.register_fake("shardwise_sends::add_up", lib=_library)
def _(rows: list[Tensor], group: str) -> list[Tensor]:
    return [torch.empty_like(each) for each in rows]


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
    kind = KINDS[node.target]
    several = node.target in (ALL_GATHERS, REDUCE_SCATTERS, ALL_REDUCES)
    inputs: Any = node.args[0] if several else [node.args[0]]
    ranks = () if kind == "all_reduce" else (groups[group_of(node)].size,)
    values = node.meta["val"] if several else [node.meta["val"]]
    with graph.inserting_before(node):
        sent = graph.call_function(_SENDS[kind], (list(inputs), *ranks, group_of(node)))
        sent.meta["val"] = list(values)
        tensors = []
        for i, value in enumerate(values):
            tensor = graph.call_function(operator.getitem, (sent, i))
            tensor.meta["val"] = value
            tensors.append(tensor)
    waits: list[tuple[Node, int]] = []
    given: dict[Node, Any] = {u: u.args[1] for u in node.users} if several else {node: 0}
    for source, i in given.items():
        waits += [(user, i) for user in source.users if is_wait(user)]
    places = {each: at for at, each in enumerate(graph.nodes)}
    first = min((wait for wait, _ in waits), key=places.__getitem__)
    with graph.inserting_before(first):
        graph.call_function(ARRIVE, (tensors,)).meta["val"] = None
    for wait, i in waits:
        wait.replace_all_uses_with(tensors[i])
        graph.erase_node(wait)
    for source in list(given) if several else ():
        graph.erase_node(source)
    graph.erase_node(node)
