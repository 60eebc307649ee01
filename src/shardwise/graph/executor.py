"""The schedule's verbs as nodes of a graph: casts, collectives, waits.

`lower.py` walks a traced graph and calls the schedule's moments; what the schedule answers is
appended here, between the nodes of the model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from shardwise.graph.nodes import (
    ALL_GATHER,
    ALL_GATHERS,
    ALL_REDUCES,
    REDUCE_SCATTER,
    REDUCE_SCATTERS,
    WAIT,
)
from shardwise.planning.rows import Rows
from shardwise.schedule.executor import Held, Reduction
from shardwise.schedule.policy import UnitPolicy
from shardwise.schedule.unit import ScheduledUnit, State

aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default  # what the compiler makes of casts


@dataclass(frozen=True)
class GraphParameter:
    """One parameter: how it is cut, over which groups it moves, in which dtypes."""

    names: tuple[str, ...]  # all that it has in the model
    unit: str
    rows: Rows
    master: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    shard_group: str = ""
    replica_group: str = ""
    replicas: int = 1
    divide_before: float = 1.0  # gradients, before and after they are summed
    divide_after: float = 1.0

    @property
    def aliased(self) -> bool:
        """The part is the whole parameter as it is computed with."""
        return self.rows.ranks == 1 and self.master == self.compute


class GraphUnit(ScheduledUnit):
    """A unit in a graph: numbers of its parameters, and the nodes that stand for them."""

    def __init__(
        self, name: str, policy: UnitPolicy, parameters: dict[int, GraphParameter], is_root: bool
    ) -> None:
        first = next(iter(parameters.values()))
        super().__init__(
            name, policy, is_root=is_root, shard=first.rows.ranks, replicate=first.replicas
        )
        self.parameters = parameters
        self.aliased = all(p.aliased for p in parameters.values())
        self.state = State.READY if self.aliased else State.FREE
        self.needed: dict[int, tuple[Any, ...]] = {}  # of this graph: the markers' arguments
        self.arriving: dict[int, Node] = {}
        self.under_way: dict[Node, None] = {}  # of those, what has to be waited for
        self.whole: dict[int, Node] = {}
        self.gradients: dict[int, Node] = {}  # that have come in this backward
        self.results: dict[int, Node] = {}  # what has become of them

    @property
    def sums_take_reduces(self) -> bool:
        return False  # a graph has no memory of its own to reduce into


@dataclass(eq=False)
class GraphReduction(Reduction):
    scattering: dict[int, Node] = field(default_factory=dict)  # not waited for yet


class GraphExecutor:
    """Appends nodes to one graph. Like a host it has no lanes: a wait is a node, and the schedule
    says where.
    """

    ordered = False

    def __init__(self, together: bool) -> None:
        """`together`: a unit's parameters travel as one message; else each is one, for passes to
        join.
        """
        self.graph = Graph()
        self.together = together
        self._summing: list[tuple[GraphUnit, dict[int, Node]]] = []  # over replicas, not waited for

    def call(self, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """Append a call of an operator, with an example of its value."""
        node = self.graph.call_function(target, args, kwargs)
        given, named = torch.fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
        with torch.no_grad():
            node.meta["val"] = target(*given, **named)
        return node

    def _cast(self, node: Node, dtype: torch.dtype) -> Node:
        if node.meta["val"].dtype == dtype:
            return node
        return self.call(CAST, node, dtype)

    # A unit

    def gather(self, unit: GraphUnit) -> None:
        sent: dict[int, Node] = {}
        for number, (part, whole, *_) in unit.needed.items():
            p = unit.parameters[number]
            if whole is not None:
                unit.arriving[number] = whole
            elif p.rows.ranks == 1 or not p.rows.part:
                unit.arriving[number] = self._cast(part, p.compute)
            else:
                sent[number] = self._cast(part, p.compute)
        unit.arriving |= self._send(unit, sent, ALL_GATHER, ALL_GATHERS)

    def _send(
        self, unit: GraphUnit, inputs: dict[int, Node], one: Any, several: Any, *more: Any
    ) -> dict[int, Node]:
        """Messages over the shard group, not waited for."""
        by_group: dict[tuple[int, str], list[int]] = {}
        for number in inputs:
            p = unit.parameters[number]
            by_group.setdefault((p.rows.ranks, p.shard_group), []).append(number)
        found: dict[int, Node] = {}
        for group, numbers in by_group.items():
            if self.together and len(numbers) > 1:
                sent = self.call(several, [inputs[n] for n in numbers], *more, *group)
                found |= {n: self.call(operator.getitem, sent, i) for i, n in enumerate(numbers)}
            else:
                found |= {n: self.call(one, inputs[n], *more, *group) for n in numbers}
        unit.under_way |= dict.fromkeys(found.values())
        return found

    def wait(self, unit: GraphUnit) -> None:
        for number, node in unit.arriving.items():
            if node in unit.under_way:
                node = self.call(WAIT, node)
            unit.whole[number] = self._shaped(node, unit.parameters[number].rows)
        unit.arriving, unit.under_way = {}, {}

    def _shaped(self, flat: Node, rows: Rows) -> Node:
        """The parameter itself, from the padded rows of all ranks."""
        value = flat.meta["val"]
        if tuple(value.shape) == rows.shape:
            return flat
        if value.numel() != rows.numel:
            flat = self.call(aten.slice.Tensor, flat, 0, 0, rows.numel)
        return self.call(aten.view.default, flat, list(rows.shape))

    def show(self, unit: GraphUnit) -> None:
        if unit.aliased:
            for number, (part, *_) in unit.needed.items():
                if number not in unit.whole:
                    unit.whole[number] = self._shaped(part, unit.parameters[number].rows)

    def hide(self, unit: GraphUnit) -> None: ...

    def free(self, unit: GraphUnit) -> None:
        """Nothing: a value goes behind its last use."""

    def shrink(self, unit: GraphUnit) -> None: ...

    def forget_piece(self, unit: GraphUnit) -> None: ...

    # A reduce

    def open(self, unit: GraphUnit) -> bool:
        return True

    def pack(self, unit: GraphUnit, into_sums: bool, passes: bool) -> GraphReduction:
        """Gradients in the reduce's dtype. A later micro-batch's are added whole, so they keep
        their shapes until then.
        """
        packed = {n: self._cast(g, unit.parameters[n].reduce) for n, g in unit.gradients.items()}
        unit.gradients = {}
        return GraphReduction(unit, None, Held(packed))

    def zeros(self, unit: GraphUnit) -> GraphReduction:
        raise AssertionError("a rank that runs nothing runs no graph")

    def scatter(self, reduction: GraphReduction, into_sums: bool) -> None:
        parameters, found = reduction.unit.parameters, reduction.held.content
        sent: dict[int, Node] = {}
        for number, node in found.items():
            p = parameters[number]
            if p.divide_before != 1.0:
                node = self.call(aten.div.Tensor, node, p.divide_before)
            found[number] = node = self._rank_after_rank(node, p.rows)
            if p.rows.ranks > 1 and p.rows.part:
                sent[number] = node
        unit = reduction.unit
        reduction.scattering = self._send(unit, sent, REDUCE_SCATTER, REDUCE_SCATTERS, "sum")
        reduction.pending = True if reduction.scattering else None
        unit.under_way = {}
        reduction.held = Held(found)

    def _rank_after_rank(self, node: Node, rows: Rows) -> Node:
        """A gradient, flat, with every rank's rows padded to the same number."""
        if rows.replicated:
            if rows.ranks == 1:
                return self.call(aten.view.default, node, [1])
            expanded = self.call(aten.expand.default, node, [rows.ranks])
            return self.call(aten.clone.default, expanded)
        if not node.meta["val"].is_contiguous():
            node = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
        flat = self.call(aten.view.default, node, [rows.numel])
        missing = rows.part * rows.ranks - rows.numel
        return self.call(aten.constant_pad_nd.default, flat, [0, missing]) if missing else flat

    def all_reduce(self, reduction: GraphReduction) -> None:
        """Over the replicas; nobody waits for it before the end of the pass."""
        parameters, found = reduction.unit.parameters, reduction.held.content
        moved = [n for n in found if parameters[n].rows.part]
        group = next(iter(parameters.values())).replica_group
        together = self.call(ALL_REDUCES, [found[n] for n in moved], "sum", group)
        summing = {n: self.call(operator.getitem, together, i) for i, n in enumerate(moved)}
        reduction.held = Held({**found, **summing})
        self._summing.append((reduction.unit, reduction.held.content))

    def add(self, reduction: GraphReduction, to: Held) -> None:
        for number, node in reduction.held.content.items():
            earlier = to.content.get(number)
            to.content[number] = (
                node if earlier is None else self.call(aten.add.Tensor, earlier, node)
            )

    def add_to_sums(self, reduction: GraphReduction, overwrites: bool) -> None:
        if reduction.unit.replicas == 1:
            self._end(reduction.unit, reduction.held.content)

    def _end(self, unit: GraphUnit, sums: dict[int, Node]) -> None:
        for number, node in sums.items():
            p = unit.parameters[number]
            if p.divide_after != 1.0:
                node = self.call(aten.div.Tensor, node, p.divide_after)
            unit.results[number] = self._cast(node, p.master)

    def drop(self, held: Held) -> None: ...

    def join(self, reduction: GraphReduction) -> None:
        waited = {n: self.call(WAIT, node) for n, node in reduction.scattering.items()}
        reduction.held.content.update(waited)
        reduction.scattering, reduction.pending = {}, None

    def hold(self, reduction: GraphReduction) -> None: ...

    def retire(self, reduction: GraphReduction) -> None: ...

    def finish(self) -> None:
        """Wait for the sums over replicas."""
        for unit, summing in self._summing:
            rows = {n: unit.parameters[n].rows for n in summing}
            waited = {
                n: self.call(WAIT, node) if rows[n].part else node for n, node in summing.items()
            }
            self._end(unit, waited)
        self._summing = []
