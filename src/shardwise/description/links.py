"""How collectives share the links they run over: one rule, for the predictor and the emulator.

A collective that moves its bytes uses a share of each link, and the whole of the one that limits
it. When the shares in use of a link sum to more than the whole, all who use it slow by that sum:
two that fill one link get half of it each, and end when the sum of their bytes would.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwise.description.cluster import Cluster
from shardwise.description.collectives import Members, find_hops

LinkShares = tuple[tuple[str, float], ...]  # by link, above 0 and up to 1


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
