"""What somebody who follows one step has to read: the files that it visits."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch

import shardwise as sw
from tests.parity.models import Model, loss_sum, token_batch
from tests.ranks import Ranks

# One of them is the optimizer's.
MOST_FILES = 10
WIRE = ["engine/near.py", "engine/regions.py"]


def _visited() -> list[str]:
    """Files of shardwise that one zero3 step runs through: five units, two micro-batches, AdamW."""
    torch.manual_seed(0)
    model = sw.shard(Model(blocks=4), sw.Plan.of("zero3", 2))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        for tokens in sw.microbatches(model, [token_batch(0, i) for i in range(2)]):
            loss_sum(model(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    seen: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        _, found, file = frame.f_code.co_filename.partition("/src/shardwise/")
        if event == "call" and found:
            seen.add(file)

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return sorted(seen)


def test_a_step_visits_few_files(two: Ranks) -> None:
    """The watch hears of a step, by one file, and does nothing to it. Two are the wire between
    ranks of one host: what gloo and NCCL are elsewhere, which nobody has to read.
    """
    visited = two.run(_visited)[0]
    beside = [file for file in visited if file.startswith("watch/") or file in WIRE]
    assert beside == [*WIRE, "watch/page.py"]
    assert len(visited) - len(beside) <= MOST_FILES, "\n".join(visited)
    assert {"schedule/moments.py", "engine/executor.py"} <= set(visited)
