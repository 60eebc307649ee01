"""The network of a described cluster, for `emulation/`."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import Members, collective_time, find_hops
from shardwise.emulation.collectives import Transfer


class ClusterNetwork:
    """Every group takes the time of the levels it spans: neighbours of a node theirs, groups across
    nodes theirs. A level is one link of the rank, which its groups share.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def transfer(self, collective: str, nbytes: int, ranks: Sequence[int]) -> Transfer:
        members = members_of(ranks)
        seconds = collective_time(self.cluster, collective, nbytes, members)
        # What even one byte takes is not the links' bandwidth.
        fixed = min(seconds, collective_time(self.cluster, collective, 1, members))
        return Transfer(fixed, seconds - fixed, self._uses(members))

    def _uses(self, members: Members) -> tuple[tuple[str, float], ...]:
        """The level that limits the group is used in full, the others in proportion."""
        if members.ranks == 1:
            return ()
        hops = find_hops(self.cluster, members)
        # Every member below has a link of its own into a level.
        rates = [(hop.level.name, hop.level.bandwidth_bytes_per_s * hop.members) for hop in hops]
        slowest = min(rate for _, rate in rates)
        return tuple((name, slowest / rate) for name, rate in rates)


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
