"""A run whose plan was chosen by trials, held against what was said of it."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import shardwise as sw
from shardwise.checked import read_text
from shardwise.children import say
from shardwise.errors import UserError
from shardwise.predict.foresight import Foresight
from shardwise.run_files import CHOICE, PLAN
from shardwise.trainer.config import TrainConfig
from shardwise.trainer.group import Member
from shardwise.trainer.outputs import StepMetrics
from shardwise.trainer.step_profiler import WARMUP, StepProfiler

_LEAST_ROWS = 3


def read_choice(config: TrainConfig, world: int) -> tuple[sw.Plan, Foresight | None] | None:
    """The plan of the run that goes on, for as many ranks, and what was said of it, if that is
    there.
    """
    out = Path(config.run.out)
    if config.run.resume == "none":
        return None
    if config.run.resume != "auto":
        out = next((d for d in (out, Path(config.run.resume)) if (d / PLAN).exists()), out)
    if not (out / PLAN).exists():
        return None
    try:
        plan = sw.Plan.from_json(read_text(str(out / PLAN), "the plan"))
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{out / PLAN} is not a plan ({error}): remove it, or --overwrite"
        ) from error
    if plan.world != world:
        return None
    try:
        return plan, Foresight.from_json((out / CHOICE).read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError, KeyError):
        return plan, None  # it was not chosen, or that was lost: it trains as well


class Comparison:
    """Gathers steps on rank 0 until there are enough to compare."""

    def __init__(
        self,
        config: TrainConfig,
        plan: sw.Plan,
        member: Member,
        foresight: Foresight | None,
        profiler: StepProfiler,
        done: int,
    ) -> None:
        """`done`: steps before the run resumed."""
        self._file, self._plan, self._profiler = Path(config.run.out) / CHOICE, plan, profiler
        self._steps, self._on_cuda = config.run.steps, member.device.type == "cuda"
        self._after = config.run.compare_after
        self._first, self._at = done + WARMUP + 1, done + self._after
        self._rows: list[StepMetrics] = []
        self._foresight = foresight if member.rank == 0 else None
        if self._foresight is not None:
            self._file.write_text(self._foresight.to_json(plan) + "\n", encoding="utf-8")

    def add(self, row: StepMetrics, first: int) -> None:
        """A logged row, of the steps from `first` on; profiled ones do not count."""
        if self._foresight is None or not self._after:
            return
        profiled = any(first <= step <= row.step for step in self._profiler.steps)
        if first >= self._first and not profiled:
            self._rows.append(row)
        last = row.step == self._steps
        if row.step < self._at and not last:
            return
        if len(self._rows) >= _LEAST_ROWS:
            self._compare(self._foresight)
        elif last:
            say("too few steps to compare the plan with what was said of it")

    def _compare(self, foresight: Foresight) -> None:
        """Say it once, and leave it to the report."""
        self._foresight = None
        peak = self._profiler.peak_bytes
        if self._on_cuda:
            peak = max(row.memory_bytes for row in self._rows)
        step_ms = median(row.step_s for row in self._rows) * 1e3
        shares = [row.exposed_share for row in self._rows if row.exposed_share is not None]
        exposed = median(shares) * step_ms if shares else None
        compared = foresight.compare(step_ms, peak, exposed)
        say(f"after {self._rows[-1].step} steps: {compared}")
        text = foresight.to_json(self._plan, compared)
        self._file.write_text(text + "\n", encoding="utf-8")
