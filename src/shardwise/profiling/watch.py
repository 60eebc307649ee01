"""Profiling a program that does not know of it: `shardwise profile -- CMD`.

`import shardwise` imports this module in a rank whose environment has SHARDWISE_PROFILE (a
directory), which watches its optimizers: after SHARDWISE_PROFILE_SKIP steps,
SHARDWISE_PROFILE_STEPS are profiled and the files written. Programs that do not import shardwise
are started by `run.py`.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.checks import engine_training
from shardwise.engine.hooks import watch_steps
from shardwise.profiling import DIRECTORY, SKIP, STEPS
from shardwise.profiling.collect import Profile
from shardwise.profiling.step_times import OptimizerNesting
from shardwise.profiling.write import choose_cluster


class ProgramWatch:
    """Counts this process's optimizer steps and profiles those that were asked for."""

    def __init__(self, directory: str, steps: int, skip: int) -> None:
        self.directory, self.steps, self.skip = Path(directory), steps, skip
        self.taken = 0
        self.profile: Profile | None = None
        self.done = False
        self._nesting = OptimizerNesting()
        watch_steps(self._before, self._after)
        atexit.register(self._tell)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._nesting.begin(optimizer)
        if self.profile is not None:
            self.profile.before_optimizer(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.profile is not None and not self.done:
            self.profile.after_optimizer(optimizer)
        if not self._nesting.end():
            return
        self.taken += 1
        if self.taken == self.skip:
            self._begin(optimizer)
        elif self.profile is not None and self.profile.stopped and not self.done:
            self._finish()

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = {id(e): e for e in map(engine_training, parameters) if e is not None}
        fsdp = not found and any(isinstance(p.data, DTensor) for p in parameters)
        device = parameters[0].device.type if parameters else "cpu"
        engines = list(found.values())
        self.profile = Profile(None, self.steps, engines=engines, fsdp=fsdp, device=device)
        self.profile.start()

    def _finish(self) -> None:
        self.done = True
        assert self.profile is not None
        self.profile.finish()
        device = self.profile.timeline.labels["device"]
        self.profile.write(self.directory, cluster=choose_cluster(device))

    def _tell(self) -> None:
        """At the program's end: why there is no profile. A trace still on would crash it."""
        if self.profile is not None and not self.done:
            self.profile.cancel()
        if not self.done and self.taken and int(os.environ.get("RANK", "0")) == 0:
            print(
                f"shardwise profile: the program took {self.taken} optimizer steps, and "
                f"{self.skip} to warm up and {self.steps} to profile were asked for; run more of "
                "them, or lower --skip or --steps",
                file=sys.stderr,
            )


if os.environ.get(DIRECTORY):
    ProgramWatch(
        os.environ[DIRECTORY],
        int(os.environ.get(STEPS, "3")),
        int(os.environ.get(SKIP, "3")),
    )
