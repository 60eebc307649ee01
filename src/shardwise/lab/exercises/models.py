"""The language models of seed 004's exercises: what is built, on what, and in which precision."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shardwise.description.language_model import LM, OPTIMIZER, draw_tokens, make_model
from shardwise.description.preset import SIZES, AttentionKind, Size
from shardwise.lab.exercises import seed004
from shardwise.lab.rows import say
from shardwise.profiling.results import Row

QUICK = Size(d_model=32, d_ff=64, layers=2, heads=2, kv_heads=2, vocab=64)
QUICK_CONTEXT = 8
# What a CPU measures in minutes.
CPU_SIZES = ("small",)


@dataclass(frozen=True)
class ModelCase:
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

    def describe(self) -> Row:
        """What a row says of its model."""
        return {name: value for name, value in asdict(self).items() if name != "quick"}

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def model_size(self) -> Size:
        """The seed's sizes; of a trial run, next to nothing."""
        attention: AttentionKind = "plain" if self.attention == "plain" else "torch"
        known = QUICK if self.quick else SIZES[self.size]
        return dataclasses.replace(known, attention=attention)

    def make_model(self) -> LM:
        return make_model(self.model_size, self.device, self.context)

    def make_tokens(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets."""
        return draw_tokens(self.model_size, self.batch, self.context, self.device)

    def autocast(self) -> AbstractContextManager[Any]:
        if self.precision == "fp32":
            return nullcontext()
        return torch.autocast(self.device, torch.bfloat16)

    def synchronize(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, the same for all."""
    return torch.optim.AdamW(model.parameters(), **OPTIMIZER)


def choose_cases(arguments: argparse.Namespace, context: int) -> list[ModelCase]:
    """Every model asked for, in every precision."""
    return [
        ModelCase(size, precision, arguments.attention, context, quick=arguments.quick)
        for size, precision in itertools.product(
            choose_sizes(arguments.sizes, arguments.quick), arguments.precision
        )
    ]


def choose_sizes(asked: Sequence[str] | None, quick: bool) -> Sequence[str]:
    """The sizes asked for; otherwise all that this machine measures in reasonable time."""
    tell_device()
    if asked is not None:
        return asked
    if quick:
        return seed004.MODELS[:1]
    return seed004.MODELS if torch.cuda.is_available() else CPU_SIZES


@contextmanager
def one_thread(quick: bool) -> Iterator[None]:
    """A trial computes in one thread: it often shares its cores, and threads that wait for each
    other there take hundreds of times as long as the work.
    """
    before = torch.get_num_threads()
    if quick:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def tell_device() -> None:
    if not torch.cuda.is_available():
        say("no CUDA device here: the figures are this CPU's")
