"""The passes in their order, over a forward and a backward graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from torch.fx import Graph

from shardwise.checked import Bound, check_bounds
from shardwise.errors import UserError, nearest
from shardwise.graph.nodes import message_bytes
from shardwise.graph.passes.bucket import bucket
from shardwise.graph.passes.cap import Interleaving, cap, restore_order, snapshot
from shardwise.graph.passes.identify import identify
from shardwise.graph.passes.prefetch import prefetch
from shardwise.graph.passes.settle import settle
from shardwise.graph.passes.sort import sort

PASSES = ("identify", "bucket", "prefetch", "sort", "cap")


def _whole(least: int) -> Bound:
    return Bound(f"a whole number >= {least}", lambda n: type(n) is int and n >= least)


@dataclass(frozen=True)
class PassOptions:
    """How far each pass goes."""

    bucket_bytes: Annotated[int, _whole(1)] = 48 << 20
    adjacent_only: bool = False  # torch's greedy buckets, for comparison
    coalesced: bool = True  # one call with a list of tensors instead of one packed tensor
    # Compute nodes between a bucket's first and last member; None: any number.
    max_span: Annotated[int, _whole(0)] | None = None
    window: Annotated[int, _whole(0)] = 50  # compute nodes by which a gather may come earlier
    in_flight_bytes: Annotated[int, _whole(0)] = 2 << 30  # of gathers that came earlier
    under_way_bytes: Annotated[int, _whole(0)] = 256 << 20  # of reduce-scatters not waited for
    ready_first: bool = True  # compute that waits for nothing goes first; False: torch's sort
    # Compute nodes between reduce-scatters; None: no cap.
    max_consecutive: Annotated[int, _whole(1)] | None = 8
    restore: bool = False  # the original order of all compute instead of a cap

    def __post_init__(self) -> None:
        check_bounds(self, "graph passes: ", UserError)


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
    """The group's collectives of parameters and gradients, and the compute between them."""
    found = identify(graph, group=group)
    runs = snapshot(graph, group=group, known=found).runs()[:-1]
    return PassSummary(
        graph=name,
        after=after,
        gathers=len(found.gathers),
        gather_bytes=sum(map(message_bytes, found.gathers)),
        scatters=len(found.scatters),
        scatter_bytes=sum(map(message_bytes, found.scatters)),
        longest_run=max(runs, default=0),
        before_first=runs[0] if runs else 0,
    )


@dataclass(frozen=True)
class PassResult:
    """Both graphs after a pass, or as they were given (`after` is "none")."""

    after: str
    forward: Graph
    backward: Graph
    summaries: tuple[PassSummary, PassSummary]


def each_pass(
    forward: Graph,
    backward: Graph,
    options: PassOptions | None = None,
    *,
    passes: Sequence[str] = PASSES,
) -> Iterator[PassResult]:
    """Both graphs as given, then after each pass. The passes run in the order of `PASSES`; `passes`
    says which of them.
    """
    for name in passes:
        if name not in PASSES:
            raise UserError(f"graph passes: unknown pass {name!r}{nearest(name, PASSES)}")
    options = options or PassOptions()
    group = identify(forward).group or identify(backward).group  # kept parameters: no gather there
    graphs = [forward, backward]
    before = [snapshot(graph, group=group) for graph in graphs]
    for step in ("none", *(name for name in PASSES if name in passes and name != "identify")):
        if step != "none":
            pairs = zip(graphs, before, strict=True)
            graphs = [_run(step, graph, options, group, known) for graph, known in pairs]
        first, second = (
            summarize(graph, group=group, name=name, after=step)
            for name, graph in zip(("forward", "backward"), graphs, strict=True)
        )
        yield PassResult(step, graphs[0], graphs[1], (first, second))


def run_passes(
    forward: Graph,
    backward: Graph,
    options: PassOptions | None = None,
    *,
    passes: Sequence[str] = PASSES,
) -> tuple[Graph, Graph, list[PassSummary]]:
    """Both graphs after the passes, and what each pass left: of forward, then of backward."""
    results = list(each_pass(forward, backward, options, passes=passes))
    summaries = [result.summaries[i] for i in (0, 1) for result in results]
    return results[-1].forward, results[-1].backward, summaries


def _run(step: str, graph: Graph, options: PassOptions, group: str, before: Interleaving) -> Graph:
    if step == "bucket":
        return bucket(
            graph,
            group=group,
            bucket_bytes=options.bucket_bytes,
            adjacent_only=options.adjacent_only,
            coalesced=options.coalesced,
            max_span=options.max_span,
        )
    if step == "prefetch":
        return prefetch(graph, window=options.window, in_flight_bytes=options.in_flight_bytes)
    made = _ordered(step, graph, options, group, before)
    if made is not graph:
        settle(made, under_way_bytes=options.under_way_bytes)
    return made


def _ordered(
    step: str, graph: Graph, options: PassOptions, group: str, before: Interleaving
) -> Graph:
    if step == "sort":
        return sort(graph, ready_first=options.ready_first)
    if options.restore:
        return restore_order(graph, before=before)
    if options.max_consecutive is None:
        return graph
    return cap(graph, group=group, before=before, max_consecutive=options.max_consecutive)
