"""Marks: what the engine says about itself while a profile listens.

`on` is None almost always, and a unit pays one test for it. A profile puts a `Marks` there, which
collects three kinds of marks, all in the host's clock (`time.perf_counter_ns`):

    context   from now on, compute belongs to this unit and phase
    range     in between, the host worked on this for that unit: gather, pack, wait, ...
    call      a collective was issued: what, over whom, how many bytes
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol


@dataclass(slots=True)
class RangeMark:
    """The host did `name` for `unit` from `start` to `end`."""

    name: str
    unit: str
    phase: str
    start: int
    end: int


@dataclass(slots=True)
class CallMark:
    """One collective as this rank issued it, from `start` to `issued`; it ran from `begun` to
    `end`, where that is known.
    """

    name: str
    unit: str
    phase: str
    axis: str
    nbytes: int  # of the whole message
    members: tuple[int, ...]  # the group's ranks in the world
    start: int
    issued: int = 0
    begun: int | None = None
    end: int | None = None


@dataclass(slots=True)
class WaitMark(RangeMark):
    """The host waited for `call`."""

    call: CallMark


@dataclass(slots=True)
class BufferMark:
    """A buffer of the engine got its memory, or gave it back."""

    time: int
    buffer: Any
    address: int
    nbytes: int  # negative: given back


class Annotator(Protocol):
    """Shows marks to another tool while they are made (NVTX), in steps that are traced."""

    def start(self, text: str) -> Any: ...

    def end(self, token: Any) -> None: ...


class Marks:
    """All marks since it was made."""

    def __init__(self, device_type: str = "cpu", annotator: Annotator | None = None) -> None:
        # On a device with streams a wait blocks nobody, and the device's own trace has the ends.
        self.waits_block = device_type == "cpu"
        self.traced = False  # torch's profiler runs beside
        self.contexts: list[tuple[int, str, str]] = [(perf_counter_ns(), "", "forward")]
        self.ranges: list[RangeMark] = []
        self.calls: list[CallMark] = []
        self.buffers: list[BufferMark] = []
        self.roots: list[int] = []  # when an outermost forward began
        self.on_forward: Callable[[], None] | None = None  # called before that
        self._stack: list[tuple[str, str]] = []  # (unit, phase) of the modules that run
        self._open: list[RangeMark] = []
        self._annotator = annotator
        self._shown: Any = None

    # Contexts

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        if self.on_forward is not None:
            self.on_forward()
        self.roots.append(perf_counter_ns())
        self._stack.clear()
        self._change("", "forward")

    def enter(self, unit: str, phase: str) -> None:
        """A module of `unit` runs."""
        self._stack.append((unit, phase))
        self._change(unit, phase)

    def leave(self) -> None:
        """It has run, and the module around it goes on. What follows the outermost module (a loss)
        still counts as that module's.
        """
        if self._stack:
            left = self._stack.pop()
            self._change(*(self._stack[-1] if self._stack else left))

    def turn(self, unit: str, phase: str) -> None:
        """From now on `unit` runs, whatever modules ran before: in backward, in the optimizer."""
        self._stack[:] = [(unit, phase)]
        self._change(unit, phase)

    @property
    def phase(self) -> str:
        return self.contexts[-1][2]

    def _change(self, unit: str, phase: str) -> None:
        self.contexts.append((perf_counter_ns(), unit, phase))
        if self._annotator is not None:
            if self._shown is not None:
                self._annotator.end(self._shown)
            self._shown = None
            if self.traced:
                self._shown = self._annotator.start(f"{phase} {unit}".strip())

    # Ranges

    def range(self, name: str, unit: str) -> AbstractContextManager[None]:
        return _OpenRange(self, name, unit)

    # Calls

    def call(self, name: str, axis: str, nbytes: int, members: tuple[int, ...]) -> None:
        """A collective is about to be issued."""
        around = self._open[-1] if self._open else None
        unit = around.unit if around is not None else self.contexts[-1][1]
        now = perf_counter_ns()
        self.calls.append(CallMark(name, unit, self.phase, axis, nbytes, members, now))

    def end_call(self, call: CallMark) -> None:
        call.issued = perf_counter_ns()

    def issued(self, handle: Any) -> Any:
        """The last call returned `handle`. Gives what the engine is to wait for instead of it."""
        call = self.calls[-1]
        self.end_call(call)
        return Watched(handle, call, self) if self.waits_block and handle is not None else handle

    # Memory

    def buffer(self, buffer: Any, address: int, nbytes: int) -> None:
        if self.traced or self.waits_block:  # a device's memory is followed with its trace
            self.buffers.append(BufferMark(perf_counter_ns(), buffer, address, nbytes))


class _OpenRange:
    """A range that is open. A class and not a generator: marks must not lengthen a step."""

    __slots__ = ("_made", "_marks", "_name", "_token", "_unit")

    def __init__(self, marks: Marks, name: str, unit: str) -> None:
        self._marks, self._name, self._unit = marks, name, unit

    def __enter__(self) -> None:
        marks = self._marks
        made = self._made = RangeMark(self._name, self._unit, marks.contexts[-1][2], 0, 0)
        marks._open.append(made)
        made.start = perf_counter_ns()
        self._token = None
        if marks.traced and marks._annotator is not None:
            self._token = marks._annotator.start(f"{self._name} {self._unit}")

    def __exit__(self, *_: object) -> None:
        marks, made = self._marks, self._made
        made.end = perf_counter_ns()
        if self._token is not None and marks._annotator is not None:
            marks._annotator.end(self._token)
        marks._open.pop()
        marks.ranges.append(made)


class Watched:
    """A collective under way on a host, whose wait is a range."""

    def __init__(self, handle: Any, call: CallMark, marks: Marks) -> None:
        self.handle, self.call, self.marks = handle, call, marks

    def wait(self) -> Any:
        marks, call = self.marks, self.call
        began, flow = perf_counter_ns(), getattr(self.handle, "flow", None)
        result = self.handle.wait()
        now = perf_counter_ns()
        marks.ranges.append(WaitMark("wait", call.unit, marks.phase, began, now, call))
        if call.end is None:
            # An emulated network says when it moved the data, shared memory when it was there. Of
            # others, the end of the wait is the latest moment at which it can have arrived.
            call.end = now
            if flow is not None and flow.started is not None and flow.ended is not None:
                call.begun, call.end = int(flow.started * 1e9), int(flow.ended * 1e9)
        return result


on: Marks | None = None
