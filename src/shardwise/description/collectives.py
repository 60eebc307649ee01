"""How long a collective takes, and how collectives share the links they run over: one rule for the
predictor and the emulator.

Sizes are of the whole buffer: what an all-gather gives, a reduce-scatter takes, an all-reduce
changes. A group is `Members(ranks, stride)`: on a mesh (replicate, shard) of neighbouring ranks a
shard group is Members(shard), a replica group Members(replicate, stride=shard).

A collective that moves its bytes uses a share of each link, and the whole of the one that limits
it. When the shares in use of a link sum to more than the whole, all who use it slow by that sum:
two that fill one link get half of it each, and end when the sum of their bytes would.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from shardwise.description.cluster import COLLECTIVES, Cluster, CollectivePoint, Level, Protocol

ALL_TO_ALL = "all_to_all"  # not measured by itself
LinkShares = tuple[tuple[str, float], ...]  # by link, above 0 and up to 1


@dataclass(frozen=True)
class Members:
    """A group of `ranks` ranks, every `stride`-th of the cluster's."""

    ranks: int
    stride: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.stride < 1:
            raise ValueError(f"a group has ranks and stride of at least 1, got {self}")


@dataclass(frozen=True)
class Hop:
    """The part of a group's ring that runs over one level: `groups` pieces that hold `members`
    each below it.
    """

    level: Level
    members: int
    groups: int


def find_hops(cluster: Cluster, members: Members) -> tuple[Hop, ...]:
    """The levels that a group spans, from the inside out.

    On nodes of 8, 16 neighbouring ranks are 8 over NVLink on each of 2 nodes; 2 ranks with stride
    8 are 1 on each of 2 nodes, and only the second level is used.
    """
    hops: list[Hop] = []
    below = 1  # members inside one group of the level below
    for level in cluster.levels:
        if level.ranks is None:
            inside = members.ranks
        else:
            inside = max(1, min(members.ranks, math.ceil(level.ranks / members.stride)))
        if inside > below:
            hops.append(Hop(level, below, math.ceil(inside / below)))
            below = inside
    if below < members.ranks:
        last = cluster.levels[-1]
        raise ValueError(
            f"{members} has {members.ranks} ranks, but cluster {cluster.name} holds {last.ranks}; "
            "use fewer ranks, or a cluster file whose last level has no limit"
        )
    return tuple(hops)


def collective_time(cluster: Cluster, kind: str, nbytes: float, members: Members | int) -> float:
    """Seconds that `kind` takes from the arrival of the last member.

    One rank: 0. A group whose outermost level has measured points of this kind, of groups that lie
    as this one does: interpolated between them in the logarithms. Else a ring: the whole buffer's
    (n - 1) / n at the slowest level's bandwidth, twice for an all-reduce, plus the protocol's start
    and its steps, by the protocol that is quickest at this size.

    An all-to-all inside one level is a gather of as many bytes. Across levels every rank sends the
    others' parts by its own link, where a ring's neighbours share what they send.
    """
    if kind not in (*COLLECTIVES, ALL_TO_ALL):
        raise ValueError(f"collective {kind!r}, expected one of {(*COLLECTIVES, ALL_TO_ALL)}")
    if nbytes < 0:
        raise ValueError(f"a collective of {nbytes} bytes")
    if isinstance(members, int):
        members = Members(members)
    if members.ranks == 1 or nbytes == 0:
        return 0.0
    hops = find_hops(cluster, members)
    if kind == ALL_TO_ALL and len(hops) > 1:
        names = [protocol.name for protocol in hops[-1].level.protocols]
        return min(_all_to_all_time(hops, nbytes, members.ranks, name) for name in names)
    kind = "all_gather" if kind == ALL_TO_ALL else kind
    last = hops[-1]
    points = [p for p in last.level.points if (p.kind, p.inside) == (kind, last.members)]
    if points:
        return _interpolate(points, nbytes, members.ranks)
    names = [protocol.name for protocol in hops[-1].level.protocols]
    return min(_ring_time(hops, kind, nbytes, members.ranks, name) for name in names)


def bus_share(kind: str, ranks: int) -> float:
    """Bytes each rank sends, as a multiple of the buffer: (n - 1) / n, twice for an all-reduce."""
    once = (ranks - 1) / ranks
    return 2 * once if kind == "all_reduce" else once


def _ring_time(hops: tuple[Hop, ...], kind: str, nbytes: float, ranks: int, name: str) -> float:
    """NCCL's own model of one protocol: start + steps x latency + bytes / bandwidth.

    Of the ring's n - 1 steps (2(n - 1) for an all-reduce), one for each group but the first
    crosses a level above the innermost.
    """
    times = 2 if kind == "all_reduce" else 1
    bandwidth, latency, outer = math.inf, 0.0, 0
    for hop in reversed(hops):
        protocol = _protocol(hop.level, name)
        # Every member below has a link of its own into this level.
        bandwidth = min(
            bandwidth,
            hop.level.bandwidth_bytes_per_s * hop.members * protocol.share,
            protocol.limit_bytes_per_s,
        )
        crossings = _crossings(hops, hop)
        latency += (crossings - outer) * protocol.step_s
        outer = crossings
    start = max(_protocol(hop.level, name).start_s for hop in hops)
    return start + times * latency + bus_share(kind, ranks) * nbytes / bandwidth


def _all_to_all_time(hops: tuple[Hop, ...], nbytes: float, ranks: int, name: str) -> float:
    """Each hop's link carries what goes to the ranks that are reached by it; they run at once."""
    start = max(_protocol(hop.level, name).start_s for hop in hops)
    latency, moving, inside = 0.0, 0.0, 1
    for hop in hops:
        protocol, reached = _protocol(hop.level, name), hop.members * hop.groups
        rate = min(hop.level.bandwidth_bytes_per_s * protocol.share, protocol.limit_bytes_per_s)
        moving = max(moving, nbytes * (min(reached, ranks) - inside) / ranks / rate)
        latency += (hop.groups - 1) * protocol.step_s
        inside = min(reached, ranks)
    return start + latency + moving


def _crossings(hops: tuple[Hop, ...], hop: Hop) -> int:
    """Ring steps that use `hop` or a level above it."""
    groups = math.prod(other.groups for other in hops[hops.index(hop) :])
    return groups - 1


def _protocol(level: Level, name: str) -> Protocol:
    """The protocol of that name, or the level's last (the one for large messages)."""
    return next((p for p in level.protocols if p.name == name), level.protocols[-1])


def _interpolate(points: list[CollectivePoint], nbytes: float, ranks: int) -> float:
    """Between measured sizes a straight line in the logarithms; below the smallest its own time;
    above the largest at its bandwidth.

    A group of another size than any measured takes the nearest measured one's, at equal bytes sent
    by each rank.
    """
    nearest = min({p.ranks for p in points}, key=lambda n: (abs(math.log(n / ranks)), n))
    kind = points[0].kind
    nbytes *= bus_share(kind, ranks) / bus_share(kind, nearest)
    curve = sorted((p.nbytes, p.seconds) for p in points if p.ranks == nearest)
    # Noise must not make a larger message quicker.
    rising: list[tuple[int, float]] = []
    for size, seconds in curve:
        rising.append((size, max(seconds, rising[-1][1] if rising else 0.0)))
    if nbytes <= rising[0][0]:
        return rising[0][1]
    for (low, low_s), (high, high_s) in pairwise(rising):
        if nbytes <= high:
            part = math.log(nbytes / low) / math.log(high / low)
            return low_s * (high_s / low_s) ** part
    largest, seconds = rising[-1]
    return seconds * nbytes / largest


def link_shares(cluster: Cluster, members: Members) -> LinkShares:
    """What a group's collective uses of each level: all of the slowest, others in proportion."""
    if members.ranks == 1:
        return ()
    # Every member below has a link of its own into a level.
    rates = [
        (hop.level.name, hop.level.bandwidth_bytes_per_s * hop.members)
        for hop in find_hops(cluster, members)
    ]
    slowest = min(rate for _, rate in rates)
    return tuple((name, slowest / rate) for name, rate in rates)


def slowdown(in_use: Iterable[float]) -> float:
    """How many times as long as alone a collective takes to move its bytes, by how much is in use
    of each of its links: the sum of all shares.
    """
    return max(1.0, max(in_use, default=1.0))
