"""What a schedule is told: of all units (`Policy`), of one unit (`UnitPolicy`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

UNBOUNDED = 2**31


@dataclass(frozen=True)
class Policy:
    """How passes run. The defaults are those of torch's `fully_shard`."""

    forward_prefetch: int = 1
    backward_prefetch: int = 1
    reduce_depth: int = 1  # 0: one reduce, its wait, the next one
    # When to sum over the micro-batches of a step: a Plan's word; None: every unit's own flags say.
    sync: str | None = None
    frees_in_pass: bool = True  # full parameters go within a pass; False: not before its end
    frees_after_step: bool = True
    during_backward: bool = True  # reduce as soon as a unit's gradients are there
    sums_in_slots: bool = False  # what a reduce is packed in is the memory of its sum
    # Full parameters of an earlier step are gathered anew; False: only where the masters changed.
    refreshes: bool = False
    # A parameter that some ranks used and others did not: an error, or zeros from the others.
    needs_equal_use: bool = False
    # Ranks that start from different values: an error, or a warning.
    needs_equal_values: bool = False
    may_grow: bool = True  # modules may be added after sharding, and are not the engine's

    def depth(self, ordered: bool) -> int:
        """How many reduces may be under way, on lanes that are ordered or not: where they take no
        memory, as many on a host as there are. Streams wait for a pack only.
        """
        return UNBOUNDED if self.sums_in_slots and not ordered else self.reduce_depth


@dataclass
class UnitPolicy:
    """What one unit does when; torch's setters may change it between passes."""

    keep: bool | int = False  # full parameters from forward to backward: all, none, or 1/k
    stays_shown: bool = False  # kept parameters also stay in their modules' places
    keep_after_backward: bool = False
    gathers_in_backward: bool = True
    scatters: bool = True  # reduce-scatter at the next backward, else only add up here
    all_reduces: bool = True  # and all-reduce over the replicas
    gather_ahead: list[Any] | None = None  # units, instead of the recorded order, in forward
    gather_ahead_backward: list[Any] | None = None
