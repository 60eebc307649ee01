"""The step that a profile shows: which one it is, and what one rank saw of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardwise.engine.marks import Marks
from shardwise.profiling import foreign, memory
from shardwise.profiling.device import device_end, device_spans, when_needed
from shardwise.profiling.host import host_step
from shardwise.profiling.memory import CudaHistory, Owners, StepMemory
from shardwise.profiling.merge import Peers, RankStep
from shardwise.profiling.pieces import HostPieces
from shardwise.profiling.step_times import StepTimes
from shardwise.profiling.trace import TorchTrace, unix_offset
from shardwise.profiling.traced_to_timed import StepMap, bring_kernels
from shardwise.run_files import TRACED, UNTRACED
from shardwise.timeline.kernel_groups import tabulate

NO_TRACE = (
    "the profile ended before its last step, the traced one: what the host did between operations "
    "counts as compute, and memory is the engine's own buffers"
)
RETIMED = (
    "launches are placed as in a step without a trace, and the device's times follow from them"
)
# On CUDA the traced step itself is shown if it is at most this share longer or shorter than the
# timed one.
AS_LONG = 0.02
# A traced step that was brought to the timed one may be this share longer or shorter than it.
MOST_OFF = 0.05


@dataclass
class Collected:
    """All that one rank sees while it profiles."""

    device: str
    marks: Marks
    marked: bool  # marks tell whose work everything is
    waits_marked: bool
    steps: StepTimes
    traced: range  # which of the steps
    history: CudaHistory | None
    ahead: int  # nanoseconds that this rank's clock is ahead of the first one's
    before: Owners  # of memory when the trace began
    owners: Owners  # of memory when it ended


@dataclass
class Choice:
    """The step that is shown, on all ranks the same."""

    shown: int
    trace: TorchTrace | None  # as of the shown step on CUDA, on a CPU as of the traced one
    labels: dict[str, str]
    source: int | None = None  # the traced step that tells of it
    step_map: StepMap | None = None  # from the source to the shown one, if they are two
    note: str = ""  # what a reader of it should know
    warns: bool = False  # the user is warned with the note


def choose(seen: Collected, trace: TorchTrace | None, count: int, peers: Peers) -> Choice:
    """Of `count` steps, the one to show: the median of those that were timed, as the slowest rank
    took it, if what the trace knows can be brought there; else the traced one. All ranks meet here.
    """
    cuda = seen.device == "cuda"
    traced = [i for i in seen.traced if i < count]
    timed = [i for i in range(count) if i not in seen.traced] or traced
    if cuda and len(timed) > 1 and timed != traced:
        timed = timed[1:]  # the trace ends before the first, which finds the device idle
    took = seen.steps.durations()
    slowest = [max(times) for times in zip(*peers.exchange(took[:count]), strict=True)]
    shown = sorted(timed, key=slowest.__getitem__)[(len(timed) - 1) // 2]
    labels = {
        "step_ms": f"{statistics.median(slowest[i] for i in timed) / 1e6:.3f}",
        # Whether tracing lengthened the shown step: only steps of one kind are compared.
        "timing": TRACED if timed == traced else UNTRACED,
    }
    if trace is None or not traced:
        return Choice(shown, None, labels, note=NO_TRACE, warns=True)
    source = traced[-1]
    if timed == traced:
        shown = source if cuda else shown
        return Choice(shown, trace, labels, shown)
    labels["traced_ms"] = f"{slowest[source] / 1e6:.3f}"
    if cuda and abs(slowest[source] / slowest[shown] - 1) <= AS_LONG:
        return Choice(source, trace, labels, source)
    step_map = StepMap(seen.marks, seen.steps.bounds[source], seen.steps.bounds[shown])
    why = f"the timed one went another way: {step_map.difference}" if step_map.difference else ""
    brought = trace
    if cuda and not why:
        brought, why = _bring(trace, step_map, took[shown])
    reasons = [each for each in peers.exchange(why) if each]
    if reasons:  # on any rank
        note = (
            f"the traced step is shown ({slowest[source] / 1e6:.1f} ms where the timed one took "
            f"{slowest[shown] / 1e6:.1f}), because {reasons[0]}"
        )
        return Choice(source, trace, labels | {"timing": TRACED}, source, note=note, warns=True)
    return Choice(shown, brought, labels, source, step_map, RETIMED if cuda else "")


def _bring(trace: TorchTrace, step_map: StepMap, took: int) -> tuple[TorchTrace, str]:
    """The trace as of the timed step, which `took` nanoseconds, or why that fails."""
    kernels = bring_kernels(trace.kernels, step_map)
    opened, closed = (device_end(kernels, moment) for moment in step_map.timed)
    if abs(closed - opened - took) > MOST_OFF * took:
        why = (
            f"brought to the timed one it would take {(closed - opened) / 1e6:.1f} ms, and that "
            f"took {took / 1e6:.1f} ms"
        )
        return trace, why
    return replace(trace, kernels=kernels), ""


def read_step(seen: Collected, choice: Choice, rank: int) -> RankStep:
    """This rank's spans, transfers and memory in the step that is shown."""
    marks, trace, step_map = seen.marks, choice.trace, choice.step_map
    start, end = seen.steps.bounds[choice.shown]
    if trace is not None and not seen.marked:
        # Backward's contexts come from the trace: in the traced step, and as many in the shown one.
        found = foreign.find_backward(trace, marks)
        moved = [(step_map.time(at), unit, phase) for at, unit, phase in found] if step_map else []
        marks.contexts[:] = sorted([*marks.contexts, *found, *moved])
    if seen.device == "cpu":
        opened = start
        spans, transfers = host_step(trace, marks, (start, end), rank, step_map, seen.waits_marked)
    else:
        assert trace is not None
        spans, transfers, opened, _ = device_spans(trace, marks, start, end, rank)
    return RankStep(rank, opened, seen.ahead, spans, transfers, _read_memory(seen, choice, rank))


def read_kernels(seen: Collected, choice: Choice, trace: TorchTrace | None) -> list[dict[str, Any]]:
    """This rank's kernels, or a host's operators, in the traced step, by phase and name. After
    `read_step`, which completes the marks.
    """
    if trace is None or choice.source is None:
        return []
    start, end = seen.steps.bounds[choice.source]
    known = HostPieces(seen.marks, start, end)
    return tabulate((known.at(ran.begun).phase, ran) for ran in trace.list_ran(start, end))


def _read_memory(seen: Collected, choice: Choice, rank: int) -> StepMemory:
    """The memory of the traced step, at the moments of the one that is shown."""
    marks, bounds, step_map, trace = seen.marks, seen.steps.bounds, choice.step_map, choice.trace
    pieces = HostPieces(marks, bounds[0][0], bounds[-1][1])
    start, end = bounds[choice.shown] if step_map is None else step_map.traced
    changes: list[tuple[int, int, int]] = []
    reserved = 0
    if seen.history is None:
        since = bounds[choice.source][0] if choice.source and seen.traced.start else 0
        noted = [mark for mark in marks.buffers if mark.time >= since]
        allocations = trace.allocations if trace is not None else []
        blocks = memory.host_blocks(allocations, seen.before, seen.owners, noted)
    else:
        blocks, changes = seen.history.blocks(unix_offset())
        reserved = seen.history.reserved
    memory.assign_roles(blocks, seen.owners, seen.before, marks, pieces)
    found = memory.draw_curve(blocks, start, end, rank, changes, reserved)
    times = list(found.curve.times)
    if step_map is not None:
        times = step_map.times(times)
    if seen.device == "cuda":
        assert trace is not None
        times = when_needed(trace.kernels, times, *bounds[choice.shown])
        limit = torch.cuda.get_device_properties("cuda").total_memory
        found = replace(found, limit_bytes=limit)
    return found.moved(times)
