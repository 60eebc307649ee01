"""From a trace to a description: the segments of units that events belong to, and their sums."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    PassFacts,
    UnitDescription,
    UnitSegment,
)
from shardwise.description.parameters import UnitSpec
from shardwise.description.tracing.trace import ModelTrace, TraceEvent


def describe_by(units: Sequence[UnitSpec], trace: ModelTrace, name: str) -> ModelDescription:
    """Describe a traced model by these units.

    Every forward event goes to a unit: the deepest running module that is a unit's own decides,
    else the deepest that holds a parameter; outside of both, whoever ran last (so the loss goes to
    the output projection). Runs of one unit are its segments. A backward event goes to the segment
    of the forward event it goes back to, and never back up the order.
    """
    owners = _Owners(trace, units)
    drafts = _cut_forward(trace.events, owners)
    _assign_backward(trace.events, owners, drafts)
    saved = set(trace.inputs)  # by an earlier segment, or there before
    # Where gradients come; of reentrant checkpointing one may come in parts.
    came = set(
        {
            e.parameter: i for i, e in reversed([*enumerate(trace.events)]) if e.what == "gradient"
        }.values()
    )
    built: dict[int, list[UnitSegment]] = {i: [] for i in range(len(units))}
    for position, draft in enumerate(drafts):
        built[draft.unit].append(_finish(position, draft, trace, owners, saved, came))
    return ModelDescription(
        name=name,
        units=tuple(
            UnitDescription(unit.name, unit.modules, unit.parameters, tuple(built[i]))
            for i, unit in enumerate(units)
        ),
        input_bytes=trace.input_bytes,
        buffer_bytes=trace.buffer_bytes,
        without_gradient=trace.without_gradient,
        notes=trace.notes,
    )


@dataclass
class _Draft:
    """A segment in the making. Events are held by index."""

    unit: int
    forward: list[int] = field(default_factory=list)
    recompute: list[int] = field(default_factory=list)
    backward: list[int] = field(default_factory=list)


class _Owners:
    """Which unit the modules on a stack belong to."""

    def __init__(self, trace: ModelTrace, units: Sequence[UnitSpec]) -> None:
        if not units:
            raise ValueError("a description needs at least one unit")
        self._parameters_in = trace.owners
        self._of_parameter = {p.name: i for i, unit in enumerate(units) for p in unit.parameters}
        self._of_module: dict[str, int] = {}
        for i, unit in enumerate(units):
            for module in filter(None, unit.modules):
                self._of_module.setdefault(module, i)
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
            for parameter in self._parameters_in.get(name, ()):
                if parameter in self._of_parameter:
                    return self._of_parameter[parameter]
        return None

    def is_edge(self, stack: tuple[str, ...], unit: int) -> bool:
        """The innermost module of the stack is where the unit begins: nothing around it is."""
        return self.find(stack) == unit and self.find(stack[:-1]) != unit


def _cut_forward(events: Sequence[TraceEvent], owners: _Owners) -> list[_Draft]:
    segments: list[_Draft] = []
    early: list[int] = []  # before any unit has run: they go to the first that does
    for index, event in enumerate(events):
        if event.phase != "forward":
            continue
        unit = owners.find(event.stack)
        if unit is None or event.what == "free":
            (segments[-1].forward if segments else early).append(index)
        elif segments and segments[-1].unit == unit:
            segments[-1].forward.append(index)
        else:
            before = _take_saves(segments[-1].forward, events) if segments else early
            segments.append(_Draft(unit, [*before, index]))
    return segments or [_Draft(0, early)]


def _take_saves(indices: list[int], events: Sequence[TraceEvent]) -> list[int]:
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


def _assign_backward(events: Sequence[TraceEvent], owners: _Owners, segments: list[_Draft]) -> None:
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
            unit = owners.find(event.stack)
            found = last_of_unit.get(unit, -1) if unit is not None else -1
        elif event.origin >= 0:
            found = segment_of[min(event.origin, len(events) - 1)]
        if 0 <= found < current:
            current = found
        segment_of[index] = current
        draft = segments[current]
        (draft.recompute if event.phase == "recompute" else draft.backward).append(index)


def _finish(
    position: int,
    draft: _Draft,
    trace: ModelTrace,
    owners: _Owners,
    saved: set[int],
    came: Collection[int],
) -> UnitSegment:
    events = trace.events
    left = [
        events[i].nbytes
        for i in draft.forward
        if events[i].what == "leave" and owners.is_edge(events[i].stack, draft.unit)
    ]
    saves = {e.storage: e.nbytes for i in draft.forward if (e := events[i]).what == "save"}
    new = sum(nbytes for storage, nbytes in saves.items() if storage not in saved)
    saved.update(saves)
    # Operators of backward before the recomputation are few: their memory counts with it.
    ends = draft.recompute[-1] if draft.recompute else -1
    early = [i for i in draft.backward if i < ends]
    late = [i for i in draft.backward if i >= ends]
    return UnitSegment(
        position=position,
        forward=_make_pass(trace, draft.forward, draft.forward),
        backward=_make_pass(trace, draft.backward, late),
        recompute=_make_pass(trace, draft.recompute, sorted([*early, *draft.recompute])),
        checkpointed=any(events[i].kernel is not None for i in draft.recompute),
        saved_bytes=new,
        output_bytes=left[-1] if left else 0,
        gradients=tuple(
            events[i].parameter for i in (*draft.recompute, *draft.backward) if i in came
        ),
    )


def _make_pass(trace: ModelTrace, computed: list[int], allocated: list[int]) -> PassFacts:
    """The kernels of the events `computed`, the activation bytes of the events `allocated`."""
    kernels = _count(trace, computed)
    live = peak = 0
    for event in (trace.events[i] for i in allocated):
        if event.storage in trace.inputs or event.storage in trace.gradients:
            continue
        if event.what == "alloc":
            live += event.nbytes
            peak = max(peak, live)
        elif event.what == "free":
            live -= event.nbytes
    counted = tuple(dataclasses.replace(k, count=count) for k, count in kernels.items())
    # Of a recurrent network that the device fuses nobody sees when inside its gradients come.
    fused = any(kernel.kind == "recurrent" for kernel in kernels)
    with_gradients = (0, 0, 0) if fused else _with_gradients(trace, allocated)
    return PassFacts(counted, peak, live, *with_gradients)


def _count(trace: ModelTrace, computed: list[int]) -> dict[KernelFact, int]:
    """How often each kernel runs. Most are one object, which is compared quicker than its facts."""
    found = [k for i in computed if (k := trace.events[i].kernel) is not None]
    by_object = {id(kernel): kernel for kernel in found}
    kernels: Counter[KernelFact] = Counter()
    for each, count in Counter(map(id, found)).items():
        kernels[by_object[each]] += count
    return kernels


def _with_gradients(trace: ModelTrace, allocated: list[int]) -> tuple[int, int, int]:
    """The most bytes of activations and gradients: where these stay; until the first has come; from
    then on, without those that have come.
    """
    if not any(trace.events[i].what == "gradient" for i in allocated):
        return 0, 0, 0
    live = passed = keeping = before = passing = 0
    sizes: dict[int, int] = {}  # of gradients on their way
    came = False
    for event in (trace.events[i] for i in allocated):
        if event.what == "gradient":
            passed += sizes.pop(event.storage, 0)
            came = True
            passing = max(passing, live - passed)
        if event.storage in trace.inputs:
            continue
        if event.what == "alloc":
            live += event.nbytes
            if event.storage in trace.gradients:
                sizes[event.storage] = event.nbytes
            keeping = max(keeping, live)
            if came:
                passing = max(passing, live - passed)
            else:
                before = max(before, live)
        elif event.what == "free" and event.storage not in trace.gradients:
            live -= event.nbytes
    return keeping, max(1, before), passing
