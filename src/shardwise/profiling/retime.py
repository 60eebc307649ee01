"""A device's kernels as they would have run without a trace.

Tracing a launch takes the host a microsecond or more. A step that waits for its host gets longer by
that; kernels themselves do not. A timed step, without a trace, went through the same marks: between
those a launch has its place (`carry.py`). From there the device's times follow: a kernel begins
when it was launched, the one before it on its stream has ended, and so has what it waited for.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardwise.engine.marks import Call, Marks
from shardwise.profiling.carry import Carry
from shardwise.profiling.spans import HostPieces, cut_host
from shardwise.profiling.trace import Kernel

# A kernel that begins later than this after all that is known of it waited for another stream.
READY_NS = 10_000
# What it waited for ended at most this long before.
AFTER_NS = 20_000


@dataclass
class _Run:
    """Kernels that move together: one, or all of a collective."""

    kernels: list[Kernel]

    @property
    def launched(self) -> int:
        return self.kernels[0].launched

    @property
    def start(self) -> int:
        return self.kernels[0].start

    @property
    def end(self) -> int:
        return max(kernel.end for kernel in self.kernels)

    @property
    def stream(self) -> int:
        return self.kernels[0].stream


def retime(kernels: list[Kernel], marks: Marks, carry: Carry) -> list[Kernel]:
    """The kernels of the carry's source in its target. Those before it keep their distance from the
    step's beginning, so that a device that is behind its host stays as far behind.
    """
    begin, end = carry.source
    shift = carry.target[0] - begin
    moved = [_move(k, k.launched + shift, k.start + shift) for k in kernels if k.launched < begin]
    last: dict[int, tuple[int, int]] = {}  # of each stream: when it got idle, before and now
    for old, new in zip((k for k in kernels if k.launched < begin), moved, strict=True):
        last[old.stream] = max(last.get(old.stream, (0, 0)), (old.end, new.end))
    ended = sorted((was, now, stream) for stream, (was, now) in last.items())
    mine = [kernel for kernel in kernels if begin <= kernel.launched < end]
    for run in _together(mine, HostPieces(cut_host(marks, begin, end))):
        launched = carry.time(run.launched)
        idle_before, idle = last.get(run.stream, (0, 0))
        waited = run.start - max(run.launched, idle_before)
        start = max(launched, idle) + max(0, waited)
        if waited > READY_NS:
            cause = _ended_before(ended, run)
            if cause is not None:
                start = max(launched, idle, cause[1] + run.start - cause[0])
        for kernel in run.kernels:
            moved.append(
                _move(kernel, carry.time(kernel.launched), start + kernel.start - run.start)
            )
        done = run.end, start + run.end - run.start
        last[run.stream] = max(last.get(run.stream, (0, 0)), done)
        insort(ended, (*done, run.stream))
    return sorted(moved, key=lambda kernel: kernel.start)


def _move(kernel: Kernel, launched: int, start: int) -> Kernel:
    return replace(kernel, launched=launched, start=start, end=start + kernel.end - kernel.start)


def _together(kernels: Iterable[Kernel], known: HostPieces) -> list[_Run]:
    """By when they began. What a collective launches keeps its time: it is the network's."""
    runs: list[_Run] = []
    calls: dict[int, _Run] = {}
    for kernel in kernels:
        call = known.at(kernel.launched).mark
        if isinstance(call, Call) and id(call) in calls:
            calls[id(call)].kernels.append(kernel)
            continue
        runs.append(_Run([kernel]))
        if isinstance(call, Call):
            calls[id(call)] = runs[-1]
    return runs


def _ended_before(ended: list[tuple[int, int, int]], run: _Run) -> tuple[int, int] | None:
    """The last that another stream ended before `run` began: when it did, before and now."""
    at = bisect_right(ended, (run.start + 1,))
    while at and ended[at - 1][0] >= run.start - AFTER_NS:
        at -= 1
        was, now, stream = ended[at]
        if stream != run.stream:
            return was, now
    return None
