"""What an emulated step waited for: every collective with its times, and how much of it the compute
stream (on a CPU: the host) stood still for.

On a GPU a wait of the compute stream is the time from reaching it to going on, between two timing
events, less what they are apart where there is nothing left to wait for. Exposed is what of these
waits falls into a collective's time; the rest is waiting for other work of other streams (packing,
copying out).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from shardwise.emulation.links import Flow, HostLinks

Interval = tuple[float, float]

EMPTY = 15  # waits for what has come that are timed
SAME_S = 2e-6  # events of one moment may be this far apart


@dataclass(frozen=True)
class Message:
    """One collective as it went. Times are seconds since the measurement began."""

    collective: str
    ranks: int
    nbytes: int
    modelled_s: float  # with the links to itself
    start: float
    end: float
    exposed_s: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Exposure:
    """What was measured. `exposed_s` counts a moment once, however many collectives run in it."""

    messages: list[Message] = field(default_factory=list)
    exposed_s: float = 0.0
    waited_s: float = 0.0  # all waits, also those that no collective runs in


@dataclass
class Note:
    """A collective while the measurement is open: its two events, or on a CPU its flow."""

    collective: str
    ranks: int
    nbytes: int
    modelled_s: float
    start: Any = None
    end: Any = None
    flow: Flow | None = None


class HostRecorder:
    """Waits by the host's clock."""

    def __init__(self, links: HostLinks) -> None:
        self.began = time.perf_counter()
        self._links = links
        self.notes: list[Note] = []
        self.waits: list[Interval] = []

    def result(self) -> Exposure:
        now = time.perf_counter()
        placed = []
        for note in self.notes:
            assert note.flow is not None
            end = self._links.end_of(now, note.flow)
            # One that nobody has waited for may not have got the wire yet.
            start = end if note.flow.started is None else note.flow.started
            placed.append((note, (start - self.began, end - self.began)))
        waits = [(start - self.began, end - self.began) for start, end in self.waits]
        return summarize(placed, waits)


class DeviceRecorder:
    """Waits of one stream, by timing events. Events are kept and serve the next measurement."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device)
        self.notes: list[Note] = []
        self.waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._origin = self.mark()
        self._origin.record(self.stream)
        # What two events are apart around a wait for what has come by then, if not when it was
        # queued: behind whatever keeps the stream busy, another one marks `passed`.
        other, passed = torch.cuda.Stream(device), torch.cuda.Event()
        other.wait_event(self._origin)
        passed.record(other)
        self._empty = [self._around(lambda: passed.wait(self.stream)) for _ in range(EMPTY)]

    def _around(self, wait: Callable[[], None]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        before, after = self.mark(), self.mark()
        before.record(self.stream)
        wait()
        after.record(self.stream)
        return before, after

    def mark(self) -> torch.cuda.Event:
        return _idle.pop() if _idle else torch.cuda.Event(enable_timing=True)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """See every wait that Python queues on the stream."""
        original = torch.cuda.Event.wait
        watched, own = self.stream.cuda_stream, self

        def wait(event: torch.cuda.Event, stream: Any = None) -> None:
            handle = torch.cuda.current_stream(own.device) if stream is None else stream
            if getattr(handle, "cuda_stream", None) != watched:
                return original(event, stream)
            own.waits.append(own._around(lambda: original(event, stream)))
            return None

        torch.cuda.Event.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.cuda.Event.wait = original  # type: ignore[method-assign]

    def result(self) -> Exposure:
        torch.cuda.synchronize(self.device)

        def at(event: torch.cuda.Event) -> float:
            return self._origin.elapsed_time(event) / 1e3

        placed = [(note, (at(note.start), at(note.end))) for note in self.notes]
        empty = statistics.median(at(after) - at(before) for before, after in self._empty)
        waits = [(at(before) + empty, at(after)) for before, after in self.waits]
        waits = [(start, end) for start, end in waits if end > start]
        _idle.append(self._origin)
        _idle.extend(event for pair in (*self.waits, *self._empty) for event in pair)
        _idle.extend(event for note in self.notes for event in (note.start, note.end))
        return summarize(placed, waits)


_idle: list[torch.cuda.Event] = []


def summarize(placed: list[tuple[Note, Interval]], waits: list[Interval]) -> Exposure:
    """Cut the waits with the times of the collectives that they can have been for: one that goes on
    after a wait has ended was not what it waited for.
    """
    exposed = [
        cut(interval, [wait for wait in waits if wait[1] >= interval[1] - SAME_S])
        for _, interval in placed
    ]
    messages = [
        Message(
            note.collective,
            note.ranks,
            note.nbytes,
            note.modelled_s,
            *interval,
            length(parts),
        )
        for (note, interval), parts in zip(placed, exposed, strict=True)
    ]
    return Exposure(
        messages,
        length([part for parts in exposed for part in parts]),
        length(waits),
    )


def length(intervals: list[Interval]) -> float:
    """Seconds that are in any of them."""
    return sum(end - start for start, end in merge(intervals))


def cut(interval: Interval, others: list[Interval]) -> list[Interval]:
    """The parts of `others` that lie in the interval."""
    parts = [(max(interval[0], start), min(interval[1], end)) for start, end in others]
    return [(start, end) for start, end in parts if end > start]


def merge(intervals: list[Interval]) -> list[Interval]:
    """The same moments as intervals that do not meet, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged
