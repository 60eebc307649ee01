"""From the traced step to a timed one: what only a trace knows, between the same marks.

Tracing makes a step longer, so the timed steps have marks alone and the traced one is not timed.
Where both went through the same marks, a moment of the traced step is one of the timed step, evenly
between two marks.

On a host, operations and transfers are brought over so. On a device, launches are: tracing one
takes the host a microsecond or more, and a step that waits for its host gets longer by that, but
kernels do not. The device's times follow from the launches: a kernel begins when it was launched,
the one before it on its stream has ended, and so has what it waited for.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardwise.engine.marks import CallMark, Marks, WaitMark
from shardwise.profiling.pieces import HostPieces
from shardwise.profiling.trace import Kernel

WAIT_NS = 50_000  # a wait that takes longer has blocked
# A kernel that begins later than this after all that is known of it waited for another stream.
READY_NS = 10_000
# What it waited for ended at most this long before.
AFTER_NS = 20_000

Window = tuple[int, int]
Named = tuple[int, tuple[str, ...]]  # a mark's moment, and what it says


class StepMap:
    """Moments of the traced step as moments of the timed one."""

    def __init__(self, marks: Marks, traced: Window, timed: Window) -> None:
        self.marks, self.traced, self.timed = marks, traced, timed
        # Tracing begins with the forward; what a step does before it is not compared.
        self._opened = [_first_forward(marks, window) for window in (traced, timed)]
        here = _sequence(marks, self._opened[0], traced[1])
        there = _sequence(marks, self._opened[1], timed[1])
        self.difference = _differ(here, there)
        self._here = [traced[0], *[time for time, _ in here], traced[1]]
        self._there = [timed[0], *[time for time, _ in there], timed[1]]

    def time(self, moment: int) -> int:
        """This moment of the traced step in the timed one."""
        at = min(max(bisect_right(self._here, moment) - 1, 0), len(self._here) - 2)
        share = (moment - self._here[at]) / max(1, self._here[at + 1] - self._here[at])
        begin, end = self._there[at], self._there[at + 1]
        return round(begin + min(max(share, 0.0), 1.0) * (end - begin))

    def times(self, moments: Iterable[int]) -> list[int]:
        return [self.time(moment) for moment in moments]

    def windows(self, found: Iterable[Window]) -> list[Window]:
        return [(self.time(start), self.time(end)) for start, end in found]

    def bring_calls(self) -> None:
        """Give the timed step's collectives the beginnings and ends that the trace has of the
        traced step's.

        Where the host stood still for one, it ended when the host went on, less what waking up took
        in the traced step. Those of an emulated network have theirs already.
        """
        traced = _calls_in(self.marks, self._opened[0], self.traced[1])
        timed = _calls_in(self.marks, self._opened[1], self.timed[1])
        waits: dict[int, WaitMark] = {}
        for made in self.marks.ranges:
            if isinstance(made, WaitMark):
                waits.setdefault(id(made.call), made)
        for known, call in zip(traced, timed, strict=True):
            if call.begun is not None or known.begun is None or known.end is None:
                continue
            end, wait, waited = self.time(known.end), waits.get(id(call)), waits.get(id(known))
            if wait is not None and wait.end - wait.start > WAIT_NS:
                waking = 0
                if waited is not None and known.end > waited.start:
                    waking = max(0, waited.end - known.end)
                end = max(wait.start, wait.end - waking)
            elif wait is not None:
                end = min(end, wait.end)
            call.begun, call.end = min(self.time(known.begun), end), end


def _first_forward(marks: Marks, window: Window) -> int:
    return next((time for time in marks.roots if window[0] <= time < window[1]), window[0])


def _calls_in(marks: Marks, start: int, end: int) -> list[CallMark]:
    return [call for call in marks.calls if start <= call.start < end]


def _sequence(marks: Marks, start: int, end: int) -> list[Named]:
    """All marks in between, by time."""
    found: list[Named] = [(time, ("context", unit, phase)) for time, unit, phase in marks.contexts]
    for made in marks.ranges:
        names = made.name, made.unit, made.phase
        found += [(made.start, ("begins", *names)), (made.end, ("ends", *names))]
    for call in marks.calls:
        names = call.name, call.unit, call.phase
        found += [(call.start, ("called", *names)), (call.issued, ("issued", *names))]
    return sorted(mark for mark in found if start <= mark[0] < end)


def _differ(here: Sequence[Named], there: Sequence[Named]) -> str:
    """Where two steps first go different ways; nothing if they do not."""
    for (_, first), (_, second) in zip(here, there, strict=False):
        if first != second:
            return f"{' '.join(second)} where the traced step has {' '.join(first)}"
    if len(here) != len(there):
        return f"{len(there)} marks where the traced step has {len(here)}"
    return ""


def bring_kernels(kernels: list[Kernel], step_map: StepMap) -> list[Kernel]:
    """The traced step's kernels in the timed one. Kernels launched before it keep their distance
    from the step's beginning, so that a device that is behind its host stays as far behind.
    """
    begin, end = step_map.traced
    shift = step_map.timed[0] - begin
    moved: list[Kernel] = []
    last: dict[int, tuple[int, int]] = {}  # when each stream got idle: as traced, as moved
    for old in (kernel for kernel in kernels if kernel.launched < begin):
        moved.append(_move(old, old.launched + shift, old.start + shift))
        last[old.stream] = max(last.get(old.stream, (0, 0)), (old.end, moved[-1].end))
    ended = sorted((was, now, stream) for stream, (was, now) in last.items())
    mine = [kernel for kernel in kernels if begin <= kernel.launched < end]
    for group in _together(mine, HostPieces(step_map.marks, begin, end)):
        first = group[0]
        launched = step_map.time(first.launched)
        idle_before, idle = last.get(first.stream, (0, 0))
        waited = first.start - max(first.launched, idle_before)
        start = max(launched, idle) + max(0, waited)
        if waited > READY_NS:
            cause = _ended_before(ended, first)
            if cause is not None:
                start = max(launched, idle, cause[1] + first.start - cause[0])
        for kernel in group:
            offset = kernel.start - first.start
            moved.append(_move(kernel, step_map.time(kernel.launched), start + offset))
        group_end = max(kernel.end for kernel in group)
        done = group_end, start + group_end - first.start
        last[first.stream] = max(last.get(first.stream, (0, 0)), done)
        insort(ended, (*done, first.stream))
    return sorted(moved, key=lambda kernel: kernel.start)


def _move(kernel: Kernel, launched: int, start: int) -> Kernel:
    return replace(kernel, launched=launched, start=start, end=start + kernel.end - kernel.start)


def _together(kernels: Iterable[Kernel], known: HostPieces) -> list[list[Kernel]]:
    """Kernels that move together, one or all of a collective, by when they began. What a collective
    launches keeps its time: it is the network's.
    """
    groups: list[list[Kernel]] = []
    calls: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        call = known.at(kernel.launched).mark
        if isinstance(call, CallMark) and id(call) in calls:
            calls[id(call)].append(kernel)
            continue
        groups.append([kernel])
        if isinstance(call, CallMark):
            calls[id(call)] = groups[-1]
    return groups


def _ended_before(ended: list[tuple[int, int, int]], kernel: Kernel) -> tuple[int, int] | None:
    """When the last work of another stream that ended before `kernel` began did so: as traced, and
    as moved.
    """
    at = bisect_right(ended, (kernel.start + 1,))
    while at and ended[at - 1][0] >= kernel.start - AFTER_NS:
        at -= 1
        was, now, stream = ended[at]
        if stream != kernel.stream:
            return was, now
    return None
