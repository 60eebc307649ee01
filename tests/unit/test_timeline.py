"""The timeline's identity, attribution, files."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.timeline import COMPUTE, SPAN_ROLES, Busy, MemoryCurve, Span, Timeline


def span(role: str, stream: str, start: int, end: int, unit: str = "u", **more: object) -> Span:
    name = more.pop("name", role)
    phase = more.pop("phase", "forward")
    return Span(name, unit, phase, role, 0, stream, start, end, **more)  # type: ignore[arg-type]


def test_every_moment_has_one_kind() -> None:
    timeline = Timeline(
        (
            span("compute", COMPUTE, 10, 30, alone=15),
            span("transfer", "shard", 0, 12, unit="a", name="all_gather"),
            span("waiting", "shard", 30, 34, unit="b"),
            span("transfer", "shard", 34, 40, unit="b", name="all_gather"),
            span("copy", "gather", 40, 43, unit="b"),
            span("copy", COMPUTE, 45, 47),
            span("host", "host", 0, 47),
        )
    )
    parts = timeline.breakdown()
    assert parts.step == 47
    assert parts.parts() == {
        "compute": 15, "contention": 5, "exposed_transfer": 16, "waiting_for_peers": 4,
        "copies": 5, "host_idle": 2,
    }  # fmt: skip
    assert timeline.exposed() == {("a", "forward"): 10, ("b", "forward"): 6}
    assert timeline.waiting() == {("b", "forward"): 4}
    assert timeline.breakdown().host_idle == 2
    first, second = timeline.overlaps("all_gather")
    assert (first.hidden, first.exposed, first.is_hidden) == (2, 10, False)
    assert (second.hidden, second.exposed) == (0, 6)
    assert "step 0.0 ms = compute" in str(parts)


spans = st.builds(
    lambda role, stream, start, length, alone: Span(
        role, "u", "forward", role, 0, stream, start, start + length,
        alone if role == "compute" else None,
    ),
    st.sampled_from(SPAN_ROLES),
    st.sampled_from([COMPUTE, "shard", "replicate", "host"]),
    st.integers(0, 1000),
    st.integers(0, 300),
    st.one_of(st.none(), st.integers(0, 300)),
)  # fmt: skip


@given(st.lists(spans, min_size=1, max_size=30))
def test_the_parts_sum_to_the_step_exactly(found: list[Span]) -> None:
    timeline = Timeline(tuple(found))
    parts = timeline.breakdown()
    assert parts.step == sum(parts.parts().values())
    assert all(value >= 0 for value in parts.parts().values())
    assert sum(timeline.exposed().values()) == parts.exposed_transfer
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(st.lists(spans, min_size=1, max_size=30))
def test_overlaps_are_hidden_under_compute_and_sum_up(found: list[Span]) -> None:
    timeline = Timeline(tuple(found))
    ran = {t for s in found if s.stream == COMPUTE for t in range(s.start, s.end)}
    for overlap in timeline.overlaps():
        moments = range(overlap.span.start, overlap.span.end)
        assert overlap.hidden == sum(t in ran for t in moments)
    exposed = sum(overlap.exposed for overlap in timeline.overlaps())
    assert exposed <= timeline.breakdown().exposed_transfer


def test_busy_counts_overlapping_intervals_once() -> None:
    busy = Busy([(0, 4), (2, 6), (8, 9), (7, 7)])
    assert busy.stretches == [(0, 6), (8, 9)]
    assert busy.between(0, 10) == 7
    assert busy.between(3, 8) == 3 and busy.between(6, 8) == 0 and busy.between(-5, 1) == 1
    assert Busy([]).between(0, 5) == 0


def test_busy_and_idle_stretches_fill_the_time_between_two_moments() -> None:
    busy = Busy([(0, 4), (6, 9), (20, 30)], gap=2)  # what is at most 2 apart is one stretch
    assert busy.stretches == [(0, 9), (20, 30)]
    assert list(busy.inside(3, 25)) == [(3, 9), (20, 25)]
    assert list(busy.outside(3, 25)) == [(9, 20)]
    assert list(busy.outside(-5, 35)) == [(-5, 0), (9, 20), (30, 35)]
    assert list(busy.inside(10, 20)) == [] and list(busy.outside(0, 9)) == []


def count_calls(function: Callable[[], object]) -> int:
    """Calls of Python and builtin functions inside; an element of a generator is one."""
    count = 0

    def count_one(_frame: object, event: str, _arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count_one)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def test_twice_the_spans_take_twice_the_work() -> None:
    def look(count: int) -> int:
        made = []
        for i in range(count // 2):  # every transfer outlasts its compute by 2 ns
            made.append(span("compute", COMPUTE, 10 * i, 10 * i + 8))
            made.append(span("transfer", "shard", 10 * i + 4, 10 * i + 10))
        timeline = Timeline(tuple(made))

        def ask() -> None:
            overlaps = timeline.overlaps()
            assert len(overlaps) == count // 2
            assert all((o.hidden, o.exposed) == (4, 2) for o in overlaps)
            assert timeline.step == 5 * count and timeline.slowest == 0

        return count_calls(ask)

    first, twice = look(10_000), look(20_000)
    assert twice < 2.2 * first and twice < 100 * 20_000
    timeline = Timeline((span("compute", COMPUTE, 0, 10),))
    assert timeline.step == 10
    assert count_calls(lambda: [timeline.step for _ in range(100)]) < 10


def test_memory_peak_and_files() -> None:
    curve = MemoryCurve(0, (0, 5, 9), {"parameters": (4, 4, 4), "activations": (0, 7, 1)})
    timeline = Timeline(
        (span("compute", COMPUTE, 0, 10),), (curve,), stands_for={0: 8}, labels={"plan": "zero3"}
    )
    peak = timeline.peak()
    assert (peak.total, peak.time, peak.by_role["activations"]) == (11, 5, 7)
    assert timeline.world == 8
    assert Timeline.from_json(timeline.to_json()) == timeline
    events = json.loads(json.dumps(timeline.to_chrome()))["traceEvents"]
    assert {e["ph"] for e in events} == {"M", "X", "C"}
    assert any("and 7 like it" in str(e["args"]) for e in events)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: span("spin", COMPUTE, 0, 1), "role 'spin'"),
        (lambda: span("copy", COMPUTE, 2, 1), "before its start"),
        (lambda: MemoryCurve(0, (0, 1), {"full": (1,)}), "one each"),
        (lambda: MemoryCurve(0, (1, 0), {"full": (1, 1)}), "back in time"),
        (lambda: MemoryCurve(0, (0,), {"magic": (1,)}), "unknown"),
        (lambda: Timeline((span("copy", COMPUTE, 0, 1),), (MemoryCurve(3, (), {}),)), "ranks"),
    ],
)
def test_values_check_themselves(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
