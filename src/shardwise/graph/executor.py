"""The schedule's verbs as nodes of a graph: casts, collectives, waits.

`lower.py` walks a traced graph and calls the schedule's moments; what the schedule answers is
appended here, between the nodes of the model.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from shardwise.graph.nodes import (
    ALL_GATHER,
    ALL_REDUCES,
    REDUCE_SCATTER,
    WAIT,
)
from shardwise.graph.runtime import ADD_UP, ARRIVE, DELIVER, GATHER_KEPT, LET_GO, SCATTER
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

    @property
    def moves(self) -> bool:
        """It is gathered, and its gradient scattered."""
        return self.rows.ranks > 1 and self.rows.part > 0


@dataclass(frozen=True)
class Message:
    """Several tensors, by their parameters' numbers, in one that is under way."""

    node: Node
    shapes: Mapping[int, tuple[int, ...]]


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
        self.under_way: Message | dict[int, Node] = {}  # what has to be waited for
        self.whole: dict[int, Node] = {}
        self.gradients: dict[int, Node] = {}  # that have come in this backward
        self.results: dict[int, Node] = {}  # what has become of them

    @property
    def sums_take_reduces(self) -> bool:
        return False  # a graph has no memory of its own to reduce into


@dataclass(eq=False)
class GraphReduction(Reduction):
    scattering: Message | dict[int, Node] = field(default_factory=dict)  # not waited for yet


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
        # Over replicas, not waited for: a unit's sums, and those of them that are under way.
        self._summing: list[tuple[GraphUnit, dict[int, Node], Message | dict[int, Node]]] = []
        # Sums that nothing reads before the end of the pass: not waited for until then.
        self._landing: list[tuple[GraphUnit, Message]] = []
        # Only these units are sent for at once; others when told to (None: all at once).
        self.hurries: set[GraphUnit] | None = None
        self._delayed: list[GraphUnit] = []

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
        if self.hurries is None or unit in self.hurries:
            self._send_for(unit)
        else:
            self._delayed.append(unit)

    def send_delayed(self) -> None:
        self.hurries = None
        for unit in self._delayed:
            self._send_for(unit)
        self._delayed = []

    def _send_for(self, unit: GraphUnit) -> None:
        sent: dict[int, Node] = {}
        for number, (part, whole, *_) in unit.needed.items():
            p = unit.parameters[number]
            if whole is not None:
                unit.arriving[number] = whole
            elif not p.moves:
                unit.arriving[number] = self._cast(part, p.compute)
            else:
                sent[number] = part if self.together else self._cast(part, p.compute)
        if self.together:
            self._gather_together(unit, sent)
        else:
            unit.under_way = {
                n: self.call(ALL_GATHER, node, *self._group(unit, n)) for n, node in sent.items()
            }

    def _group(self, unit: GraphUnit, number: int) -> tuple[int, str]:
        p = unit.parameters[number]
        return p.rows.ranks, p.shard_group

    def _gather_together(self, unit: GraphUnit, parts: dict[int, Node]) -> None:
        if parts:
            first = next(iter(parts))
            group, dtype = self._group(unit, first), unit.parameters[first].compute
            numels = {n: unit.parameters[n].rows.part for n in parts}
            kept = list(parts), sum(numels.values())
            sent = self.call(GATHER_KEPT, parts[first], *kept, *group, dtype)
            shapes = {n: (numel * group[0],) for n, numel in numels.items()}
            unit.under_way = Message(sent, shapes)

    def _let_go(self, sent: Message) -> None:
        """What a message is packed of has to stay until here: only its packing reads it."""
        self.call(LET_GO, sent.node, sent.node.args[0])

    def _wait(self, sent: Message | dict[int, Node]) -> dict[int, Node]:
        """What was sent, when it has arrived."""
        if not isinstance(sent, Message):
            return {n: self.call(WAIT, node) for n, node in sent.items()}
        self.call(ARRIVE, sent.node)
        found, at = {}, 0
        for number, shape in sent.shapes.items():
            numel = math.prod(shape)
            piece = self.call(aten.slice.Tensor, sent.node, 0, at, at + numel)
            found[number] = self.call(aten.view.default, piece, list(shape))
            at += numel
        return found

    def wait(self, unit: GraphUnit) -> None:
        arrived = unit.arriving | self._wait(unit.under_way)
        for number, node in arrived.items():
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
        packed = unit.gradients
        if not (self.together and passes):  # else the message itself is packed so
            packed = {n: self._cast(g, unit.parameters[n].reduce) for n, g in packed.items()}
        unit.gradients = {}
        return GraphReduction(unit, None, Held(packed))

    def zeros(self, unit: GraphUnit) -> GraphReduction:
        raise AssertionError("a rank that runs nothing runs no graph")

    def scatter(self, reduction: GraphReduction, into_sums: bool) -> None:
        unit, found = reduction.unit, dict(reduction.held.content)
        for number, node in found.items():
            p = unit.parameters[number]
            if p.divide_before != 1.0:
                node = self.call(aten.div.Tensor, self._cast(node, p.reduce), p.divide_before)
            if not (self.together and p.moves):
                node = self._rank_after_rank(self._cast(node, p.reduce), p.rows)
            found[number] = node
        sent = {n: node for n, node in found.items() if unit.parameters[n].moves}
        if self.together and sent:
            first = next(iter(sent))
            rows = {n: (unit.parameters[n].rows.part,) for n in sent}
            group, dtype = self._group(unit, first), unit.parameters[first].reduce
            total = sum(part for (part,) in rows.values())
            together = self.call(SCATTER, list(sent.values()), total, *group, dtype)
            reduction.scattering = Message(together, rows)
        else:
            reduction.scattering = {
                n: self.call(REDUCE_SCATTER, node, "sum", *self._group(unit, n))
                for n, node in sent.items()
            }
        reduction.pending = True if sent else None
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
        inputs = [found[n] for n in moved]
        if not moved:
            self._end(reduction.unit, found)
        elif self.together:
            sent = self.call(ADD_UP, inputs, group, parameters[moved[0]].reduce)
            shapes = {n: tuple(found[n].meta["val"].shape) for n in moved}
            self._summing.append((reduction.unit, found, Message(sent, shapes)))
        else:
            sent = self.call(ALL_REDUCES, inputs, "sum", group)
            each = {n: self.call(operator.getitem, sent, i) for i, n in enumerate(moved)}
            self._summing.append((reduction.unit, found, each))

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
        """Wait for what was sent; where its sums are only laid down at the end of the pass, until
        it is packed: then its gradients' memory may go.
        """
        unit, sent = reduction.unit, reduction.scattering
        if isinstance(sent, Message):
            self._let_go(sent)
        if isinstance(sent, Message) and self._lands_late(unit):
            self._landing.append((unit, sent))
            for number in sent.shapes:
                del reduction.held.content[number]
        else:
            reduction.held.content.update(self._wait(sent))
        reduction.scattering, reduction.pending = {}, None

    @staticmethod
    def _lands_late(unit: GraphUnit) -> bool:
        """No other sum is added to this one, nor is it made something else of."""
        each = unit.parameters.values()
        as_it_is = all(p.reduce == p.master and p.divide_after == 1.0 for p in each)
        return as_it_is and unit.replicas == 1 and unit.sums.partial is None

    def hold(self, reduction: GraphReduction) -> None: ...

    def retire(self, reduction: GraphReduction) -> None: ...

    def deliver(self, sink: Node, results: Mapping[int, Node]) -> Node:
        """Lay the gradients on the shelf of the sink."""
        return self.call(DELIVER, sink, list(results.values()), list(results))

    def finish(self) -> None:
        """Wait for the sums that are still on their way."""
        for unit, sent in self._landing:
            self._end(unit, self._wait(sent))
        self._landing = []
        for unit, found, summing in self._summing:
            if isinstance(summing, Message):
                self._let_go(summing)
            self._end(unit, found | self._wait(summing))
        self._summing = []
