"""What the rest of the engine has to know of `sw.capture`: who listens while a captured step runs
eagerly, and whether the step that runs now is the one that every later one will repeat.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine


class Listener(Protocol):
    """Hears what runs inside a step that is to be captured."""

    def meet_engine(self, engine: Engine) -> None:
        """A forward of this engine's model begins."""

    def meet_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """It is about to step."""


on: Listener | None = None
# `sw.capture` records this step, or rehearses it: it will be repeated as it is, so nothing may be
# asked of the device, and what earlier steps have found out holds. The same goes for a graph of the
# user's (`torch_private.is_recording`).
fixed = False
