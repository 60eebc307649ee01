"""From markers to collectives: the schedule, run over the nodes of a traced graph.

The model's own nodes keep their order. Before the first and after the last node that uses a unit's
parameters the schedule hears of it, as the engine's hooks would tell, and `GraphExecutor` appends
what it answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from shardwise.graph.executor import GraphExecutor, GraphParameter, GraphUnit
from shardwise.graph.nodes import is_compute, is_wait
from shardwise.graph.ops import FULL, REDUCED
from shardwise.planning.plan import Plan
from shardwise.schedule.executor import Held
from shardwise.schedule.moments import Schedule

# Later than any checkpointed region of the model's own, as torch's partitioner numbers them: it
# saves what a later region recomputes from.
_LAST_REGION = 2**30


class Lowering:
    """One model's graphs of one kind of micro-batch: forward, then backward."""

    def __init__(
        self,
        parameters: Sequence[GraphParameter],
        plan: Plan,
        scatters: bool = True,
        all_reduces: bool = True,
        together: bool = False,
    ) -> None:
        """`scatters`, `all_reduces`: what this micro-batch does with its gradients. `together`: the
        Plan's units are the messages.
        """
        self.plan, self.parameters = plan, parameters
        self.scatters, self.all_reduces = scatters, all_reduces
        by_unit: dict[str, dict[int, GraphParameter]] = {}
        for number, p in enumerate(parameters):
            by_unit.setdefault(p.unit, {})[number] = p
        roots = {unit.name for unit in plan.require_units() if unit.modules == ("",)}
        units = [
            GraphUnit(name, plan.unit_policy(name in roots), members, name in roots)
            for name, members in by_unit.items()
        ]
        self.unit_of = {number: unit for unit in units for number in unit.parameters}
        self.executor = GraphExecutor(together)
        self.schedule: Schedule[GraphUnit] = Schedule(units, plan.policy, self.executor)
        for unit in units:
            unit.executor = self.executor

    def keeps(self, number: int) -> bool:
        """Whether a parameter stays whole from forward to backward."""
        unit = self.unit_of[number]
        return unit.aliased or not self.schedule.policy.frees_in_pass or unit.options.keep is True

    def tag(self, joint: Graph) -> None:
        """Tell torch's partitioner which parameters backward finds as forward left them, and which
        it gathers again: those, and what is made of them alone, are never saved. A wait is made
        again with its collective; torch 2.11 tags that one only, and would save what it brought.
        """
        again: set[Node] = set()
        for node in joint.nodes:
            if node.target is FULL and not self.keeps(node.args[4]):
                again.add(node)
            elif node.op == "call_function" and node.all_input_nodes:
                again.update([node] if again.issuperset(node.all_input_nodes) else [])
            if node in again:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = _LAST_REGION
            elif node.target is FULL:
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
                node.meta["ac_graph_id"] = _LAST_REGION
            elif is_wait(node) and "recompute" not in node.meta:
                known = node.all_input_nodes[0].meta
                tags = ("recompute", "ac_graph_id")
                node.meta |= {tag: known[tag] for tag in tags if tag in known}

    def forward(self, graph: Graph) -> Graph:
        walk = _Walk(self, graph)
        schedule = self.schedule
        # A graph knows when it needs each of the root's units: an output's projection comes last.
        roots = [unit for unit in schedule.units if unit.is_root and unit.needed]
        returned = [unit for unit in roots if unit not in walk.order]  # and not used
        schedule.forward_order.expected = returned + walk.order
        schedule.forward_order.begin()
        walk.inputs()
        for unit in returned:
            schedule.before_forward(unit)
        hurries = self.executor.together  # else passes move messages
        walk.run(schedule.before_forward, schedule.after_forward, roots=True, hurries=hurries)
        for unit in roots:
            schedule.after_forward(unit)
        schedule.end_forward()
        return walk.end()

    def backward(self, graph: Graph) -> Graph:
        _reduce_when_made(graph)
        walk = _Walk(self, graph)
        schedule = self.schedule
        schedule.set_gradients()
        schedule.reduce_in([unit.name for unit in walk.ended])
        # A micro-batch that is not the last leaves its sums as the Plan says.
        schedule.micro = (0, 1) if self.scatters and self.all_reduces else (0, 2)
        roots = [unit for unit in schedule.units if unit.is_root and unit.needed]
        order = [unit for unit in walk.order if not unit.is_root]
        schedule.backward_order.expected = roots + order
        walk.inputs()
        schedule.open_backward()
        for unit in roots:
            schedule.before_backward(unit)
        if not roots and self.executor.together:  # kept: what comes next is sent for at once
            for unit in order[: schedule.policy.backward_prefetch]:
                if unit.options.gathers_in_backward:
                    unit.gather()
        walk.run(schedule.before_backward, schedule.after_backward)
        schedule.end_backward()
        return walk.end()


def _reduce_when_made(backward: Graph) -> None:
    """Autograd runs what was recorded first last, so all gradients' ends stand at the end of what
    it traced. Here each one follows its gradient.
    """
    for node in list(backward.nodes):
        if node.target is REDUCED:
            gradient = node.args[0]
            assert isinstance(gradient, Node)
            gradient.append(node)


class _Walk:
    """One graph's nodes, copied in their order."""

    def __init__(self, lowering: Lowering, graph: Graph) -> None:
        self.lowering, self.old = lowering, graph
        executor = self.executor = lowering.executor
        executor.graph = Graph()
        self.copies: dict[Node, Node] = {}
        self.gathered: dict[Node, int] = {}  # markers of whole parameters, with their numbers
        self.reduced: dict[Node, int] = {}
        # What becomes of one leaf's gradient: markers, and autograd's sums of them.
        self._sink: Node | None = None
        self._of_sink: set[Node] = set()
        self._delivered: Node | None = None
        for unit in lowering.schedule.units:
            unit.needed, unit.results, unit.gradient_count = {}, {}, 0
            unit.whole = {}
        nodes = list(graph.nodes)
        for node in nodes:
            if node.target is FULL:
                self.gathered[node] = node.args[4]
                lowering.unit_of[node.args[4]].needed[node.args[4]] = node.args
            elif node.target is REDUCED:
                self.reduced[node] = node.args[2]
                unit = lowering.unit_of[node.args[2]]
                unit.gradient_count += 1
                if node.args[3] is not None:
                    self._sink = node.args[3]
                    self._of_sink.add(node)
            elif node.all_input_nodes and self._of_sink.issuperset(node.all_input_nodes):
                self._of_sink.add(node)
        self._find_uses(nodes)

    def _find_uses(self, nodes: Sequence[Node]) -> None:
        """The first node that needs each unit whole, and the last that has to do with it."""
        first: dict[GraphUnit, Node] = {}
        last: dict[GraphUnit, Node] = {}
        for node in nodes:
            for source in node.all_input_nodes if node.op != "output" else ():
                if source in self.gathered:
                    unit = self.lowering.unit_of[self.gathered[source]]
                    first.setdefault(unit, node)
                    last[unit] = node
            if node in self.reduced:
                last[self.lowering.unit_of[self.reduced[node]]] = node
        self.order = list(first)  # units as they are first used
        self._begins: dict[Node, list[GraphUnit]] = {}
        self._ends: dict[Node, list[GraphUnit]] = {}
        for unit, node in first.items():
            self._begins.setdefault(node, []).append(unit)
        at = {node: i for i, node in enumerate(nodes)}
        for unit, node in sorted(last.items(), key=lambda pair: at[pair[1]]):
            self._ends.setdefault(node, []).append(unit)
        self.ended = [unit for units in self._ends.values() for unit in units]

    def inputs(self) -> None:
        for node in self.old.nodes:
            if node.op == "placeholder":
                self._copy(node)
        for unit in self.lowering.schedule.units:
            unit.needed = {
                number: tuple(self.copies.get(a, a) if isinstance(a, Node) else a for a in args)
                for number, args in unit.needed.items()
            }

    def run(
        self,
        begins: Callable[[GraphUnit], None],
        ends: Callable[[GraphUnit], None],
        roots: bool = False,
        hurries: bool = False,
    ) -> None:
        """Copy all nodes. `begins` hears of the root's units too where they are not there yet. If
        it `hurries`, what is gathered ahead of its need goes behind the first product: the device
        is idle until that, and each message takes the host its time.
        """
        nodes = [n for n in self.old.nodes if n.op not in ("placeholder", "output")]
        nodes = [node for node in nodes if node not in self.gathered]
        product = next(filter(is_compute, nodes), None) if hurries else None
        if product is not None:
            early = nodes[: nodes.index(product) + 1]
            self.executor.hurries = {u for node in early for u in self._begins.get(node, ())}
        for node in nodes:
            for unit in self._begins.get(node, ()):
                if roots or not unit.is_root:
                    begins(unit)
            if node in self.reduced:
                self._take(node)
            elif node not in self._of_sink:
                self._copy(node)
            if node is product:
                self.executor.send_delayed()
            for unit in self._ends.get(node, ()):
                if not unit.is_root or unit.gradient_count:
                    ends(unit)

    def _take(self, node: Node) -> None:
        """A gradient has come to its end; what earlier micro-batches left goes with it."""
        gradient, held, number = cast(tuple[Node, Node | None, int], node.args[:3])
        unit = self.lowering.unit_of[number]
        unit.gradients[number] = self._find(gradient)
        if held is not None:
            self._hold(unit, number, self._find(held))

    def _hold(self, unit: GraphUnit, number: int, held: Node) -> None:
        sums, scattered = unit.sums, self.lowering.plan.sync != "last"
        if scattered:
            sums.partial = sums.partial or Held({})
            sums.partial.content[number] = held
        else:
            sums.accumulator = sums.accumulator or Held({})
            sums.accumulator.content[number] = held

    def _find(self, node: Node) -> Node:
        """What stands in the new graph for a node of the old one."""
        if node in self.gathered:
            number = self.gathered[node]
            return self.lowering.unit_of[number].whole[number]
        if node in self._of_sink and self._delivered is not None:
            return self._delivered
        if node in self.reduced:
            return self._result(self.reduced[node])
        return self.copies[node]

    def _result(self, number: int) -> Node:
        unit = self.lowering.unit_of[number]
        if number in unit.results:
            return unit.results[number]
        left = unit.sums.accumulator or unit.sums.partial
        assert left is not None
        node: Node = left.content[number]
        return node

    def _copy(self, node: Node) -> None:
        copy = self.copies[node] = self.executor.graph.node_copy(node, self._find)
        copy.meta = dict(node.meta)

    def end(self) -> Graph:
        graph = self.executor.graph
        output = next(node for node in self.old.nodes if node.op == "output")
        if self._sink is not None:
            numbers = [n for node, n in self.reduced.items() if node in self._of_sink]
            results = {number: self._result(number) for number in sorted(numbers)}
            self._delivered = self.executor.deliver(self.copies[self._sink], results)
        self._copy(output)
        graph.lint()
        return graph


def replace_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """The same module with another graph, without what passes note of other nodes in it."""
    for node in graph.nodes:
        node.meta.pop("after", None)
        node.meta.pop("parts", None)
    return GraphModule(module, graph, module.__class__.__name__)
