"""The steps of a profile: when each began and ended, by the host's clock and by the device's, and
which end of an optimizer's step is the end of one.
"""

from __future__ import annotations

from time import perf_counter_ns

import torch


class StepTimes:
    """Steps that follow each other from `begin` on; `end` tells of each one's end.

    A step has one or more optimizers. Those that step after the same forward are of one step.
    """

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        self.bounds: list[tuple[int, int]] = []  # of the steps that ended
        self._optimizers: list[int] = []  # that ended, in each of them
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []  # their bounds, on CUDA
        self._forwards = 0  # outermost ones that began before the last end

    def begin(self) -> None:
        """The next step begins here, and not where the last one ended."""
        if self._cuda:
            self._opened = _record_event()
        self._begun = perf_counter_ns()

    def end(self, forwards: int | None) -> None:
        """A step ends here; `forwards` is how many outermost forwards began so far, if that is
        known. Without a new one since the last end, the last step goes on until here.
        """
        now = perf_counter_ns()
        closed = _record_event() if self._cuda else None
        if self.bounds and forwards == self._forwards:
            self.bounds[-1] = self.bounds[-1][0], now
            self._optimizers[-1] += 1
            if closed is not None:
                self._events[-1] = self._events[-1][0], closed
        else:
            self.bounds.append((self._begun, now))
            self._optimizers.append(1)
            if closed is not None:
                self._events.append((self._opened, closed))
        self._begun = now
        if closed is not None:
            self._opened = closed
        self._forwards = forwards if forwards is not None else -1

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


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
