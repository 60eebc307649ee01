"""What a step of graphs takes: kernels and their fusion, collectives beside them, memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Graph, Node

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import Members
from shardwise.errors import UserError
from shardwise.graph.cost import MeshAxis, program_of, simulate_graphs
from shardwise.graph.nodes import ALL_GATHER, REDUCE_SCATTER, WAIT
from shardwise.graph.passes.order import copy_graph
from shardwise.graph.passes.run import PassOptions
from shardwise.graph.passes.schedule import Trial, choose, frontier
from shardwise.graph.passes.settle import settle
from shardwise.predict.cost import Costs
from shardwise.predict.program import Op, Program

aten = torch.ops.aten
AXES = {"g": MeshAxis("shard", Members(4))}
COSTS = Costs.of(Cluster.load("h100x8"))
N = 4096
SQUARE = N * N * 2  # bytes of a bf16 matrix


class Drawn:
    """A graph drawn by hand, every node with an example of its value."""

    def __init__(self) -> None:
        self.graph = Graph()

    def given(self, name: str, *shape: int) -> Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return node

    def call(self, target: Callable[..., Any], *args: Any) -> Node:
        node = self.graph.call_function(target, args)
        values = torch.fx.node.map_arg(args, lambda n: n.meta["val"])
        node.meta["val"] = target(*values)
        return node

    def mm(self, a: Node, b: Node) -> Node:
        return self.call(aten.mm.default, a, b)

    def gather(self, part: Node) -> Node:
        return self.call(ALL_GATHER, part, 4, "g")

    def end(self, *results: Node) -> Graph:
        self.graph.output(tuple(results))
        self.graph.lint()
        return self.graph


def nothing() -> Graph:
    return Drawn().end()


def computes(program: Program) -> list[Op]:
    return [op for op in program.ops if op.role == "compute"]


def curve(program: Program, role: str) -> list[int]:
    held, seen = 0, [0]
    for change in program.changes:
        held += change.nbytes if change.role == role else 0
        seen.append(held)
    return seen


def test_a_chain_of_pointwise_kernels_is_one_that_reads_and_writes_its_ends() -> None:
    d = Drawn()
    x, w = d.given("x", N, N), d.given("w", N, N)
    y = d.mm(x, w)
    inside = d.call(aten.relu.default, y)
    chain = d.call(aten.mul.Tensor, d.call(aten.view.default, inside, [N, N]), x)
    z = d.mm(chain, w)
    program = program_of(d.end(z), nothing(), COSTS, AXES)
    assert [op.name for op in computes(program)] == ["mm", "fused mul", "mm"]
    fused = computes(program)[1]
    assert fused.seconds == pytest.approx(3 * SQUARE / COSTS.cluster.device.copy_bytes_per_s)
    # y and the chain's end together, then the chain's end and z; what is inside is nowhere.
    assert max(curve(program, "activations")) == 2 * SQUARE


def test_pointwise_kernels_that_share_nothing_stay_apart() -> None:
    d = Drawn()
    x, w = d.given("x", N, N), d.given("w", N, N)
    a, b = d.call(aten.relu.default, x), d.call(aten.relu.default, w)
    program = program_of(d.end(d.mm(a, b)), nothing(), COSTS, AXES)
    assert [op.name for op in computes(program)] == ["relu", "relu", "mm"]


def test_a_pointwise_value_of_few_inputs_is_made_again_where_it_is_read() -> None:
    """A cast between products that two chains read, one on each side of a product: no memory of
    its own, its input stays instead. One that a product reads is in memory.
    """
    d = Drawn()
    x, w = d.given("x", N, N), d.given("w", N, N)
    y = d.mm(x, w)
    cast = d.call(aten.relu.default, y)
    first = d.call(aten.mul.Tensor, cast, x)
    z = d.mm(first, w)
    last = d.call(aten.add.Tensor, cast, z)
    program = program_of(d.end(d.mm(last, w)), nothing(), COSTS, AXES)
    assert [op.name for op in computes(program)] == ["mm", "fused mul", "mm", "add", "mm"]
    assert max(curve(program, "activations")) == 3 * SQUARE  # y, z and what one of them becomes
    d = Drawn()
    x, w = d.given("x", N, N), d.given("w", N, N)
    cast = d.call(aten.relu.default, d.mm(x, w))
    z = d.mm(cast, w)
    last = d.call(aten.add.Tensor, cast, z)
    program = program_of(d.end(d.mm(last, w)), nothing(), COSTS, AXES)
    assert [op.name for op in computes(program)] == ["mm", "relu", "mm", "add", "mm"]


def test_a_value_of_many_inputs_is_made_once() -> None:
    d = Drawn()
    w, parts = d.given("w", N, N), [d.given(f"x{i}", N, N) for i in range(6)]
    total = parts[0]
    for part in parts[1:]:
        total = d.call(aten.add.Tensor, total, part)
    z = d.mm(d.call(aten.relu.default, total), w)
    program = program_of(d.end(d.call(aten.add.Tensor, total, z)), nothing(), COSTS, AXES)
    last = computes(program)[-1]
    assert last.seconds == pytest.approx(3 * SQUARE / COSTS.cluster.device.copy_bytes_per_s)


def gathered_step(early: bool) -> Graph:
    """Two products; the second one's weight is gathered before the first, or behind it."""
    d = Drawn()
    x, w, part = d.given("x", N, N), d.given("w", N, N), d.given("part", N // 4, N)
    full = d.gather(part) if early else None
    y = d.mm(x, w)
    for _ in range(8):
        y = d.mm(y, w)
    full = full or d.gather(part)
    return d.end(d.mm(y, d.call(WAIT, full)))


def test_a_collective_runs_beside_compute_until_its_wait() -> None:
    early = simulate_graphs(gathered_step(True), nothing(), COSTS, AXES)
    late = simulate_graphs(gathered_step(False), nothing(), COSTS, AXES)
    (gather,) = late.overlaps("all_gather")
    assert not gather.is_hidden and gather.span.stream == "shard"
    (hidden,) = early.overlaps("all_gather")
    assert hidden.hidden > 0 and hidden.exposed < gather.exposed and early.step < late.step
    for timeline in (early, late):
        parts = timeline.breakdown()
        assert parts.step == sum(parts.parts().values())
        assert timeline.peak().by_role["parameters"] == 2 * SQUARE + SQUARE // 4
    # It is paid for in memory: the gathered weight is there for longer.
    held = [t.curve().roles["full"] for t in (early, late)]
    assert [max(roles) for roles in held] == [SQUARE, SQUARE]
    assert early.peak().total >= late.peak().total


def test_a_collective_of_an_unknown_group_is_named() -> None:
    with pytest.raises(ValueError, match=r"'g', expected one of \['other'\]"):
        program_of(gathered_step(True), nothing(), COSTS, {"other": AXES["g"]})


def two_passes() -> tuple[Graph, Graph]:
    """y = relu(x w), saved through a view; backward makes w's gradient and scatters it."""
    d = Drawn()
    x, part = d.given("primals_1", N, N), d.given("primals_2", N // 4, N)
    w = d.call(WAIT, d.gather(part))
    y = d.call(aten.relu.default, d.mm(x, w))
    seen = d.call(aten.view.default, y, [N * N])
    forward = d.end(y, x, seen)
    d = Drawn()
    x, seen = d.given("primals_1", N, N), d.given("view", N * N)
    tangent = d.given("tangents_1", N, N)
    y = d.call(aten.view.default, seen, [N, N])
    masked = d.call(aten.mul.Tensor, tangent, y)
    gradient = d.mm(d.call(aten.t.default, x), masked)
    scattered = d.call(REDUCE_SCATTER, gradient, "sum", 4, "g")
    later = d.mm(x, x)
    return forward, d.end(d.call(WAIT, scattered), later)


def test_memory_comes_and_goes_with_its_uses() -> None:
    program = program_of(*two_passes(), COSTS, AXES)
    left: dict[str, int] = defaultdict(int)
    for change in program.changes:
        left[change.role] += change.nbytes
        assert left[change.role] >= 0, change
    assert left["full"] == left["activations"] == 0
    assert left["gradients"] == SQUARE // 4 + SQUARE  # both results of backward
    assert left["state"] == 2 * left["gradients"]
    # What is saved, through its view, is there when backward begins; the product is not.
    begins = next(i for i, op in enumerate(program.ops) if op.phase == "backward")
    saved = sum(c.nbytes for c in program.changes if c.role == "activations" and c.at < begins)
    assert saved == SQUARE


def test_what_a_reduce_scatter_reads_stays_until_its_wait() -> None:
    program = program_of(*two_passes(), COSTS, AXES)
    last = max(i for i, op in enumerate(program.ops) if op.role == "compute")
    held = sum(c.nbytes for c in program.changes if c.role == "activations" and c.at < last)
    assert held == SQUARE  # the whole gradient, while the last product runs


def test_reduce_scatters_are_waited_for_in_time() -> None:
    """Waits at the end hold every whole gradient; `settle` lets go of all but two at a time."""
    d = Drawn()
    x = d.given("primals_1", N, N)
    scattered = [d.call(REDUCE_SCATTER, d.mm(x, x), "sum", 4, "g") for _ in range(6)]
    backward = d.end(*[d.call(WAIT, node) for node in scattered])
    settled, _ = copy_graph(backward)
    settle(settled, under_way_bytes=2 * SQUARE)
    assert [n.name for n in settled.nodes if n.op == "output"] == ["output"]
    forward = Drawn()
    empty = forward.end(forward.given("primals_1", N, N))
    late, soon = (program_of(empty, graph, COSTS, AXES) for graph in (backward, settled))
    assert max(curve(late, "activations")) == 6 * SQUARE
    assert max(curve(soon, "activations")) == 3 * SQUARE  # two under way, and the next one's
    assert len(late.ops) == len(soon.ops)
    order = [n.name for n in backward.nodes]
    settle(backward, under_way_bytes=6 * SQUARE)  # all may be under way
    assert [n.name for n in backward.nodes] == order


def trial(ms: float, nbytes: int) -> Trial:
    return Trial(PassOptions(), ms, 0.0, nbytes)


def test_the_frontier_and_the_choice() -> None:
    trials = [trial(3.0, 10), trial(1.0, 30), trial(2.0, 30), trial(2.0, 20), trial(4.0, 10)]
    assert [(t.step_ms, t.peak_bytes) for t in frontier(trials)] == [(1, 30), (2, 20), (3, 10)]
    assert choose(trials, 25).step_ms == 2.0
    with pytest.raises(UserError, match="the least is"):
        choose(trials, 5)
