"""Small graphs as tracing leaves them, and a world of two ranks that runs them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.proxy_tensor import make_fx

from shardwise.graph import nodes
from shardwise.graph.torch_private import collectives as c10d

RANKS, GROUP, OTHER = 2, "dp", "tp"
WIDTH, ROWS = 8, 4


def gathered(shard: torch.Tensor, group: str = GROUP) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, RANKS, group))


def scattered(gradient: torch.Tensor, group: str = GROUP) -> torch.Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(gradient, "sum", RANKS, group))


def reduced(value: torch.Tensor, group: str = OTHER) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_reduce(value, "sum", group))


def trace(function: Callable[..., Any], *examples: torch.Tensor) -> Graph:
    graph = make_fx(function, tracing_mode="fake")(*examples).graph
    graph.eliminate_dead_code()
    return graph


@functools.cache
def backward_of(layers: int) -> tuple[Graph, list[torch.Tensor]]:
    """The backward graph of two-product layers that recompute: for each, its input is saved, its
    weights are gathered, products are recomputed with an all-reduce of activations between them,
    then come the gradients, weight by weight. A norm's weight travels on the other group.
    """

    def function(gradient: torch.Tensor, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for layer in range(layers):
            saved, first, second, third, norm = given[5 * layer : 5 * layer + 5]
            x = saved * gathered(norm, OTHER)
            full_1 = gathered(first.to(torch.float64))
            hidden = reduced(x @ full_1)
            full_2 = gathered(second.to(torch.float64))
            hidden_2 = hidden @ full_2
            full_3 = gathered(third.to(torch.float64))
            out = torch.relu(hidden_2) @ full_3
            back = gradient * out
            found.append(scattered(torch.relu(hidden_2).t() @ back).float())
            back = (back @ full_3.t()) * (hidden_2 > 0)
            found.append(scattered(hidden.t() @ back) / 2)
            back = reduced(back @ full_2.t())
            found.append(scattered(x.t() @ back).float())
            gradient = back @ full_1.t() + gradient
        return (gradient, *found)

    torch.manual_seed(0)
    given = [torch.randn(ROWS, WIDTH, dtype=torch.float64)]
    for _ in range(layers):
        given.append(torch.randn(ROWS, WIDTH, dtype=torch.float64))
        given += [torch.randn(WIDTH // RANKS, WIDTH) for _ in range(3)]
        given.append(torch.randn(WIDTH // RANKS, dtype=torch.float64))
    return trace(function, *given), given


class _Rank(Interpreter):
    """One of the ranks: collectives are done when all have come to them."""

    def run_node(self, n: Node) -> Any:
        if nodes.is_wait(n):
            return self.fetch_args_kwargs_from_env(n)[0][0]
        return super().run_node(n)


def run(graph: Graph, given: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """What each rank gets for what each is given, all groups being all ranks."""
    ranks = [_Rank(GraphModule({}, graph)) for _ in given]
    for rank, values in zip(ranks, given, strict=True):
        rank.args_iter = iter(values)
    outputs: list[Any] = [None] * len(given)
    for node in graph.nodes:
        if nodes.kind_of(node):
            sent = [rank.fetch_args_kwargs_from_env(node)[0] for rank in ranks]
            results = exchange(node, sent)
        else:
            results = [rank.run_node(node) for rank in ranks]
        for rank, result in zip(ranks, results, strict=True):
            rank.env[node] = result
        if node.op == "output":
            outputs = results
    return outputs


def exchange(node: Node, sent: list[tuple[Any, ...]]) -> list[Any]:
    several = isinstance(sent[0][0], list)
    lists = [args[0] if several else [args[0]] for args in sent]
    results: list[list[torch.Tensor]] = [[] for _ in sent]
    for tensors in zip(*lists, strict=True):
        total = sum(tensors[1:], tensors[0])
        for rank, result in enumerate(results):
            if nodes.kind_of(node) == "all_gather":
                result.append(torch.cat(tensors))
            elif nodes.kind_of(node) == "reduce_scatter":
                result.append(total.chunk(len(sent))[rank].clone())
            else:
                result.append(total.clone())
    return [result if several else result[0] for result in results]


def worlds(given: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Other values for every rank."""
    return [[value * (rank + 1) + rank for value in given] for rank in range(RANKS)]


def assert_equal(before: Graph, after: Graph, given: list[torch.Tensor]) -> None:
    """Every rank gets bit for bit the same."""
    for ours, theirs in zip(run(before, worlds(given)), run(after, worlds(given)), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def fingerprint(graph: Graph) -> list[tuple[str, str, tuple[str, ...]]]:
    return [(n.name, str(n.target), tuple(a.name for a in n.all_input_nodes)) for n in graph.nodes]


def names(graph: Graph, kind: str, group: str = GROUP) -> list[str]:
    found = (n for n in graph.nodes if nodes.kind_of(n) == kind)
    return [n.name for n in found if nodes.group_of(n) == group]
