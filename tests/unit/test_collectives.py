"""Collective times: the ring's formula, the hierarchy, measured tables, what must always hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.description.cluster import (
    COLLECTIVES,
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulRate,
    Protocol,
)
from shardwise.description.collectives import (
    ALL_TO_ALL,
    Members,
    bus_share,
    collective_time,
    find_hops,
)

H100 = Cluster.load("h100x8")
CLUSTERS = {
    name: Cluster.load(name) for name in ("h100x8", "a100x8", "b200x8", "tpu-v5p", "cpu-gloo")
}
names = st.sampled_from(sorted(CLUSTERS))
kinds = st.sampled_from((*COLLECTIVES, ALL_TO_ALL))
sizes = st.floats(1, 1e12)


def simple(bandwidth: float = 1e9, step: float = 0.0, points=()) -> Cluster:
    """One level, one protocol: the bare formula."""
    device = Device("d", 1e9, 1e9, 0.9, 0.0, (MatmulRate("float32", 1e12, 1.0),))
    level = Level("l", None, bandwidth, (Protocol("p", 0.0, step),), tuple(points))
    return Cluster("c", device, (level,), Host(0, 0, 0))


@given(names, kinds, st.integers(1, 4), sizes, st.integers(1, 16))
def test_one_rank_takes_no_time(name, kind, stride, nbytes, ranks) -> None:
    assert collective_time(CLUSTERS[name], kind, nbytes, Members(1, stride)) == 0
    assert collective_time(CLUSTERS[name], kind, 0, ranks) == 0


@given(names, kinds, st.integers(2, 512), st.sampled_from([1, 2, 8]), sizes, st.floats(1, 100))
def test_more_bytes_never_take_less_time(name, kind, ranks, stride, nbytes, factor) -> None:
    cluster, members = CLUSTERS[name], Members(ranks, stride)
    less = collective_time(cluster, kind, nbytes, members)
    more = collective_time(cluster, kind, nbytes * factor, members)
    assert 0 < less <= more * (1 + 1e-9)


@given(st.integers(2, 8), sizes)
def test_an_all_to_all_is_a_gather_inside_a_node(ranks, nbytes) -> None:
    both = [collective_time(H100, kind, nbytes, ranks) for kind in (ALL_TO_ALL, "all_gather")]
    assert both[0] == both[1]


def test_an_all_to_all_across_nodes_goes_by_each_rank_s_own_link() -> None:
    link = H100.levels[1].bandwidth_bytes_per_s
    for nodes in (2, 4):
        taken = collective_time(H100, ALL_TO_ALL, 1e12, 8 * nodes)
        assert taken == pytest.approx(1e12 * (nodes - 1) / nodes / link, rel=0.1)


@given(st.sampled_from(["h100x8", "b200x8", "tpu-v5p"]), st.integers(2, 256))
def test_an_all_reduce_is_a_scatter_and_a_gather(name, ranks) -> None:
    cluster, nbytes = CLUSTERS[name], 1e12
    gather = collective_time(cluster, "all_gather", nbytes, ranks)
    scatter = collective_time(cluster, "reduce_scatter", nbytes, ranks)
    reduce = collective_time(cluster, "all_reduce", nbytes, ranks)
    assert gather == scatter
    assert reduce == pytest.approx(2 * gather, rel=1e-3)


@given(st.integers(2, 64), sizes)
def test_the_bare_ring(ranks, nbytes) -> None:
    cluster = simple(bandwidth=1e9, step=1e-6)
    expected = (ranks - 1) * 1e-6 + nbytes * (ranks - 1) / ranks / 1e9
    assert collective_time(cluster, "all_gather", nbytes, ranks) == pytest.approx(expected)
    assert collective_time(cluster, "all_reduce", nbytes, ranks) == pytest.approx(2 * expected)


def test_large_messages_inside_a_node_go_at_nvlinks_bandwidth() -> None:
    seconds = collective_time(H100, "all_gather", 8e9, 8)
    assert seconds == pytest.approx(8e9 * 7 / 8 / 370e9, rel=0.01)


def test_small_messages_cost_latency_and_take_the_quick_protocol() -> None:
    # NCCL's LL: 6.6 us to start, 7 steps of 0.6 us.
    assert collective_time(H100, "all_gather", 8, 8) == pytest.approx(10.8e-6, rel=0.01)
    assert collective_time(H100, "all_reduce", 8, 8) == pytest.approx(15.0e-6, rel=0.01)


def test_the_slowest_level_decides() -> None:
    hops = find_hops(H100, Members(32))
    assert [(hop.level.name, hop.members, hop.groups) for hop in hops] == [
        ("nvlink", 1, 8),
        ("infiniband", 8, 4),
    ]
    # Eight adapters of 47 GB/s carry a node's traffic: 376 GB/s, about NVLink's own.
    whole = collective_time(H100, "all_gather", 32e9, Members(32))
    assert whole == pytest.approx(32e9 * 31 / 32 / 370e9, rel=0.02)
    # One rank of each of four nodes has one adapter.
    across = collective_time(H100, "all_gather", 32e9, Members(4, stride=8))
    assert across == pytest.approx(32e9 * 3 / 4 / 47e9, rel=0.02)
    assert [h.level.name for h in find_hops(H100, Members(4, stride=8))] == ["infiniband"]
    # Two of each node, stride 4.
    assert [(h.members, h.groups) for h in find_hops(H100, Members(4, stride=4))] == [
        (1, 2),
        (2, 2),
    ]


def test_more_nodes_add_steps() -> None:
    few = collective_time(H100, "all_gather", 1e5, Members(2, stride=8))
    many = collective_time(H100, "all_gather", 1e5, Members(64, stride=8))
    assert many > few + 60 * 2.7e-6


def points(ranks: int = 2) -> list[CollectivePoint]:
    return [
        CollectivePoint("all_gather", ranks, 1_000, 1e-4),
        CollectivePoint("all_gather", ranks, 100_000, 1e-3),
        CollectivePoint("all_gather", ranks, 10_000_000, 5e-2),
    ]


def test_a_measured_table_is_interpolated_in_the_logarithms() -> None:
    cluster = simple(points=points())
    time = {n: collective_time(cluster, "all_gather", n, 2) for n in (10, 1000, 10_000, 100_000)}
    assert time[10] == time[1000] == 1e-4
    assert time[10_000] == pytest.approx((1e-4 * 1e-3) ** 0.5)
    assert time[100_000] == pytest.approx(1e-3)
    assert collective_time(cluster, "all_gather", 1e8, 2) == pytest.approx(0.5)
    # A kind without points keeps the formula.
    assert collective_time(cluster, "all_reduce", 1e9, 2) == pytest.approx(1.0)


def test_a_noisy_table_still_rises() -> None:
    noisy = [dataclasses.replace(p, seconds=2e-3) if p.nbytes == 1000 else p for p in points()]
    cluster = simple(points=noisy)
    assert collective_time(cluster, "all_gather", 100_000, 2) == 2e-3


def test_another_group_size_takes_the_nearest_measured_at_equal_traffic() -> None:
    cluster = simple(points=points(ranks=2))
    assert collective_time(cluster, "all_gather", 1_000_000, 4) == pytest.approx(
        collective_time(cluster, "all_gather", 1_500_000, 2)
    )


def test_wrong_questions() -> None:
    with pytest.raises(ValueError, match="collective 'gather'"):
        collective_time(H100, "gather", 1, 2)
    with pytest.raises(ValueError, match="at least 1"):
        Members(0)
    limited = dataclasses.replace(H100, levels=H100.levels[:1])
    with pytest.raises(ValueError, match="has 16 ranks, but cluster h100x8 holds 8"):
        collective_time(limited, "all_gather", 1, 16)
    assert bus_share("all_reduce", 4) == 1.5


def test_measured_points_count_for_groups_that_lie_as_the_measured_ones() -> None:
    """Two ranks on each of two hosts: inside a host, one of each, all."""
    base = simple(bandwidth=1e6)
    points = [
        CollectivePoint("all_gather", 2, 1000, 0.2),
        CollectivePoint("all_gather", 4, 1000, 0.3, 0, 2),
    ]
    inner = dataclasses.replace(
        base.levels[0], ranks=2, points=(CollectivePoint("all_gather", 2, 1000, 0.1),)
    )
    outer = dataclasses.replace(base.levels[0], name="link", points=tuple(points))
    cluster = dataclasses.replace(base, levels=(inner, outer))
    assert collective_time(cluster, "all_gather", 1000, Members(2)) == 0.1
    assert collective_time(cluster, "all_gather", 1000, Members(2, stride=2)) == 0.2
    assert collective_time(cluster, "all_gather", 1000, Members(4)) == 0.3
    # Of this kind nothing was measured: the ring.
    assert collective_time(cluster, "all_reduce", 1e6, Members(2)) == pytest.approx(1.0)
