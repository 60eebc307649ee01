"""Findings on steps made by the simulator or by hand, each with one planted loss."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from shardwise.reporting.findings import Finding, choose, find, find_in
from shardwise.reporting.findings.communication import FIRST, LAST, LATE, TURN, WIRE, explain
from shardwise.reporting.formats import (
    name_collective,
    name_units,
    show_bytes,
    show_share,
    show_time,
)
from shardwise.reporting.run import read_run
from shardwise.timeline import MemoryCurve, Span, Timeline
from tests.browser.made import Workload, cluster, resolved, simulate
from tests.parity import planted

MS = 1_000_000
PLAN = {"name": "zero3", "forward_prefetch": 1, "backward_prefetch": 1, "reduce_depth": 1}


def step(slow=None, rate=12e9, **settings):
    plan, description = resolved(**settings)
    return simulate(plan, description, cluster(rate), Workload(8), slow=slow), plan


def kinds(found):
    return [finding.kind for finding in found]


def only(found, kind):
    return next(finding for finding in found if finding.kind == kind)


def span(name, unit, phase, role, start, end, rank=0, stream=None, alone=None):
    lane = stream or ("compute" if role in ("compute", "host") else "shard")
    return Span(name, unit, phase, role, rank, lane, int(start * MS), int(end * MS), alone)


def row(count, length, gap_after=None, gap=0.0, rank=0, phase="forward"):
    """Compute of `count` units one after the other, with one gap."""
    spans, at = [], 0.0
    for i in range(count):
        spans.append(span(phase, f"layers.{i}", phase, "compute", at, at + length, rank))
        at += length + (gap if i == gap_after else 0)
    return spans


def test_a_slow_rank_is_named_with_what_it_costs_and_where_it_shows():
    timeline, plan = step(slow={2: 1.2})
    found = only(find(timeline, None, json.loads(plan.to_json())), "slow_rank")
    assert found.rank == 2
    waits = timeline.breakdown(0).waiting_for_peers
    assert found.cost_ns == waits - timeline.breakdown(2).waiting_for_peers > 0
    assert found.text.startswith(f"Rank 2 is late: the other ranks wait {show_time(waits)}")
    first = next(s.span for s in timeline.segments(0) if s.kind == "waiting_for_peers")
    assert f"starts to show at {first.unit} in {first.phase}" in found.text
    assert "more on compute" in found.text


@pytest.fixture
def first_of(two, tmp_path_factory):
    """The three findings that the report of a planted run opens with, by kind."""

    def read(fault):
        run = read_run(planted.run_planted(two, tmp_path_factory.getbasetemp(), fault))
        return {finding.kind: finding for finding in choose(find_in(run))[0]}

    return read


def names_late_rank(found, sleep):
    return (
        found.rank == 1
        and found.cost_ns > 0.5e9 * sleep
        and f"within blocks.{planted.SLOW} in forward" in found.text
    )


def names_bare_unit(found):
    return found.units == (f"blocks.{planted.BARE}",) and "forward_prefetch is 1" in found.change


def names_sleep(found):
    place = f"between blocks.{planted.AFTER} and blocks.{planted.AFTER + 1} in forward"
    return found.cost_ns > 0.9e9 * planted.SLEEP_S and f"ms, is {place}" in found.text


@pytest.mark.quiet
def test_each_planted_fault_of_two_real_ranks_is_among_the_first_three(first_of):
    assert names_late_rank(first_of("slow")["slow_rank"], planted.SLEEP_S)
    assert names_bare_unit(first_of("exposed")["unprefetched"])
    assert names_sleep(first_of("host")["host_bound"])


@pytest.mark.quiet
def test_three_faults_planted_in_one_run_are_its_three_findings(first_of):
    first = first_of("all")
    assert set(first) == {"slow_rank", "unprefetched", "host_bound"}
    assert names_late_rank(first["slow_rank"], planted.LONG_SLEEP_S)
    # Over gloo the block behind it may be late with it.
    assert f"blocks.{planted.BARE}" in first["unprefetched"].units
    assert "forward_prefetch" in first["unprefetched"].change
    assert names_sleep(first["host_bound"]) and first["host_bound"].rank == 0


def test_even_ranks_have_no_slow_one():
    spans = [*row(4, 10), *row(4, 10, rank=1)]
    assert "slow_rank" not in kinds(find(Timeline(tuple(spans))))


def test_a_rank_that_its_host_holds_up_is_told_from_one_that_computes_longer():
    late = [*row(4, 10, gap_after=1, gap=15, rank=1)]
    waits = [
        *row(4, 10),
        span("reduce_scatter", "layers.3", "backward", "waiting", 40, 55),
        span("reduce_scatter", "layers.3", "backward", "transfer", 55, 56),
    ]
    done = span("reduce_scatter", "layers.3", "backward", "transfer", 55, 56, rank=1)
    found = only(find(Timeline((*waits, *late, done))), "slow_rank")
    assert found.rank == 1
    assert "15.0 ms more on host idle" in found.text
    assert "between layers.1 and layers.2 in forward" in found.text
    assert "Look at the host of rank 1" in found.text


def test_gathers_without_prefetch_are_grouped_and_the_setting_is_named():
    timeline, plan = step(forward_prefetch=0)
    found = find(timeline, None, json.loads(plan.to_json()))
    late = next(f for f in found if "issued only when" in f.text and "in forward" in f.text)
    assert "all-gathers of layers 1 to 7 are exposed" in late.text
    assert late.text.endswith("Raise forward_prefetch from 0 to 1.")
    assert late.units == tuple(f"layers.{i}" for i in range(1, 8))
    exposed = sum(v for (unit, phase), v in timeline.exposed().items() if phase == "forward")
    first = timeline.exposed()["layers.0", "forward"]
    assert late.cost_ns == exposed - first


def test_backward_has_its_own_setting():
    timeline, plan = step(backward_prefetch=0)
    found = find(timeline, None, json.loads(plan.to_json()))
    assert any(f.text.endswith("Raise backward_prefetch from 0 to 1.") for f in found)
    assert not any("forward_prefetch from" in f.text for f in found)


def test_a_single_unit_that_is_not_gathered_ahead_is_told_from_a_slow_wire():
    compute, gathers = [], []
    at = 4.0
    gathers.append(span("all_gather", "layers.0", "forward", "transfer", 0, 4))
    for i in range(8):
        if i == 5:  # gathered on demand: compute waits for all of it
            gathers.append(span("all_gather", "layers.5", "forward", "transfer", at, at + 4))
            at += 4
        compute.append(span("forward", f"layers.{i}", "forward", "compute", at, at + 10))
        if i + 1 not in (5, 8):
            gathers.append(span("all_gather", f"layers.{i + 1}", "forward", "transfer", at, at + 4))
        at += 10
    timeline = Timeline((*compute, *gathers))
    assert [(w.span.unit, w.why) for w in explain(timeline, 0)] == [
        ("layers.0", FIRST),
        ("layers.5", LATE),
    ]
    found = next(f for f in find(timeline, None, PLAN) if f.units == ("layers.5",))
    assert found.kind == "unprefetched"
    assert "all-gather of layers.5 is exposed 4.00 ms" in found.text
    assert "not gathered ahead although forward_prefetch is 1" in found.text


def test_a_slow_wire_is_told_from_a_late_gather():
    timeline, plan = step(rate=3e9)
    reasons = {w.why for w in explain(timeline, 0) if w.span.phase == "forward"}
    assert reasons == {FIRST, WIRE}
    found = find(timeline, None, json.loads(plan.to_json()))
    wire = next(f for f in found if "take longer than it" in f.text)
    assert "The wire is slower than compute here" in wire.change
    assert "bfloat16" in wire.change


def test_the_ends_of_a_step_are_explained_as_such():
    timeline, _ = step()
    reasons = {(w.span.name, w.span.unit): w.why for w in explain(timeline, 0)}
    assert reasons["all_gather", "layers.0"] == FIRST
    assert reasons["all_gather", "layers.7"] == TURN
    assert reasons["reduce_scatter", "layers.0"] == LAST


def test_messages_too_small_for_the_wire_ask_for_larger_units():
    timeline, plan = step(rate=3e9)
    curve = [
        {"collective": "all_gather", "ranks": 4, "bytes": size, "seconds": 1e-3 + size / 1e10}
        for size in (1e5, 1e6, 1e8, 1e9)
    ]
    sent = [
        {"collective": "all_gather", "unit": f"layers.{i}", "phase": "forward", "ranks": 4,
         "bytes": 1e6, "seconds": 2e-3, "exposed_s": 1e-3}
        for i in range(8)
    ]  # fmt: skip
    messages = {"messages": sent, "curve": curve}
    found = find(timeline, None, json.loads(plan.to_json()), messages=messages)
    assert any("make units larger" in f.change for f in found)


def test_a_host_that_sleeps_is_found_where_it_does():
    timeline = Timeline(tuple(row(6, 10, gap_after=2, gap=12)))
    found = only(find(timeline), "host_bound")
    assert found.cost_ns == 12 * MS
    assert found.units == ("layers.2",)
    assert "the largest gap, 12.0 ms, is between layers.2 and layers.3 in forward" in found.text
    assert "Find what the host does between layers.2 and layers.3 in forward" in found.text


def test_many_small_gaps_are_the_host_s_pace_not_one_place():
    spans = []
    for i in range(40):
        spans.append(span("forward", f"layers.{i}", "forward", "compute", 2 * i, 2 * i + 1))
    found = only(find(Timeline(tuple(spans))), "host_bound")
    assert "small and many" in found.change
    assert found.cost_ns == 39 * MS
    on_cpu = Timeline(tuple(spans), labels={"device": "cpu"})
    assert "On a CPU" in only(find(on_cpu), "host_bound").change


def test_copies_and_contention_are_found_by_unit():
    spans = row(6, 10)
    spans[3] = dataclasses.replace(spans[3], alone=4 * MS)
    spans.append(span("copy-out", "layers.0", "forward", "copy", 60, 70, stream="compute"))
    found = find(Timeline(tuple(spans)), None, {**PLAN, "gather": "packed"})
    copied, slowed = only(found, "copies"), only(found, "contention")
    assert copied.cost_ns == 10 * MS and "copy-out 10.0 ms" in copied.text
    assert 'gather="grouped"' in copied.change
    assert slowed.cost_ns == 6 * MS and slowed.units == ("layers.3",)


def with_memory(*totals):
    curve = MemoryCurve(0, (0, 1, 2), {"activations": tuple(totals), "state": (100, 100, 100)})
    return Timeline(tuple(row(4, 10)), (curve,))


def test_memory_near_its_limit_comes_first():
    memory = {"ranks": [{"rank": 0, "limit_bytes": 1050, "peak_allocated": 1000}]}
    found = find(with_memory(0, 900, 10), memory=memory)
    assert found[0].kind == "memory" and found[0].urgent
    assert "95 % of its 1.0 KiB" in found[0].text
    assert "activations 900 B" in found[0].text and "checkpointing" in found[0].change


def test_a_fragmented_reserve_is_said():
    entry = {"rank": 0, "limit_bytes": 2000, "peak_allocated": 1000, "reserved": [1990]}
    found = find(with_memory(0, 900, 10), memory={"ranks": [entry]})
    assert "fragmented" in found[0].text and "expandable_segments" in found[0].change


def test_a_step_beyond_its_prediction_says_what_grew():
    predicted = Timeline(tuple(row(4, 10)))
    measured = Timeline(tuple(row(4, 15)))
    found = only(find(measured, predicted), "deviation")
    assert "takes 60.0 ms where 40.0 ms were predicted; 20.0 ms of the difference is compute" in (
        found.text
    )
    assert "shardwise calibrate" in found.change


def test_an_optimizer_slower_than_predicted_is_named_before_the_units():
    def steps(layer, update):
        spans, at = row(4, layer), 4 * layer
        return Timeline((*spans, span("update", "", "optimizer", "compute", at, at + update)))

    found = only(find(steps(11, 60), steps(10, 5)), "deviation")
    assert "is compute, most in the optimizer's step." in found.text


def test_when_nothing_stands_out_it_says_so_and_gives_facts():
    timeline = Timeline(tuple(row(6, 10)))
    first, _ = choose(find(timeline, timeline))
    assert len(first) == 3
    assert first[0].kind == "good" and first[0].text.startswith("Nothing stands out")
    assert any("of the predicted 60.0 ms" in f.text for f in find(timeline, timeline))


@pytest.mark.parametrize("settings", [{}, {"forward_prefetch": 0}, {"rate": 2e9}, {"slow": {1: 2}}])
def test_always_exactly_three_are_shown_and_every_loss_costs_less_than_the_step(settings):
    timeline, plan = step(**settings)
    found = find(timeline, None, json.loads(plan.to_json()))
    first, rest = choose(found)
    assert len(first) == 3 and len({f.text for f in first}) == 3
    assert set(first) | set(rest) == set(found)
    assert all(0 <= f.cost_ns < timeline.step for f in found)
    costs = [f.cost_ns for f in found]
    assert costs == sorted(costs, reverse=True)


def test_one_of_each_kind_is_shown_before_a_second_one():
    found = [
        Finding("exposed", "a", cost_ns=9),
        Finding("exposed", "b", cost_ns=8),
        Finding("slow_rank", "c", cost_ns=2),
        Finding("host_bound", "d", cost_ns=1),
        Finding("fact", "e"),
    ]
    first, rest = choose(found)
    assert [f.what for f in first] == ["a", "c", "d"]
    assert [f.what for f in rest] == ["b", "e"]
    assert [f.what for f in choose(found[:2] + found[4:])[0]] == ["a", "b", "e"]


@pytest.mark.parametrize(
    ("units", "words"),
    [
        (["layers.0", "layers.1", "layers.2", "layers.3"], "layers 0 to 3"),
        (["layers.5", "layers.4", "layers.3"], "layers 3 to 5"),
        (["root"], "root"),
        (["0", "1", "2"], "units 0 to 2"),
        (["7"], "unit 7"),
        ([""], "the root"),
        (["root", "layers.0", "layers.1"], "root and layers 0 and 1"),
        (["a", "b", "c", "d", "e", "f"], "a, b, c, d and 2 more"),
        (["h.0", "h.1", "h.2", "h.7", "head"], "h 0 to 2, h.7 and head"),
    ],
)
def test_neighbouring_units_are_named_together(units, words):
    assert name_units(units) == words


def test_words_for_numbers():
    times = [0, 5_000, 812_345, 4_120_000, 41_200_000, 2_512_300_000]
    assert [show_time(t) for t in times] == [
        "0 ms", "5 µs", "0.81 ms", "4.12 ms", "41.2 ms", "2,512 ms",
    ]  # fmt: skip
    assert [show_share(s) for s in (0, 0.034, 0.0996, 0.254)] == ["0 %", "3.4 %", "10 %", "25 %"]
    assert [show_bytes(b) for b in (None, 5, 3 * 2**20, 300 * 2**20, 2**31)] == [
        "unknown", "5 B", "3.0 MiB", "300 MiB", "2.00 GiB",
    ]  # fmt: skip
    assert name_collective("all_gather call") == "all-gather"
    assert name_collective("gather") == "all-gather"
    assert name_collective("reduce_scatter") == "reduce-scatter"


def test_findings_read_as_sentences():
    timeline, plan = step(slow={1: 1.3}, forward_prefetch=0)
    for finding in find(timeline, None, json.loads(plan.to_json())):
        assert re.match(r"^[A-Z0-9].*[.?]$", finding.text), finding.text
        assert "  " not in finding.text and "None" not in finding.text.replace("None of it", "")


def test_small_pieces_of_exposed_time_are_summed():
    spans, at = [], 0.0
    for i in range(20):  # each gather outlasts the compute beside it by 0.3 ms, of 20 ms in all
        phase = ("forward", "backward", "optimizer")[i * 3 // 20]
        spans.append(span(phase, f"layers.{i}", phase, "compute", at, at + 1))
        if i % 4 == 0:
            name = ("all_gather", "reduce_scatter", "all_reduce")[i // 4 % 3]
            spans.append(span(name, f"layers.{i}", phase, "transfer", at + 0.5, at + 1.3))
            at += 0.3
        at += 1
    found = [f for f in find(Timeline(tuple(spans)), None, PLAN) if f.kind == "exposed"]
    assert len(found) == 1 and found[0].cost_ns == int(5 * 0.3 * MS)
    assert "sum to 1.50 ms" in found[0].text and "in 5 small pieces" in found[0].text
