"""A graph-level schedule: collectives of single parameters, bucketed and moved by a compiler pass.

Under `torch.compile` a sharded model is one graph of compute nodes and collectives. A pass buckets
the data-parallel gathers and moves each bucket ahead of its first use, at most `window` compute
nodes; tensor-parallel collectives of activations lie between the nodes and stay where they are.
Recomputation (activation checkpointing) gives backward nodes that depend on nothing but a layer's
input: a sort may run many of them before the first reduce-scatter, which holds their outputs for
longer. `consecutive` caps how many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.description.collectives import Members
from shardwise.predict.cost import Costs
from shardwise.predict.events import Rank, run
from shardwise.predict.program import Builder, Change, Op, Program
from shardwise.timeline import COMPUTE, Timeline

BUCKETINGS = ("adjacent", "any")
MIB = 2**20
ITEMSIZE = 2  # of gathered parameters


@dataclass(frozen=True)
class GraphPolicy:
    """What the pass does.

    bucketing: "adjacent" joins gathers with no other collective between them, of all groups;
        "any" joins those of the data-parallel group wherever they are, up to `bucket_bytes`.
    window: compute nodes by which a gather may be issued before its first use.
    consecutive: recomputed nodes that may run ahead of the reduce-scatter they come before in the
        original order; None: as many as the sort found ready (`RUNAWAY`); 0: the original order,
        gathers included.
    """

    window: int = 5
    bucketing: str = "adjacent"
    bucket_bytes: int = 64 * MIB
    consecutive: int | None = None

    def __post_init__(self) -> None:
        if self.bucketing not in BUCKETINGS:
            raise ValueError(f"bucketing is {self.bucketing!r}, expected one of {BUCKETINGS}")
        if self.window < 0 or (self.consecutive is not None and self.consecutive < 0):
            raise ValueError(
                f"window {self.window} and consecutive {self.consecutive} must be at least 0"
            )
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes is {self.bucket_bytes}, expected at least 1")


# Compute nodes that the sort put before the first reduce-scatter of backward, uncapped.
RUNAWAY = 40


@dataclass(frozen=True)
class GraphNode:
    """One compute node of a layer: seconds, the bytes of the parameter it needs (as gathered), the
    tensor-parallel collective before it (bytes), and the activation bytes it leaves.
    """

    name: str
    seconds: float
    parameter_bytes: int = 0
    collective: str = ""  # of the tensor-parallel group, before this node
    collective_bytes: int = 0
    saved_bytes: int = 0


@dataclass(frozen=True)
class GraphModel:
    """`layers` equal layers: forward nodes, and backward nodes (each takes its own parameter
    again). `norm_bytes` of parameters per layer are gathered over all ranks, not the data-parallel
    group.
    """

    layers: int
    forward: tuple[GraphNode, ...]
    backward: tuple[GraphNode, ...]
    norm_bytes: int
    reduce_itemsize: int  # bytes of an element on its way through a reduce-scatter
    checkpoint_bytes: int  # a layer's input, which stays from forward to backward
    static_bytes: int  # parameters, gradients and optimizer state of one rank


@dataclass(frozen=True)
class _Placed:
    node: GraphNode
    layer: int
    phase: str  # forward, recompute, backward
    last: bool = False  # the layer's gradients are complete behind it


@dataclass(frozen=True)
class _Bucket:
    """Gathers that travel as one message, and the places of the nodes that use them."""

    group: str
    nbytes: int
    uses: tuple[int, ...]


def simulate_graph(
    model: GraphModel, policy: GraphPolicy, costs: Costs, data: Members, tensor: Members
) -> Timeline:
    """One step of forward and backward. All ranks are alike, so one is simulated."""
    program = _Layout(model, policy, costs, data, tensor).build()
    alone = {axis: (0,) for axis in ("data", "tensor", "all")}
    timeline = run([Rank(0, program, alone, stands_for=data.ranks * tensor.ranks)])
    labels = {"schedule": f"{policy}"}
    return Timeline(timeline.spans, timeline.memory, timeline.stands_for, labels)


class _Layout:
    def __init__(
        self, model: GraphModel, policy: GraphPolicy, costs: Costs, data: Members, tensor: Members
    ) -> None:
        self.model, self.policy = model, policy
        self.b = Builder(costs, {"data": data.stride, "tensor": tensor.stride})
        self.members = {
            "data": data, "tensor": tensor, "all": Members(data.ranks * tensor.ranks),
        }  # fmt: skip
        # Of each chain of dependent nodes: the last one, and the collective on its way to the next.
        self.last: dict[tuple[str, int], int] = {}
        self.coming: dict[tuple[str, int], int] = {}

    def build(self) -> Program:
        self.b.hold("parameters", self.model.static_bytes)
        forward = [
            _Placed(node, layer, "forward")
            for layer in range(self.model.layers)
            for node in self.model.forward
        ]
        self._run(forward)
        self._run(self._order_backward())
        return self.b.build()

    def _order_backward(self) -> list[_Placed]:
        """Layer after layer: recompute, then backward. Up to the cap, recomputed nodes of the
        layers that come next run between a layer's backward nodes: they depend on nothing there,
        so each hides the other's tensor-parallel collectives.
        """
        ahead = RUNAWAY if self.policy.consecutive is None else self.policy.consecutive
        recompute = [
            _Placed(node, layer, "recompute")
            for layer in reversed(range(self.model.layers))
            for node in self.model.forward
        ]
        order: list[_Placed] = []
        done, per_layer, nodes = 0, len(self.model.forward), self.model.backward
        for i, layer in enumerate(reversed(range(self.model.layers))):
            needed = (i + 1) * per_layer
            order += recompute[done:needed]
            done = max(done, needed)
            start, upto = done, min(len(recompute), max(done, needed + ahead))
            for j, node in enumerate(nodes):
                order.append(_Placed(node, layer, "backward", last=j == len(nodes) - 1))
                share = start + (upto - start) * (j + 1) // len(nodes)
                order += recompute[done:share]
                done = share
        return order

    def _buckets(self, order: Sequence[_Placed]) -> list[_Bucket]:
        """Group the gathers of one pass in the order of first use."""
        gathers: list[
            tuple[str, int, list[int], int]
        ] = []  # group, bytes, uses, collectives before
        collectives = 0
        seen: dict[tuple[int, str], int] = {}
        for place, placed in enumerate(order):
            node = placed.node
            collectives += bool(node.collective)
            key = (placed.layer, node.name.removesuffix(" backward"))
            if not node.parameter_bytes:
                continue
            if key in seen:
                gathers[seen[key]][2].append(place)
                continue
            seen[key] = len(gathers)
            gathers.append(("data", node.parameter_bytes, [place], collectives))
            if self.model.norm_bytes and node is self.model.forward[0]:
                gathers.append(("all", self.model.norm_bytes, [place], collectives))
        joined: list[_Bucket] = []
        before: tuple[str, int] | None = None
        for group, nbytes, uses, passed in gathers:
            adjacent = before == (group, passed)
            joins = adjacent if self.policy.bucketing == "adjacent" else group == "data"
            at = len(joined) - 1
            if self.policy.bucketing == "any":
                at = next((i for i in reversed(range(len(joined))) if joined[i].group == group), -1)
            if joins and at >= 0 and joined[at].nbytes + nbytes <= self.policy.bucket_bytes:
                joined[at] = _Bucket(group, joined[at].nbytes + nbytes, (*joined[at].uses, *uses))
            else:
                joined.append(_Bucket(group, nbytes, tuple(uses)))
            before = (group, passed)
        return sorted(joined, key=lambda bucket: min(bucket.uses))

    def _run(self, order: Sequence[_Placed]) -> None:
        buckets = self._buckets(order)
        window = 0 if self.policy.consecutive == 0 else self.policy.window
        issued, arrives = 0, {}
        last_use: dict[int, list[int]] = {}
        for number, bucket in enumerate(buckets):
            last_use.setdefault(max(bucket.uses), []).append(number)
        for place, placed in enumerate(order):
            while issued < len(buckets) and min(buckets[issued].uses) <= place + window:
                arrives[issued] = self._gather(buckets[issued], placed)
                issued += 1
            for number, bucket in enumerate(buckets[:issued]):
                if number in arrives and min(bucket.uses) <= place:
                    self.b.join(arrives.pop(number))
            self._node(placed)
            for number in last_use.get(place, ()):
                self.b.hold("full", -buckets[number].nbytes)

    def _gather(self, bucket: _Bucket, placed: _Placed) -> int:
        b = self.b
        b.hold("full", bucket.nbytes)
        b.phase = "forward" if placed.phase == "forward" else "backward"
        return b.collective(
            "all_gather", f"layer {placed.layer}", bucket.group, bucket.nbytes,
            self.members[bucket.group].ranks, b.behind_compute(),
        )  # fmt: skip

    def _node(self, placed: _Placed) -> None:
        b, node = self.b, placed.node
        unit = f"layer {placed.layer}"
        phase = b.phase = "forward" if placed.phase == "forward" else "backward"
        chain = (placed.phase, placed.layer if placed.phase == "recompute" else 0)
        if node.collective:
            if chain not in self.coming:
                self._send(placed, chain)
            b.join(self.coming.pop(chain))
        number = len(b.ops)
        if placed.phase == "recompute":
            b.changes.append(Change(number, False, "activations", node.saved_bytes))
        elif placed.phase == "forward" and node is self.model.forward[0]:
            b.changes.append(Change(number, False, "activations", self.model.checkpoint_bytes))
        self.last[chain] = b.add(Op(placed.phase, unit, phase, "compute", COMPUTE, node.seconds))
        following = self._following(placed)
        if following is not None and following.node.collective:
            self._send(following, chain)
        if placed.phase == "backward" and placed.last:
            kept = sum(n.saved_bytes for n in self.model.forward) + self.model.checkpoint_bytes
            b.changes.append(Change(b.last_compute, True, "activations", -kept))
            gathered = sum(n.parameter_bytes for n in self.model.forward)
            nbytes = gathered // ITEMSIZE * self.model.reduce_itemsize
            b.collective(
                "reduce_scatter", unit, "data", nbytes, self.members["data"].ranks,
                b.behind_compute(),
            )  # fmt: skip

    def _following(self, placed: _Placed) -> _Placed | None:
        """The next node of the same layer and chain."""
        nodes = self.model.backward if placed.phase == "backward" else self.model.forward
        at = next(i for i, node in enumerate(nodes) if node is placed.node) + 1
        if at == len(nodes):
            return None
        return _Placed(nodes[at], placed.layer, placed.phase)

    def _send(self, placed: _Placed, chain: tuple[str, int]) -> None:
        """Start a node's tensor-parallel collective as soon as its chain has what it sends."""
        b, node = self.b, placed.node
        before = (self.last[chain],) if chain in self.last else b.behind_compute()
        b.phase = "forward" if placed.phase == "forward" else "backward"
        self.coming[chain] = b.collective(
            node.collective, f"layer {placed.layer}", "tensor", node.collective_bytes,
            self.members["tensor"].ranks, before,
        )  # fmt: skip
