"""The step as shardwise's own engine issues it: `engine/engine.py` and `engine/unit.py` retold
as operations, for streams (CUDA) and for a host that does everything itself (gloo).
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.description.collectives import Members
from shardwise.planning.strategies import choose_gather
from shardwise.predict.program import Work, rounded
from shardwise.predict.reduces import Reducer
from shardwise.predict.step import StepSchedule, UnitState
from shardwise.timeline import COMPUTE


@dataclass
class EngineSchedule(StepSchedule):
    """Gathers, computes, frees and reduces in the engine's order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        kept = self.plan.strategy.parameters
        self.frees_in_pass = kept == "shard"
        self.frees_after_step = kept != "replicate"
        self.reducer = Reducer(self.plan, self.b)

    def begin_step(self) -> None:
        if not self.frees_after_step:
            for unit in self.units:
                if not unit.sizes.aliased:
                    self.b.hold("full", rounded(unit.sizes.full))
                    unit.allocated = unit.gathered = unit.stale = True

    # Forward

    def forward(self, work: Work) -> None:
        roots = [i for i, unit in enumerate(self.units) if unit.is_root]
        first_use = work.first_use
        last_use = {u: place for place, units in enumerate(work.uses) for u in units}
        visits = list(roots)
        for place, used in enumerate(work.uses):
            visits += [u for u in used if not self.units[u].is_root and first_use[u] == place]
        at = 0
        for _ in roots:
            self._bring(visits, at, self.plan.forward_prefetch, "forward")
            at += 1
        for place, (name, segment) in enumerate(work.segments):
            for number in work.uses[place]:
                if not self.units[number].is_root and first_use[number] == place:
                    self._bring(visits, at, self.plan.forward_prefetch, "forward")
                    at += 1
            self.b.compute(segment.forward, "forward", name, "forward")
            for number in work.uses[place]:
                if not self.units[number].is_root and last_use[number] == place:
                    self._after_forward(self.units[number])
        if self.frees_in_pass and self.plan.keep_after_forward is False:
            for number in roots:
                self._free(self.units[number])

    def _after_forward(self, unit: UnitState) -> None:
        keep = self.plan.keep_after_forward
        if not self.frees_in_pass or keep is True:
            return
        if keep is not None and keep is not False and not unit.sizes.aliased:
            piece = rounded(unit.sizes.full // keep)
            self.b.hold("full", piece)
            self.b.copy("keep", unit.name, "forward", COMPUTE, 2 * piece)
        self._free(unit)

    def _bring(self, visits: list[int], at: int, depth: int, phase: str) -> None:
        """Gather the unit and those after it, and let compute wait for the unit."""
        unit = self.units[visits[at]]
        self._gather(unit, phase)
        for ahead in visits[at + 1 : at + 1 + depth]:
            self._gather(self.units[ahead], phase)
        self._wait(unit, phase)

    def _gather(self, unit: UnitState, phase: str) -> None:
        if unit.sizes.aliased or (unit.gathered and not unit.stale):
            return
        unit.stale, unit.gathered = False, True
        b, full, n = self.b, unit.sizes.full, unit.shard
        mode = choose_gather(self.plan.gather, unit.count, full, self.costs.streams)
        stages = mode == "packed" and n > 1
        b.engine_work("gather" if n > 1 else "cast", unit.name, phase)
        if self.costs.streams or not stages:
            self._allocate(unit)
        before = b.behind_compute()
        if n == 1:
            unit.arrives = b.copy(
                "cast", unit.name, phase, "gather", unit.sizes.master + full, before
            )
            return
        kept = self._regathers_kept(unit, phase)
        members = Members(kept) if kept else self.shard
        axis = "keep" if kept else "shard"
        staging = rounded(full) if stages else 0
        b.hold("temporary", staging)
        if unit.casts and not kept:
            own = unit.sizes.master + full // n
            before = (b.copy("cast", unit.name, phase, "gather", own, before),)
        calls = unit.count if mode == "each" else 1
        for _ in range(calls):
            unit.arrives = b.collective(
                "all_gather", unit.name, phase, axis, full / calls, members, before, full / calls
            )
        if not self.costs.streams:
            unit.staged = staging
            return
        if stages:
            done = (unit.arrives,)
            unit.arrives = b.copy("copy-out", unit.name, phase, "gather", 2 * full, done)
            b.hold("temporary", -staging)

    def _regathers_kept(self, unit: UnitState, phase: str) -> int:
        """The size of the smaller group that holds the unit since forward, or 0."""
        keep = self.plan.keep_after_forward
        if phase != "backward" or keep is None or isinstance(keep, bool) or unit.is_root:
            return 0
        return keep

    def _wait(self, unit: UnitState, phase: str) -> None:
        if unit.arrives < 0:
            return
        b = self.b
        b.join(unit.arrives)
        unit.arrives = -1
        if unit.staged:
            self._allocate(unit)
            b.copy("copy-out", unit.name, phase, COMPUTE, 2 * unit.sizes.full)
            b.hold("temporary", -unit.staged)
            unit.staged = 0
        if self._regathers_kept(unit, phase):
            keep = self.plan.keep_after_forward
            assert isinstance(keep, int)
            b.hold("full", -rounded(unit.sizes.full // keep))

    def _allocate(self, unit: UnitState) -> None:
        if not unit.allocated:
            unit.allocated = True
            self.b.hold("full", rounded(unit.sizes.full))

    def _free(self, unit: UnitState) -> None:
        if unit.sizes.aliased or not unit.gathered:
            return
        self._wait(unit, "backward")
        unit.gathered = unit.allocated = False
        self.b.hold("full", -rounded(unit.sizes.full))

    # Backward

    def backward(self, work: Work, last: bool) -> None:
        peaked, last_place = self.peak_of_loss(work), len(work.segments) - 1
        first_use = work.first_use
        roots = [i for i, unit in enumerate(self.units) if unit.is_root]
        visits = list(roots)
        stops: list[list[int]] = []  # positions in `visits` that each segment brings
        for place in reversed(range(len(work.segments))):
            mine = [u for u in work.uses[place] if not self.units[u].is_root]
            again = 2 if work.segments[place][1].checkpointed else 1
            stops.append([len(visits) + i for i in range(len(mine) * again)])
            visits += mine * again
        for at in range(len(roots)):
            self._bring(visits, at, self.plan.backward_prefetch, "backward")
        ready: list[UnitState] = []
        for place, brings in zip(reversed(range(len(work.segments))), stops, strict=True):
            for at in brings:
                self._bring(visits, at, self.plan.backward_prefetch, "backward")
            self.run_backward(work, place, peaks=not (peaked and place == last_place))
            for number in work.uses[place]:
                if first_use[number] == place:
                    unit = self.units[number]
                    if self.frees_in_pass and unit.frees_early:
                        self._free(unit)
                    if unit.trained:
                        ready.append(unit)
                        if self.reducer.during_backward:
                            self.reducer.reduce(unit, last)
        if not self.reducer.during_backward:
            for unit in ready:
                self.reducer.reduce(unit, last)
        self.reducer.finish()
        if last or self.plan.sync == "each":
            for unit in self.units:
                unit.opened = False
        if self.frees_in_pass or (self.frees_after_step and last):
            for unit in self.units:
                self._free(unit)
