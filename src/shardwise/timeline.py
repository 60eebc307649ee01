"""The timeline of one training step: what every rank's streams did when, and what was in memory.

Predicted by the simulator or measured by a profiler, it is the same type, so that a report is a
difference of two. Times are whole nanoseconds: parts then sum to the whole exactly.

Every moment of a rank's step is one of these, told from its compute stream (first match wins):

    compute            it runs; the part beyond what the kernels take alone is contention
    copies             it runs a copy (pack, cast, copy-out)
    exposed transfer   it is idle while a collective moves bytes
    waiting for peers  it is idle while a collective waits for a late rank
    copies             it is idle while another stream runs a copy
    host idle          it is idle and nothing runs: the host has not issued the next work yet
                       (on a CPU, where both are one: the host's own work between the kernels)

so that step = compute + contention + exposed transfer + waiting for peers + copies + host idle.
"""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

SPAN_ROLES = ("compute", "copy", "transfer", "waiting", "host")
MEMORY_ROLES = (
    "parameters", "full", "gradients", "slots", "state", "activations", "temporary", "other",
)  # fmt: skip
COMPUTE = "compute"  # the stream's name, and the role's
HOST = "host"


@dataclass(frozen=True)
class Span:
    """Something that ran on one stream of one rank, from `start` to `end` nanoseconds."""

    name: str  # what: forward, gather, reduce_scatter, pack, ...
    unit: str
    phase: str  # forward, backward, optimizer
    role: str  # one of SPAN_ROLES
    rank: int
    stream: str  # "compute", "host", or the lane or group it ran on
    start: int
    end: int
    # Nanoseconds it would take with the device to itself; None where that is not known.
    alone: int | None = None

    def __post_init__(self) -> None:
        if self.role not in SPAN_ROLES:
            raise ValueError(
                f"span {self.name!r} has role {self.role!r}, expected one of {SPAN_ROLES}"
            )
        if self.end < self.start:
            raise ValueError(
                f"span {self.name!r} of rank {self.rank} ends at {self.end} ns, before its start "
                f"at {self.start} ns"
            )

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def contention(self) -> int:
        """Nanoseconds that others on the device cost it."""
        return 0 if self.alone is None else max(0, self.duration - self.alone)


@dataclass(frozen=True)
class MemoryPeak:
    """The moment at which one rank held the most."""

    rank: int
    time: int
    total: int
    by_role: Mapping[str, int]


@dataclass(frozen=True)
class MemoryCurve:
    """Bytes by role on one rank: `roles[r][i]` holds from `times[i]` until `times[i + 1]`."""

    rank: int
    times: tuple[int, ...]
    roles: Mapping[str, tuple[int, ...]]

    def __post_init__(self) -> None:
        unknown = sorted(set(self.roles) - set(MEMORY_ROLES))
        if unknown:
            raise ValueError(f"memory roles {unknown} are unknown, expected some of {MEMORY_ROLES}")
        lengths = {role: len(values) for role, values in self.roles.items()}
        if any(length != len(self.times) for length in lengths.values()):
            raise ValueError(
                f"rank {self.rank} has {len(self.times)} moments but {lengths} values: one each"
            )
        if list(self.times) != sorted(self.times):
            raise ValueError(f"the memory curve of rank {self.rank} goes back in time")

    @cached_property
    def totals(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.roles.values(), strict=True))) if self.roles else ()

    def peak(self) -> MemoryPeak:
        if not self.totals:
            return MemoryPeak(self.rank, 0, 0, {})
        at = max(range(len(self.totals)), key=self.totals.__getitem__)
        by_role = {role: values[at] for role, values in self.roles.items()}
        return MemoryPeak(self.rank, self.times[at], self.totals[at], by_role)


@dataclass(frozen=True)
class Breakdown:
    """Where one rank's step went, in nanoseconds; the parts sum to `step` exactly."""

    step: int
    compute: int
    contention: int
    exposed_transfer: int
    waiting_for_peers: int
    copies: int
    host_idle: int

    PARTS = (
        "compute", "contention", "exposed_transfer", "waiting_for_peers", "copies", "host_idle",
    )  # fmt: skip

    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.PARTS}

    def __str__(self) -> str:
        terms = " + ".join(f"{n.replace('_', ' ')} {v / 1e6:.1f}" for n, v in self.parts().items())
        return f"step {self.step / 1e6:.1f} ms = {terms}"


@dataclass(frozen=True)
class Overlap:
    """How much of one transfer ran under compute, and how much the compute stream waited for it."""

    span: Span
    hidden: int
    exposed: int

    @property
    def is_hidden(self) -> bool:
        """Compute never stood still for it."""
        return self.exposed == 0


@dataclass(frozen=True)
class Segment:
    """A stretch of a rank's step of one kind; `span` is what it is laid to, if anything."""

    start: int
    end: int
    kind: str  # of Breakdown.PARTS
    span: Span | None


@dataclass(frozen=True)
class Timeline:
    """One step: spans and memory by rank. `stands_for` says how many ranks a listed one is the
    picture of (ranks that do the same are folded).
    """

    spans: tuple[Span, ...]
    memory: tuple[MemoryCurve, ...] = ()
    stands_for: Mapping[int, int] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)  # title, source, plan, ...

    def __post_init__(self) -> None:
        missing = sorted({curve.rank for curve in self.memory} - {s.rank for s in self.spans})
        if self.spans and missing:
            raise ValueError(f"memory of ranks {missing} without any span of theirs")

    @cached_property
    def _by_rank(self) -> dict[int, list[Span]]:
        found: dict[int, list[Span]] = defaultdict(list)
        for span in self.spans:
            found[span.rank].append(span)
        return {rank: sorted(found[rank], key=lambda s: s.start) for rank in sorted(found)}

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self._by_rank)

    @property
    def world(self) -> int:
        return sum(self.stands_for.get(rank, 1) for rank in self.ranks)

    def streams(self, rank: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(span.stream for span in self._by_rank[rank]))

    @cached_property
    def start(self) -> int:
        return min((span.start for span in self.spans), default=0)

    def end(self, rank: int) -> int:
        return max(span.end for span in self._by_rank[rank])

    @property
    def slowest(self) -> int:
        """The rank that ends last: the step is as long as its."""
        if not self.spans:
            raise ValueError("a timeline without spans has no slowest rank")
        return max(self.ranks, key=lambda rank: (self.end(rank), -rank))

    @property
    def step(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return self.end(self.slowest) - self.start if self.spans else 0

    @property
    def step_ms(self) -> float:
        return self.step / 1e6

    # Where the time went

    @cached_property
    def _known_segments(self) -> dict[int, list[Segment]]:
        return {}

    def segments(self, rank: int) -> list[Segment]:
        """The step of `rank` in stretches of one kind each, from the step's start to its end."""
        if rank not in self._known_segments:
            self._known_segments[rank] = _cut(self.start, self._by_rank[rank])
        return self._known_segments[rank]

    def breakdown(self, rank: int | None = None) -> Breakdown:
        """Where the step went, of `rank` or of the slowest one."""
        rank = self.slowest if rank is None else rank
        held = dict.fromkeys(Breakdown.PARTS, 0)
        for segment in self.segments(rank):
            held[segment.kind] += segment.end - segment.start
        computed = [s for s in self._by_rank[rank] if s.role == "compute"]
        contention = min(sum(span.contention for span in computed), held["compute"])
        held["compute"] -= contention
        held["contention"] = contention
        return Breakdown(step=self.end(rank) - self.start, **held)

    def exposed(self, rank: int | None = None) -> dict[tuple[str, str], int]:
        """Nanoseconds of exposed transfer by (unit, phase)."""
        return self._laid_to("exposed_transfer", rank)

    def waiting(self, rank: int | None = None) -> dict[tuple[str, str], int]:
        """Nanoseconds of waiting for late peers by (unit, phase)."""
        return self._laid_to("waiting_for_peers", rank)

    def host_bound(self, rank: int | None = None) -> int:
        """Nanoseconds in which the compute stream had nothing because the host was late."""
        return self.breakdown(rank).host_idle

    def _laid_to(self, kind: str, rank: int | None) -> dict[tuple[str, str], int]:
        rank = self.slowest if rank is None else rank
        found: dict[tuple[str, str], int] = defaultdict(int)
        for segment in self.segments(rank):
            if segment.kind == kind and segment.span is not None:
                found[segment.span.unit, segment.span.phase] += segment.end - segment.start
        return dict(found)

    def overlaps(
        self, name: str | None = None, phase: str | None = None, rank: int | None = None
    ) -> list[Overlap]:
        """Every transfer (of collective `name`, in `phase`) with its hidden and exposed time."""
        rank = self.slowest if rank is None else rank
        exposed: dict[int, int] = defaultdict(int)
        for segment in self.segments(rank):
            if segment.kind == "exposed_transfer" and segment.span is not None:
                exposed[id(segment.span)] += segment.end - segment.start
        busy = _union((s.start, s.end) for s in self._by_rank[rank] if s.stream == COMPUTE)
        return [
            Overlap(span, _covered(busy, span.start, span.end), exposed[id(span)])
            for span in self._by_rank[rank]
            if span.role == "transfer" and name in (None, span.name) and phase in (None, span.phase)
        ]

    # Memory

    def curve(self, rank: int | None = None) -> MemoryCurve:
        """The memory of `rank`, or of the rank with the highest peak."""
        if not self.memory:
            raise ValueError("this timeline has no memory curve")
        if rank is None:
            return max(self.memory, key=lambda curve: curve.peak().total)
        return next(curve for curve in self.memory if curve.rank == rank)

    def peak(self, rank: int | None = None) -> MemoryPeak:
        return self.curve(rank).peak()

    # Files

    def to_json(self) -> str:
        spans = [list(dataclasses.astuple(span)) for span in self.spans]
        memory = [
            {"rank": c.rank, "times": list(c.times), "roles": {k: [*v] for k, v in c.roles.items()}}
            for c in self.memory
        ]  # fmt: skip
        columns = [f.name for f in dataclasses.fields(Span)]
        return json.dumps(
            {
                "columns": columns,
                "spans": spans,
                "memory": memory,
                "stands_for": {str(k): v for k, v in self.stands_for.items()},
                "labels": dict(self.labels),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The inverse of `to_json`."""
        data = json.loads(text)
        expected = [f.name for f in dataclasses.fields(Span)]
        if data.get("columns") != expected:
            raise ValueError(f"spans have columns {data.get('columns')}, expected {expected}")
        return cls(
            spans=tuple(Span(*row) for row in data["spans"]),
            memory=tuple(
                MemoryCurve(
                    m["rank"], tuple(m["times"]), {r: tuple(v) for r, v in m["roles"].items()}
                )
                for m in data["memory"]
            ),
            stands_for={int(k): v for k, v in data["stands_for"].items()},
            labels=data["labels"],
        )

    def to_chrome(self) -> dict[str, Any]:
        """The trace format that Perfetto and chrome://tracing open: ranks are processes, streams
        threads, memory a counter.
        """
        events: list[dict[str, Any]] = []
        for rank in self.ranks:
            folded = self.stands_for.get(rank, 1)
            title = f"rank {rank}" + (f" (and {folded - 1} like it)" if folded > 1 else "")
            events.append(_meta("process_name", rank, 0, title))
            threads = {stream: i for i, stream in enumerate(self.streams(rank))}
            events += [_meta("thread_name", rank, i, name) for name, i in threads.items()]
            events += [
                {
                    "ph": "X", "name": f"{span.name} {span.unit}".strip(), "cat": span.role,
                    "pid": rank, "tid": threads[span.stream], "ts": span.start / 1e3,
                    "dur": span.duration / 1e3,
                    "args": {"unit": span.unit, "phase": span.phase, "role": span.role},
                }
                for span in self._by_rank[rank]
            ]  # fmt: skip
        for curve in self.memory:
            for i, time in enumerate(curve.times):
                held = {role: values[i] for role, values in curve.roles.items()}
                counter = {"ph": "C", "name": "memory", "pid": curve.rank, "ts": time / 1e3}
                events.append(counter | {"args": held})
        return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(self.labels)}


def _meta(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": name}}


# A moment's kind by what runs, the first that is there: on the compute stream, then beside it.
_ON_COMPUTE = (("compute", "compute"), ("copy", "copies"), ("host", "host_idle"))
_BESIDE = (
    ("transfer", "exposed_transfer"), ("waiting", "waiting_for_peers"), ("copy", "copies"),
)  # fmt: skip


def _cut(start: int, spans: list[Span]) -> list[Segment]:
    """Cut a rank's step, from `start` to its last end, into segments of one kind each."""
    changes: list[tuple[int, int, Span]] = []
    for span in spans:
        if _key(span) != (False, HOST) and span.end > span.start:
            changes.append((span.start, 1, span))
            changes.append((span.end, 0, span))
    changes.sort(key=lambda change: change[:2])
    busy = _union((s.start, s.end) for s in spans if _key(s) in _COMPUTE_KEYS)
    resumes = iter(busy)
    next_busy = next(resumes, None)
    active: dict[tuple[bool, str], dict[int, Span]] = defaultdict(dict)
    segments: list[Segment] = []
    at, last = start, max(span.end for span in spans)
    for time, opens, span in [*changes, (last, 1, spans[-1])]:
        if time > at:
            while next_busy is not None and next_busy[0] < time:
                next_busy = next(resumes, None)
            # Compute resumes at the start of the next stretch, or never in this step.
            resume = next_busy[0] if next_busy is not None else last
            kind, blame = _classify(active, resume)
            segments.append(Segment(at, time, kind, blame))
            at = time
        if opens:
            active[_key(span)][id(span)] = span
        else:
            active[_key(span)].pop(id(span), None)
    return segments


def _classify(
    active: Mapping[tuple[bool, str], dict[int, Span]], resume: int
) -> tuple[str, Span | None]:
    for on_compute, order in ((True, _ON_COMPUTE), (False, _BESIDE)):
        for role, kind in order:
            running = active.get((on_compute, role))
            if running:
                # What compute waits for is what ends when compute goes on.
                if kind == "host_idle":
                    return kind, None
                return kind, min(running.values(), key=lambda s: (abs(s.end - resume), s.start))
    return "host_idle", None


def _key(span: Span) -> tuple[bool, str]:
    return span.stream == COMPUTE or span.role == "compute", span.role


_COMPUTE_KEYS = {(True, role) for role, _ in _ON_COMPUTE}


def _union(intervals: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted, disjoint, covering the same."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _covered(intervals: list[tuple[int, int]], start: int, end: int) -> int:
    return sum(max(0, min(end, stop) - max(start, begin)) for begin, stop in intervals)
