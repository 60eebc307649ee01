"""The arena's layout: nothing that lives at once overlaps, for any schedule; and what a Plan says
of it.
"""

from __future__ import annotations

import itertools

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwise as sw
from shardwise.description.cluster import Cluster
from shardwise.description.workload import Workload
from shardwise.emulation.run import joined
from shardwise.planning.memory import count_kept, lay_out_arena
from shardwise.profiling import footprint
from shardwise.schedule.arena import ALIGNMENT, Life, Lives, lay_out

ROLES = st.sampled_from(["full", "staging", "slot"])


@st.composite
def steps(draw: st.DrawFn) -> list[Life]:
    """What any order of taking and giving back leaves: several pieces of a unit at once, some that
    outlive the step, some from before it.
    """
    lives, there, sizes = Lives(), [], {}
    for part in range(draw(st.integers(1, 2))):
        if part:
            lives.begin_step()
        for _ in range(draw(st.integers(0, 40))):
            if there and draw(st.booleans()):
                lives.give(there.pop(draw(st.integers(0, len(there) - 1))))
                continue
            role, unit = draw(ROLES), f"unit {draw(st.integers(0, 5))}"
            nbytes = sizes.setdefault((role, unit), draw(st.integers(1, 9000)))
            there.append(lives.take(role, unit, nbytes, role if role == "slot" else "compute"))
    return lives.end_step()


@settings(max_examples=150, deadline=None)
@given(steps())
def test_what_lives_at_once_does_not_overlap(lives: list[Life]) -> None:
    layout = lay_out(lives)
    for life in lives:
        start = layout.offsets[life.key]
        assert start % ALIGNMENT == 0 and start >= 0
        assert start + life.nbytes <= layout.nbytes
    for one, other in itertools.combinations(lives, 2):
        a, b = layout.offsets[one.key], layout.offsets[other.key]
        apart = a + one.nbytes <= b or b + other.nbytes <= a
        assert apart or (one.stream == other.stream and not one.meets(other)), (one, other)
        assert apart != (other.key in layout.sharing()[one.key])
    # No more than all side by side, no less than what is there at the worst moment.
    sizes = {life.key: -(-life.nbytes // ALIGNMENT) * ALIGNMENT for life in lives}
    moments = {moment for life in lives for span in life.spans for moment in span}
    for stream in {life.stream for life in lives}:
        of_stream = [life for life in lives if life.stream == stream]
        for moment in moments:
            there = [s for s in of_stream if any(a <= moment < b for a, b in s.spans)]
            assert sum(sizes[life.key] for life in there) <= layout.nbytes
    assert layout.nbytes <= sum(sizes.values())


def test_blocks_that_run_one_after_the_other_share_two_places() -> None:
    lives = Lives()
    last = lives.take("full", "0", 1000, "compute")
    for i in range(1, 9):
        ahead = lives.take("full", str(i), 1000, "compute")
        lives.give(last)
        last = ahead
    lives.give(last)
    assert lay_out(lives.end_step()).nbytes == 2 * 1024


def test_explain_prints_the_arena_to_the_byte() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    plan = sw.Plan.of("zero3", 4, units=[nn.Linear], memory="arena").resolve(model)
    device, host = (lay_out_arena(plan, 1, streams).nbytes for streams in (True, False))
    assert f"arena: {device:,} bytes in one block; on a CPU {host:,}" in plan.explain()
    # Two units of 1056 numbers at once; staging and a slot beside them, rows behind counts.
    full = 32 * 33 * torch.float32.itemsize
    assert device < 4 * (full + 4 * 8 * 4 + ALIGNMENT)
    assert "arena" not in sw.Plan.of("zero3", 4).resolve(model).explain()
    # The block is always there: what stands in it counts whole, the gradients' rows come on top,
    # and on a host what gloo's ranks receive beside a slot.
    kept = count_kept(plan)
    assert kept.at_once == kept.master + kept.state + device + kept.gradients
    received = full + 4 * 4 * 8
    assert kept.host_at_once == kept.master + kept.state + host + kept.gradients + received


def test_auto_is_an_arena_where_there_are_streams() -> None:
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
    arena, auto, plain = (
        sw.Plan.of("zero3", 4, units=[nn.Linear], memory=memory).resolve(model)
        for memory in ("arena", "auto", "allocator")
    )
    assert [p.has_arena(streams=True) for p in (arena, auto, plain)] == [True, True, False]
    assert [p.has_arena(streams=False) for p in (arena, auto, plain)] == [True, False, False]
    device = lay_out_arena(auto, 1, streams=True).nbytes
    assert f"arena: {device:,} bytes in one block; on a CPU none" in auto.explain()
    described = sw.describe(model, torch.zeros(2, 32), auto)
    work = Workload(1, 2, of="samples")
    for name, expected in (("h200x8-measured", arena), ("cpu-gloo", plain)):
        cluster = Cluster.load(name)
        peaks = [sw.simulate(p, described, cluster, work).peak() for p in (auto, expected)]
        assert peaks[0].total == peaks[1].total
        found = sw.simulate(auto, described, cluster, work).memory[0].roles["full"]
        assert (set(found[1:]) == {device}) == (name != "cpu-gloo")


def test_a_host_has_no_arena_by_auto(no_group: None) -> None:
    with joined(0, 4):
        model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])
        sw.shard(model, sw.Plan.of("zero3", 4, memory="auto"))
        for _ in range(4):
            model(torch.ones(2, 8)).sum().backward()
        assert footprint.arena_bytes(model) is None
