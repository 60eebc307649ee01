"""What a profile collected, read into one step of one rank."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace

import torch

from shardwise.engine.marks import Marks
from shardwise.profiling import device as profile_device
from shardwise.profiling import foreign as profile_foreign
from shardwise.profiling import host as profile_host
from shardwise.profiling import memory as profile_memory
from shardwise.profiling.carry import Carry
from shardwise.profiling.memory import CudaHistory, Curve, Owners
from shardwise.profiling.merge import RankStep
from shardwise.profiling.ranks import Peers
from shardwise.profiling.retime import retime
from shardwise.profiling.spans import HostPieces, cut_host
from shardwise.profiling.steps import Steps
from shardwise.profiling.trace import Trace, unix_offset
from shardwise.run_files import TRACED, UNTRACED

NO_TRACE = (
    "the profile ended before its last step, the traced one: what the host did between operations "
    "counts as compute, and memory is the engine's own buffers"
)
RETIMED = (
    "launches are placed as in a step without a trace, and the device's times follow from them"
)
# A traced step on CUDA that is as long as the timed ones up to this is shown as it is.
LITTLE = 0.02
# So far a retimed step may be off what the timed step took.
ALLOWED = 0.05


@dataclass
class Collected:
    """All that one rank saw."""

    device: str
    marks: Marks
    marked: bool  # marks tell whose work everything is
    waits_marked: bool
    steps: Steps
    traced: range  # which of the steps
    history: CudaHistory | None
    before: Owners
    owners: Owners
    ahead: int  # nanoseconds that this rank's clock is ahead of the first one's


@dataclass
class Choice:
    """The step that is shown, on all ranks the same."""

    shown: int
    source: int | None  # the traced one that tells of it
    trace: Trace | None
    carry: Carry | None  # from the source to the shown one, if they are two
    note: str  # what a reader of it should know
    warns: bool  # it is not what was asked for
    labels: dict[str, str]


def choose(seen: Collected, trace: Trace | None, count: int, peers: Peers) -> Choice:
    """Of `count` steps, the one to show: the median of those that were timed, as the slowest rank
    took it, if what the trace knows can be brought there; else the traced one. All ranks meet here.
    """
    traced = [i for i in seen.traced if i < count]
    source = traced[-1] if traced else None
    timed = [i for i in range(count) if i not in seen.traced] or traced
    if seen.device == "cuda" and len(timed) > 1 and timed != traced:
        timed = timed[1:]  # the trace ends before the first, which finds the device idle
    took = seen.steps.durations()
    slowest = [max(times) for times in zip(*peers.exchange(took[:count]), strict=True)]
    shown = sorted(timed, key=slowest.__getitem__)[(len(timed) - 1) // 2]
    labels = {"step_ms": f"{statistics.median(slowest[i] for i in timed) / 1e6:.3f}"}
    # What kind of step the shown one is as to its time; a comparison wants two of one kind.
    labels["timing"] = TRACED if timed == traced else UNTRACED
    if trace is None or source is None:
        return Choice(shown, None, None, None, NO_TRACE, True, labels)
    if timed == traced:
        shown = source if seen.device == "cuda" else shown
        return Choice(shown, shown, trace, None, "", False, labels)
    labels["traced_ms"] = f"{slowest[source] / 1e6:.3f}"
    if seen.device == "cuda" and abs(slowest[source] / slowest[shown] - 1) <= LITTLE:
        return Choice(source, source, trace, None, "", False, labels)
    carry = Carry(seen.marks, seen.steps.bounds[source], seen.steps.bounds[shown])
    why = f"the timed one went another way: {carry.difference}" if carry.difference else ""
    brought = trace
    if seen.device == "cuda" and not why:
        brought, why = _retimed(seen, trace, carry, took[shown])
    whys = [each for each in peers.exchange(why) if each]
    if whys:  # on any rank
        took_ms = [f"{slowest[i] / 1e6:.1f}" for i in (source, shown)]
        note = "the traced step is shown ({} ms where the timed one took {}), because ".format(
            *took_ms
        )
        labels["timing"] = TRACED
        return Choice(source, source, trace, None, note + whys[0], True, labels)
    note = RETIMED if seen.device == "cuda" else ""
    return Choice(shown, source, brought, carry, note, False, labels)


def _retimed(seen: Collected, trace: Trace, carry: Carry, took: int) -> tuple[Trace, str]:
    """The trace in the carry's target, or why it cannot be brought there."""
    kernels = retime(trace.kernels, seen.marks, carry)
    opened, closed = (profile_device.device_end(kernels, moment) for moment in carry.target)
    if abs(closed - opened - took) > ALLOWED * took:
        why = (
            f"brought to the timed one it would take {(closed - opened) / 1e6:.1f} ms, and that "
            f"took {took / 1e6:.1f} ms"
        )
        return trace, why
    return replace(trace, kernels=kernels), ""


def read_step(seen: Collected, choice: Choice, rank: int) -> RankStep:
    """This rank's spans, transfers and memory in the step that is shown."""
    start, end = seen.steps.bounds[choice.shown]
    if choice.trace is not None and not seen.marked:
        _add_contexts(choice.trace, seen.marks, choice.carry)
    if seen.device == "cpu":
        spans, transfers = profile_host.host_step(
            choice.trace, seen.marks, (start, end), rank, choice.carry, seen.waits_marked
        )
        opened = start
    else:
        assert choice.trace is not None
        spans, transfers, opened, _ = profile_device.device_spans(
            choice.trace, seen.marks, start, end, rank
        )
    memory = _read_memory(seen, choice)
    shift = -seen.ahead
    spans = [replace(s, start=s.start + shift, end=s.end + shift) for s in spans]
    transfers = [
        replace(t, span=replace(t.span, start=t.span.start + shift, end=t.span.end + shift))
        for t in transfers
    ]
    memory.times = [time + shift for time in memory.times]
    limit = None
    if seen.device == "cuda":
        limit = torch.cuda.get_device_properties("cuda").total_memory
    return RankStep(opened + shift, spans, transfers, memory, limit)


def _add_contexts(trace: Trace, marks: Marks, carry: Carry | None) -> None:
    """Backward's, where no mark tells them, in the traced step and in the shown one."""
    found = profile_foreign.find_backward(trace, marks)
    moved = [(carry.time(at), unit, phase) for at, unit, phase in found] if carry else []
    marks.contexts[:] = sorted([*marks.contexts, *found, *moved])


def _read_memory(seen: Collected, choice: Choice) -> Curve:
    """The curve of the traced step, at the moments of the one that is shown."""
    marks, bounds, carry, trace = seen.marks, seen.steps.bounds, choice.carry, choice.trace
    pieces = HostPieces(cut_host(marks, bounds[0][0], bounds[-1][1]))
    start, end = bounds[choice.shown] if carry is None else carry.source
    others: list[tuple[int, int, int]] = []
    if seen.history is None:
        since = bounds[choice.source][0] if choice.source and seen.traced.start else 0
        noted = [mark for mark in marks.buffers if mark.time >= since]
        allocations = trace.allocations if trace is not None else []
        blocks = profile_memory.host_blocks(allocations, seen.before, seen.owners, noted)
    else:
        blocks, others = seen.history.blocks(unix_offset())
    profile_memory.assign_roles(blocks, seen.owners, seen.before, marks, pieces)
    reserved = seen.history.reserved if seen.history is not None else 0
    curve = profile_memory.draw_curve(blocks, start, end, others, reserved)
    if carry is not None:
        curve.times = carry.times(curve.times)
    if seen.history is not None:
        assert trace is not None
        shown = bounds[choice.shown]
        curve.times = profile_device.when_needed(trace.kernels, curve.times, *shown)
    return curve
