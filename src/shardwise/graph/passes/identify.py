"""Which collectives shard parameters: gathers of one parameter, scatters of a gradient."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from shardwise.graph.nodes import group_of, is_view, is_wait, kind_of, operator_name

# What stands between a parameter's shard and its gather, besides views.
_PREPARES = {
    "_to_copy",
    "convert_element_type",
    "clone",
    "constant_pad_nd",
    "pad",
    "cat",
    "full",
    "zeros",
    "new_zeros",
    "zeros_like",
    "slice",
}
# What stands between a scattered gradient and the graph's output, besides views and all-reduces.
_FINISHES = {"_to_copy", "convert_element_type", "clone", "mul", "div", "add", "slice", "deliver"}


@dataclass(frozen=True)
class Sharding:
    """The gathers and reduce-scatters of the primary group, in the graph's order."""

    group: str
    gathers: tuple[Node, ...]
    scatters: tuple[Node, ...]


def identify(graph: Graph, *, group: str | None = None) -> Sharding:
    """The group with most gathers of single parameters, or the one that is given. Without either
    it is the group with most scatters of gradients; without those there is none.
    """
    gathers, scatters = sharding_gathers(graph), sharding_scatters(graph)
    if group is None:
        counts = Counter(group_of(node) for node in gathers or scatters)
        group = counts.most_common(1)[0][0] if counts else ""
    return Sharding(
        group,
        tuple(node for node in gathers if group_of(node) == group),
        tuple(node for node in scatters if group_of(node) == group),
    )


def sharding_gathers(graph: Graph) -> list[Node]:
    """Gathers on any group of what derives from one placeholder, and buckets of them."""
    return [n for n in graph.nodes if kind_of(n) == "all_gather" and _is_of_one_parameter(n)]


def sharding_scatters(graph: Graph) -> list[Node]:
    """Reduce-scatters on any group that end in an output, and buckets of them."""
    return [n for n in graph.nodes if kind_of(n) == "reduce_scatter" and _ends_in_output(n)]


def _is_of_one_parameter(gather: Node) -> bool:
    def passes(node: Node) -> bool:
        return is_view(node) or operator_name(node) in _PREPARES

    if "parts" in gather.meta:
        return True
    return _count_ends(gather, "placeholder", passes, lambda node: node.all_input_nodes) == 1


def _ends_in_output(scatter: Node) -> bool:
    def passes(node: Node) -> bool:
        if is_wait(node) or is_view(node) or kind_of(node) == "all_reduce":
            return True
        return operator_name(node) in _FINISHES

    if "parts" in scatter.meta:
        return True
    return _count_ends(scatter, "output", passes, lambda node: node.users) > 0


def _count_ends(
    start: Node,
    op: str,
    passes: Callable[[Node], bool],
    following: Callable[[Node], Iterable[Node]],
) -> int:
    """How many nodes of kind `op` all ways from `start` lead to; 0 if one leads to a node that is
    neither that nor `passes`.
    """
    seen, stack, ends = {start}, [*following(start)], 0
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.op == op:
            ends += 1
        elif passes(node):
            stack += following(node)
        else:
            return 0
    return ends
