"""From a trace to a description: which unit each event belongs to, and the sums for each."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    ParameterFact,
    Pass,
    Segment,
    UnitDescription,
)
from shardwise.description.trace import Event, Trace


@dataclass(frozen=True)
class UnitFacts:
    """A unit as its Plan names it: the modules whose forward needs it, and its parameters."""

    name: str
    modules: tuple[str, ...]
    parameters: tuple[ParameterFact, ...]


def group(trace: Trace, units: Sequence[UnitFacts], name: str = "model") -> ModelDescription:
    """Describe a traced model by these units.

    Every forward event goes to a unit: the deepest running module that is a unit's own decides,
    else the deepest that holds a parameter; outside of both, whoever ran last (so the loss goes to
    the output projection). Runs of one unit are its segments. A backward event goes to the segment
    of the forward event it goes back to, and never back up the order.
    """
    places = _Places(trace, units)
    segments = _cut_forward(trace.events, places)
    _assign_backward(trace.events, places, segments)
    _follow_memory(trace, segments)
    _count_saved(trace, segments)
    built: dict[int, list[Segment]] = {i: [] for i in range(len(units))}
    for position, draft in enumerate(segments):
        built[draft.unit].append(_finish(position, draft, trace, places))
    return ModelDescription(
        name=name,
        units=tuple(
            UnitDescription(unit.name, unit.modules, unit.parameters, tuple(built[i]))
            for i, unit in enumerate(units)
        ),
        input_bytes=trace.input_bytes,
        buffer_bytes=trace.buffer_bytes,
        tied=trace.tied,
        notes=trace.notes,
        outline=trace.outline,
    )


@dataclass
class _Draft:
    """A segment in the making. Events are held by index."""

    unit: int
    forward: list[int] = field(default_factory=list)
    recompute: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)
    saved: int = 0
    # Per phase: activation bytes at the start, the peak above it, and the change.
    memory: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Places:
    """Which unit the modules on a stack belong to."""

    def __init__(self, trace: Trace, units: Sequence[UnitFacts]) -> None:
        if not units:
            raise ValueError("a description needs at least one unit")
        self._owners = trace.owners
        self._of_module: dict[str, int] = {}
        self._of_parameter: dict[str, int] = {}
        for i, unit in enumerate(units):
            for module in unit.modules:
                if module:
                    self._of_module.setdefault(module, i)
            for parameter in unit.parameters:
                self._of_parameter[parameter.name] = i
        self._found: dict[tuple[str, ...], int | None] = {}

    def find(self, stack: tuple[str, ...]) -> int | None:
        if stack not in self._found:
            self._found[stack] = self._search(stack)
        return self._found[stack]

    def _search(self, stack: tuple[str, ...]) -> int | None:
        for name in reversed(stack):
            if name in self._of_module:
                return self._of_module[name]
        for name in reversed(stack):
            for parameter in self._owners.get(name, ()):
                if parameter in self._of_parameter:
                    return self._of_parameter[parameter]
        return None

    def is_edge(self, stack: tuple[str, ...], unit: int) -> bool:
        """The innermost module of the stack is where the unit begins: nothing around it is."""
        return self.find(stack) == unit and self.find(stack[:-1]) != unit


def _cut_forward(events: Sequence[Event], places: _Places) -> list[_Draft]:
    segments: list[_Draft] = []
    early: list[int] = []  # before any unit has run: they go to the first that does
    for index, event in enumerate(events):
        if event.phase != "forward":
            continue
        unit = places.find(event.stack)
        if unit is None or event.what == "free":
            (segments[-1].forward if segments else early).append(index)
        elif segments and segments[-1].unit == unit:
            segments[-1].forward.append(index)
        else:
            before = _take_saves(segments[-1].forward, events) if segments else early
            segments.append(_Draft(unit, [*before, index]))
    return segments or [_Draft(0, early)]


def _take_saves(indices: list[int], events: Sequence[Event]) -> list[int]:
    """Take from the last segment what was kept outside of any module, just before another unit
    begins, of what the last segment made: checkpointing keeps the next unit's input there. (The
    reentrant kind keeps it after the unit has run; that is right where it is.)
    """
    start = len(indices)
    while start and not events[indices[start - 1]].stack:
        if events[indices[start - 1]].what == "kernel":
            break
        start -= 1
    made = {events[i].storage for i in indices if events[i].what == "alloc"}
    taken = [i for i in indices[start:] if events[i].what == "save" and events[i].storage in made]
    indices[start:] = [i for i in indices[start:] if i not in taken]
    return taken


def _assign_backward(events: Sequence[Event], places: _Places, segments: list[_Draft]) -> None:
    segment_of = [-1] * len(events)
    last_of_unit: dict[int, int] = {}
    for number, draft in enumerate(segments):
        last_of_unit[draft.unit] = number
        for index in draft.forward:
            segment_of[index] = number
    current = len(segments) - 1
    for index, event in enumerate(events):
        if event.phase == "forward":
            continue
        found = -1
        if event.phase == "recompute":
            unit = places.find(event.stack)
            found = last_of_unit.get(unit, -1) if unit is not None else -1
        elif event.origin >= 0:
            found = segment_of[min(event.origin, len(events) - 1)]
        if 0 <= found < current:
            current = found
        segment_of[index] = current
        draft = segments[current]
        (draft.recompute if event.phase == "recompute" else draft.backward).append(index)


def _follow_memory(trace: Trace, segments: list[_Draft]) -> None:
    """Activation bytes over time, cut at the segments' edges."""
    outside = trace.inputs | trace.gradients
    live = 0
    for draft in segments:
        live = _follow(trace.events, draft.forward, outside, live, draft, "forward")
    for draft in reversed(segments):
        # Operators before the recomputation are few: they count with it.
        ends = draft.recompute[-1] if draft.recompute else -1
        early = [i for i in draft.backward if i < ends]
        again = sorted([*early, *draft.recompute])
        late = [i for i in draft.backward if i >= ends]
        live = _follow(trace.events, again, outside, live, draft, "recompute")
        live = _follow(trace.events, late, outside, live, draft, "backward")


def _follow(
    events: Sequence[Event],
    indices: list[int],
    outside: frozenset[int],
    live: int,
    draft: _Draft,
    phase: str,
) -> int:
    start = peak = live
    for index in indices:
        event = events[index]
        if event.storage in outside:
            continue
        if event.what == "alloc":
            live += event.nbytes
            peak = max(peak, live)
        elif event.what == "free":
            live -= event.nbytes
    draft.memory[phase] = (peak - start, live - start)
    return live


def _count_saved(trace: Trace, segments: list[_Draft]) -> None:
    seen = set(trace.inputs)
    for draft in segments:
        for index in draft.forward:
            event = trace.events[index]
            if event.what == "save" and event.storage not in seen:
                seen.add(event.storage)
                draft.saved += event.nbytes


def _finish(position: int, draft: _Draft, trace: Trace, places: _Places) -> Segment:
    events = trace.events
    edges = [
        events[i]
        for i in draft.forward
        if events[i].what in ("enter", "leave") and places.is_edge(events[i].stack, draft.unit)
    ]
    entered = [event.nbytes for event in edges if event.what == "enter"]
    left = [event.nbytes for event in edges if event.what == "leave"]
    return Segment(
        position=position,
        forward=_make_pass(draft, "forward", draft.forward, events),
        backward=_make_pass(draft, "backward", draft.backward, events),
        recompute=_make_pass(draft, "recompute", draft.recompute, events),
        checkpointed=any(events[i].kernel is not None for i in draft.recompute),
        saved_bytes=draft.saved,
        input_bytes=entered[0] if entered else 0,
        output_bytes=left[-1] if left else 0,
    )


def _make_pass(draft: _Draft, phase: str, indices: list[int], events: Sequence[Event]) -> Pass:
    peak, net = draft.memory[phase]
    counts: Counter[KernelFact] = Counter()
    for index in indices:
        kernel = events[index].kernel
        if kernel is not None:
            counts[kernel] += 1
    kernels = tuple(dataclasses.replace(k, count=count) for k, count in counts.items())
    return Pass(kernels, peak, net)
