"""The language models of seed 004's exercises: what is built, on what, and in which precision."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.lab.exercises import seed004
from shardwise.lab.rows import say
from shardwise.profiling.timing import describe_environment
from shardwise.trainer.model import LM, make_model
from shardwise.trainer.sizes import SIZES, AttentionKind, Size

QUICK = Size(d_model=32, d_ff=64, layers=2, heads=2, kv_heads=2, vocab=64)
# What a CPU measures in minutes.
CPU_SIZES = ("small",)


@dataclass(frozen=True)
class Case:
    """One model under measurement."""

    size: str
    precision: str  # fp32, or bf16: fp32 weights under autocast
    attention: str = "plain"  # or fused
    context: int = seed004.CONTEXT
    batch: int = seed004.BATCH
    quick: bool = False

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def shape(self) -> Size:
        """The seed's sizes; of a trial run, next to nothing."""
        attention: AttentionKind = "plain" if self.attention == "plain" else "torch"
        known = QUICK if self.quick else SIZES[self.size]
        return dataclasses.replace(known, attention=attention)

    def make_model(self) -> LM:
        return make_model(self.shape, self.device, self.context)

    def make_tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        draw = torch.Generator().manual_seed(1)
        size = (2, self.batch, self.context)
        tokens, targets = torch.randint(0, self.shape.vocab, size, generator=draw).to(self.device)
        return tokens, targets

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, the same for all."""
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)


def choose_sizes(asked: tuple[str, ...] | None, quick: bool) -> tuple[str, ...]:
    """The sizes asked for; otherwise all that this machine measures in reasonable time."""
    if not torch.cuda.is_available():
        say("no CUDA device here: the figures are this CPU's")
    if asked is not None:
        return asked
    if quick:
        return ("small", "medium")
    return tuple(seed004.MODELS) if torch.cuda.is_available() else CPU_SIZES


def describe_run(command: str, commit: str | None, quick: bool) -> dict[str, Any]:
    """What a file of results says of all its rows."""
    facts: dict[str, Any] = {"environment": describe_environment(commit), "command": command}
    if quick:
        facts["quick"] = True
    return facts


def explain_failure(error: BaseException) -> str:
    """An out-of-memory is a result; the rest is named."""
    words = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in words:
        return "out of memory"
    return f"{type(error).__name__}: {words[:200]}"
