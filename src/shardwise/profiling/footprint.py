"""The most bytes that are allocated at one moment of a training step."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.profiling.timing import Step

_MARK = "shardwise.peak"


def peak_on_cpu(build: Callable[[], Step], warmup: int = 2) -> int:
    """Build a candidate and give the most bytes its step has allocated at one time.

    Counts everything that torch's CPU allocator gave out and has not got back, since before the
    model was made: sharded and gathered parameters, gradients, staging and reduce buffers,
    optimizer state, activations. torch keeps no such statistics on a CPU, but its profiler reports
    every allocation with the total, the same way for every engine. Leaves out what gloo takes by
    itself.
    """
    gc.collect()
    with open_profiler() as profiled:
        step = build()
        for _ in range(warmup):
            step()
        with record_function(_MARK):
            step()
    return read_peak(read_events(profiled))


def open_profiler() -> profile:
    """torch's profiler of a host's memory; its library otherwise announces every start."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True)


def read_events(profiled: profile) -> list[dict]:
    """What torch's profiler writes of a trace."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(trace))
        return json.loads(trace.read_text())["traceEvents"]


def read_peak(events: list[dict]) -> int:
    """The highest total inside the marked step of a trace, above the total at the trace's start."""
    mark = next(event for event in events if event.get("name") == _MARK)
    memory = sorted(
        (event for event in events if event.get("name") == "[memory]"), key=lambda e: e["ts"]
    )
    start, end = mark["ts"], mark["ts"] + mark["dur"]
    at_first = memory[0]["args"]["Total Allocated"] - memory[0]["args"]["Bytes"]
    before = [e["args"]["Total Allocated"] for e in memory if e["ts"] < start]
    inside = [e["args"]["Total Allocated"] for e in memory if start <= e["ts"] <= end]
    return max([*before[-1:], *inside]) - at_first


def peaks_on_cuda(step: Step) -> tuple[int, int]:
    """The most bytes that a step has allocated, and that the allocator has reserved for it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def free_device() -> int:
    """Give back what the last candidate held. The bytes that stay (inputs, libraries' workspace)
    are not the next one's: subtract them from its peak.
    """
    for _ in range(2):  # what tensors kept alive is garbage only after they are gone
        gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
