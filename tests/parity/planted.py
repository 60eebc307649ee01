"""Three profiled runs on two gloo ranks, each with one planted fault that a report has to name.

    slow rank   rank 1 sleeps inside the forward of one block
    exposed     one block is not gathered ahead, on an emulated network that takes its time
    host        all ranks sleep between two blocks

`write_runs(ranks, folder)` leaves the three directories.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardwise as sw
from shardwise.comms.emulated import Network, emulate
from shardwise.runtime.api import engine_of
from shardwise.timeline import Timeline
from tests.ranks import Ranks

BLOCKS = 4
COMPUTE_S = 0.04  # that a block computes at least, forward
SLEEP_S = 0.15
LATENCY_S = 0.02  # of every collective of the emulated network
SLOW, BARE, AFTER = 1, 2, 1  # blocks: the slow one, the one not gathered ahead, the one slept after
FAULTS = ("slow", "exposed", "host")


class Block(nn.Module):
    """Computes for a while, so that a transfer has something to hide under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.sleeps = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.sleeps:
            time.sleep(self.sleeps)
        until = time.perf_counter() + COMPUTE_S
        with torch.no_grad():
            while time.perf_counter() < until:
                torch.mm(x, x.T)
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.sleeps = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == AFTER and self.sleeps:
                time.sleep(self.sleeps)
        return x


def run_fault(fault: str, directory: str | None = None, **settings: Any) -> str:
    """Train and profile with one fault (or none), on this rank; the Timeline's JSON."""
    torch.manual_seed(0)
    model = Model()
    sw.shard(model, sw.Plan.of("zero3", mesh=2, **{"forward_prefetch": 1, **settings}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault == "slow" and dist.get_rank() == 1:
        model.blocks[SLOW].sleeps = SLEEP_S  # type: ignore[assignment]
    if fault == "host":
        model.sleeps = SLEEP_S
    if fault == "exposed":
        # The block before it gathers nothing ahead.
        engine_of(model).units[BARE - 1].options.gather_ahead = []
    emulated = fault in ("exposed", "emulated")
    with emulate(Network(latency=LATENCY_S)) if emulated else nullcontext():
        for _ in range(2):
            _step(model, optimizer)
        with sw.profile(model, steps=3, title=f"planted: {fault}") as measured:
            for _ in range(3):
                _step(model, optimizer)
    if directory is not None:
        measured.write(directory, cluster="cpu-gloo")
    return measured.timeline.to_json()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()


def profile_fault(ranks: Ranks, fault: str, **settings: Any) -> Timeline:
    """The timeline of one fault; the same on all ranks."""
    texts = ranks.run(_run, fault, None, settings)
    assert texts[0] == texts[1]
    return Timeline.from_json(texts[0])


def write_runs(ranks: Ranks, folder: Path) -> dict[str, Path]:
    """The directory of each fault's run."""
    for fault in FAULTS:
        ranks.run(_run, fault, str(folder / fault), {})
    return {fault: folder / fault for fault in FAULTS}


def _run(fault: str, directory: str | None, settings: dict[str, Any]) -> str:
    return run_fault(fault, directory, **settings)
