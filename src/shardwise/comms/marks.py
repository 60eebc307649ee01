"""Marks: what the engine says about itself while a profile listens.

`on` is None almost always, and a unit pays one test for it. A profile puts a `Marks` there, which
collects three kinds of marks, all in the host's clock (`time.perf_counter_ns`):

    context   from now on, compute belongs to this unit and phase
    range     in between, the host worked on this for that unit: gather, pack, wait, ...
    call      a collective was issued: what, over whom, how many bytes
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

_NOTHING = nullcontext()


@dataclass
class Range:
    """The host did `name` for `unit` from `start` to `end`."""

    name: str
    unit: str
    phase: str
    start: int
    end: int


@dataclass
class Call:
    """One collective as this rank issued it, from `start` to `issued`; `end` where it is known."""

    name: str
    unit: str
    phase: str
    axis: str
    nbytes: int  # of the whole message
    ranks: int
    members: tuple[int, ...]  # the group's ranks in the world
    start: int
    issued: int = 0
    end: int | None = None


@dataclass(frozen=True)
class BufferMark:
    """A buffer of the engine got its memory, or gave it back."""

    time: int
    buffer: Any
    address: int
    nbytes: int  # negative: given back


class Annotator(Protocol):
    """Shows marks to another tool while they are made (NVTX)."""

    def start(self, text: str) -> Any: ...

    def end(self, token: Any) -> None: ...


class Marks:
    """All marks since it was made."""

    def __init__(self, device_type: str = "cpu", annotator: Annotator | None = None) -> None:
        # On a device with streams a wait blocks nobody, and the device's own trace has the ends.
        self.waits_block = device_type == "cpu"
        self.contexts: list[tuple[int, str, str]] = [(perf_counter_ns(), "", "forward")]
        self.ranges: list[Range] = []
        self.calls: list[Call] = []
        self.buffers: list[BufferMark] = []
        self.roots: list[int] = []  # when an outermost forward began
        self._stack: list[tuple[str, str]] = []
        self._open: list[Range] = []
        self._annotator = annotator
        self._shown: Any = None

    # Contexts

    def begin_forward(self) -> None:
        """An outermost forward begins."""
        self.roots.append(perf_counter_ns())
        self._stack.clear()
        self._change("", "forward")

    def enter(self, unit: str, phase: str) -> None:
        """A module of `unit` runs."""
        self._stack.append((unit, phase))
        self._change(unit, phase)

    def leave(self) -> None:
        """It has run; what is around it goes on. A loss, after the outermost, is still its."""
        if self._stack:
            left = self._stack.pop()
            self._change(*(self._stack[-1] if self._stack else left))

    def turn(self, unit: str, phase: str) -> None:
        """Whatever ran before, now `unit` does: backward, and the optimizer."""
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
            self._shown = self._annotator.start(f"{phase} {unit}".strip())

    # Ranges

    @contextmanager
    def range(self, name: str, unit: str) -> Iterator[None]:
        made = Range(name, unit, self.phase, perf_counter_ns(), 0)
        self._open.append(made)
        token = self._annotator.start(f"{name} {unit}") if self._annotator is not None else None
        try:
            yield
        finally:
            made.end = perf_counter_ns()
            if self._annotator is not None:
                self._annotator.end(token)
            self._open.pop()
            self.ranges.append(made)

    # Calls

    def call(self, name: str, axis: str, nbytes: int, members: tuple[int, ...]) -> None:
        """A collective is about to be issued."""
        around = self._open[-1] if self._open else None
        unit = around.unit if around is not None else self.contexts[-1][1]
        ranks, now = len(members), perf_counter_ns()
        self.calls.append(Call(name, unit, self.phase, axis, nbytes, ranks, members, now))

    def end_call(self, call: Call) -> None:
        call.issued = perf_counter_ns()

    def issued(self, handle: Any) -> Any:
        """The last call returned `handle`; what to wait for instead of it."""
        call = self.calls[-1]
        self.end_call(call)
        return Watched(handle, call, self) if self.waits_block and handle is not None else handle

    # Memory

    def buffer(self, buffer: Any, address: int, nbytes: int) -> None:
        self.buffers.append(BufferMark(perf_counter_ns(), buffer, address, nbytes))


class Watched:
    """A collective under way on a host, whose wait is a range."""

    def __init__(self, handle: Any, call: Call, marks: Marks) -> None:
        self.handle, self.call, self.marks = handle, call, marks

    def wait(self) -> Any:
        marks, call = self.marks, self.call
        began = perf_counter_ns()
        result = self.handle.wait()
        now = perf_counter_ns()
        marks.ranges.append(Range("wait", call.unit, marks.phase, began, now))
        if call.end is None:
            # An emulated network says when its data is there. Otherwise the trace has the end; this
            # is the latest that it can be.
            ready = getattr(self.handle, "ready", None)
            call.end = int(ready * 1e9) if ready else now
        return result


on: Marks | None = None


def range(name: str, unit: str) -> AbstractContextManager[None]:
    """What the host does inside is `name` for `unit`."""
    return _NOTHING if on is None else on.range(name, unit)


def issued(handle: Any) -> Any:
    """A collective that was called has returned `handle`."""
    return handle if on is None else on.issued(handle)
