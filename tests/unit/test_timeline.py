"""The timeline's identity, attribution, files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.timeline import COMPUTE, SPAN_ROLES, MemoryCurve, Span, Timeline


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
    assert timeline.host_bound() == 2
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
