"""Where a rank's step went: cutting it into stretches of one kind each."""

from __future__ import annotations

from bisect import bisect_left
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
    """A stretch of a rank's step of one kind; `span` is what it is attributed to, if anything."""

    start: int
    end: int
    kind: str  # of Breakdown.PARTS
    span: Span | None

    @property
    def duration(self) -> int:
        return self.end - self.start


# A moment's kind by what runs, on the compute stream (True) or beside it: the first that is there.
_KINDS = {
    (True, "compute"): "compute", (True, "copy"): "copies", (True, HOST): "host_idle",
    (False, "transfer"): "exposed_transfer", (False, "waiting"): "waiting_for_peers",
    (False, "copy"): "copies",
}  # fmt: skip


def cut(start: int, spans: list[Span]) -> list[Segment]:
    """Cut a rank's step, from `start` to its last end, into segments of one kind each."""
    changes: list[tuple[int, int, Span]] = []
    for span in spans:
        if _stream_and_role(span) != (False, HOST) and span.end > span.start:
            changes += [(span.start, 1, span), (span.end, 0, span)]
    changes.sort(key=lambda change: change[:2])
    on_compute = union(
        (s.start, s.end) for s in spans if _stream_and_role(s) in _KINDS and _stream_and_role(s)[0]
    )
    resumes = [begin for begin, _ in on_compute]
    active: dict[tuple[bool, str], dict[int, Span]] = defaultdict(dict)
    segments: list[Segment] = []
    at, last = start, max(span.end for span in spans)
    for time, opens, span in [*changes, (last, 1, spans[-1])]:
        if time > at:
            # Compute resumes at the start of its next stretch, or never in this step.
            following = bisect_left(resumes, time)
            resume = resumes[following] if following < len(resumes) else last
            segments.append(Segment(at, time, *_classify(active, resume)))
            at = time
        if opens:
            active[_stream_and_role(span)][id(span)] = span
        else:
            active[_stream_and_role(span)].pop(id(span), None)
    return segments


def _classify(
    active: Mapping[tuple[bool, str], dict[int, Span]], resume: int
) -> tuple[str, Span | None]:
    for key, kind in _KINDS.items():
        running = active.get(key)
        if running:
            if kind == "host_idle":
                break
            # What compute waits for is what ends when compute goes on.
            return kind, min(running.values(), key=lambda s: (abs(s.end - resume), s.start))
    return "host_idle", None


def _stream_and_role(span: Span) -> tuple[bool, str]:
    """Whether it is on the compute stream, and its role."""
    return span.stream == COMPUTE or span.role == "compute", span.role
