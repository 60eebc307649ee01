"""Every rank's picture of a step as one timeline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from shardwise.profiling.memory import Curve
from shardwise.profiling.spans import Transfer, part_waiting
from shardwise.timeline import MemoryCurve, Span, Timeline


@dataclass(frozen=True)
class RankStep:
    """One step as one rank saw it, in that rank's clock."""

    start: int
    spans: list[Span]
    transfers: list[Transfer]
    memory: Curve
    limit_bytes: int | None


@dataclass(frozen=True)
class Message:
    """One collective of the step: its time without waiting for late peers, and what of it the
    slowest rank's compute stood still for.
    """

    collective: str
    unit: str
    phase: str
    ranks: int
    bytes: int
    seconds: float
    exposed_s: float


def merge(
    seen: list[RankStep], labels: dict[str, str]
) -> tuple[Timeline, list[Message], list[dict[str, Any]]]:
    """One timeline of all ranks, from nanosecond 0 on."""
    first = min(step.start for step in seen)
    spans = [span for step in seen for span in step.spans]
    spans += part_waiting([step.transfers for step in seen])
    spans = [replace(s, start=s.start - first, end=s.end - first) for s in spans]
    spans.sort(key=lambda s: (s.rank, s.start, s.end))
    curves, memory = [], []
    for step, rank in zip(seen, _ranks(seen), strict=True):
        curve = step.memory
        times = tuple(max(0, time - first) for time in curve.times)
        roles = {role: tuple(values) for role, values in curve.roles.items()}
        curves.append(MemoryCurve(rank, times, roles))
        memory.append(
            {
                "rank": rank,
                "limit_bytes": step.limit_bytes,
                "peak_allocated": max(curve.totals),
                "times": list(times),
                "allocated": curve.totals,
                "reserved": curve.reserved,
                "active": curve.active,
                "largest": curve.largest,
            }
        )
    timeline = Timeline(tuple(spans), tuple(curves), labels=labels)
    return timeline, _list_messages(timeline, seen), memory


def _ranks(seen: list[RankStep]) -> list[int]:
    return [step.spans[0].rank for step in seen]


def _list_messages(timeline: Timeline, seen: list[RankStep]) -> list[Message]:
    """The collectives that the slowest rank issued, by their order."""
    rank = timeline.slowest
    transfers = next(
        step.transfers for step, r in zip(seen, _ranks(seen), strict=True) if r == rank
    )
    overlaps = {
        (o.span.name, o.span.unit, o.span.phase, o.span.end): o
        for o in timeline.overlaps(rank=rank)
    }
    first = min(step.start for step in seen)
    messages = []
    for each in transfers:
        span = each.span
        overlap = overlaps.get((span.name, span.unit, span.phase, span.end - first))
        if overlap is not None:
            took, exposed = overlap.span.duration / 1e9, overlap.exposed / 1e9
            messages.append(
                Message(span.name, span.unit, span.phase, each.ranks, each.nbytes, took, exposed)
            )
    return messages
