"""Which settings of the passes are best: each is tried, and costed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph

from shardwise.errors import UserError
from shardwise.graph.cost import Axes, simulate_graphs
from shardwise.graph.passes.run import PassOptions, run_passes
from shardwise.predict.cost import Costs

MIB = 2**20


@dataclass(frozen=True)
class Trial:
    """Settings, and what a step takes with them."""

    options: PassOptions
    step_ms: float
    exposed_ms: float
    peak_bytes: int

    def __str__(self) -> str:
        o = self.options
        capped = "no cap" if o.max_consecutive is None else f"cap {o.max_consecutive}"
        return (
            f"{self.step_ms:8.1f} ms {self.peak_bytes / 1e9:7.2f} GB   "
            f"buckets of {o.bucket_bytes // MIB} MiB, window {o.window}, {capped}"
        )


def schedule(
    forward: Graph,
    backward: Graph,
    *,
    costs: Costs,
    axes: Axes,
    bucket_sizes: Sequence[int] = (16 * MIB, 32 * MIB, 64 * MIB),
    windows: Sequence[int] = (5, 50),
    caps: Sequence[int | None] = (8, None),
) -> list[Trial]:
    """Every combination, the fastest first."""
    trials = []
    for size, window, most in itertools.product(bucket_sizes, windows, caps):
        options = PassOptions(bucket_bytes=size, window=window, max_consecutive=most)
        first, second, _ = run_passes(forward, backward, options)
        timeline = simulate_graphs(first, second, costs, axes)
        exposed = timeline.breakdown().exposed_transfer / 1e6
        trials.append(Trial(options, timeline.step_ms, exposed, timeline.peak().total))
    return sorted(trials, key=lambda trial: (trial.step_ms, trial.peak_bytes))


def frontier(trials: Sequence[Trial]) -> list[Trial]:
    """Those that no other one beats in time and in memory, the fastest first."""
    best: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.step_ms, trial.peak_bytes)):
        if not best or trial.peak_bytes < best[-1].peak_bytes:
            best.append(trial)
    return best


def choose(trials: Sequence[Trial], budget_bytes: float) -> Trial:
    """The fastest that fits."""
    fits = [trial for trial in trials if trial.peak_bytes <= budget_bytes]
    if not fits:
        least = min(trials, key=lambda trial: trial.peak_bytes)
        raise UserError(
            f"no settings of the passes fit in {budget_bytes / 1e9:.2f} GB: the least is "
            f"{least.peak_bytes / 1e9:.2f} GB ({least.step_ms:.1f} ms)"
        )
    return min(fits, key=lambda trial: (trial.step_ms, trial.peak_bytes))
