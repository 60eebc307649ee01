"""The passes in their order, over a forward and a backward graph."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph

PASSES = ("identify", "bucket", "prefetch", "sort", "cap")


@dataclass(frozen=True)
class PassOptions:
    bucket_bytes: int = 48 << 20
    adjacent_only: bool = False
    coalesced: bool = True
    max_span: int | None = None  # compute nodes between a bucket's first and last member
    window: int = 50  # compute nodes by which a gather may come earlier
    in_flight_bytes: int = 2 << 30
    max_consecutive: int | None = 8  # compute nodes between reduce-scatters; None: no cap
    restore: bool = False  # the original order of compute instead of a cap


@dataclass(frozen=True)
class PassSummary:
    """A graph after a pass."""

    graph: str  # forward or backward
    after: str  # the pass, or "none"
    gathers: int
    gather_bytes: int
    scatters: int
    scatter_bytes: int
    longest_run: int  # compute nodes between reduce-scatters
    before_first: int  # compute nodes in front of the first reduce-scatter


def summarize(graph: Graph, *, group: str, name: str = "", after: str = "none") -> PassSummary:
    raise NotImplementedError


def run_passes(
    forward: Graph,
    backward: Graph,
    options: PassOptions | None = None,
    *,
    passes: tuple[str, ...] = PASSES,
) -> tuple[Graph, Graph, list[PassSummary]]:
    """Both graphs after the passes, and what each pass left, in order."""
    raise NotImplementedError
