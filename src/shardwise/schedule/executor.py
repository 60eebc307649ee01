"""Who carries a schedule out: the verbs that it speaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(eq=False)
class Held:
    """Memory that a reduce reads or writes: a slot, rows of sums, an accumulator. `content` is the
    executor's: a tensor, or a number of bytes.
    """

    content: Any
    in_sums: bool = False  # it is the memory of the step's sums itself
    loan: Any = None  # which piece of an arena it is, if it is one


@dataclass(eq=False)
class Reduction:
    """One unit's reduce under way."""

    unit: Any
    gradients: Any  # what backward left, until it is packed; the executor's
    held: Held  # the slot; once scattered, this rank's rows
    pending: Any = None  # what has to end before the next verb, where nothing orders them
    freed: Any = None  # the moment after which compute's memory is no longer read
    goes_last: Held | None = None  # memory that goes when the reduce is retired


class Executor(Protocol):
    """Moves bytes, or says what that costs. A unit's verbs, then a reduce's.

    `ordered`: verbs queue behind each other on lanes beside compute (streams). A host has no such
    lanes: the schedule lets it wait between the verbs of a reduce.
    """

    ordered: bool

    def gather(self, unit: Any) -> None:
        """Start bringing the full parameters together, from the shards or from kept pieces."""

    def wait(self, unit: Any) -> None:
        """Compute waits for that; what arrived packed is copied to its place."""

    def show(self, unit: Any) -> None:
        """Put the full parameters into their modules."""

    def hide(self, unit: Any) -> None:
        """Put what users see back."""

    def free(self, unit: Any) -> None:
        """Give the full parameters' memory back."""

    def shrink(self, unit: Any) -> None:
        """Copy this rank's piece of the full parameters, to be kept until backward."""

    def forget_piece(self, unit: Any) -> None:
        """Give that piece's memory back."""

    def open(self, unit: Any) -> bool:
        """Memory for the step's sums; true if what is there is worth nothing."""

    def pack(self, unit: Any, into_sums: bool, passes: bool) -> Any:
        """Take the gradients into a slot, or into the sums themselves. `passes`: the slot is
        scattered at once, and nothing is added to it before.
        """

    def zeros(self, unit: Any) -> Any:
        """Rows of a rank that ran nothing."""

    def scatter(self, reduction: Any, into_sums: bool) -> None:
        """Sum the slot over the shard group; what is held is then this rank's rows."""

    def all_reduce(self, reduction: Any) -> None:
        """Sum the rows over the replicas."""

    def add(self, reduction: Any, to: Any) -> None:
        """Add what is held to an accumulator or to rows summed before."""

    def add_to_sums(self, reduction: Any, overwrites: bool) -> None:
        """Divide if asked to, and bring the rows into the step's sums."""

    def drop(self, held: Any) -> None:
        """Its memory may go, in the order of the lane that used it."""

    def join(self, reduction: Any) -> None:
        """A host waits for what is pending."""

    def hold(self, reduction: Any) -> None:
        """Compute's memory goes only when all that is queued now has ended."""

    def retire(self, reduction: Any) -> None:
        """Compute waits until the gradients may go, and lets them go."""

    def finish(self) -> None:
        """Compute waits for every lane."""
