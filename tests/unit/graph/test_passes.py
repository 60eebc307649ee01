"""Each pass: what it leaves, that results are the same, and that its argument is not touched."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from shardwise.errors import UserError
from shardwise.graph.nodes import is_compute, is_wait, kind_of, message_bytes
from shardwise.graph.passes import (
    PassOptions,
    bucket,
    cap,
    identify,
    prefetch,
    restore_order,
    run_passes,
    snapshot,
    sort,
    summarize,
)
from shardwise.graph.passes.bucket import choose
from shardwise.graph.passes.order import compute_before, copy_graph, stable_order
from shardwise.graph.passes.prefetch import first_needed
from tests.unit.graph import graphs
from tests.unit.graph.graphs import GROUP, OTHER, backward_of

ONE = 512  # bytes of a gathered or scattered weight: 8 x 8 in 64 bits


@pytest.fixture(scope="module")
def backward() -> tuple[Graph, list[torch.Tensor]]:
    return backward_of(6)


PASSES: dict[str, Callable[[Graph], Graph]] = {
    "coalesced": lambda g: bucket(g, group=GROUP, bucket_bytes=4 * ONE),
    "packed": lambda g: bucket(g, group=GROUP, bucket_bytes=4 * ONE, coalesced=False),
    "adjacent": lambda g: bucket(g, group=GROUP, bucket_bytes=4 * ONE, adjacent_only=True),
    "prefetch": lambda g: prefetch(g, window=7, in_flight_bytes=4 * ONE),
    "stable": lambda g: sort(g, ready_first=False),
    "ready first": sort,
    "cap": lambda g: cap(g, group=GROUP, before=snapshot(g, group=GROUP), max_consecutive=2),
    "restore": lambda g: restore_order(g, before=snapshot(g, group=GROUP)),
}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_keeps_results_and_its_argument(
    name: str, backward: tuple[Graph, list[torch.Tensor]]
) -> None:
    graph, values = backward
    was = graphs.fingerprint(graph)
    made = PASSES[name](graph)
    made.lint()
    assert graphs.fingerprint(graph) == was
    assert all("val" in node.meta for node in made.nodes if node.op != "output")
    graphs.assert_equal(graph, made, values)


@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("more", [{}, {"restore": True}, {"max_consecutive": None}, {"window": 3}])
def test_all_passes_together_keep_results(
    coalesced: bool, more: dict[str, int], backward: tuple[Graph, list[torch.Tensor]]
) -> None:
    graph, values = backward
    options = PassOptions(**{"bucket_bytes": 5 * ONE, "coalesced": coalesced, **more})
    forward, made, summaries = run_passes(graph, graph, options)
    graphs.assert_equal(graph, made, values)
    graphs.assert_equal(graph, forward, values)
    assert [s.after for s in summaries] == ["none", "bucket", "prefetch", "sort", "cap"] * 2
    assert len({(s.gather_bytes, s.scatter_bytes) for s in summaries}) == 1


# -- identify ------------------------------------------------------------------------------------


def test_the_primary_group_is_the_one_with_most_gathers(
    backward: tuple[Graph, list[torch.Tensor]],
) -> None:
    found = identify(backward[0])
    assert found.group == GROUP
    assert len(found.gathers) == len(found.scatters) == 18
    assert len(identify(backward[0], group=OTHER).gathers) == 6  # norms


def test_a_gather_of_activations_is_left_out() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return graphs.gathered(x @ graphs.gathered(w.to(torch.float64)), OTHER)

    graph = graphs.trace(function, torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8))
    found = identify(graph)
    assert found.group == GROUP and len(found.gathers) == 1
    assert identify(graph, group=OTHER).gathers == ()


def test_a_scatter_that_goes_on_computing_is_left_out() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = graphs.scattered(x)
        return graphs.scattered(inner @ x.t()), graphs.reduced(graphs.scattered(x) / 2) + 1

    graph = graphs.trace(function, torch.randn(8, 8))
    found = identify(graph)
    assert found.group == GROUP and found.gathers == ()
    assert len(found.scatters) == 2


def test_padding_and_slices_derive_from_the_parameter() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        padded = torch.nn.functional.pad(w, (0, 0, 0, 1)).to(torch.float64)
        return x @ graphs.gathered(padded)[:8]

    graph = graphs.trace(function, torch.randn(4, 8, dtype=torch.float64), torch.randn(4, 8))
    assert len(identify(graph).gathers) == 1


def test_without_gathers_the_group_may_be_given() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return graphs.scattered(x)

    graph = graphs.trace(function, torch.randn(8, 8))
    assert identify(graph, group="none such").scatters == ()
    assert len(identify(graph, group=GROUP).scatters) == 1


# -- bucket --------------------------------------------------------------------------------------


@pytest.mark.parametrize("coalesced", [True, False])
def test_buckets_hold_what_fits(
    coalesced: bool, backward: tuple[Graph, list[torch.Tensor]]
) -> None:
    made = bucket(backward[0], group=GROUP, bucket_bytes=4 * ONE, coalesced=coalesced)
    found = identify(made, group=GROUP)
    assert [message_bytes(n) // ONE for n in found.gathers] == [4, 4, 4, 4, 2]
    assert [message_bytes(n) // ONE for n in found.scatters] == [4, 4, 4, 4, 2]
    assert len(graphs.names(made, "all_gather", OTHER)) == 6


def test_adjacent_buckets_end_where_another_group_gathers(
    backward: tuple[Graph, list[torch.Tensor]],
) -> None:
    made = bucket(backward[0], group=GROUP, bucket_bytes=4 * ONE, adjacent_only=True)
    found = identify(made, group=GROUP)
    assert [message_bytes(n) // ONE for n in found.gathers] == [3] * 6
    assert [message_bytes(n) // ONE for n in found.scatters] == [4, 4, 4, 4, 2]


def test_a_bucket_spans_no_more_compute_than_it_may(
    backward: tuple[Graph, list[torch.Tensor]],
) -> None:
    made = bucket(backward[0], group=GROUP, bucket_bytes=1 << 20, max_span=3)
    found = identify(made, group=GROUP)
    assert len(found.gathers) == 6 and len(found.scatters) == 12


def test_a_gather_bucket_stands_where_its_first_stood(
    backward: tuple[Graph, list[torch.Tensor]],
) -> None:
    made = bucket(backward[0], group=GROUP, bucket_bytes=1 << 20)
    order = list(made.nodes)
    gather = identify(made, group=GROUP).gathers[0]
    waits = [n for n in made.nodes if is_wait(n) and n in {p.result for p in gather.meta["parts"]}]
    assert order.index(gather) < next(i for i, n in enumerate(order) if is_compute(n))
    between = [sum(map(is_compute, order[: order.index(w)])) for w in waits]
    assert len(set(between)) > 6  # where they were: at uses all over the graph


def test_dependent_collectives_are_never_joined_not_even_through_a_bucket() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = graphs.scattered(x)
        b = graphs.scattered(torch.cat([a, a]))  # needs a
        c = graphs.scattered(y)
        d = graphs.scattered(torch.cat([c, c]))  # needs c
        return b, d

    graph = graphs.trace(function, torch.randn(8, 8), torch.randn(8, 8))
    all_four = [n for n in graph.nodes if kind_of(n)]
    a, b, c, d = all_four
    chosen = choose(graph, [a, d, b, c], among=[a, d, b, c], bucket_bytes=1 << 20)
    # b needs a, so it is not with a; c with b would need itself, through d that is with a.
    assert chosen == [[a, d], [b], [c]]


# -- prefetch ------------------------------------------------------------------------------------


def leads(graph: Graph) -> list[int]:
    """How many compute nodes stand between each gather and the first that needs it."""
    gathers = identify(graph, group=GROUP).gathers
    before, needed = compute_before(graph), first_needed(graph, gathers)
    return [needed[n] - before[n] for n in gathers]


@pytest.mark.parametrize("window", [0, 1, 5, 50])
def test_gathers_come_earlier_by_the_window(
    window: int, backward: tuple[Graph, list[torch.Tensor]]
) -> None:
    made = prefetch(backward[0], window=window, in_flight_bytes=1 << 30)
    assert max(leads(made)) == min(window, 47)
    assert sum(n == window for n in leads(made)) >= (16 - window if window < 16 else 0)


def test_gathers_in_flight_are_bounded(backward: tuple[Graph, list[torch.Tensor]]) -> None:
    made = prefetch(backward[0], window=50, in_flight_bytes=3 * ONE)
    flying, most = set(), 0
    for node in made.nodes:
        if kind_of(node) == "all_gather":
            flying.add(node)
            most = max(most, sum(map(message_bytes, flying)))
        elif is_compute(node):
            flying -= {g for g in flying if node in _reached(g)}
    assert most <= 3 * ONE
    assert max(leads(made)) > 1


def _reached(node: Node) -> set[Node]:
    found, stack = set(), [node]
    while stack:
        for user in stack.pop().users:
            if user not in found:
                found.add(user)
                stack.append(user)
    return found


# -- sort ----------------------------------------------------------------------------------------


def test_a_wider_window_lets_recomputation_run_ahead_of_the_first_scatter() -> None:
    """The seed's problem, by itself: nothing says how far."""
    graph, _ = backward_of(12)
    firsts = {}
    for window in (2, 12, 24, 1000):
        options = PassOptions(bucket_bytes=12 * ONE, window=window, max_consecutive=None)
        _, _, summaries = run_passes(graph, graph, options)
        firsts[window] = summaries[-1].before_first
    _, _, unsorted = run_passes(graph, graph, options, passes=("bucket", "prefetch"))
    assert firsts[2] <= firsts[12] < firsts[24] < firsts[1000]
    assert firsts[1000] > unsorted[-1].before_first
    recomputed = 3 * 12
    assert firsts[1000] >= recomputed  # all of it before the first gradient travels


def test_order_only_dependencies_hold(backward: tuple[Graph, list[torch.Tensor]]) -> None:
    graph, _ = copy_graph(backward[0])
    compute = [n for n in graph.nodes if is_compute(n)]
    first = compute[0]
    free = next(n for n in compute[1:] if n not in _reached(first) and first not in _reached(n))
    first.meta["after"] = (free,)
    for ready_first in (True, False):
        made = sort(graph, ready_first=ready_first)
        order = [n.name for n in made.nodes]
        assert order.index(free.name) < order.index(first.name)
        new = next(n for n in made.nodes if n.name == first.name)
        assert [n.name for n in new.meta["after"]] == [free.name]
    first.meta["after"] = (next(n for n in compute if n in _reached(first)),)
    with pytest.raises(ValueError, match="depend on each other"):
        sort(graph)


def test_waits_for_gradients_come_last(backward: tuple[Graph, list[torch.Tensor]]) -> None:
    made = sort(backward[0])
    order = list(made.nodes)
    last = max(i for i, n in enumerate(order) if is_compute(n))
    scatters = identify(made, group=GROUP).scatters
    assert all(order.index(user) > last for node in scatters for user in node.users)


@pytest.mark.parametrize("most", [None, 2])
def test_an_all_reduce_behind_a_scatter_lets_the_next_scatter_go_first(most: int | None) -> None:
    def function(x: torch.Tensor, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        found = []
        for weight in weights:
            x = x @ weight
            found.append(graphs.reduced(graphs.scattered(x), "replicas") / 2)
        return (x, *found)

    values = [torch.randn(8, 8, dtype=torch.float64) for _ in range(6)]
    graph = graphs.trace(function, *values)
    options = PassOptions(bucket_bytes=2 * ONE if most else 1, max_consecutive=most)
    _, made, _ = run_passes(graph, graph, options)
    graphs.assert_equal(graph, made, values)
    kinds = [kind_of(n)[:3] for n in made.nodes if kind_of(n) or is_compute(n)]
    if most is None:  # of each, but for the last: scatter, product, scatter, product, all-reduce
        assert kinds[:6] == ["", "red", "", "red", "", "all"]


# -- cap -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 3 * ONE, 8 * ONE, 1 << 20])
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize("most", [4, 6, 8])
def test_no_run_is_longer_than_the_cap(bucket_bytes: int, coalesced: bool, most: int) -> None:
    graph, values = backward_of(8)
    was = snapshot(graph, group=GROUP).runs()[:-1]
    options = PassOptions(
        bucket_bytes=bucket_bytes, coalesced=coalesced, window=1000, max_consecutive=most
    )
    _, made, _ = run_passes(graph, graph, options)
    assert summarize(made, group=GROUP).longest_run <= max(most, *was)
    assert max(was) > 4  # so that for 4 it was the original order that had a longer run
    graphs.assert_equal(graph, made, values)


def test_the_cap_keeps_some_of_the_overlap() -> None:
    graph, _ = backward_of(8)
    options = PassOptions(bucket_bytes=3 * ONE, window=1000)
    _, made, _ = run_passes(graph, graph, options)
    _, restored, _ = run_passes(graph, graph, PassOptions(restore=True, window=1000))
    original = [n.name for n in graph.nodes if is_compute(n)]
    assert [n.name for n in restored.nodes if is_compute(n)] == original
    capped = [n.name for n in made.nodes if is_compute(n)]
    assert capped != original
    done: set[str] = set()
    for name in capped:
        done.add(name)
        turn = next((i for i, n in enumerate(original) if n not in done), len(original))
        assert len(done) - turn <= 8  # ahead of their turn


# -- run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"bucket_bytes": 0}, "bucket_bytes is 0, expected a whole number >= 1"),
        ({"window": -1}, "window is -1"),
        ({"max_consecutive": 0}, "max_consecutive is 0"),
        ({"max_span": 1.5}, "max_span is 1.5"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        PassOptions(**wrong)


def test_an_unknown_pass_is_named(backward: tuple[Graph, list[torch.Tensor]]) -> None:
    with pytest.raises(UserError, match="unknown pass 'buckets': did you mean 'bucket'"):
        run_passes(backward[0], backward[0], passes=("buckets",))


# -- any graph -----------------------------------------------------------------------------------


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    """Steps over values of one shape: what is done, to which earlier values."""
    length = draw(st.integers(4, 30))
    kinds = st.sampled_from(["mm", "add", "gather", "gather", "scatter", "reduce", "mix"])
    return [
        (draw(kinds), draw(st.integers(0, 100)), draw(st.integers(0, 100))) for _ in range(length)
    ]


def graph_of(steps: list[tuple[str, int, int]]) -> tuple[Graph, list[torch.Tensor]]:
    """Of any program: gathers of parameters, products, all-reduces, scatters that end, others that
    do not.
    """
    parameters = sum(kind == "gather" for kind, *_ in steps)

    def function(x: torch.Tensor, *shards: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values, outputs, left = [x], [], list(shards)
        for kind, i, j in steps:
            a, b = values[i % len(values)], values[j % len(values)]
            if kind == "mm":
                values.append(a @ b)
            elif kind == "add":
                values.append(a + b)
            elif kind == "gather":
                shard = left.pop()
                values.append(graphs.gathered(shard if i % 3 else shard.double() * 1).double())
            elif kind == "scatter":
                outputs.append(graphs.scattered(a).float() if i % 2 else graphs.scattered(a))
            elif kind == "reduce":
                values.append(graphs.reduced(a))
            else:
                half = graphs.scattered(a)
                values.append(torch.cat([half, half]))
        return (*outputs, values[-1])

    torch.manual_seed(1)
    examples = [torch.randint(-2, 3, (4, 4)).double()]
    examples += [torch.randint(-2, 3, (2, 4)).double() for _ in range(parameters)]
    return graphs.trace(function, *examples), examples


@settings(max_examples=15, deadline=None)
@given(programs(), st.integers(1, 8), st.booleans(), st.integers(0, 12), st.integers(1, 5))
def test_any_graph_keeps_its_results_and_dependencies(
    steps: list[tuple[str, int, int]], fits: int, coalesced: bool, window: int, most: int
) -> None:
    graph, values = graph_of(steps)
    options = PassOptions(
        bucket_bytes=fits * 128, coalesced=coalesced, window=window, max_consecutive=most
    )
    was = snapshot(graph, group=GROUP).runs()[:-1]
    _, made, summaries = run_passes(graph, graph, options)
    graphs.assert_equal(graph, made, values)
    if identify(graph).group == GROUP:
        assert summaries[-1].longest_run <= max(most, *was, 0)
    _, uncapped, _ = run_passes(graph, graph, options, passes=("bucket", "prefetch", "sort"))
    _in_order(uncapped)
    restored = restore_order(uncapped, before=snapshot(graph, group=GROUP))
    compute = [n.name for n in graph.nodes if is_compute(n)]
    assert [n.name for n in restored.nodes if is_compute(n)] == compute


def _in_order(graph: Graph) -> None:
    seen: set[Node] = set()
    for node in graph.nodes:
        assert set(node.all_input_nodes) <= seen
        seen.add(node)


@settings(max_examples=15, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_the_stable_order_is_torchs(steps: list[tuple[str, int, int]], random: object) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    graph, _ = graph_of(steps)
    nodes = list(graph.nodes)
    inner = nodes[1:-1]
    random.shuffle(inner)  # type: ignore[attr-defined]
    for before, node in zip([nodes[0], *inner], [*inner, nodes[-1]], strict=True):
        before.append(node)
    ours = stable_order(graph.nodes)
    stable_topological_sort(graph)
    assert list(graph.nodes) == ours
