"""What the nodes of a traced graph are: compute, collectives, waits for them, or neither.

A graph here is one pass, forward or backward, as torch's compiler leaves it: placeholders, calls
of operators, one output; every node has an example of its value in `meta["val"]`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

from shardwise.description.model import KernelFact
from shardwise.description.tracing.op_costs import cost_of
from shardwise.graph.torch_private import collectives, is_operator

ALL_GATHER = collectives.all_gather_into_tensor.default
ALL_GATHERS = collectives.all_gather_into_tensor_coalesced.default  # several as one message
REDUCE_SCATTER = collectives.reduce_scatter_tensor.default
REDUCE_SCATTERS = collectives.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = collectives.all_reduce.default
ALL_REDUCES = collectives.all_reduce_coalesced.default
WAIT = collectives.wait_tensor.default

KINDS = {
    ALL_GATHER: "all_gather",
    ALL_GATHERS: "all_gather",
    REDUCE_SCATTER: "reduce_scatter",
    REDUCE_SCATTERS: "reduce_scatter",
    ALL_REDUCE: "all_reduce",
    ALL_REDUCES: "all_reduce",
}
# Where the arguments hold the group's name; gathers and scatters have its size before it.
_GROUP_AT = {
    ALL_GATHER: 2,
    ALL_GATHERS: 2,
    REDUCE_SCATTER: 3,
    REDUCE_SCATTERS: 3,
    ALL_REDUCE: 2,
    ALL_REDUCES: 2,
}


def kind_of(node: Node) -> str:
    """all_gather, reduce_scatter or all_reduce; empty for what is no collective."""
    return KINDS.get(node.target, "") if node.op == "call_function" else ""


def is_wait(node: Node) -> bool:
    return node.op == "call_function" and node.target is WAIT


def collective_of(wait: Node) -> Node | None:
    """The collective that a wait is for, also as one of several; None if it is no such wait."""
    source = wait.args[0] if is_wait(wait) else None
    if isinstance(source, Node) and source.target is operator.getitem:
        source = source.args[0]
    return source if isinstance(source, Node) and kind_of(source) else None


def operator_name(node: Node) -> str:
    """`mm` of `aten.mm.default`; empty for what calls no operator."""
    if node.op != "call_function" or not is_operator(node.target):
        return ""
    return str(node.target).split(".")[1]


def is_view(node: Node) -> bool:
    """Another look at its input, or one of the tensors of a list: nothing runs."""
    if node.op != "call_function":
        return False
    if node.target is operator.getitem:
        return True
    runs = not is_operator(node.target) or kind_of(node) or is_wait(node)
    return not runs and kernel_of(node) is None


def group_of(node: Node) -> str:
    """The name of a collective's group."""
    return str(node.args[_GROUP_AT[node.target]])


def message_bytes(node: Node) -> int:
    """Of a collective's whole message: what a gather makes, what the others are given."""
    return value_bytes(node if kind_of(node) == "all_gather" else node.args[0])


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The example values of a node, or of several."""
    if isinstance(value, Node):
        value = value.meta.get("val")
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_of(each)


def value_bytes(value: Any) -> int:
    """Bytes of a node's value, or of several nodes'."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(value))


def kernel_of(node: Node) -> KernelFact | None:
    """The kernel that a node launches; None for collectives, waits, views and what is no call.
    Looked for once: a node's copies have its meta.
    """
    if "kernel" not in node.meta:
        node.meta["kernel"] = _find_kernel(node)
    fact: KernelFact | None = node.meta["kernel"]
    return fact


def _find_kernel(node: Node) -> KernelFact | None:
    if node.op != "call_function" or not is_operator(node.target):
        return None
    if kind_of(node) or is_wait(node):
        return None
    example = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    return cost_of(node.target, example[0], example[1], node.meta.get("val"))


def is_compute(node: Node) -> bool:
    """It multiplies matrices, convolves or attends: what collectives are hidden behind."""
    fact = kernel_of(node)
    return fact is not None and fact.flops > 0
