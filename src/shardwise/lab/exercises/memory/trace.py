"""Reading a profiler's trace: memory over time, and the name of what holds it.

torch's profiler reports every allocation and release with its address, on a CPU and on a GPU alike,
among the operators that ran. An allocation is named after the module and operator it happened in;
one made in backward after the forward operator that it belongs to (autograd numbers them); one that
turns out to be a gradient or a moment after its parameter.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PHASE, MODULE = "phase:", "module:"
TraceEvent = dict[str, Any]


@dataclass
class HeldMemory:
    """Memory that was given out in the trace."""

    bytes: int
    start: float
    end: float = float("inf")
    what: str = ""


@dataclass(frozen=True)
class Phase:
    """A marked stretch of the trace, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class MemoryTrace:
    """What one profiled pass says of memory; `times` in microseconds, `totals` in bytes."""

    times: list[float]
    totals: list[int]
    allocations: list[HeldMemory]
    phases: list[Phase]

    def peak(self, start: float, end: float) -> tuple[float, int]:
        """When the most was held between two moments, and how much."""
        first = max(0, bisect_right(self.times, start) - 1)
        inside = range(first, bisect_right(self.times, end))
        at = max(inside, key=self.totals.__getitem__, default=first)
        return self.times[at], self.totals[at]

    def held_at(self, time: float) -> list[HeldMemory]:
        return [a for a in self.allocations if a.start <= time < a.end]


def read_trace(
    events: Sequence[TraceEvent],
    on_gpu: bool,
    before: int,
    owners: Sequence[Mapping[int, str]] = (),
) -> MemoryTrace:
    """Turn a trace's events into curve and names.

    `before` is what was held when the trace began. `owners[i]` names addresses in use at the end of
    the i-th pass (the i-th phase called optimizer, or the last of all).
    """
    spans = [e for e in events if e.get("ph") == "X" and e.get("cat") in _SPANS]
    phases = sorted(
        (Phase(e["name"].removeprefix(PHASE), e["ts"], e["ts"] + e["dur"])
         for e in spans if e["name"].startswith(PHASE)),
        key=lambda phase: phase.start,
    )  # fmt: skip
    memory = sorted(
        (e for e in events if e.get("name") == "[memory]" and _is_on_gpu(e) == on_gpu),
        key=lambda e: e["ts"],
    )
    names = _name_allocations(spans, memory)
    times, totals = [phases[0].start if phases else 0.0], [before]
    alive: dict[int, HeldMemory] = {}
    allocations: list[HeldMemory] = []
    ends = [phase.end for phase in phases if phase.name == "optimizer"] or [
        phase.end for phase in phases[-1:]
    ]
    marks = list(zip(ends, owners, strict=False))
    for event, name in zip(memory, names, strict=True):
        while marks and event["ts"] > marks[0][0]:
            _name_owners(alive, marks.pop(0)[1])
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            alive[address] = HeldMemory(size, event["ts"], what=name)
            allocations.append(alive[address])
        elif address in alive:
            alive.pop(address).end = event["ts"]
        times.append(event["ts"])
        totals.append(totals[-1] + size)
    for _, owned in marks:
        _name_owners(alive, owned)
    return MemoryTrace(times, totals, allocations, phases)


_SPANS = ("cpu_op", "user_annotation")


def _is_on_gpu(event: TraceEvent) -> bool:
    return event["args"].get("Device Type") == 1


def _name_owners(alive: Mapping[int, HeldMemory], owned: Mapping[int, str]) -> None:
    for address, allocation in alive.items():
        allocation.what = owned.get(address, allocation.what)


def _name_allocations(spans: Sequence[TraceEvent], memory: Sequence[TraceEvent]) -> list[str]:
    """The name of each memory event by what was running on its thread at its time."""
    by_thread: dict[Any, list[TraceEvent]] = defaultdict(list)
    for event in (*spans, *memory):
        by_thread[event["tid"]].append(event)
    # Sequence number -> the module whose operator autograd gave it.
    recorded: dict[int, str] = {}
    names: dict[int, str] = {}
    threads = sorted(by_thread.values(), key=lambda own: min(e["ts"] for e in own))
    for own in threads:
        open_spans: list[TraceEvent] = []
        for event in sorted(own, key=lambda e: (e["ts"], -e.get("dur", 0))):
            while open_spans and open_spans[-1]["ts"] + open_spans[-1]["dur"] <= event["ts"]:
                open_spans.pop()
            if event["name"] == "[memory]":
                names[id(event)] = _name(open_spans, recorded)
                continue
            open_spans.append(event)
            number = event["args"].get("Sequence number", -1)
            if number >= 0 and not event["args"].get("Fwd thread id"):
                recorded[number] = _module(open_spans)
    return [names[id(event)] for event in memory]


def _name(open_spans: Sequence[TraceEvent], recorded: Mapping[int, str]) -> str:
    module, operator = _module(open_spans), ""
    for span in open_spans:
        name = span["name"]
        if name.startswith(MODULE):
            operator = ""  # what counts is inside the innermost module
        elif span["args"].get("Fwd thread id") and "Sequence number" in span["args"]:
            module = recorded.get(span["args"]["Sequence number"], module)
            operator = f"backward of {name.rpartition(' ')[2].removesuffix('Backward0')}"
        elif not operator and span["cat"] == "cpu_op":
            operator = name.removeprefix("aten::")
    return f"{module}: {operator}" if module and operator else operator or module or "other"


def _module(open_spans: Sequence[TraceEvent]) -> str:
    inside = [s["name"] for s in open_spans if s["name"].startswith(MODULE)]
    return inside[-1].removeprefix(MODULE) if inside else ""


def group_by_name(allocations: Sequence[HeldMemory]) -> list[dict[str, Any]]:
    """Allocations of the same name and size in different layers as one, the most bytes first."""
    groups: dict[tuple[str, int], int] = defaultdict(int)
    for allocation in allocations:
        name = re.sub(r"\.\d+\b", ".*", allocation.what)
        groups[name, allocation.bytes] += 1
    found = [
        {"what": what, "count": count, "each": size, "total": size * count}
        for (what, size), count in groups.items()
    ]
    return sorted(found, key=lambda group: -group["total"])


def thin_out(times: Sequence[float], totals: Sequence[int], points: int) -> list[tuple[float, int]]:
    """At most about `points` of a curve, every stretch's lowest and highest among them."""
    if len(times) <= points:
        return list(zip(times, totals, strict=True))
    stretch = -(-2 * len(times) // points)
    extremes: list[int] = []
    for first in range(0, len(times), stretch):
        inside = range(first, min(first + stretch, len(times)))
        low, high = (pick(inside, key=totals.__getitem__) for pick in (min, max))
        extremes += sorted({low, high})
    return [(times[i], totals[i]) for i in extremes]
