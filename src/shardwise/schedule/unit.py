"""A unit as its schedule sees it: the states it passes through, and what a step has of it.

    gather            wait              free
FREE ----> GATHERING ----> READY ------------> FREE
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from shardwise.schedule.policy import UnitPolicy

if TYPE_CHECKING:
    from shardwise.schedule.executor import Executor, Held


class State(Enum):
    FREE = "free"
    GATHERING = "gathering"
    READY = "ready"


@dataclass
class StepSums:
    """How far the sums of a unit's gradients are, over the micro-batches of a step."""

    opened: bool = False  # a reduce of this step has looked at the gradient buffer
    overwrite: bool = False  # what the buffer holds is worth nothing: the next sum overwrites it
    accumulator: Held | None = None  # local gradients not yet scattered
    partial: Held | None = None  # scattered sums not yet all-reduced
    complete: bool = False  # summed over all ranks

    @property
    def wait_for_more(self) -> bool:
        """Gradients of this step wait for those of a later pass."""
        return self.accumulator is not None or self.partial is not None


class ScheduledUnit:
    """Facts and states of one unit. Executors extend it by what they hold of it."""

    executor: Executor
    aliased = False  # the full unit is the master itself: nothing to gather, nothing to free
    keeps_piece = False  # it can keep 1/k of itself from forward to backward
    gradient_count = 0  # trainable parameters
    trains_all = True

    def __init__(
        self,
        name: str,
        policy: UnitPolicy,
        *,
        is_root: bool = False,
        module_count: int = 1,
        shard: int = 1,
        replicate: int = 1,
    ) -> None:
        self.name, self.options = name, policy
        self.is_root, self.module_count = is_root, module_count
        self.shard_ranks, self.replicas = shard, replicate
        self.state = State.FREE
        self.stale = False  # full is older than master: from an optimizer step to the next gather
        self.is_shown = False
        self.piece = False  # 1/k of it is kept, and backward gathers that
        self.sums = StepSums()

    @property
    def sums_take_reduces(self) -> bool:
        """The memory of the sums can take a reduce's output as it is."""
        raise NotImplementedError

    @property
    def frees_early(self) -> bool:
        """Complete gradients prove that backward needs the unit no more. Not so for the root, whose
        modules are everywhere, nor for several modules of which some weights are frozen.
        """
        return not self.is_root and (self.module_count == 1 or self.trains_all)

    def gather(self) -> None:
        """Start bringing the full parameters together, unless they are there or on their way."""
        if self.state is not State.FREE:
            if not self.stale:
                return
            self.wait()
        self.stale = False
        if not self.aliased:
            self.executor.gather(self)
            self.state = State.GATHERING

    def wait(self) -> None:
        """Let compute wait for the gather under way, if any."""
        if self.state is State.GATHERING:
            self.executor.wait(self)
            self.forget_piece()
            self.state = State.READY

    def show(self) -> None:
        if not self.is_shown or self.keeps_piece:
            self.executor.show(self)
            self.is_shown = True

    def hide(self) -> None:
        if self.is_shown:
            self.executor.hide(self)
            self.is_shown = False

    def free(self) -> None:
        """Give the full parameters' memory back."""
        self.hide()
        if self.state is not State.FREE and not self.aliased:
            self.wait()
            self.executor.free(self)
            self.state = State.FREE

    def shrink(self) -> None:
        """Free all but this rank's piece in the smaller group of keep_after_forward = k."""
        keeps = self.keeps_piece and self.state is State.READY
        if keeps:
            self.executor.shrink(self)
        self.free()
        self.piece = keeps

    def forget_piece(self) -> None:
        """What a smaller group kept is worth nothing: it is gathered, or of another step."""
        if self.piece:
            self.piece = False
            self.executor.forget_piece(self)
