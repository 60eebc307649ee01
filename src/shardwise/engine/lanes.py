"""Lanes: where communication runs beside compute. A CUDA stream, or on a CPU nothing but the same
words.

The order of memory is always that of the compute stream: a lane first waits for the moment at which
compute had allocated what the lane will touch, and compute waits for the lane before it reads or
frees it. What a lane allocates for itself lives and dies in the lane's own order.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch

from shardwise.engine import torch_private
from shardwise.engine.collectives import DONE, Handle

_NOTHING = nullcontext()


class Lane:
    """One queue of communication work beside the compute stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A lane is ordered when work can be queued behind an operation that has not ended: streams
        # can, a host cannot.
        self.ordered = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.ordered else None
        self._inside = _Inside(self) if self.ordered else _NOTHING
        self._behind = _Inside(self, behind_compute=True) if self.ordered else _NOTHING
        self.waited = 0.0  # host seconds blocked in `join`; on a CPU that is exposed communication

    def behind_compute(self) -> AbstractContextManager[Any]:
        """Queue what follows on this lane, after everything compute has queued so far."""
        return self._behind

    def enter(self) -> AbstractContextManager[Any]:
        """Queue what follows on this lane, after what the lane already has."""
        return self._inside

    def aside(self, stream: torch.cuda.Stream | None) -> AbstractContextManager[Any]:
        """Queue what follows on another stream, in this lane's order, if one is given. A host's
        stream orders nothing, but is the current one inside.
        """
        if stream is None:
            return _NOTHING
        if self.stream is None:
            return torch.cpu.stream(cast(Any, stream))
        return _Aside(self.stream, stream)

    def block_host(self) -> None:
        """The host waits for all that the lane has."""
        if self.stream is not None:
            self.stream.synchronize()

    def follow(self, other: Lane) -> None:
        """Queue what follows on this lane after what `other` has."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def make_event(self) -> torch.cuda.Event | None:
        """An event to mark moments with again and again; making one is dearer than recording it."""
        return torch.cuda.Event() if self.ordered else None

    def mark(self, event: torch.cuda.Event | None = None) -> Handle:
        """This moment of the lane, for compute to wait for."""
        if self.stream is None:
            return DONE
        return self.stream.record_event(event)

    def join(self, handle: Handle) -> None:
        """Make what runs now (the current stream, or the host) wait for `handle`."""
        if handle is DONE:
            return
        if isinstance(handle, torch.cuda.Event):
            torch_private.current_stream(self.device).wait_event(handle)
            return
        began = time.perf_counter()
        handle.wait()
        self.waited += time.perf_counter() - began


class _Aside:
    """A stream that runs between two moments of a lane."""

    def __init__(self, lane: torch.cuda.Stream, stream: torch.cuda.Stream) -> None:
        self._lane, self._stream = lane, stream
        self._current = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        self._stream.wait_stream(self._lane)
        self._current.__enter__()

    def __exit__(self, *exc: Any) -> None:
        self._current.__exit__(*exc)
        self._lane.wait_stream(self._stream)


class _Inside:
    """The lane's stream as the current one. Made once: torch.cuda.stream builds three objects."""

    def __init__(self, lane: Lane, behind_compute: bool = False) -> None:
        assert lane.stream is not None
        self._stream, self._device = lane.stream, lane.device
        self._moment = torch.cuda.Event() if behind_compute else None
        self._outer: list[torch.cuda.Stream] = []

    def __enter__(self) -> None:
        outer = torch_private.current_stream(self._device)
        if self._moment is not None:
            self._moment.record(outer)
            self._stream.wait_event(self._moment)
        self._outer.append(outer)
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._outer.pop())
