"""What an emulated collective costs: over one link for all groups, or on a described cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import (
    LinkShares,
    Members,
    bus_share,
    collective_time,
    link_shares,
)


@dataclass(frozen=True)
class Transfer:
    """The time of one collective: a fixed part (start-up, latency) that nothing changes, and a
    moving part that takes this time alone, and longer where others use its links.
    """

    fixed: float
    moving: float
    uses: LinkShares = ()
    joins: float = 0.0  # seconds after the step's begin at which the last peer is there

    @property
    def seconds(self) -> float:
        """With the links to itself."""
        return self.fixed + self.moving

    def less(self, seconds: float) -> Transfer:
        """Without what something else adds to it; that comes off the fixed part first."""
        fixed = self.fixed - seconds
        moving = max(0.0, self.moving + min(0.0, fixed))
        return replace(self, fixed=max(0.0, fixed), moving=moving)

    def after(self, since_step: float) -> Transfer:
        """From this moment of the step on: the wait for the last peer is part of the fixed time."""
        return replace(self, fixed=self.fixed + max(0.0, self.joins - since_step), joins=0.0)


NO_TIME = Transfer(0.0, 0.0)


class NetworkModel(Protocol):
    """Says what a collective over these ranks costs. `nbytes` is the whole buffer: what an
    all-gather gives, a reduce-scatter takes, an all-reduce changes.
    """

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer: ...


@dataclass(frozen=True)
class Network:
    """The same link for every group of ranks. The default is free: data arrives, nobody waits."""

    bandwidth: float = math.inf  # bytes per second that one rank sends
    latency: float = 0.0  # seconds per collective
    shared: bool = False  # the groups of a rank share one link; else each has its own

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"Network.bandwidth is {self.bandwidth}, expected bytes/s above 0")
        if not self.latency >= 0:
            raise ValueError(f"Network.latency is {self.latency}, expected seconds, at least 0")

    def seconds(self, nbytes: int, ranks: int, collective: str = "all_gather") -> float:
        """A ring's time for a message of `nbytes`."""
        return self.latency + bus_share(collective, ranks) * nbytes / self.bandwidth

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
        seconds = self.seconds(nbytes, len(ranks), collective)
        uses = (("network", 1.0),) if self.shared else ()
        return Transfer(self.latency, seconds - self.latency, uses)


@dataclass(frozen=True)
class ClusterNetwork:
    """Every group takes the time of the levels it spans: neighbours of a node theirs, groups across
    nodes theirs. A level is one link of the rank, which its groups share.
    """

    cluster: Cluster

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
        members = members_of(ranks)
        seconds = collective_time(self.cluster, collective, nbytes, members)
        # What even one byte takes is not the links' bandwidth.
        fixed = min(seconds, collective_time(self.cluster, collective, 1, members))
        return Transfer(fixed, seconds - fixed, link_shares(self.cluster, members))


def members_of(ranks: Sequence[int]) -> Members:
    """How many ranks, and how far apart: a mesh's groups are evenly spaced."""
    if len(ranks) == 1:
        return Members(1)
    stride = ranks[1] - ranks[0]
    if any(after - before != stride for before, after in itertools.pairwise(ranks)):
        raise ValueError(
            f"an emulated group has the ranks {list(ranks)}; only evenly spaced ones, as a mesh "
            "makes them, can be placed on a cluster"
        )
    return Members(len(ranks), stride)
