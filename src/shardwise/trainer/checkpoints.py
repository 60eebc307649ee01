"""Checkpoints of a run: what is saved beside the model, and where a run goes on.

The data needs no position of its own: a batch is a function of the step.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import CheckpointError, CorruptCheckpoint, Manifest, Saving, all_of
from shardwise.checkpoint.read import locate
from shardwise.checkpoint.talk import talk
from shardwise.errors import UserError
from shardwise.run_files import CHECKPOINTS
from shardwise.trainer.config import TrainConfig
from shardwise.trainer.data import Corpus

_EXTRA = "trainer"  # under which the run's own part of a checkpoint is saved
_SIZES = ("vocab", "d_model", "d_ff", "layers", "heads", "kv_heads", "tied")


@dataclass
class Progress:
    """How far a run is; all zero at its start."""

    step: int = 0
    tokens: int = 0  # of all ranks
    skipped: int = 0  # steps left out because the norm was not finite
    skipped_in_a_row: int = 0


class Checkpoints:
    """Those of one run, on one rank. `restore` and `save` are collective calls."""

    def __init__(
        self,
        config: TrainConfig,
        corpus: Corpus,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self.config, self.model, self.optimizer = config, model, optimizer
        self.root = str(Path(config.run.out) / CHECKPOINTS)
        self._facts = _facts_of(config, corpus)
        self._last: Saving | None = None

    def restore(self) -> Progress:
        """Take over the newest checkpoint that is whole, the same on all ranks; what is wrong with
        newer ones is said. Without any, the start.
        """
        wanted = self.config.run.resume
        if wanted == "none":
            return Progress()
        ranks = talk()
        found = ranks.first(f"cannot resume from {wanted}", self._candidates)
        for path in found:
            try:
                progress = self._load(path)
            except CorruptCheckpoint as error:
                _say(f"{error}; an older checkpoint is tried")
            else:
                left = self.config.run.steps - progress.step
                more = "" if left > 0 else ": no step is left of run.steps"
                _say(f"resumed from {path}, after step {progress.step}{more}")
                return progress
        if found:
            raise CheckpointError(
                f"none of the {len(found)} checkpoints that {found[0]} is the newest of is whole: "
                "run.resume may name another, --overwrite starts anew"
            )
        _say(f"{self.root} has no checkpoint yet: the run starts at its first step")
        return Progress()

    def _candidates(self) -> list[str]:
        """Folders of checkpoints, the newest first; of a path: itself, or those in it."""
        path = self.config.run.resume
        if path == "auto":
            return all_of(self.root)
        for root in (path, f"{path}/{CHECKPOINTS}"):
            if found := all_of(root):
                return found
        return [locate(path)]

    def _load(self, path: str) -> Progress:
        """Compare what the checkpoint's run was with what this one is, then load."""
        doing = f"cannot resume from {path}"
        progress, facts = talk().first(doing, lambda: _read_trainer(path))
        differing = [
            f"{name} (was {facts.get(name)!r}, is {value!r})"
            for name, value in self._facts.items()
            if facts.get(name) != value
        ]
        if differing:
            raise UserError(
                f"{doing}: the run that saved it differs from this one in {', '.join(differing)}. "
                "Give the same values, or start a new run without --resume"
            )
        sw.load(path, self.model, self.optimizer)
        return progress

    def save(self, progress: Progress, wait: bool = False) -> float:
        """Save, in the background where the configuration says so and nobody waits for it. Gives
        the seconds that the run stood still.
        """
        began, run = time.perf_counter(), self.config.run
        self._last = sw.save(
            self.root,
            self.model,
            self.optimizer,
            step=progress.step,
            extra={_EXTRA: {"progress": asdict(progress), "facts": self._facts}},
            asynchronous=run.asynchronous_save and not wait,
            keep_latest_k=run.keep or None,
        )
        return time.perf_counter() - began

    def finish(self) -> str | None:
        """Wait until the last one is committed; its folder, if this run saved any."""
        return None if self._last is None else self._last.wait()

    def advise(self) -> str:
        """Where a run that has failed can go on, in words."""
        self.finish()
        finite = (path for path in all_of(self.root) if Manifest.read(path).finite)
        last = talk().first("cannot list the checkpoints", lambda: next(finite, None))
        if last is None:
            return "No checkpoint was saved: run.save_every saves some"
        return f"The last finite checkpoint is {last}: --resume goes on there"


def _facts_of(config: TrainConfig, corpus: Corpus) -> dict[str, Any]:
    """What has to be the same for a run to go on: the model's sizes and the data."""
    size = config.model.resolve()
    return {
        **{f"model.{name}": getattr(size, name) for name in _SIZES},
        "data.path": corpus.fingerprint(),  # a file may have moved
        "data.seed": config.data.seed,
        "data.seq": config.data.seq,
    }


def _read_trainer(path: str) -> tuple[Progress, dict[str, Any]]:
    """The run's own part of a checkpoint: its progress and its facts."""
    manifest = Manifest.read(path)
    saved = manifest.extra[manifest.extra_of[0]] if manifest.extra_of else {}
    try:
        own = saved[_EXTRA]
        progress = Progress(**{each.name: own["progress"][each.name] for each in fields(Progress)})
        whole = all(type(value) is int and value >= 0 for value in asdict(progress).values())
        if not whole or progress.step != manifest.step:
            raise ValueError
        return progress, dict(own["facts"])
    except (KeyError, TypeError, ValueError):
        raise CheckpointError(
            f"{path} was not saved by `shardwise train`: load it with sw.load"
        ) from None


def _say(text: str) -> None:
    if talk().rank == 0:
        print(f"shardwise: {text}", file=sys.stderr, flush=True)
