"""What was said of a Plan when it was chosen, kept to be held against what it took."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardwise.planning.plan import Plan
from shardwise.predict.ranking import MEMORY_MARGIN, WORTH, Candidate, Ranking, show_gb
from shardwise.run_files import MISS


@dataclass(frozen=True)
class Foresight:
    """The step and the memory that a Plan was chosen for, and why, in three lines."""

    plan: str
    step_ms: float
    range_ms: tuple[float, float]
    peak_bytes: int
    basis: str
    parts_ms: Mapping[str, float]  # of the step, as a Breakdown has them
    load: float  # of the host when it was said: processes that want to run
    why: tuple[str, ...]

    @classmethod
    def of(cls, ranking: Ranking) -> Foresight:
        """Of the first in a ranking."""
        best = ranking[0]
        assert best.range_ms is not None
        # What is measured is the step alone; its parts are predicted, in proportion.
        factor = best.step_ms / (best.breakdown.step / 1e6)
        parts = {name: ns / 1e6 * factor for name, ns in best.breakdown.parts().items()}
        return cls(
            best.plan.title,
            best.step_ms,
            best.range_ms,
            best.peak_bytes,
            best.basis,
            parts,
            os.getloadavg()[0],
            (_say_chosen(best, ranking), _say_basis(best, ranking), _say_next(ranking)),
        )

    @classmethod
    def from_json(cls, text: str) -> Foresight:
        """From what `to_json` gave; ValueError, TypeError or KeyError from anything else."""
        values = json.loads(text)["foreseen"]
        low, high = values["range_ms"]
        return cls(**values | {"range_ms": (low, high), "why": tuple(values["why"])})

    def to_json(self, plan: Plan, compared: Compared | None = None) -> str:
        """With the plan that it is of, and what it took."""
        written: dict[str, Any] = {"foreseen": asdict(self), "mesh": list(plan.mesh)}
        if compared is not None:
            written["taken"] = compared.to_dict()
        return json.dumps(written, indent=2)

    def compare(
        self, step_ms: float, peak_bytes: int | None = None, exposed_ms: float | None = None
    ) -> Compared:
        return Compared(self, step_ms, peak_bytes, exposed_ms, os.getloadavg()[0])


@dataclass(frozen=True)
class Compared:
    """What a Plan took, beside what was said of it."""

    foreseen: Foresight
    step_ms: float
    peak_bytes: int | None  # None: not measured
    exposed_ms: float | None  # of the step, that a rank waited for communication; None: unknown
    load: float

    @property
    def time_apart(self) -> float:
        """As a share of what was said."""
        return self.step_ms / self.foreseen.step_ms - 1

    @property
    def memory_apart(self) -> float:
        if self.peak_bytes is None or not self.foreseen.peak_bytes:
            return 0.0
        return self.peak_bytes / self.foreseen.peak_bytes - 1

    @property
    def misses(self) -> bool:
        return max(abs(self.time_apart), abs(self.memory_apart)) > MISS

    def to_dict(self) -> dict[str, Any]:
        names = ("step_ms", "peak_bytes", "exposed_ms", "load")
        return {name: getattr(self, name) for name in names} | {"cores": os.cpu_count() or 1}

    def __str__(self) -> str:
        said = self.foreseen
        words = (
            f"a step takes {self.step_ms:.1f} ms where {said.step_ms:.1f} ms were said "
            f"({self.time_apart:+.1%}; {said.basis}, {show_range(said.range_ms)} ms)"
        )
        if self.peak_bytes is not None:
            words += (
                f", memory peaks at {show_gb(self.peak_bytes)} GB where "
                f"{show_gb(said.peak_bytes)} GB were ({self.memory_apart:+.1%})"
            )
        return f"{words}: {'a miss' if self.misses else 'as foreseen'}"


def show_range(bounds: tuple[float, float]) -> str:
    return "{:.1f} to {:.1f}".format(*bounds)


def _say_chosen(best: Candidate, ranking: Ranking) -> str:
    work = f"{best.workload.split} {best.workload.of} on a rank{best.workload.again}"
    return (
        f"chosen: {best.plan.title} on {best.plan.replicate}x{best.plan.shard} "
        f"({best.show_settings()}; {best.plan.compute_dtype}), the fastest of {ranking.tried} "
        f"plans for {work}"
    )


def _say_basis(best: Candidate, ranking: Ranking) -> str:
    assert best.range_ms is not None
    how = f" ({best.trial.how})" if best.trial is not None else ""
    low, high = (best.peak_bytes * (1 + sign * MEMORY_MARGIN) for sign in (-1, 1))
    return (
        f"rests on: {best.basis}{how}: {best.step_ms:.1f} ms a step "
        f"({show_range(best.range_ms)}), peak {show_gb(best.peak_bytes)} GB "
        f"({show_gb(low)} to {show_gb(high)}), which needs {show_gb(best.needed_bytes)} of "
        f"{show_gb(ranking.limit_bytes)}"
    )


def _say_next(ranking: Ranking) -> str:
    best, *others = ranking.best_of_each()
    others = [c for c in others if not c.gives_way_to(best)]
    if not others:
        why = f"{len(ranking.rejected)} do not fit" if ranking.rejected else "nothing else is left"
        return f"next: no other strategy ({why})"
    other = others[0]
    more, memory = other.step_ms - best.step_ms, other.peak_bytes - best.peak_bytes
    took = (
        "as long" if more < WORTH * best.step_ms
        else f"{more:.1f} ms more ({more / best.step_ms:.0%}; {other.basis})"
    )  # fmt: skip
    side = "more" if memory > 0 else "less"
    held = f"{show_gb(abs(memory))} GB {side}" if memory else "as much"
    return f"next: {other.title} would take {took}, and {held} memory"
