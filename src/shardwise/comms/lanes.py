"""Lanes: where communication runs beside compute. A CUDA stream, or on a CPU nothing but the same
words.

The order of memory is always that of the compute stream: a lane first waits for the moment at which
compute had allocated what the lane will touch, and compute waits for the lane before it reads or
frees it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from shardwise.comms.real import DONE, Handle


class Lane:
    """One queue of communication work beside the compute stream of `device`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # A lane is ordered when work can be queued behind an operation that has not ended: streams
        # can, a host cannot.
        self.ordered = device.type == "cuda"
        self.stream = torch.cuda.Stream(device) if self.ordered else None
        self.waited = 0.0  # host seconds blocked in `join`; on a CPU that is exposed communication

    @contextmanager
    def behind_compute(self) -> Iterator[None]:
        """Queue what follows on this lane, after everything compute has queued so far."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            yield

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Queue what follows on this lane, after what the lane already has."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def follow(self, other: Lane) -> None:
        """Queue what follows on this lane after what `other` has."""
        if self.stream is not None and other.stream is not None:
            self.stream.wait_stream(other.stream)

    def mark(self) -> Handle:
        """This moment of the lane, for compute to wait for."""
        return DONE if self.stream is None else self.stream.record_event()

    def join(self, handle: Handle) -> None:
        """Make what runs now (the current stream, or the host) wait for `handle`."""
        if handle is DONE:
            return
        if self.ordered:
            handle.wait()
            return
        began = time.perf_counter()
        handle.wait()
        self.waited += time.perf_counter() - began
