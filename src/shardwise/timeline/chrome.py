"""The trace format that Perfetto and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.timeline.spans import MemoryCurve, Span


def to_chrome(
    by_rank: Mapping[int, Sequence[Span]],
    memory: Iterable[MemoryCurve],
    stands_for: Mapping[int, int],
    labels: Mapping[str, str],
) -> dict[str, Any]:
    """Ranks as processes, streams as threads, memory as a counter, and an arrow from every gather
    to the compute that waits for it.
    """
    events: list[dict[str, Any]] = []
    arrows = 0
    for rank, spans in by_rank.items():
        folded = stands_for.get(rank, 1)
        title = f"rank {rank}" + (f" (and {folded - 1} like it)" if folded > 1 else "")
        events.append(_meta("process_name", rank, 0, title))
        threads = {name: i for i, name in enumerate(dict.fromkeys(s.stream for s in spans))}
        events += [_meta("thread_name", rank, i, name) for name, i in threads.items()]
        events += [
            {
                "ph": "X", "name": f"{span.name} {span.unit}".strip(), "cat": span.role,
                "pid": rank, "tid": threads[span.stream], "ts": span.start / 1e3,
                "dur": span.duration / 1e3,
                "args": {"unit": span.unit, "phase": span.phase, "role": span.role},
            }
            for span in spans
        ]  # fmt: skip
        for gather, use in _uses(spans):
            arrow = {"name": "gather to use", "cat": "flow", "id": arrows, "pid": rank}
            arrows += 1
            # An arrow starts inside the slice it leaves, and ends at the start of the next one.
            leaves = max(gather.start, gather.end - 1) / 1e3
            events.append(arrow | {"ph": "s", "tid": threads[gather.stream], "ts": leaves})
            ends = {"ph": "f", "bp": "e", "tid": threads[use.stream], "ts": use.start / 1e3}
            events.append(arrow | ends)
    for curve in memory:
        for i, time in enumerate(curve.times):
            held = {role: values[i] for role, values in curve.roles.items()}
            counter = {"ph": "C", "name": "memory", "pid": curve.rank, "ts": time / 1e3}
            events.append(counter | {"args": held})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(labels)}


def _uses(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """Each gather, with the first compute of its unit and phase that starts after it ended."""
    found = []
    computes: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        if span.role == "compute":
            computes.setdefault((span.unit, span.phase), []).append(span)
    for span in spans:
        if span.role == "transfer" and span.name == "all_gather":
            later = computes.get((span.unit, span.phase), [])
            use = next((s for s in later if s.start >= span.end), None)
            if use is not None:
                found.append((span, use))
    return found


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}
