"""Profiling a program that does not know of it: `shardwise profile -- CMD`.

Importing this module in a rank whose environment has SHARDWISE_PROFILE (a directory) watches its
optimizers: after SHARDWISE_PROFILE_SKIP steps, SHARDWISE_PROFILE_STEPS are profiled and the files
written. `import shardwise` does so by itself; `profile_run` does it for programs that do not.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.engine import Engine
from shardwise.engine.guard import engine_of
from shardwise.engine.local_step import watch_steps
from shardwise.profiling.collect import Profile
from shardwise.profiling.files import choose_cluster

DIRECTORY, STEPS, SKIP = (f"SHARDWISE_PROFILE{part}" for part in ("", "_STEPS", "_SKIP"))


class Watch:
    """Counts this process's optimizer steps and profiles those that were asked for."""

    def __init__(self, directory: str, steps: int, skip: int) -> None:
        self.directory, self.steps, self.skip = Path(directory), steps, skip
        self.taken = 0
        self.profile: Profile | None = None
        self.done = False
        self._stack: list[int] = []
        watch_steps(self._before, self._after)
        atexit.register(self._tell)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if id(optimizer) in self._stack:  # its last step raised
            self._stack.clear()
        self._stack.append(id(optimizer))
        if self.profile is not None:
            self.profile.before_optimizer(optimizer)

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._stack:
            self._stack.pop()
        if self.profile is not None and not self.done:
            self.profile.after_optimizer(optimizer)
        if self._stack:
            return
        self.taken += 1
        if self.taken == self.skip:
            self._begin(optimizer)
        elif self.profile is not None and self.profile.stopped and not self.done:
            self._finish()

    def _begin(self, optimizer: torch.optim.Optimizer) -> None:
        engines = _engines_of(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        fsdp = not engines and any(isinstance(p.data, DTensor) for p in parameters)
        device = parameters[0].device.type if parameters else "cpu"
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


def _engines_of(optimizer: torch.optim.Optimizer) -> list[Engine]:
    found: dict[int, Engine] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            engine = engine_of(parameter)
            if engine is not None:
                found[id(engine)] = engine
    return list(found.values())


_watch: Watch | None = None


def install() -> None:
    """Watch, once, if the environment asks for it."""
    global _watch
    if _watch is None and os.environ.get(DIRECTORY):
        _watch = Watch(
            os.environ[DIRECTORY],
            int(os.environ.get(STEPS, "3")),
            int(os.environ.get(SKIP, "3")),
        )


install()
