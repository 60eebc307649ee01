"""What an emulated step waited for: every collective with its times, and how much of it the compute
stream (on a CPU: the host) stood still for.

On a GPU a wait of the compute stream is the time from reaching it to going on, between two timing
events, less the time between two such events where there is nothing left to wait for. Exposed is
what of these waits falls into a collective's time; the rest is waiting for other work of other
streams (packing, copying out).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from shardwise.emulation.links import Flow, HostLinks
from shardwise.timeline import Busy

Interval = tuple[float, float]  # seconds since the measurement began
EventPair = tuple[torch.cuda.Event, torch.cuda.Event]

EMPTY_WAITS = 15  # waits for nothing that are timed
SAME_S = 2e-6  # events of one moment may be this far apart


@dataclass
class Message:
    """One collective; where it ran and what of it was exposed is known when the measurement ends.
    Times are seconds since the measurement began.
    """

    collective: str
    ranks: int
    nbytes: int
    modelled_s: float  # with the links to itself
    start: float = 0.0
    end: float = 0.0
    exposed_s: float = 0.0
    group: tuple[int, ...] = ()  # which ranks they are

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Exposure:
    """What was measured. `exposed_s` counts a moment once, however many collectives run in it."""

    messages: list[Message] = field(default_factory=list)
    exposed_s: float = 0.0
    waited_s: float = 0.0  # all waits, also those that no collective runs in

    def fill(self, messages: list[Message], waits: list[Interval]) -> None:
        """Cut the waits with the times of the collectives that they can have been for: a wait that
        ended while a collective went on was not for that one.
        """
        exposed: list[tuple[int, int]] = []
        for message in messages:
            parts = Busy(
                (_ns(max(message.start, start)), _ns(min(message.end, end)))
                for start, end in waits
                if end >= message.end - SAME_S
            ).stretches
            message.exposed_s = _seconds_in(parts)
            exposed += parts
        self.messages = messages
        self.exposed_s = _seconds_in(exposed)
        self.waited_s = _seconds_in((_ns(start), _ns(end)) for start, end in waits)


class HostRecorder:
    """Waits by the host's clock."""

    def __init__(self, links: HostLinks) -> None:
        self.waits: list[Interval] = []  # by the host's clock
        self._links = links
        self._flows: list[tuple[Message, Flow]] = []

    def add(self, message: Message, flow: Flow) -> None:
        self._flows.append((message, flow))

    @contextmanager
    def watch(self) -> Iterator[Exposure]:
        began, measured = time.perf_counter(), Exposure()
        yield measured
        now = time.perf_counter()
        for message, flow in self._flows:
            message.end = self._links.end_of(now, flow) - began
            # One that nobody has waited for may not have got the wire yet.
            message.start = message.end if flow.started is None else flow.started - began
        waits = [(start - began, end - began) for start, end in self.waits]
        measured.fill([message for message, _ in self._flows], waits)


class DeviceRecorder:
    """Waits of the current stream, by timing events."""

    _idle: ClassVar[list[torch.cuda.Event]] = []  # of earlier measurements, to serve again

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.current_stream(device)
        self._messages: list[tuple[Message, EventPair]] = []
        self._waits: list[EventPair] = []
        self._origin = self._event()
        self._origin.record(self.stream)
        # The time between two events around a wait for something that was still to come when the
        # wait was queued and is there when the stream reaches it: what this stream is busy with
        # keeps it behind the other one, which marks `passed`.
        other, passed = torch.cuda.Stream(device), torch.cuda.Event()
        other.wait_event(self._origin)
        passed.record(other)
        self._empty = [self._around(lambda: passed.wait(self.stream)) for _ in range(EMPTY_WAITS)]

    def add(self, message: Message) -> EventPair:
        """The events to record at the message's start and end."""
        events = self._event(), self._event()
        self._messages.append((message, events))
        return events

    def _event(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)

    def _around(self, wait: Callable[[], None]) -> EventPair:
        before, after = self._event(), self._event()
        before.record(self.stream)
        wait()
        after.record(self.stream)
        return before, after

    @contextmanager
    def watch(self) -> Iterator[Exposure]:
        """See every wait that Python queues on the stream."""
        original = torch.cuda.Event.wait
        watched, measured = self.stream.cuda_stream, Exposure()

        def wait(event: torch.cuda.Event, stream: Any = None) -> None:
            handle = torch.cuda.current_stream(self.device) if stream is None else stream
            if getattr(handle, "cuda_stream", None) != watched:
                return original(event, stream)
            self._waits.append(self._around(lambda: original(event, stream)))
            return None

        torch.cuda.Event.wait = wait  # type: ignore[method-assign, assignment]
        try:
            yield measured
        finally:
            torch.cuda.Event.wait = original  # type: ignore[method-assign]
        self._read_events(measured)

    def _read_events(self, measured: Exposure) -> None:
        torch.cuda.synchronize(self.device)

        def at(event: torch.cuda.Event) -> float:
            return self._origin.elapsed_time(event) / 1e3

        for message, (start, end) in self._messages:
            message.start, message.end = at(start), at(end)
        empty = statistics.median(at(after) - at(before) for before, after in self._empty)
        waits = [(at(before) + empty, at(after)) for before, after in self._waits]
        measured.fill([message for message, _ in self._messages], waits)
        pairs = [*self._waits, *self._empty, *(events for _, events in self._messages)]
        self._idle.extend([self._origin, *(event for pair in pairs for event in pair)])


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _seconds_in(intervals: Iterable[tuple[int, int]]) -> float:
    """Seconds that are in any of these intervals of nanoseconds."""
    return sum(end - start for start, end in Busy(intervals).stretches) / 1e9
