"""Profiled runs on two gloo ranks with planted faults that a report has to name.

    slow      rank 1 sleeps inside the forward of one block
    exposed   one block is not gathered ahead, on an emulated network that takes its time
    host      all ranks sleep between two blocks
    all       the three at once, on the real network: that one block is large
    ahead     none, on the emulated network
    late      nothing is gathered ahead, on the emulated network

`run_planted(ranks, folder, fault)` runs each once for a folder and gives its directory.
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
from shardwise.emulation.collectives import Network, emulate
from shardwise.engine import collectives
from shardwise.engine.engine import engine_of
from shardwise.run_files import PLAN, TIMELINE
from shardwise.timeline import Timeline
from tests.ranks import Ranks

BLOCKS = 4
COMPUTE_S = 0.04  # that a block computes at least, forward
SLEEP_S = 0.15
LONG_SLEEP_S = 0.5  # of the slow rank, where the host sleeps too
LATENCY_S = 0.02  # of every collective of the emulated network
LARGE = 8 * 2**20  # frozen elements of the block that is not gathered ahead on the real network
SLOW, BARE, AFTER = 1, 2, 1  # blocks: the slow one, the one not gathered ahead, the one slept after
STEPS = 3
FAULTS = ("slow", "exposed", "host")
_SETTINGS: dict[str, dict[str, Any]] = {
    "slow": {"forward_prefetch": 0},
    "late": {"forward_prefetch": 0},
    "all": {"keep_after_forward": True},
}


def compute() -> None:
    """Operations, few and long: tracing many short ones takes longer than running them."""
    until = time.perf_counter() + COMPUTE_S
    matrix = torch.ones(256, 256)
    with torch.no_grad():
        while time.perf_counter() < until:
            torch.mm(matrix, matrix)


class Block(nn.Module):
    """Computes for a while, so that a transfer has something to hide under."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.sleep_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compute()
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return torch.relu(self.linear(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.sleep_s = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == AFTER and self.sleep_s:
                time.sleep(self.sleep_s)
        return x


def make_model(fault: str) -> Model:
    """The model with its fault, but for what the engine has to be told."""
    torch.manual_seed(0)
    model = Model()
    blocks: list[Any] = list(model.blocks)
    everything = fault == "all"
    if fault in ("slow", "all") and dist.get_rank() == 1:
        blocks[SLOW].sleep_s = LONG_SLEEP_S if everything else SLEEP_S
    if fault in ("host", "all"):
        model.sleep_s = SLEEP_S
    if everything:
        large = nn.Parameter(torch.zeros(LARGE), requires_grad=False)
        blocks[BARE].register_parameter("large", large)
    return model


def run_fault(fault: str, directory: str) -> None:
    """Train and profile with one fault, on this rank, and write the files."""
    model = make_model(fault)
    settings = {"forward_prefetch": 1, **_SETTINGS.get(fault, {})}
    found = collectives.near_of
    try:
        if fault == "all":  # by gloo: through shared memory a large block is there at once
            collectives.near_of = lambda *_: None
        sw.shard(model, sw.Plan.of("zero3", mesh=2, **settings))
    finally:
        collectives.near_of = found
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if fault in ("exposed", "all"):
        # The block before it gathers nothing ahead.
        engine_of(model).units[BARE - 1].options.gather_ahead = []
    emulated = fault in ("exposed", "ahead", "late")
    with emulate(Network(latency=LATENCY_S)) if emulated else nullcontext():
        for _ in range(2):
            _step(model, optimizer)
        with sw.profile(model, steps=STEPS, title=f"planted: {fault}") as measured:
            for _ in range(STEPS):
                _step(model, optimizer)
    measured.write(directory, cluster="cpu-gloo")
    plan = engine_of(model).plan
    assert plan is not None
    (Path(directory) / PLAN).write_text(plan.to_json())


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()


def run_planted(ranks: Ranks, folder: Path, fault: str) -> Path:
    """The directory of this fault's run."""
    directory = folder / "planted" / fault
    if not (directory / TIMELINE).exists():
        ranks.run(run_fault, fault, str(directory))
    return directory


def read_planted(ranks: Ranks, folder: Path, fault: str) -> Timeline:
    """The timeline of this fault's run."""
    return Timeline.from_json((run_planted(ranks, folder, fault) / TIMELINE).read_text())
