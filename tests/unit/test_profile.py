"""Profiles without ranks: from marks and traces to spans, memory by role."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.engine import collectives
from shardwise.engine import marks as marking
from shardwise.engine.executor import marked
from shardwise.engine.marks import BufferMark, CallMark, Marks, RangeMark, WaitMark
from shardwise.profiling.collect import NothingProfiled
from shardwise.profiling.device import device_spans
from shardwise.profiling.host import host_step
from shardwise.profiling.memory import (
    MemoryBlock,
    Owned,
    Owners,
    assign_roles,
    draw_curve,
    host_blocks,
)
from shardwise.profiling.merge import RankTransfer, part_waiting
from shardwise.profiling.pieces import HostPieces
from shardwise.profiling.trace import HostAllocation, HostEvent, Kernel, TorchTrace
from shardwise.profiling.traced_to_timed import StepMap
from shardwise.timeline import COMPUTE, Span, Timeline

MS = 1_000_000


def make_marks() -> Marks:
    """A forward of units a and b, where b's gather is issued at 1 ms and waited for at 11 ms."""
    marks = Marks()
    call = CallMark(
        "all_gather", "b", "forward", "shard", 64, (0, 1), 1 * MS, 2 * MS, None, 15 * MS
    )
    marks.contexts[:] = [(0, "", "forward"), (3 * MS, "a", "forward"), (16 * MS, "b", "forward")]
    marks.ranges[:] = [
        RangeMark("gather", "b", "forward", 1 * MS, 3 * MS),
        WaitMark("wait", "b", "forward", 11 * MS, 16 * MS, call),
    ]
    marks.calls[:] = [call]
    return marks


def test_a_host_computes_copies_waits_and_idles() -> None:
    marks = make_marks()
    trace = TorchTrace(host=1)
    trace.operations = [
        HostEvent("c10d::allgather_", 1 * MS, 2 * MS, 1),
        HostEvent("aten::mm", 4 * MS, 8 * MS, 1),
        HostEvent("aten::mm", 8 * MS + 100_000, 10 * MS, 1),  # after Python between two operations
        HostEvent("aten::copy_", 5 * MS, 30 * MS, 2),  # gloo's own thread
        HostEvent("aten::mm", 17 * MS, 20 * MS, 1),
    ]
    trace.transfers = [HostEvent("gloo:all_gather", 2 * MS, 15 * MS, 2)]
    spans, transfers = host_step(trace, marks, (0, 20 * MS), 0)
    assert [t.span.start for t in transfers] == [2 * MS]
    timeline = Timeline((*spans, *part_waiting([transfers])))
    assert timeline.breakdown().parts() == {
        "compute": 9 * MS, "contention": 0, "exposed_transfer": 4 * MS, "waiting_for_peers": 0,
        "copies": 1 * MS, "host_idle": 6 * MS,
    }  # fmt: skip
    assert timeline.exposed() == {("b", "forward"): 4 * MS}
    computed = {s.unit: s.duration for s in spans if s.role == "compute"}
    assert computed == {"a": 6 * MS, "b": 3 * MS}
    # Waking up after the data had arrived is the host's.
    assert any(s.role == "host" and (s.start, s.end) == (15 * MS, 16 * MS) for s in spans)


def test_a_long_pause_between_operations_is_the_hosts() -> None:
    marks = Marks()
    marks.contexts[:] = [(0, "a", "forward")]
    trace = TorchTrace(host=1)
    trace.operations = [HostEvent("aten::mm", 0, MS, 1), HostEvent("aten::mm", 9 * MS, 10 * MS, 1)]
    spans, _ = host_step(trace, marks, (0, 10 * MS), 0)
    assert [(s.role, s.duration) for s in spans] == [
        ("compute", MS), ("host", 8 * MS), ("compute", MS),
    ]  # fmt: skip


def test_kernels_belong_to_the_mark_that_launched_them() -> None:
    marks = Marks("cuda")
    call = CallMark("all_gather", "b", "forward", "shard", 64, tuple(range(8)), 120, 140)
    marks.contexts[:] = [(0, "a", "forward"), (200, "b", "forward")]
    marks.ranges[:] = [RangeMark("gather", "b", "forward", 100, 180)]
    marks.calls[:] = [call]
    trace = TorchTrace()
    us = 1000
    trace.kernels = [
        Kernel("gemm", 10 * us, 20 * us, 7, 50, "kernel"),
        Kernel("convert", 12 * us, 13 * us, 8, 110, "kernel"),  # inside the gather, before its call
        Kernel("spin_kernel", 15 * us, 40 * us, 9, 130, "kernel"),  # inside the call
        Kernel("split", 40 * us, 41 * us, 8, 170, "kernel"),  # inside the gather, after it
        Kernel("gemm", 42 * us, 60 * us, 7, 250, "kernel"),  # was there and waited for the gather
        Kernel("gemm", 90 * us, 95 * us, 7, 85 * us, "kernel"),  # the host was late
    ]
    spans, transfers, opened, closed = device_spans(trace, marks, 0, 100 * us, 0)
    assert (opened, closed) == (0, 100 * us)
    timeline = Timeline((*spans, *part_waiting([transfers])))
    assert timeline.exposed() == {("b", "forward"): 20 * us}
    parts = timeline.breakdown()
    assert parts.compute == (10 + 18 + 5) * us
    assert parts.copies == 1 * us
    assert parts.host_idle == parts.step - parts.compute - parts.copies - parts.exposed_transfer
    late = [s for s in spans if s.name == "host late"]
    assert (late[-1].start, late[-1].end) == (60 * us, 90 * us)
    assert {s.unit for s in spans if s.role == "compute"} == {"a", "b"}
    assert [s.name for s in spans if s.role == "copy"] == ["cast", "copy-out"]


def transfer(rank: int, start: int, end: int, number: int = 0) -> RankTransfer:
    span = Span("all_gather", "a", "forward", "transfer", rank, "shard", start, end)
    return RankTransfer(span, ("shard", (0, 1), number), 8)


def test_time_beyond_the_quickest_rank_is_waiting() -> None:
    spans = part_waiting([[transfer(0, 0, 100)], [transfer(1, 90, 101)]])
    assert [(s.rank, s.role, s.start, s.end) for s in spans] == [
        (0, "waiting", 0, 89), (0, "transfer", 89, 100), (1, "transfer", 90, 101),
    ]  # fmt: skip


def test_memory_gets_the_role_of_its_owner_or_of_its_birth() -> None:
    marks = Marks()
    marks.contexts[:] = [(0, "a", "forward"), (100, "a", "backward"), (200, "", "optimizer")]
    marks.ranges[:] = [RangeMark("pack", "a", "backward", 150, 160)]
    full = object()
    marks.buffers[:] = [BufferMark(11, full, 3, 40), BufferMark(90, full, 3, -40)]
    before = Owners(tensors={1: Owned(100, "parameters", "parameters of a")})
    owners = Owners(
        tensors={1: Owned(100, "parameters", "parameters of a"), 2: Owned(7, "state", "exp_avg")},
        buffers={id(full): Owned(40, "full", "full of a")},
        sizes={"a": {30}},
    )
    allocations = [
        HostAllocation(10, 3, 40),
        HostAllocation(20, 4, 50),
        HostAllocation(25, 5, 60),
        HostAllocation(30, 5, -60),
        HostAllocation(91, 3, -40),
        HostAllocation(110, 6, 30),
        HostAllocation(120, 4, -50),
        HostAllocation(152, 7, 30),
        HostAllocation(170, 6, -30),
    ]
    blocks = host_blocks(allocations, before, owners, marks.buffers)
    assign_roles(blocks, owners, before, marks, HostPieces(marks, 0, 300))
    assert {(b.address, b.role) for b in blocks} == {
        (1, "parameters"), (2, "state"), (3, "full"), (4, "activations"), (5, "temporary"),
        (6, "gradients"), (7, "slots"),
    }  # fmt: skip
    memory = draw_curve(blocks, 0, 300)
    curve = memory.curve
    assert curve.totals[0] == 107 and max(curve.totals) == 107 + 40 + 50 + 60
    assert curve.totals[-1] == 107 + 30
    assert memory.largest[0] == {"bytes": 100, "role": "parameters", "what": "parameters of a"}


def test_a_long_curve_keeps_its_peak() -> None:
    blocks = [MemoryBlock(i, 1, born=i, died=i + 1 + (i == 4321) * 10**6) for i in range(1, 9000)]
    blocks.append(MemoryBlock(-1, 1000, born=7000, died=7001))
    curve = draw_curve(blocks, 0, 10**5).curve
    assert len(curve.times) < 2000 and max(curve.totals) >= 1001
    assert list(curve.times) == sorted(curve.times)


def two_steps(slept: int, waited: int) -> tuple[Marks, TorchTrace]:
    """A timed step from 100 ms on and the traced one from 0 on, both with a gather of b that is
    waited for; in the timed one a's forward takes `slept` longer and the wait `waited` in all.
    """
    marks = Marks()
    marks.contexts.clear()
    for at, more, wait in ((0, 0, 4), (100, slept, waited)):
        call = CallMark("all_gather", "b", "forward", "shard", 64, (0, 1), (at + 1) * MS)
        call.issued, call.end = (at + 2) * MS, (at + 12 + more + wait) * MS
        marks.roots.append(at * MS)
        for time, unit in ((at, ""), (at + 2, "a"), (at + 12 + more + wait, "b")):
            marks.contexts.append((time * MS, unit, "forward"))
        marks.ranges.append(WaitMark("wait", "b", "forward", (at + 12 + more) * MS, call.end, call))
        marks.calls.append(call)
    trace = TorchTrace(host=1)
    trace.operations = [
        HostEvent("aten::mm", 2 * MS, 4 * MS, 1),  # then the host sleeps for 6 ms
        HostEvent("aten::mm", 10 * MS, 12 * MS, 1),
        HostEvent("aten::mm", 16 * MS, 20 * MS, 1),
    ]
    trace.transfers = [HostEvent("gloo:all_gather", 2 * MS, 15 * MS, 2)]
    return marks, trace


def test_what_the_trace_knows_is_carried_to_the_timed_step_between_the_same_marks() -> None:
    marks, trace = two_steps(slept=10, waited=8)
    end = (100 + 12 + 10 + 8 + 2) * MS
    step_map = StepMap(marks, (0, 20 * MS), (90 * MS, end))
    assert not step_map.difference
    assert step_map.times([0, 2 * MS, 7 * MS, 20 * MS]) == [100 * MS, 102 * MS, 112 * MS, end]
    spans, transfers = host_step(trace, marks, (90 * MS, end), 0, step_map)
    # Twice as long between the marks of a's forward: 4 of 10 ms computed, 6 ms slept.
    computed = {unit: [s for s in spans if (s.unit, s.role) == (unit, COMPUTE)] for unit in "ab"}
    assert [(s.start, s.end) for s in computed["a"]] == [
        (102 * MS, 106 * MS), (118 * MS, 122 * MS),
    ]  # fmt: skip
    assert [(s.start, s.end) for s in computed["b"]] == [(130 * MS, end)]
    # The wait took longer, waking up did not.
    assert [(t.span.start, t.span.end) for t in transfers] == [(102 * MS, 129 * MS)]
    timeline = Timeline((*spans, *part_waiting([transfers])))
    assert timeline.exposed() == {("b", "forward"): 7 * MS}
    # Before the forward, where nothing was traced, is the host's.
    assert timeline.breakdown().host_idle == (10 + 2 + 12 + 1) * MS


def test_a_transfer_that_was_there_in_the_traced_step_and_not_in_the_timed_one() -> None:
    marks, trace = two_steps(slept=0, waited=8)
    trace.transfers = [HostEvent("gloo:all_gather", 2 * MS, 3 * MS, 2)]
    end = 122 * MS
    step_map = StepMap(marks, (0, 20 * MS), (100 * MS, end))
    _, transfers = host_step(trace, marks, (100 * MS, end), 0, step_map)
    assert [(t.span.start, t.span.end) for t in transfers] == [(102 * MS, 120 * MS)]


def test_steps_that_went_different_ways_say_where() -> None:
    marks, _ = two_steps(slept=0, waited=4)
    marks.contexts[4] = 102 * MS, "c", "forward"
    step_map = StepMap(marks, (0, 20 * MS), (100 * MS, 120 * MS))
    assert step_map.difference == "context c forward where the traced step has context a forward"
    marks.contexts.pop(4)
    shorter = StepMap(marks, (0, 20 * MS), (100 * MS, 120 * MS))
    assert "where the traced step has" in shorter.difference


def test_without_a_trace_what_no_mark_tells_is_compute() -> None:
    marks, _ = two_steps(slept=0, waited=4)
    spans, transfers = host_step(None, marks, (100 * MS, 120 * MS), 0)
    timeline = Timeline((*spans, *part_waiting([transfers])))
    assert timeline.exposed() == {("b", "forward"): 4 * MS}
    assert timeline.breakdown().compute == (1 + 10 + 4) * MS


def test_marks_say_nothing_when_nobody_listens() -> None:
    assert marking.on is None
    with marked("gather", "a"):
        pass
    assert collectives._issued("handle") == "handle"


def test_marks_are_shown_to_another_tool_while_a_trace_runs() -> None:
    shown: list[str] = []

    class Tool:
        def start(self, text: str) -> str:
            shown.append(text)
            return text

        def end(self, token: str) -> None:
            shown.remove(token)

    marks = Marks("cuda", Tool())
    with marks.range("gather", "a"):
        assert shown == []
        marks.traced = True
    marks.enter("a", "forward")
    with marks.range("gather", "b"):
        assert shown == ["forward a", "gather b"]
        marks.traced = False
    assert shown == ["forward a"]
    marks.leave()
    assert shown == []


def test_one_process_is_a_rank_of_its_own() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(3)])
    sw.shard(model, sw.Plan.of("zero3", mesh=1))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(512, 128)).sum().backward()
        optimizer.step()

    step()
    with sw.profile(model, steps=2) as measured:
        for _ in range(4):  # more than are profiled
            step()
    assert marking.on is None
    assert measured.timeline.labels["steps"] == "2"
    computes = {(s.unit, s.phase) for s in measured.timeline.spans if s.role == COMPUTE}
    assert {(str(i), phase) for i in range(3) for phase in ("forward", "backward")} <= computes
    assert ("", "optimizer") in computes
    assert measured.messages == []
    assert "note" not in measured.timeline.labels
    with (
        pytest.warns(UserWarning, match="ended before its last step"),
        sw.profile(model, steps=5) as fewer,  # than were asked for
    ):
        for _ in range(4):
            step()
    assert fewer.timeline.labels["steps"] == "4"
    assert "before its last step" in fewer.timeline.labels["note"]
    assert fewer.timeline.peak().by_role["parameters"] > 0


def test_when_the_last_step_goes_another_way_it_is_the_one_shown() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    sw.shard(model, sw.Plan.of("zero3", mesh=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(passes: int) -> None:
        optimizer.zero_grad()
        for _ in range(passes):
            model(torch.ones(4, 8)).sum().backward()
        optimizer.step()

    step(1)
    with (
        pytest.warns(UserWarning, match="went another way"),
        sw.profile(model, steps=3) as measured,
    ):
        for passes in (1, 1, 2):
            step(passes)
    assert "where the traced step has" in measured.timeline.labels["note"]
    start, end = measured.bounds[-1]
    assert measured.timeline.step <= end - start
    first = [s for s in measured.timeline.spans if (s.unit, s.phase) == ("0", "forward")]
    last = [s for s in measured.timeline.spans if (s.unit, s.phase) == ("2", "backward")]
    assert max(s.start for s in first) > min(s.end for s in last)  # two passes


def test_all_optimizers_of_the_last_step_are_in_it() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
    optimizers = [torch.optim.SGD(block.parameters(), lr=0.1) for block in model]
    with sw.profile(model, steps=3) as measured:
        for _ in range(4):
            model(torch.ones(4, 8)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert measured.timeline.labels["steps"] == "3" and "note" not in measured.timeline.labels
    counts = []
    for start, end in measured.bounds:
        turns = [c for c in measured.marks.contexts if start < c[0] < end and c[2] == "optimizer"]
        counts.append(len(turns))
    assert counts == [2, 2, 2]


def test_a_plain_model_is_profiled_by_its_blocks() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.profile(model, steps=2) as measured:
        for _ in range(2):
            model(torch.ones(256, 64)).sum().backward()
            optimizer.step()
    computes = {(s.unit, s.phase) for s in measured.timeline.spans if s.role == COMPUTE}
    assert {(str(i), phase) for i in range(3) for phase in ("forward", "backward")} <= computes
    assert measured.timeline.labels["engine"] == "torch"


def test_a_profile_without_a_step_is_an_error() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(NothingProfiled, match="no training step ended"), sw.profile(model):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match="steps is 0"):
        sw.profile(model, steps=0)
    assert marking.on is None


def test_an_error_inside_ends_the_profile() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(KeyError), sw.profile(model):
        raise KeyError
    assert marking.on is None


def test_a_profile_inside_another_leaves_the_optimizers_alone() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with sw.profile(model, steps=2) as outer:
        with pytest.raises(RuntimeError, match="runs already"), sw.profile(model):
            pass
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
    assert outer.timeline.labels["steps"] == "2"


@pytest.mark.parametrize(
    ("model", "steps", "told"),
    [
        (nn.Linear(2, 2), 2.5, "steps is 2.5, expected a whole number"),
        (nn.Linear(2, 2), "3", "steps is '3'"),
        ("model", 3, "model is a str, expected the nn.Module"),
    ],
)
def test_what_cannot_be_profiled_is_told(model: object, steps: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        sw.profile(model, steps=steps)  # type: ignore[arg-type]
