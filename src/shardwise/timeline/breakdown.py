"""Where a rank's step went: cutting it into stretches of one kind each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from shardwise.timeline.busy import union
from shardwise.timeline.spans import COMPUTE, HOST, Span


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


# A moment's kind by what runs, the first that is there: on the compute stream, then beside it.
_ON_COMPUTE = (("compute", "compute"), ("copy", "copies"), ("host", "host_idle"))
_BESIDE = (
    ("transfer", "exposed_transfer"), ("waiting", "waiting_for_peers"), ("copy", "copies"),
)  # fmt: skip


def cut(start: int, spans: list[Span]) -> list[Segment]:
    """Cut a rank's step, from `start` to its last end, into segments of one kind each."""
    changes: list[tuple[int, int, Span]] = []
    for span in spans:
        if _key(span) != (False, HOST) and span.end > span.start:
            changes.append((span.start, 1, span))
            changes.append((span.end, 0, span))
    changes.sort(key=lambda change: change[:2])
    busy = union((s.start, s.end) for s in spans if _key(s) in _COMPUTE_KEYS)
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
