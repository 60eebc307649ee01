"""`shardwise train --plan auto`: the trainer, with the plan chosen by trials of its own steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.calibration.choice import choose_for
from shardwise.calibration.trial import Program
from shardwise.description.example import Call, Example
from shardwise.description.language_model import LM
from shardwise.description.workload import Workload
from shardwise.planning.plan import Plan
from shardwise.predict.foresight import Foresight
from shardwise.predict.step import StepOptions
from shardwise.profiling.timing import Step
from shardwise.trainer import loop
from shardwise.trainer.config import TrainConfig
from shardwise.trainer.data import Corpus
from shardwise.trainer.group import Member


@dataclass(frozen=True)
class TrainerProgram(Program):
    """A step as the trainer takes it: its data, its clipping, its agreement on the loss."""

    config: TrainConfig | None = None
    corpus: Corpus | None = None
    member: Member | None = None

    @property
    def may_capture(self) -> bool:
        return self.config is not None and not self.config.run.capture

    def start(self, plan: Plan, workload: Workload, device: torch.device) -> Step:
        assert self.config is not None and self.corpus is not None and self.member is not None
        return loop.rehearse(self.config, plan, self.corpus, self.member)


def train(config_toml: str) -> None:
    """As one rank."""
    loop.train(config_toml, choose)


def choose(config: TrainConfig, corpus: Corpus, member: Member) -> tuple[Plan, Foresight]:
    """The plan for a run; all ranks get the same."""
    run, optim, given = config.run, config.optim, config.plan.settings

    def program() -> Program:
        # Recomputing is the workload's, and compiling the trial's: the model is described plain.
        with torch.device("meta"):
            model = LM(config.model.resolve(), config.data.seq, "none", config.model.dropout)
        about = (
            "train", optim.clip > 0, optim.nonfinite, run.compile, run.capture, run.deterministic,
            run.log_every == 1, config.model.dropout > 0, torch.get_num_threads(),
        )  # fmt: skip
        return TrainerProgram(
            model,
            Example(_tokens_of(config)),
            about=repr(about),
            config=config,
            corpus=corpus,
            member=member,
        )

    def settings() -> dict[str, Any]:
        work = config.workload
        sizes = work.sizes or ((work.micro_batch,) * work.micro_batches,)
        return {
            "workload": Workload.uneven(work.sequence, sizes),
            "inputs": Example(_tokens_of(config)),
            "compute_dtype": given.get("compute_dtype"),
            "reduce_dtype": given.get("reduce_dtype"),
            "budget_gb": given.get("budget_gb"),
            "checkpoints": (config.model.checkpoint,),
        }

    def say(text: str) -> None:
        print(text, flush=True)

    return choose_for(lambda: member.device, program, settings, say, StepOptions(clip=True))


def _tokens_of(config: TrainConfig) -> Any:
    """Tokens and targets of so many sequences, without values."""

    def tokens(sequences: int = config.data.batch) -> Call:
        shape = (sequences, config.data.seq)
        both = (torch.empty(shape, dtype=torch.int64, device="meta") for _ in range(2))
        return Call(tuple(both), {})

    return tokens
