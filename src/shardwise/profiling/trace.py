"""Reading torch's profiler: what ran on the host and the device, in the host's own clock.

The profiler counts nanoseconds since 1970, the engine's marks are in `time.perf_counter_ns`: ranges
that both note tell the difference, or the two clocks themselves where it sees no ranges.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter_ns, time_ns
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.description.tracing.torch_private import profiler_runs
from shardwise.engine import torch_private
from shardwise.timeline.kernel_groups import Ran, own_times, shorten

_ANCHOR = "shardwise.anchor"
_ANCHORS = 4  # the first is slow; the tightest counts


@dataclass(frozen=True)
class HostEvent:
    """Something the profiler saw on the host."""

    name: str
    start: int
    end: int
    thread: int
    sequence: int = -1  # of autograd: a forward operation and its backward have the same


@dataclass(frozen=True)
class Kernel:
    """Something that ran on the device; `launched` is when the host asked for it."""

    name: str
    start: int
    end: int
    stream: int
    launched: int
    kind: str  # kernel, gpu_memcpy, gpu_memset


@dataclass(frozen=True)
class HostAllocation:
    """Bytes taken (or, negative, given back) at an address of the host's allocator."""

    time: int
    address: int
    nbytes: int


@dataclass
class TorchTrace:
    """One rank's trace. `host` is the thread that trains."""

    host: int = -1
    operations: list[HostEvent] = field(default_factory=list)
    nodes: list[HostEvent] = field(default_factory=list)  # of autograd's graph, in backward
    transfers: list[HostEvent] = field(default_factory=list)  # of gloo, as its own threads ran them
    kernels: list[Kernel] = field(default_factory=list)
    allocations: list[HostAllocation] = field(default_factory=list)

    def list_ran(self, start: int, end: int) -> list[Ran]:
        """What ran of all that the host began from `start` to `end`: a device's kernels, or the
        host's operators and gloo's transfers.
        """
        if self.kernels:
            ran = [Ran(shorten(k.name), k.launched, k.end - k.start) for k in self.kernels]
        else:
            ran = own_times((o.name, o.start, o.end, o.thread) for o in self.operations)
            ran += [Ran(e.name, e.start, e.end - e.start) for e in self.transfers]
        return [each for each in ran if start <= each.begun < end]


class Tracer:
    """torch's profiler between `start` and `stop`.

    `operations` adds the host's to a device's, where they are most of the cost. The host's
    allocations are followed without a device, unless `memory` is of no interest; CUDA's allocator
    keeps a history of its own.
    """

    def __init__(self, cuda: bool, operations: bool = True, memory: bool = True) -> None:
        self.cuda, self.anchored = cuda, operations or not cuda
        self.memory = memory and not cuda
        self.profiler: profile | None = None
        self._anchors: list[tuple[int, int]] = []

    def start(self) -> None:
        if profiler_runs():
            raise RuntimeError(
                "torch's profiler runs already in this process, and there can be only one: end it "
                "before sw.profile begins"
            )
        activities = [ProfilerActivity.CPU] * self.anchored + [ProfilerActivity.CUDA] * self.cuda
        # Its library announces every start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # it has one cycle only, and loses nothing
            self.profiler = profile(activities=activities, profile_memory=self.memory)
            self.profiler.start()
        self._anchor()

    def stop(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self._anchor()
        assert self.profiler is not None
        self.profiler.stop()

    def _anchor(self) -> None:
        for _ in range(_ANCHORS):
            before = perf_counter_ns()
            with record_function(_ANCHOR):
                pass
            self._anchors.append((before, perf_counter_ns()))

    def read(self) -> TorchTrace:
        """All that was seen."""
        results: Any = self.profiler.profiler.kineto_results  # type: ignore[union-attr]
        events = list(results.events())
        trace, offset = TorchTrace(), unix_offset()
        if self.anchored:
            anchors = [e for e in events if e.name() == _ANCHOR and e.device_type().name == "CPU"]
            offset = self._offset([(e.start_ns(), e.end_ns()) for e in anchors])
            trace.host = anchors[0].start_thread_id()
        launches: dict[int, int] = {}
        on_device = []
        for event in events:
            kind = torch_private.activity_of(event)
            if kind in ("kernel", "gpu_memcpy", "gpu_memset"):
                on_device.append((event, kind))
            elif kind in ("cuda_runtime", "cuda_driver"):
                launches[event.correlation_id()] = event.start_ns() + offset
            elif event.device_type().name == "CPU":
                _sort_in(trace, event, kind, offset)
        for event, kind in on_device:
            start, end = event.start_ns() + offset, event.end_ns() + offset
            launched = launches.get(event.correlation_id(), start)
            stream = event.device_resource_id()
            trace.kernels.append(Kernel(event.name(), start, end, stream, launched, kind))
        for found in (trace.operations, trace.nodes, trace.transfers, trace.kernels):
            found.sort(key=lambda event: event.start)
        if self.memory:
            trace.allocations = [
                HostAllocation(
                    e.start_time_ns + offset, e.extra_fields.ptr, e.extra_fields.alloc_size
                )
                for e in _walk(results.experimental_event_tree())
                if e.tag.name == "Allocation"
            ]
            trace.allocations.sort(key=lambda each: each.time)
        return trace

    def _offset(self, seen: list[tuple[int, int]]) -> int:
        """What to add to the profiler's times, from the tightest of the anchors."""
        if len(seen) != len(self._anchors):
            raise RuntimeError(
                f"torch's profiler saw {len(seen)} of {len(self._anchors)} ranges of this profile; "
                "its clock cannot be read from them"
            )
        pairs = zip(self._anchors, sorted(seen), strict=True)
        noted, traced = min(pairs, key=lambda pair: pair[0][1] - pair[0][0])
        return (noted[0] + noted[1] - traced[0] - traced[1]) // 2


def unix_offset() -> int:
    """What to add to nanoseconds since 1970 to be on this clock; the tightest of some looks."""
    looks = [(perf_counter_ns(), time_ns(), perf_counter_ns()) for _ in range(9)]
    before, unix, after = min(looks, key=lambda look: look[2] - look[0])
    return (before + after) // 2 - unix


def _sort_in(trace: TorchTrace, event: Any, kind: str, offset: int) -> None:
    """Put an event of the host where it belongs. Ranges that somebody named are left out."""
    name = event.name()
    start, end = event.start_ns() + offset, event.end_ns() + offset
    made = HostEvent(name, start, end, event.start_thread_id(), event.sequence_nr())
    if name.startswith("gloo:") and kind in ("cpu_op", "user_annotation"):
        trace.transfers.append(made)
    elif kind == "cpu_op" and name.startswith("autograd::engine::evaluate_function"):
        trace.nodes.append(made)
    # Nodes of autograd have hooks in them, which wait and copy: their operations count instead.
    elif kind == "cpu_op" and "::" in name and not name.startswith("torch::autograd"):
        trace.operations.append(made)


def _walk(events: Any) -> Iterator[Any]:
    stack = list(events)
    while stack:
        event = stack.pop()
        yield event
        stack += event.children
