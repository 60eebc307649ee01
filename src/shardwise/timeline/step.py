"""One step over all ranks."""

from __future__ import annotations

import dataclasses
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from shardwise.timeline.breakdown import Breakdown, Overlap, Segment, cut
from shardwise.timeline.busy import Busy
from shardwise.timeline.chrome import to_chrome
from shardwise.timeline.spans import COMPUTE, MemoryCurve, MemoryPeak, Span

_COLUMNS = [field.name for field in dataclasses.fields(Span)]  # of a span in a file


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

    @cached_property
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

    @cached_property
    def _ends(self) -> dict[int, int]:
        return {rank: max(s.end for s in spans) for rank, spans in self._by_rank.items()}

    def end(self, rank: int) -> int:
        return self._ends[rank]

    @cached_property
    def slowest(self) -> int:
        """The rank that ends last: the step is as long as its."""
        if not self.spans:
            raise ValueError("a timeline without spans has no slowest rank")
        return max(self.ranks, key=lambda rank: (self.end(rank), -rank))

    @cached_property
    def step(self) -> int:
        """Nanoseconds from the first start to the last end."""
        return self.end(self.slowest) - self.start if self.spans else 0

    @property
    def step_ms(self) -> float:
        return self.step / 1e6

    def scaled(self, factor: float) -> Timeline:
        """The same step, all of it so many times as long."""

        def at(moment: int) -> int:
            return self.start + round((moment - self.start) * factor)

        return dataclasses.replace(
            self,
            spans=tuple(
                dataclasses.replace(
                    span,
                    start=at(span.start),
                    end=at(span.end),
                    alone=None if span.alone is None else round(span.alone * factor),
                )
                for span in self.spans
            ),
            memory=tuple(
                dataclasses.replace(curve, times=tuple(map(at, curve.times)))
                for curve in self.memory
            ),
        )

    # Where the time went

    @cached_property
    def _segments(self) -> dict[int, list[Segment]]:
        return {}  # of the ranks that were asked for

    def segments(self, rank: int | None = None) -> list[Segment]:
        """The step of `rank`, or of the slowest one, in stretches of one kind each, from the step's
        start to its end.
        """
        rank = self.slowest if rank is None else rank
        if rank not in self._segments:
            self._segments[rank] = cut(self.start, self._by_rank[rank])
        return self._segments[rank]

    def breakdown(self, rank: int | None = None) -> Breakdown:
        """Where the step went, of `rank` or of the slowest one."""
        rank = self.slowest if rank is None else rank
        held = dict.fromkeys(Breakdown.PARTS, 0)
        for segment in self.segments(rank):
            held[segment.kind] += segment.duration
        computed = [s for s in self._by_rank[rank] if s.role == "compute"]
        contention = min(sum(span.contention for span in computed), held["compute"])
        held["compute"] -= contention
        held["contention"] = contention
        return Breakdown(step=self.end(rank) - self.start, **held)

    def exposed(self, rank: int | None = None) -> dict[tuple[str, str], int]:
        """Nanoseconds of exposed transfer by (unit, phase)."""
        return self._by_unit("exposed_transfer", rank)

    def waiting(self, rank: int | None = None) -> dict[tuple[str, str], int]:
        """Nanoseconds of waiting for late peers by (unit, phase)."""
        return self._by_unit("waiting_for_peers", rank)

    def _by_unit(self, kind: str, rank: int | None) -> dict[tuple[str, str], int]:
        found: dict[tuple[str, str], int] = defaultdict(int)
        for segment in self.segments(rank):
            if segment.kind == kind and segment.span is not None:
                found[segment.span.unit, segment.span.phase] += segment.duration
        return dict(found)

    def overlaps(
        self, name: str | None = None, phase: str | None = None, rank: int | None = None
    ) -> list[Overlap]:
        """Every transfer (of collective `name`, in `phase`) with its hidden and exposed time."""
        rank = self.slowest if rank is None else rank
        exposed: dict[int, int] = defaultdict(int)
        for segment in self.segments(rank):
            if segment.kind == "exposed_transfer" and segment.span is not None:
                exposed[id(segment.span)] += segment.duration
        busy = Busy((s.start, s.end) for s in self._by_rank[rank] if s.stream == COMPUTE)
        return [
            Overlap(span, busy.between(span.start, span.end), exposed[id(span)])
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
        return json.dumps(
            {
                "columns": _COLUMNS,
                "spans": [dataclasses.astuple(span) for span in self.spans],
                "memory": [
                    {"rank": c.rank, "times": c.times, "roles": dict(c.roles)} for c in self.memory
                ],
                "stands_for": dict(self.stands_for),
                "labels": dict(self.labels),
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """The inverse of `to_json`."""
        data = json.loads(text)
        if not isinstance(data, dict):
            raise ValueError(f"expected a JSON object, got a {type(data).__name__}")
        kinds = {"spans": list, "memory": list, "stands_for": dict, "labels": dict}
        for key, kind in kinds.items():
            if not isinstance(data.get(key), kind):
                raise ValueError(
                    f"its {key} is {str(data.get(key))[:40]}, expected a {kind.__name__}"
                )
        if data.get("columns") != _COLUMNS:
            raise ValueError(f"spans have columns {data.get('columns')}, expected {_COLUMNS}")
        return cls(
            spans=tuple(Span(*row) for row in data["spans"]),
            memory=tuple(
                MemoryCurve(
                    c["rank"], tuple(c["times"]), {r: tuple(v) for r, v in c["roles"].items()}
                )
                for c in data["memory"]
            ),
            stands_for={int(k): v for k, v in data["stands_for"].items()},
            labels={str(name): str(value) for name, value in data["labels"].items()},
        )

    def to_chrome(self) -> dict[str, Any]:
        """The trace format that Perfetto and chrome://tracing open."""
        return to_chrome(self._by_rank, self.memory, self.stands_for, self.labels)
