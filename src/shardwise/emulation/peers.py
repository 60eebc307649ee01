"""Peers that are late: uneven work on an emulated mesh.

One process is one rank, so what the others wait for has to be found out by playing them: the rank
runs its own step and then, in their place, the steps of ranks with other micro-batches, and notes
when each joins which collective. The next time every collective waits until the last of its ranks
would be there. What is wrong at first is right after a few rounds: in each, one more micro-batch
of every rank begins when it would.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from shardwise.description.workload import row_of
from shardwise.emulation.collectives import Emulation, Joins
from shardwise.planning.plan import Plan
from shardwise.profiling.timing import Step


class Peers:
    """The steps of all roles, run on one device; `joins[role]` is when the others meet a rank."""

    def __init__(
        self, emulation: Emulation, device: torch.device, plan: Plan, steps: Sequence[Step]
    ) -> None:
        self._emulation, self._device, self._plan, self._steps = emulation, device, plan, steps
        self._seen: list[dict[tuple[int, ...], list[float]]] = [{} for _ in steps]

    def settle(self, rounds: int) -> None:
        """Play every role so often."""
        for _ in range(rounds):
            for role in range(len(self._steps)):
                self._note(role)

    def run(self, role: int) -> None:
        """One step of a role, beside others that join when they were last seen to."""
        self._emulation.begin_step(self._device, self.joins_of(role))
        self._steps[role]()

    def _note(self, role: int) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._emulation.measure(self._device) as exposure:
            self.run(role)
        seen: dict[tuple[int, ...], list[float]] = defaultdict(list)
        for message in exposure.messages:
            seen[message.group].append(message.start)
        self._seen[role] = seen

    def joins_of(self, role: int) -> Joins:
        """Of the groups that have ranks of other roles: the latest of those, call by call."""
        count, found = len(self._steps), {}
        others = [seen for i, seen in enumerate(self._seen) if i != role]
        for group in {group for seen in others for group in seen}:
            if len({row_of(rank, self._plan.mesh, count) for rank in group}) > 1:
                starts = [seen[group] for seen in others if group in seen]
                found[group] = [max(each) for each in zip(*starts, strict=False)]
        return found
