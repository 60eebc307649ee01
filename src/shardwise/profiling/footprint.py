"""The most bytes that are allocated at one moment of a training step."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shardwise.engine import torch_private
from shardwise.engine.engine import engine_of
from shardwise.profiling.timing import Step

_MARK = "shardwise.peak"

let_segments_grow = torch_private.let_segments_grow  # for whoever measures torch's engine so


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


def arena_bytes(model: nn.Module) -> int | None:
    """What a sharded model's steps have in one block; None while, or where, there is none."""
    arena = engine_of(model).executor.arena
    return None if arena is None or arena.block is None else arena.block.nbytes


def runs_within(step: Step, limit: int) -> bool:
    """Whether a step runs where torch's allocator may take no more than `limit` bytes."""
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
    try:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        return False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return True


def largest_blocks() -> str:
    """The kinds of blocks that hold most of what is allocated on the device."""
    found = Counter[int](
        block["size"]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )
    largest = sorted(found.items(), key=lambda each: -each[0] * each[1])[:4]
    return ", ".join(f"{times} x {size / 2**20:.1f} MiB" for size, times in largest)


def meet_libraries(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Let cuBLAS take its workspaces, one in forward's thread and one in backward's: they stay, so
    a step that comes first is not to be blamed for them.
    """
    square = torch.ones(16, 16, device=device, dtype=dtype, requires_grad=True)
    (square @ square).sum().backward()


def free_device(workspaces: bool = False) -> int:
    """Give back what the last candidate held. The bytes that stay (inputs, libraries' workspace)
    are not the next one's: subtract them from its peak. `workspaces`: cuBLAS's too, one for each
    stream; captured steps have streams of their own, and none may be alive.
    """
    for _ in range(2):  # what tensors kept alive is garbage only after they are gone
        gc.collect()
    if workspaces:
        torch_private.clear_workspaces()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated()
