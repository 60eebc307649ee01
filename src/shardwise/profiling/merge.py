"""The ranks that profile together, and what each saw of a step as one timeline.

They tell each other over the store through which they met (`engine/collectives.py`), so that a
profile adds no collective to the run and works over any backend. One process that stands for a rank
of many (a fake group) is alone.
"""

from __future__ import annotations

import socket
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch.distributed as dist

from shardwise.engine.marks import CallMark
from shardwise.engine.words import control_of
from shardwise.profiling.memory import StepMemory
from shardwise.timeline import MemoryCurve, Span, Timeline

_ROUNDS = 9  # of barriers, behind which clocks are compared


class Peers:
    """This rank among those of the default process group."""

    def __init__(self) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.fake = joined and dist.get_backend() == "fake"
        self._control = control_of(dist.group.WORLD) if joined else None

    @property
    def leads(self) -> bool:
        return self._control is None or self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        return [value] if self._control is None else self._control.exchange(value)

    def compare_clocks(self) -> tuple[int, int]:
        """Nanoseconds that this rank's clock is ahead of the first rank's, and how wrong that may
        be. Processes of one machine share a clock; others are compared behind barriers.
        """
        machines = self.exchange(_machine())
        if len(set(machines)) == 1:
            return 0, 0
        seen = []
        for _ in range(_ROUNDS):
            dist.barrier()
            seen.append(perf_counter_ns())
        first = self.exchange(seen)[0]
        ahead = [mine - theirs for mine, theirs in zip(seen, first, strict=True)]
        errors = self.exchange(max(ahead) - min(ahead))
        return int(statistics.median(ahead)), max(errors)


def _machine() -> str:
    """Names one boot of one machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@dataclass(frozen=True)
class RankTransfer:
    """A collective as one rank saw it; the same key on another rank is the same collective."""

    span: Span
    key: tuple[str, tuple[int, ...], int]  # axis, the group's ranks, how many came before
    nbytes: int


def number_transfers(rank: int, found: Iterable[tuple[CallMark, int, int]]) -> list[RankTransfer]:
    """The calls, and when each ran, in the order in which the host issued them: numbered by it
    within each group of ranks.
    """
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    made = []
    for call, start, end in found:
        group = call.axis, call.members
        span = Span(call.name, call.unit, call.phase, "transfer", rank, call.axis, start, end)
        made.append(RankTransfer(span, (*group, counts[group]), call.nbytes))
        counts[group] += 1
    return made


def part_waiting(ranks: Sequence[Sequence[RankTransfer]]) -> list[Span]:
    """Every transfer's span; where another rank took less time for the same collective, the rest
    was spent waiting for a late peer.
    """
    transfers = [each for seen in ranks for each in seen]
    least: dict[object, int] = {}
    for each in transfers:
        least[each.key] = min(least.get(each.key, each.span.duration), each.span.duration)
    spans: list[Span] = []
    for each in transfers:
        span, late = each.span, each.span.duration - least[each.key]
        if late:
            middle = span.start + late
            spans.append(replace(span, role="waiting", end=middle))
            span = replace(span, start=middle)
        spans.append(span)
    return spans


@dataclass(frozen=True)
class RankStep:
    """One step as one rank saw it, in that rank's clock."""

    rank: int
    start: int
    ahead: int  # nanoseconds that its clock is ahead of the first rank's
    spans: list[Span]
    transfers: list[RankTransfer]
    memory: StepMemory


@dataclass(frozen=True)
class MeasuredMessage:
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
) -> tuple[Timeline, list[MeasuredMessage], list[dict[str, Any]]]:
    """One timeline of all ranks, from nanosecond 0 on; its messages, and memory.json's ranks."""
    first = min(step.start - step.ahead for step in seen)
    spans: list[Span] = []
    transfers: dict[int, list[RankTransfer]] = {}
    curves, memory = [], []
    for step in seen:
        shift = -first - step.ahead
        spans += [_moved(span, shift) for span in step.spans]
        transfers[step.rank] = [
            replace(each, span=_moved(each.span, shift)) for each in step.transfers
        ]
        curve = step.memory.curve
        curve = replace(curve, times=tuple(max(0, time + shift) for time in curve.times))
        curves.append(curve)
        memory.append(_describe_memory(curve, step.memory))
    spans += part_waiting(list(transfers.values()))
    spans.sort(key=lambda s: (s.rank, s.start, s.end))
    timeline = Timeline(tuple(spans), tuple(curves), labels=labels)
    return timeline, _list_messages(timeline, transfers[timeline.slowest]), memory


def _moved(span: Span, shift: int) -> Span:
    return replace(span, start=span.start + shift, end=span.end + shift)


def _describe_memory(curve: MemoryCurve, memory: StepMemory) -> dict[str, Any]:
    return {
        "rank": curve.rank,
        "limit_bytes": memory.limit_bytes,
        "peak_allocated": max(curve.totals),
        "times": list(curve.times),
        "allocated": list(curve.totals),
        "reserved": memory.reserved,
        "active": memory.active,
        "largest": memory.largest,
    }


def _list_messages(timeline: Timeline, issued: list[RankTransfer]) -> list[MeasuredMessage]:
    """The collectives that the slowest rank issued, by their order."""
    overlaps = {
        (o.span.name, o.span.unit, o.span.phase, o.span.end): o for o in timeline.overlaps()
    }
    messages = []
    for each in issued:
        span, (_, members, _) = each.span, each.key
        overlap = overlaps[span.name, span.unit, span.phase, span.end]
        took, exposed = overlap.span.duration / 1e9, overlap.exposed / 1e9
        messages.append(
            MeasuredMessage(
                span.name, span.unit, span.phase, len(members), each.nbytes, took, exposed
            )
        )
    return messages
