"""The steps of a profile: when each began and ended, by the host's clock and by the device's, and
which end of an optimizer's step is the end of one.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any

import torch


class StepTimes:
    """Steps that follow each other from `begin` on; `end` tells of each one's end.

    A step has one or more optimizers. Those that step after the same forward are of one step.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.bounds: list[tuple[int, int]] = []  # of the steps that ended
        self._events: list[tuple[Any, Any]] = []  # their bounds on CUDA
        self._optimizers: list[int] = []  # that ended in each of them
        self._forwards = 0  # outermost ones that began before the last end

    def begin(self) -> None:
        """The next step begins here, and not where the last one ended."""
        self._opened, self._begun = self._record_event(), perf_counter_ns()

    def end(self, forwards: int | None) -> None:
        """A step ends here; `forwards` is how many outermost forwards began so far, if that is
        known. Without a new one since the last end, the last step goes on until here.
        """
        now, closed = perf_counter_ns(), self._record_event()
        begun, opened, ended = self._begun, self._opened, 1
        if self.bounds and forwards == self._forwards:
            begun, opened = self.bounds.pop()[0], self._events.pop()[0]
            ended += self._optimizers.pop()
        self.bounds.append((begun, now))
        self._events.append((opened, closed))
        self._optimizers.append(ended)
        self._begun, self._opened = now, closed
        self._forwards = forwards if forwards is not None else -1

    def _record_event(self) -> torch.cuda.Event | None:
        if not self._cuda:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def whole(self) -> bool:
        """The last step that ended has as many optimizers as the one before it."""
        return self._optimizers[-1] >= self._optimizers[-2:][0]

    def durations(self) -> list[int]:
        """Nanoseconds of every step: on CUDA from one end of the device's work to the next."""
        if not self._cuda:
            return [end - start for start, end in self.bounds]
        torch.cuda.synchronize()
        return [round(opened.elapsed_time(closed) * 1e6) for opened, closed in self._events]


class OptimizerNesting:
    """Optimizers that step now, one inside the other; only the outermost ends a step."""

    def __init__(self) -> None:
        self._stepping: list[int] = []

    def begin(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) in self._stepping:  # its last step raised
            self._stepping.clear()
        self._stepping.append(id(optimizer))

    def end(self) -> bool:
        """One has stepped: whether it was the outermost."""
        del self._stepping[-1:]
        return not self._stepping
