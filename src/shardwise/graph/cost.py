"""What a step of a forward and a backward graph takes: as a `Program`, and as a Timeline.

The order of nodes is the order of issue. A collective runs on its group's own queue from its node
on; compute stands still at its `wait_tensor`. One rank stands for all.

**Kernels.** A matrix product or an attention is one kernel. Of the others a compiler fuses what
stands between two of those (or collectives) and reads each other: such a chain is one kernel here,
which reads what comes from outside of it once, and writes what is used outside of it. What only
its own members read is never in memory; nor is what a compiler rather makes again in every chain
that reads it: pointwise values of few inputs. The host issues a compiled graph without dispatching,
so only its collectives cost it time.

**Memory.** A value is there from the kernel that writes it to the last that reads it, through any
views. What a collective reads stays until its wait. Forward's outputs that backward reads stay
until then; gradients until the step's end; parameters, inputs and the optimizer's state always.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from shardwise.description.collectives import Members
from shardwise.description.model import KernelFact
from shardwise.graph.nodes import (
    group_of,
    is_compute,
    is_wait,
    kernel_of,
    kind_of,
    message_bytes,
    operator_name,
    value_bytes,
)
from shardwise.predict.cost import Costs
from shardwise.predict.events import Rank, run
from shardwise.predict.program import Builder, Change, Op, Program, rounded
from shardwise.timeline import COMPUTE, Timeline

MADE_AGAIN = 4  # the most inputs of such a value: torch's compiler's own bound
STATE_TENSORS = 2  # of the optimizer for each parameter, as Adam has


@dataclass(frozen=True)
class MeshAxis:
    """What a group of a graph is: an axis of the mesh, and the ranks that it holds."""

    name: str
    members: Members


Axes = Mapping[str, MeshAxis]  # by the name of the group


def simulate_graphs(forward: Graph, backward: Graph, costs: Costs, axes: Axes) -> Timeline:
    """One step, without the optimizer's."""
    program = program_of(forward, backward, costs, axes)
    alone = {axis.name: (0,) for axis in axes.values()}
    world = max((a.members.ranks * a.members.stride for a in axes.values()), default=1)
    return run([Rank(0, program, alone, stands_for=world)])


def program_of(forward: Graph, backward: Graph, costs: Costs, axes: Axes) -> Program:
    """The operations of one rank's step, and when its bytes come and go."""
    builder = Builder(costs, {axis.name: axis.members.stride for axis in axes.values()})
    first = _Pass(forward, "forward")
    saved = _match_saved(first, backward)
    second = _Pass(backward, "backward", saved)
    gradients = {second.base(n) for n in second.outputs if n.op != "placeholder"}
    builder.hold("parameters", value_bytes(first.placeholders))
    builder.hold("state", STATE_TENSORS * sum(map(value_bytes, gradients)))
    first.lay(builder, axes, stays=set(saved.values()))
    second.lay(builder, axes, stays=gradients)
    return builder.build()


def _match_saved(forward: _Pass, backward: Graph) -> dict[Node, Node]:
    """Backward's placeholders, each with the base in forward whose memory it is. torch's compiler
    puts what it saves behind forward's results, and in the same order before the gradients that
    backward is given.
    """
    given = [n for n in backward.nodes if n.op == "placeholder"]
    saved = [n for n in given if not n.name.startswith("tangents")]
    kept = forward.outputs[len(forward.outputs) - len(saved) :]
    return {mine: forward.base(theirs) for mine, theirs in zip(saved, kept, strict=True)}


@dataclass(eq=False)
class _Launch:
    """What is issued at one moment: a kernel of one node or of a fused chain, a collective, or a
    wait for one; with the bases that it reads and writes.
    """

    nodes: list[Node]
    reads: set[Node]
    writes: list[Node] = field(default_factory=list)

    @property
    def node(self) -> Node:
        return self.nodes[-1]


class _Pass:
    """One graph: its launches in order, and who reads what last.

    A *base* is the node that brought a value's memory: views of it and waits for it share it. Where
    a node gives several values, the bases are those that take them apart. `saved` has the
    placeholders that are forward's values.
    """

    def __init__(self, graph: Graph, phase: str, saved: Mapping[Node, Node] | None = None) -> None:
        self.phase = phase
        self.nodes = list(graph.nodes)
        self.placeholders = [n for n in self.nodes if n.op == "placeholder"]
        self.outputs = [n for n in _flat(self.nodes[-1].args) if isinstance(n, Node)]
        self._bases: dict[Node, Node] = {}
        self._makers: dict[Node, Node] = {}  # of bases that take apart what another node gave
        self._find_bases(saved or {})
        self._again: dict[Node, frozenset[Node]] = {}  # made again where it is read, from these
        self._find_made_again()
        self.launches = list(self._find_launches())

    def base(self, node: Node) -> Node:
        return self._bases[node]

    def _find_bases(self, saved: Mapping[Node, Node]) -> None:
        # Two placeholders may be views of one value; those of forward's placeholders are nobody's.
        seen: dict[Node, Node] = {}
        self.given = {}  # bases that forward has left here, with forward's
        self._from_parts = {n for n in self.placeholders if n not in saved}
        for mine, theirs in saved.items():
            self._bases[mine] = seen.setdefault(theirs, mine)
            if theirs.op == "placeholder":
                self._from_parts.add(mine)
            else:
                self.given[self._bases[mine]] = theirs
        items: dict[tuple[Node, object], Node] = {}
        for node in self.nodes:
            if node in self._bases:
                continue
            source = _source_of(node)
            if node.target is operator.getitem and source is not None and not _is_view(source):
                self._bases[node] = items.setdefault((source, node.args[1]), node)
                self._makers[self._bases[node]] = source
            else:
                self._bases[node] = node if source is None else self._bases[source]
            alone = node.op == "call_function" and not kind_of(node) and not is_wait(node)
            if alone and self._comes_from_parts(node):
                self._from_parts.add(node)

    def _comes_from_parts(self, node: Node) -> bool:
        """It is made of parts of parameters and nothing else."""
        return bool(node.all_input_nodes) and self._from_parts.issuperset(node.all_input_nodes)

    def _find_made_again(self) -> None:
        for node in self.nodes:
            if not _is_pointwise(node) or not all(map(_is_fused, self._readers(node))):
                continue
            inputs = frozenset().union(*map(self._inputs, map(self.base, node.all_input_nodes)))
            if len(inputs) <= MADE_AGAIN:
                self._again[node] = inputs

    def _inputs(self, base: Node) -> frozenset[Node]:
        """What is read in memory to have a value."""
        return self._again.get(base, frozenset([base]))

    def _readers(self, value: Node) -> Iterator[Node]:
        """Who reads a value, also through views."""
        users = list(value.users)
        while users:
            user = users.pop()
            if user.op != "output" and self.base(user) is value:
                users += user.users
            else:
                yield user

    def _values_of(self, node: Node) -> list[Node]:
        """The bases of what a node gives."""
        if isinstance(node.meta.get("val"), list | tuple):
            taken = (n for n in node.users if n.target is operator.getitem)
            return list(dict.fromkeys(map(self.base, taken)))
        return [node]

    def _find_launches(self) -> Iterator[_Launch]:
        stretch: list[Node] = []  # kernels that may be fused, since the last that may not
        for node in self.nodes:
            if kind_of(node) or is_wait(node) or is_compute(node):
                yield from self._fuse(stretch)
                stretch = []
                writes = [] if is_wait(node) else self._values_of(node)
                yield _Launch([node], set(map(self.base, node.all_input_nodes)), writes)
            elif _is_fused(node):
                stretch.append(node)
        yield from self._fuse(stretch)

    def _fuse(self, stretch: Sequence[Node]) -> list[_Launch]:
        """Chains of kernels that read each other, in the order of their last members."""
        chain_of: dict[Node, list[Node]] = {}  # by the bases that they write
        for node in stretch:
            read = (chain_of.get(self.base(n)) for n in node.all_input_nodes)
            joined = {id(chain): chain for chain in read if chain}
            chain = [member for other in joined.values() for member in other] + [node]
            for member in chain:
                chain_of |= dict.fromkeys(self._values_of(member), chain)
        place = {node: i for i, node in enumerate(stretch)}
        by_id = {id(chain): chain for chain in chain_of.values()}
        chains = [chain for chain in by_id.values() if not self._again.keys() >= set(chain)]
        return [self._chain(chain) for chain in sorted(chains, key=lambda c: place[c[-1]])]

    def _chain(self, chain: list[Node]) -> _Launch:
        members = set(chain)
        inside = {value for node in chain for value in self._values_of(node)}
        outside = {self.base(n) for node in chain for n in node.all_input_nodes} - inside
        reads = {base for value in outside for base in self._inputs(value)}
        writes = [
            value
            for node in chain
            for value in self._values_of(node)
            if value not in self._again and any(n not in members for n in self._readers(value))
        ]
        return _Launch(chain, reads - inside, writes)

    def lay(self, builder: Builder, axes: Axes, stays: set[Node]) -> None:
        """Append this pass; the bases that `stays` names outlive it."""
        builder.phase = self.phase
        roles = {base: self._role(base, stays) for one in self.launches for base in one.writes}
        sizes = {base: value_bytes(base) for base in roles}
        for mine, theirs in self.given.items():
            roles[mine], sizes[mine] = "activations", value_bytes(theirs)
        ends = self._last_uses()
        leaves: dict[int, list[Node]] = {}
        for base in roles:
            if base not in stays:
                leaves.setdefault(ends.get(base, -1), []).append(base)
        for base in leaves.get(-1, ()):  # given and never read
            builder.hold(roles[base], -sizes[base])
        issued: dict[Node, int] = {}
        for at, launch in enumerate(self.launches):
            if is_wait(launch.node):
                builder.join(issued.get(self._collective_of(launch.node), -1))
            elif kind_of(launch.node):
                for base in launch.writes:
                    builder.hold(roles[base], sizes[base])
                issued[launch.node] = self._send(launch.node, builder, axes)
            else:
                number = len(builder.ops)
                builder.changes += [
                    Change(number, False, roles[base], rounded(sizes[base]))
                    for base in launch.writes
                ]
                fact = self._fact(launch)
                seconds = builder.costs.kernel(fact)
                unit = _module_of(launch.node)
                builder.add(Op(fact.op, unit, self.phase, "compute", COMPUTE, seconds))
            for base in leaves.get(at, ()):
                builder.hold(roles[base], -sizes[base])

    def _send(self, node: Node, builder: Builder, axes: Axes) -> int:
        group = group_of(node)
        if group not in axes:
            raise ValueError(f"{node.name} is of group {group!r}, expected one of {sorted(axes)}")
        axis, nbytes = axes[group], message_bytes(node)
        before, unit = builder.behind_compute(), _module_of(node)
        return builder.collective(
            kind_of(node), unit, axis.name, nbytes, axis.members.ranks, before
        )

    def _collective_of(self, wait: Node) -> Node:
        base = self.base(wait)
        return self._makers.get(base, base)

    def _fact(self, launch: _Launch) -> KernelFact:
        """One kernel; of a chain: what it reads from outside, once, and what it writes."""
        last = kernel_of(launch.node)
        assert last is not None
        if len(launch.nodes) == 1:
            return last.compiled
        read: dict[Node, float] = {}
        for node in launch.nodes:
            fact = kernel_of(node)
            assert fact is not None
            for source in node.all_input_nodes:
                for base in self._inputs(self.base(source)) & launch.reads:
                    # A lookup reads a few rows of its table, a broadcast its source once.
                    size = min(value_bytes(source), value_bytes(base), fact.bytes)
                    read[base] = max(read.get(base, 0.0), size)
        moved = sum(read.values()) + sum(map(value_bytes, launch.writes))
        return KernelFact("elementwise", 0.0, float(moved), last.dtype, op=f"fused {last.op}")

    def _last_uses(self) -> dict[Node, int]:
        """The last launch that needs each base; a collective needs what it reads until its wait."""
        ends: dict[Node, int] = {}
        under_way: dict[Node, set[Node]] = {}
        for at, launch in enumerate(self.launches):
            ends |= dict.fromkeys((*launch.writes, *launch.reads), at)
            if kind_of(launch.node):
                under_way[launch.node] = launch.reads
            elif is_wait(launch.node):
                ends |= dict.fromkeys(under_way.get(self._collective_of(launch.node), ()), at)
        return ends

    def _role(self, base: Node, stays: set[Node]) -> str:
        maker = self._makers.get(base, base)
        if kind_of(maker) == "all_gather" and self._comes_from_parts(maker):
            return "full"
        return "gradients" if self.phase == "backward" and base in stays else "activations"


def _is_fused(node: Node) -> bool:
    """It is a kernel that may be a part of another."""
    if node.op != "call_function" or kind_of(node) or is_wait(node) or is_compute(node):
        return False
    return kernel_of(node) is not None


def _is_pointwise(node: Node) -> bool:
    """Each of its numbers is made of one of every input."""
    tags = getattr(node.target, "tags", ())
    casts = operator_name(node) == "_to_copy"
    return _is_fused(node) and (casts or torch.Tag.pointwise in tags)


def _is_view(node: Node) -> bool:
    """It launches nothing and brings no memory: it is another look at its first input."""
    if node.op != "call_function" or kind_of(node) or not node.all_input_nodes:
        return False
    allocates = "empty" in getattr(node.target, "__name__", "")
    return is_wait(node) or (kernel_of(node) is None and not allocates)


def _source_of(node: Node) -> Node | None:
    """The node whose memory it shares, or takes apart."""
    if node.target is operator.getitem or _is_view(node):
        return node.all_input_nodes[0]
    return None


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for each in value:
            yield from _flat(each)
    else:
        yield value


def _module_of(node: Node) -> str:
    """The module that a node comes from, where the trace says."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    names = [str(name) for name, _ in stack.values()]
    return names[-1] if names else ""
