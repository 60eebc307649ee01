"""Profiling a program that does not know of it: `shardwise profile -- CMD`.

`import shardwise` imports this module in a rank whose environment has SHARDWISE_PROFILE (a
directory), which watches its optimizers: after SHARDWISE_PROFILE_SKIP steps,
SHARDWISE_PROFILE_STEPS are profiled and the files written. In a program that has no optimizer a
step begins with the model's forward (`ForwardWatch`). Programs that do not import shardwise are
started by `run.py`.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from shardwise.engine.checks import engine_training
from shardwise.engine.hooks import watch_steps
from shardwise.profiling import DIRECTORY, SKIP, STEPS
from shardwise.profiling.collect import Profile
from shardwise.profiling.step_times import OptimizerNesting
from shardwise.profiling.write import choose_cluster


class ForwardWatch:
    """Tells where steps begin that no optimizer ends: at each forward of the model, or, where the
    program clears the model's gradients, at the first forward after that (others are further
    micro-batches). The model is the first module with parameters that is called.
    """

    def __init__(self, begins: Callable[[nn.Module], None]) -> None:
        self._begins = begins
        self._clears = self._cleared = False
        # On all modules, but only until the first is called: nothing is traced or compiled with it.
        self._hooks: list[Any] = [register_module_forward_pre_hook(self._find)]

    def _find(self, module: nn.Module, *_: Any) -> None:
        if next(module.parameters(), None) is None or not self._hooks:
            return
        self.stop()
        self._hooks = [module.register_forward_pre_hook(self._forward, prepend=True)]
        clear = module.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            self._clears = self._cleared = True
            clear(set_to_none)

        module.__dict__["zero_grad"] = zero_grad
        self._model = module
        self._begins(module)

    def _forward(self, module: nn.Module, *_: Any) -> None:
        if self._cleared or not self._clears:
            self._cleared = False
            self._begins(module)

    def stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self._hooks and "_model" in self.__dict__:
            self._model.__dict__.pop("zero_grad", None)
        self._hooks = []


class ProgramWatch:
    """Counts this process's steps and profiles those that were asked for."""

    def __init__(self, directory: str, steps: int, skip: int) -> None:
        self.directory, self.steps, self.skip = Path(directory), steps, skip
        self.taken = 0  # optimizer steps
        self.begun = 0  # steps that forwards began, while there is no optimizer
        self.profile: Profile | None = None
        self.done = False
        self._nesting = OptimizerNesting()
        watch_steps(self._before, self._after)
        self._forwards = ForwardWatch(self._at_forward)
        atexit.register(self._tell)

    def _before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._nesting.begin(optimizer)
        if self.profile is not None:
            self.profile.before_optimizer(optimizer)

    def _at_forward(self, model: nn.Module) -> None:
        """A step begins that no optimizer ends, and so the last one is over."""
        self.begun += 1
        if self.profile is not None:
            self.profile.marks.turn("", "forward")
            self.profile.step()
            if self.profile.stopped and not self.done:
                self._forwards.stop()
                self._finish()
        elif self.begun > self.skip:
            if any(issubclass(type(thing), torch.optim.Optimizer) for thing in gc.get_objects()):
                self._forwards.stop()  # its first step is still to come
                return
            self.profile = Profile(model, self.steps)
            self.profile.start()

    def _after(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.profile is not None and not self.done:
            self.profile.after_optimizer(optimizer)
        if not self._nesting.end():
            return
        self.taken += 1
        if self.taken == 1 and self.profile is None:
            self._forwards.stop()
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
        took = f"{self.taken} optimizer steps" if self.taken else f"{self.begun} forwards"
        more = "" if self.taken else ", and one that ends the last,"
        if not self.done and (self.taken or self.begun) and int(os.environ.get("RANK", "0")) == 0:
            print(
                f"shardwise profile: the program took {took}, and {self.skip} to warm up and "
                f"{self.steps} to profile{more} were asked for; run more of them, or lower --skip "
                "or --steps",
                file=sys.stderr,
            )


if os.environ.get(DIRECTORY):
    ProgramWatch(
        os.environ[DIRECTORY],
        int(os.environ.get(STEPS, "3")),
        int(os.environ.get(SKIP, "3")),
    )
