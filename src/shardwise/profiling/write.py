"""Writing a profile's files, beside those of a run (`run_files.py`)."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import collective_time
from shardwise.profiling.merge import MeasuredMessage
from shardwise.run_files import KERNELS, MEMORY, MESSAGES, TIMELINE, TRACE
from shardwise.timeline import Timeline

_CURVE_POINTS = 13


def write_profile(
    directory: Path,
    timeline: Timeline,
    messages: Sequence[MeasuredMessage],
    memory: list[dict[str, Any]],
    kernels: list[dict[str, Any]],
    cluster: str,
) -> None:
    """Write what the report reads, and the trace for Perfetto."""
    (directory / TIMELINE).write_text(timeline.to_json() + "\n")
    (directory / MEMORY).write_text(json.dumps({"ranks": memory}) + "\n")
    (directory / KERNELS).write_text(json.dumps({"ranks": kernels}) + "\n")
    (directory / MESSAGES).write_text(json.dumps(_messages(messages, cluster)) + "\n")
    (directory / TRACE).write_text(json.dumps(timeline.to_chrome()) + "\n")


def _messages(messages: Sequence[MeasuredMessage], name: str) -> dict[str, Any]:
    curve: list[dict[str, Any]] = []
    if name:
        cluster = Cluster.load(name)
        for collective, ranks in sorted({(m.collective, m.ranks) for m in messages if m.bytes}):
            sizes = [m.bytes for m in messages if m.collective == collective and m.bytes]
            # From half the smallest message to twice the largest, in equal ratios.
            points = np.geomspace(max(1, min(sizes) // 2), max(sizes) * 2, _CURVE_POINTS)
            for size in (round(point) for point in points):
                seconds = collective_time(cluster, collective, size, ranks)
                curve.append(
                    {"collective": collective, "ranks": ranks, "bytes": size, "seconds": seconds}
                )
    return {"cluster": name, "messages": [asdict(m) for m in messages], "curve": curve}


def write_raw(
    directory: Path, rank: int, profiler: Any | None, snapshot: dict[str, Any] | None
) -> None:
    """What torch's own viewers open: the profiler's trace, and CUDA's memory snapshot
    (pytorch.org/memory_viz).
    """
    if profiler is not None:
        profiler.export_chrome_trace(str(directory / f"torch-trace-rank{rank}.json"))
    if snapshot is not None:
        with (directory / f"memory-rank{rank}.pickle").open("wb") as file:
            pickle.dump(snapshot, file)


def choose_cluster(device: str) -> str:
    """The packaged cluster that is like this device; none for one that is not known."""
    if device == "cpu":
        return "cpu-gloo"
    known = ("H200", "H100", "B200", "A100", "V100")
    return next((f"{part.lower()}x8" for part in known if part in device), "")
