"""`search` and `plan` as users call them: by prediction, and with `measure=True` by trials of the
best on this machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.calibration.trial import Program, can_try, try_plan
from shardwise.description.cluster import Cluster
from shardwise.description.model import ModelDescription
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict import search as predicted
from shardwise.predict.ranking import Candidate, Ranking, Rejected, Trial
from shardwise.predict.sources import Source, as_example, as_source
from shardwise.profiling.timing import describe_environment, no_garbage_collection

TRIED = 4  # strategies, the best Plan of each
MORE = 2  # Plans that are tried because of what was learnt of these
LEARNT = 0.15  # of its step: what a Plan may differ by from one of its strategy that was tried
Tell = Callable[[str], None]


def search(
    model: nn.Module | ModelDescription | str,
    cluster: Cluster | str,
    workload: Any = None,
    budget_gb: float | None = None,
    *,
    measure: bool = False,
    tell: Tell = lambda text: None,
    **settings: Any,
) -> Ranking:
    """Rank Plans of `model` for `workload` on ranks of `cluster`, the fastest first.

    With `measure` some steps of the best of each strategy run here: on a GPU one rank, with the
    cluster's network emulated; on a CPU all ranks. Those are ranked by what they took, and the
    others by their predictions, corrected by it. A trial takes seconds and is remembered, by
    machine, model and Plan. `tell` is called with what is tried next.

    `cluster` is one, or the name or the file that `Cluster.load` takes. All else is as
    `shardwise.predict.search.search` has it: `inputs`, `loss`, `world`, dtypes, what is searched.
    """
    if isinstance(cluster, str | Path):
        cluster = Cluster.load(str(cluster))
    if not isinstance(cluster, Cluster):
        raise UserError(
            f"cluster is {cluster!r:.40}, expected a Cluster, or a name or file of one: 'h100x8'"
        )
    # Millions of small values that refer to no other in a circle: looking through them would take a
    # quarter of the time.
    with no_garbage_collection():
        ranking = predicted.search(model, cluster, workload, budget_gb, **settings)
    if not measure or not ranking:
        return ranking
    if isinstance(model, ModelDescription):
        raise UserError("measure=True runs the model: give it, not its description")
    program = Program.of(model, settings.get("inputs"), settings.get("loss"))
    if workload is not None and not hasattr(workload, "micro_batch"):
        program = dataclasses.replace(program, inputs=workload)
    return measured(ranking, program, cluster, tell, settings.get("trace_on", "auto"))


def plan(
    model: nn.Module | ModelDescription | str,
    cluster: Cluster | str,
    workload: Any = None,
    budget_gb: float | None = None,
    **settings: Any,
) -> Plan:
    """The fastest Plan that fits, resolved: the first that `search` gives. It keeps the workload's
    tokens, but may ask for other micro-batches; `search` says which.
    """
    ranking = search(model, cluster, workload, budget_gb, **settings)
    if not ranking:
        raise ValueError(ranking.explain())
    best: Plan = ranking[0].plan
    return best


def measured(
    ranking: Ranking,
    program: Program,
    cluster: Cluster,
    tell: Tell,
    trace_on: str = "auto",
    attempt: Callable[[Plan, Workload], Trial] | None = None,
) -> Ranking:
    """The same Plans by what the best of them took here.

    `attempt` tries one on ranks that are there already; the first is then tried again, if what is
    known of it is from an earlier day: it is what the run will be held against.
    """
    why = can_try(cluster, ranking[0].plan.world) if attempt is None else ""
    if why:
        return not_measured(ranking, why)
    notes: list[str] = []
    known = _Remembered(program, cluster, trace_on)
    tried: dict[int, Trial] = {}
    failed: set[int] = set()
    fresh: set[int] = set()

    def run(candidate: Candidate, anew: bool = False) -> None:
        trial = None if anew else known.find(candidate)
        if trial is None:
            tell(f"trying {candidate.title}")
            fresh.add(id(candidate))
            try:
                if attempt is not None:
                    trial = attempt(
                        dataclasses.replace(candidate.plan, units=None), candidate.workload
                    )
                else:
                    trial = try_plan(program, candidate.plan, candidate.workload, cluster)
            except UserError as error:
                notes.append(f"{candidate.title} was not tried: {error}")
                failed.add(id(candidate))
                return
            known.keep(candidate, trial)
        tried[id(candidate)] = trial

    for candidate in ranking.best_of_each()[:TRIED]:
        run(candidate)
    found = _corrected(ranking, tried)
    for _ in range(MORE):
        first = next(c for c, _ in found if id(c) not in failed)
        if not tried or id(first) in tried:
            break
        run(first)  # what was learnt of the others puts it first
        found = _corrected(ranking, tried)
    if attempt is not None and tried:
        first = next(c for c, _ in found if id(c) in tried)
        if id(first) not in fresh:
            run(first, anew=True)
            found = _corrected(ranking, tried)
        # One that nobody ran is not chosen for what others taught of it.
        found.sort(key=lambda pair: id(pair[0]) not in tried)
    fitting: list[Candidate] = []
    too_large: list[Candidate] = []
    for _, candidate in found:
        fits = not tried or candidate.needed_bytes <= ranking.limit_bytes
        (fitting if fits else too_large).append(candidate)
    return dataclasses.replace(
        ranking,
        candidates=tuple(fitting),
        rejected=(*ranking.rejected, *map(_as_rejected, too_large)),
        notes=(*ranking.notes, *notes),
    )


def not_measured(ranking: Ranking, why: str) -> Ranking:
    return dataclasses.replace(ranking, notes=(*ranking.notes, f"nothing was measured: {why}"))


def _as_rejected(candidate: Candidate) -> Rejected:
    """One that was predicted to fit, and took more."""
    return Rejected(
        candidate.title, candidate.plan.title, candidate.peak_bytes, candidate.needed_bytes
    )


def _corrected(ranking: Ranking, tried: dict[int, Trial]) -> list[tuple[Candidate, Candidate]]:
    """Each candidate, and the same with what is known of it by now: the fastest first."""
    ratios: dict[str, list[float]] = {}
    for c in ranking:
        if id(c) in tried:
            ratios.setdefault(c.plan.title, []).append(tried[id(c)].step_ms / c.step_ms)
    every = sorted(ratio for each in ratios.values() for ratio in each)
    if not every:
        return [(c, c) for c in ranking]
    made, missed = [], _missed_bytes(ranking, tried)
    for c in ranking:
        trial = tried.get(id(c))
        if trial is not None:
            better = dataclasses.replace(
                c, peak_bytes=trial.peak_bytes, trial=trial, basis="measured here",
                range_ms=trial.range_ms,
            )  # fmt: skip
            step_ms = trial.step_ms
        else:
            own = ratios.get(c.plan.title)
            step_ms = c.step_ms * statistics.median(own or every)
            spread = every if own is None else [own[0] * (1 - LEARNT), own[-1] * (1 + LEARNT)]
            better = dataclasses.replace(
                c, peak_bytes=c.peak_bytes + round(missed * c.workload.micro_batch),
                basis="predicted, corrected by what was measured here",
                range_ms=(c.step_ms * min(spread), c.step_ms * max(spread)),
            )  # fmt: skip
        rate = c.tokens_per_s * c.step_ms / step_ms
        better = dataclasses.replace(
            better, step_ms=step_ms, tokens_per_s=rate, predicted_ms=c.step_ms
        )
        made.append((c, better))
    return sorted(made, key=lambda pair: pair[1].order)


def _missed_bytes(ranking: Ranking, tried: dict[int, Trial]) -> float:
    """What trials took of memory beyond what was said of them, for each sample of a micro-batch at
    most: activations that were described too small are so in every Plan.
    """
    more = [
        (tried[id(c)].peak_bytes - c.peak_bytes) / max(c.workload.micro_batch, 1)
        for c in ranking
        if id(c) in tried
    ]
    return max([0.0, *more])


class _Remembered:
    """Trials of this machine, in a file of the user's cache; by all that they depend on."""

    def __init__(self, program: Program, cluster: Cluster, trace_on: str) -> None:
        facts = describe_environment()
        self._machine = [facts[name] for name in ("commit", "torch", "cpu", "cores", "gpu")]
        self._program, self._cluster, self._trace_on = program, cluster, trace_on
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        self._folder = Path(root) / "shardwise" / "trials"
        self._files: dict[int, Path] = {}
        self._source: Source | None = None  # its traces are those of all candidates

    def _file(self, candidate: Candidate) -> Path:
        """Named by a digest; a model counts by what was traced of it."""
        if id(candidate) in self._files:
            return self._files[id(candidate)]
        loss = self._program.loss
        if self._source is None:
            self._source = as_source(
                self._program.model,
                candidate.workload,
                inputs=as_example(self._program.inputs, self._program.model),
                loss=None if isinstance(loss, str) else loss,
                trace_on=self._trace_on,
                device="cpu" if self._cluster.host.communicates else "cuda",
            )
        resolved, described = self._source.at(candidate.plan, candidate.workload)
        text = repr(
            (self._machine, self._cluster, candidate.workload, resolved, described.units)
            + ((self._program.about,) if self._program.about else ())
        )
        name = f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"
        self._files[id(candidate)] = self._folder / name
        return self._files[id(candidate)]

    def find(self, candidate: Candidate) -> Trial | None:
        try:
            return Trial.from_dict(json.loads(self._file(candidate).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def keep(self, candidate: Candidate, trial: Trial) -> None:
        file = self._file(candidate)
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            new = file.with_suffix(f".{os.getpid()}")
            new.write_text(json.dumps(dataclasses.asdict(trial)), encoding="utf-8")
            new.replace(file)
        except OSError:
            pass  # it is only measured again then
