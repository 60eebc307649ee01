"""Tokens per second of one training step of the reference LM, by attention backend.

    python benchmarks/attention_step.py --json attention-step.json

The model is `medium` in bf16 on one GPU: zero_grad, forward, backward, fused AdamW. The backends
take turns, so that what disturbs one disturbs the others; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch

from shardwise.description.language_model import LM
from shardwise.description.preset import SIZES
from shardwise.kernels.attention.backends import forced
from shardwise.profiling.results import write_json
from shardwise.profiling.timing import describe_environment

BACKENDS = ("default", "triton", "flash", "cudnn", "efficient", "math")
SHAPES = ((16, 1024), (4, 4096), (1, 16384))  # sequences, tokens each


class Trainee:
    """One model and its batch."""

    def __init__(self, batch: int, length: int) -> None:
        torch.manual_seed(0)
        size = SIZES["medium"]
        with torch.device("cuda"):
            self.model = LM(size, context=length).to(torch.bfloat16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(size.vocab, (batch, length + 1), device="cuda")

    def step(self, backend: str) -> float:
        """Milliseconds of one step."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.optimizer.zero_grad()
        with nullcontext() if backend == "default" else forced(backend):
            loss = self.model(self.tokens[:, :-1], self.tokens[:, 1:])
            (loss / self.tokens[:, 1:].numel()).backward()
        self.optimizer.step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end)


def measure(batch: int, length: int, rounds: int, deadline: float) -> list[dict[str, Any]]:
    trainee = Trainee(batch, length)
    times: dict[str, list[float]] = {name: [] for name in BACKENDS}
    failures: dict[str, str] = {}
    for i in range(rounds + 2):  # two to warm up
        for name in BACKENDS:
            if name in failures or (i > 3 and time.monotonic() > deadline):
                continue
            try:
                elapsed = trainee.step(name)
            except torch.OutOfMemoryError:
                failures[name] = "out of memory"
                trainee.optimizer.zero_grad()
                torch.cuda.empty_cache()
                continue
            if i >= 2:
                times[name].append(elapsed)
    rows = []
    for name in BACKENDS:
        row: dict[str, Any] = {"backend": name, "batch": batch, "seq": length}
        if name in failures:
            row["failure"] = failures[name]
        else:
            row["step_ms"] = statistics.median(times[name])
            row["tokens_per_second"] = batch * length / row["step_ms"] * 1e3
        print(row, flush=True)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--budget", type=float, default=120, help="seconds (default: 120)")
    parser.add_argument("--commit", help="what to record where the code is not in its repository")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_step: needs a CUDA device")
    rows: list[dict[str, Any]] = []
    began = time.monotonic()
    for i, (batch, length) in enumerate(SHAPES):
        deadline = began + options.budget * (i + 1) / len(SHAPES)
        rows += measure(batch, length, options.rounds, deadline)
        torch.cuda.empty_cache()
        if options.json is not None:
            write_json(
                options.json, describe_environment(options.commit),
                "python benchmarks/attention_step.py", rows, model="medium, bf16, fused AdamW",
            )  # fmt: skip


if __name__ == "__main__":
    main()
