"""Memory: a limit that is near, and what fills the peak."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.reporting.findings.finding import Finding
from shardwise.reporting.formats import join, show_bytes, show_share, show_time
from shardwise.reporting.queries import curve_of
from shardwise.timeline import MemoryPeak, Timeline

NEAR = 0.9  # of the limit: memory worth a warning

_LESS = {
    "activations": "Recompute activations (checkpointing) or use smaller micro-batches.",
    "full": "Lower forward_prefetch and backward_prefetch, or cut units smaller.",
    "parameters": "Shard over more ranks, or shard parameters too (zero3).",
    "gradients": "Shard gradients (zero2 or zero3) over more ranks.",
    "state": "Shard the optimizer's state (zero1 and up) over more ranks.",
    "slots": "Lower reduce_depth to 1 or cut units smaller.",
    "temporary": "Find the largest temporaries in the list below; fused kernels avoid them.",
    "other": "Memory that no role explains: see the largest allocations below.",
}


def memory_limit(timeline: Timeline, memory: Mapping[str, Any]) -> Finding | None:
    """The rank that is nearest to its limit, if any is near; or one whose allocator holds much
    more than is used.
    """
    found = []
    for entry in memory.get("ranks", ()):
        limit, used = entry.get("limit_bytes"), entry.get("peak_allocated")
        held = max([used or 0, *(entry.get("reserved") or ())])
        if limit and held > NEAR * limit:
            found.append((held / limit, entry["rank"], used, held, limit))
    if not found:
        return None
    share, rank, used, held, limit = max(found)
    if used and held > 1.25 * used:
        what = (
            f"Rank {rank} reserves {show_bytes(held)} of {show_bytes(limit)} "
            f"({show_share(share)}) but uses {show_bytes(used)} at most: the rest is fragmented."
        )
        change = "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
    else:
        curve = curve_of(timeline, rank)
        filled = f" ({_describe(curve.peak())})" if curve else ""
        what = f"Rank {rank} comes to {show_share(share)} of its {show_bytes(limit)}{filled}."
        change = _LESS[_largest_role(curve.peak())] if curve else ""
    return Finding("memory", what, change, rank=rank, urgent=True)


def memory_peak(timeline: Timeline, memory: Mapping[str, Any]) -> Finding | None:
    """What fills the highest peak of all ranks."""
    peak = timeline.peak() if timeline.memory else None
    if peak is None or not peak.total:
        return None
    limits = [e["limit_bytes"] for e in memory.get("ranks", ()) if e.get("limit_bytes")]
    room = f", {show_share(peak.total / min(limits))} of the limit" if limits else ""
    less = _LESS[_largest_role(peak)]
    return Finding(
        "memory",
        f"Memory peaks at {_describe(peak)}{room} "
        f"(rank {peak.rank}, {show_time(peak.time - timeline.start)} into the step).",
        f"To use less: {less[0].lower()}{less[1:]}",
        rank=peak.rank,
    )


def _largest_role(peak: MemoryPeak) -> str:
    return max(peak.by_role, key=lambda role: peak.by_role[role])


def _describe(peak: MemoryPeak) -> str:
    """The peak and the two roles that fill it most."""
    order = sorted(peak.by_role, key=lambda role: -peak.by_role[role])
    named = [f"{role} {show_bytes(peak.by_role[role])}" for role in order[:2] if peak.by_role[role]]
    return f"{show_bytes(peak.total)}: {join(named)}" if named else show_bytes(peak.total)
