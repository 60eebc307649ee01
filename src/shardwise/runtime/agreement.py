"""What ranks agree on over small host values: how many micro-batches run, the order of units,
unused parameters.

None of it touches the device. The first step always exchanges; later steps only where the model
needs it.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.planning.plan import Plan
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.unit import Unit


class Agreement:
    """Keeps what the ranks have agreed on."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        # Every step's unused parameters are compared while there may be some; settled by the first
        # step.
        self.first, self.tracks_unused = True, True

    def check_counts(self, count: int) -> None:
        """Error on every rank when ranks that must move together run different numbers of
        micro-batches.
        """
        inside = self.mesh.shard.exchange(count)
        per_replica = self.mesh.replicate.exchange(inside)
        for replica, counts in enumerate(per_replica):
            if len(set(counts)) > 1:
                listed = ", ".join(
                    f"rank {self._rank(replica, s)}: {c}" for s, c in enumerate(counts)
                )
                raise RuntimeError(
                    f"ranks of one shard group run different numbers of micro-batches ({listed}); "
                    "they gather and "
                    "scatter together, so give each the same number (sizes may differ). Only "
                    "replicas may differ, "
                    "with sync='scatter_each_reduce_last' or 'last'"
                )
        totals = [counts[0] for counts in per_replica]
        if self.plan.sync == "each" and len(set(totals)) > 1:
            raise RuntimeError(
                f"sync='each' all-reduces after every micro-batch, but replicas run {totals} of "
                "them; "
                "use sync='scatter_each_reduce_last' or 'last' for uneven work"
            )

    def settle(
        self, ran: bool, unused: frozenset[str], ready: Sequence[str]
    ) -> tuple[frozenset[str], list[str] | None]:
        """At a step's end: the parameters that no rank used, and after the first step the order of
        units to reduce in (None: keep the present one).
        """
        if not self.tracks_unused:
            return frozenset(), None
        mine = (ran, unused, tuple(ready) if self.first else ())
        inside = self.mesh.shard.exchange(mine)
        said = [value for values in self.mesh.replicate.exchange(inside) for value in values]
        ran_ranks = [(names, order) for did_run, names, order in said if did_run]
        orders = {order for _, order in ran_ranks}
        order = (
            list(orders.pop())
            if self.first and len(orders) == 1 and len(ran_ranks) == len(said)
            else None
        )
        self.first = False
        self.tracks_unused = any(names for names, _ in ran_ranks)
        nowhere = (
            frozenset.intersection(*(names for names, _ in ran_ranks)) if ran_ranks else frozenset()
        )
        return nowhere, order

    def _rank(self, replica: int, shard: int) -> int:
        return replica * self.plan.shard + shard


def order_units(units: Sequence[Unit]) -> list[Unit]:
    """The order of reduces before any step has run: backward comes from the model's end, the root
    unit last.
    """
    return [unit for unit in reversed(units) if unit.gradients is not None]
