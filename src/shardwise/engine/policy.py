"""What an engine does with all of its units: a Plan's settings that no single unit has."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.engine.lanes import Lane
from shardwise.planning.plan import Plan
from shardwise.planning.strategies import REDUCES


@dataclass(frozen=True)
class Policy:
    """How passes run. The defaults are those of the compat surface."""

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    reduce_depth: int = 1
    # When to sum over the micro-batches of a step: a Plan's word; None: every unit's own flags say.
    sync: str | None = None
    frees_in_pass: bool = True  # full parameters go within a pass; False: not before its end
    frees_after_step: bool = True
    during_backward: bool = True  # reduce as soon as a unit's gradients are there
    replicates_gradients: bool = False
    # Full parameters of an earlier step are gathered anew; False: only where the masters changed.
    refreshes: bool = False
    # A parameter that some ranks used and others did not: an error, or zeros from the others.
    needs_equal_use: bool = False
    # Ranks that start from different values: an error, or a warning.
    needs_equal_values: bool = False
    may_grow: bool = True  # modules may be added after sharding, and are not the engine's

    @classmethod
    def of(cls, plan: Plan) -> Policy:
        parameters = plan.strategy.parameters
        naive = plan.name == "ddp" and plan.reduce == "naive"
        return cls(
            forward_prefetch=plan.forward_prefetch,
            backward_prefetch=plan.backward_prefetch,
            reduce_depth=0 if naive else plan.reduce_depth,  # one call, its wait, the next call
            sync=plan.sync,
            frees_in_pass=parameters == "shard",
            frees_after_step=parameters != "replicate",
            during_backward=plan.name != "ddp" or REDUCES[plan.reduce].during_backward,
            replicates_gradients=not naive and plan.strategy.gradients == "replicate",
            refreshes=True,
            needs_equal_use=plan.unused == "error",
            needs_equal_values=True,
            may_grow=False,
        )

    def depth(self, lane: Lane) -> int:
        """How many reduces may be under way on `lane`."""
        if not self.replicates_gradients:
            return self.reduce_depth
        # On a host every unit has a slot of its own; streams wait for a pack only, so their
        # gradients need not stay.
        return max(self.reduce_depth, 2) if lane.ordered else 2**31

    def syncs(self, last: bool) -> tuple[bool, bool]:
        """Whether a micro-batch scatters, and whether it all-reduces over the replicas."""
        return last or self.sync != "last", last or self.sync == "each"
