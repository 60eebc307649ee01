"""What is compared: the gist's feed-forward stack with uneven micro-batches, in three modes."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import shardwise as sw
from shardwise.description.preset import Preset
from shardwise.description.workload import Workload
from shardwise.emulation.engines import each_micro_batch
from shardwise.profiling.timing import Step, spread

MESH = (2, 2)
RANKS = MESH[0] * MESH[1]
# Means of its measured steps, in ms, and their standard deviation; tokens/s of a GPU.
DOCUMENT: dict[str, dict[str, float]] = {
    "hsdp": {"mean_ms": 2698.9, "std_ms": 1.2, "tokens_per_s": 4553},
    "delayed": {"mean_ms": 2145.8, "std_ms": 2.5, "tokens_per_s": 5727},
    "fsdp": {"mean_ms": 2693.5, "std_ms": 1.6, "tokens_per_s": 4562},
}


@dataclass(frozen=True)
class HybridCase:
    """The stack, and the micro-batches of a step: 1 sequence and `ratio` of them in turn; while one
    replica has the small one the other has the large one, unless they are `synced`.
    """

    stack: Preset
    sequence: int
    accumulate: int
    ratio: int
    synced: bool = False

    @property
    def workload(self) -> Workload:
        rows = ((1, self.ratio),) if self.synced else ((1, self.ratio), (self.ratio, 1))
        return Workload(self.sequence, self.ratio, self.accumulate, sizes=rows)

    @property
    def tokens(self) -> int:
        """Of a step, all ranks."""
        return self.workload.tokens_on(MESH)

    def describe(self) -> dict[str, Any]:
        return {
            "hidden": self.stack.d_model, "intermediate": self.stack.d_ff,
            "layers": self.stack.layers, "sequence": self.sequence,
            "accumulate": self.accumulate, "ratio": self.ratio, "synced": self.synced,
            "precision": "fp32",
        }  # fmt: skip

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in self.describe().values())

    def sizes(self, replica: int) -> list[int]:
        """Sequences of each micro-batch of a replica's ranks."""
        return [self.workload.size_of(replica, i) for i in range(self.accumulate)]

    def step(
        self, engine: str, model: nn.Module, plan: sw.Plan, replica: int, device: torch.device
    ) -> Step:
        """Forward and backward of every micro-batch, on inputs drawn anew, without an optimizer.
        The gradients are averages over the ranks: torch divides, for shardwise the loss does.
        """
        divisor = plan.world if engine == "shardwise" else 1
        sizes = self.sizes(replica)

        def step() -> None:
            model.zero_grad()
            for size in each_micro_batch(engine, model, plan, sizes):
                x_BTD = torch.randn(size, self.sequence, self.stack.d_model, device=device)
                (model(x_BTD).sum() / divisor).backward()

        return step


def document_speedup(mode: str) -> float:
    return DOCUMENT["hsdp"]["mean_ms"] / DOCUMENT[mode]["mean_ms"]


def plan_of(mode: str) -> sw.Plan:
    """The defaults of a Plan but for the mode."""
    if mode == "fsdp":
        return sw.Plan.of("zero3", RANKS)
    sync = "scatter_each_reduce_last" if mode == "delayed" else "each"
    return sw.Plan.of("hsdp", MESH, sync=sync)


def summarize(steps_ms: list[float], tokens: int) -> dict[str, Any]:
    """Mean and deviation as the document has them; median and interquartile range beside."""
    mean = statistics.mean(steps_ms)
    return {
        "step_ms": statistics.median(steps_ms),
        "step_spread_ms": spread(steps_ms),
        "mean_ms": mean,
        "std_ms": statistics.stdev(steps_ms) if len(steps_ms) > 1 else 0.0,
        "steps": len(steps_ms),
        "tokens_per_s": tokens / RANKS / mean * 1e3,
    }
