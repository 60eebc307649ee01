"""A step's kernels without the engine, in their order, over and over: what every pass takes at the
clock that the device settles at.

A GPU at its power limit lowers its clock, by how much depends on what it runs: in a short burst a
bf16 product is 10 % quicker than in a training step, in a steady stream of products 8 % slower. So
the stream is the step's own mix: the kernels of all passes, and between them as many copies and
pauses as the step is predicted to have.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.description.model import ModelDescription, PassFacts
from shardwise.lab.accuracy.kernels import Run, Widths, key_of, recipe
from shardwise.profiling.timing import Moment, mark_moment, seconds_between

SETTLE_S = 1.0  # until the clock is steady
TIMED_S = 1.0  # an H200's clock swings about its mean once a second
LEAST = 3  # rounds that are timed, however long they take
PAUSE_S = 0.5e-3  # of one pause


@dataclass(frozen=True)
class Beside:
    """Seconds of a micro-batch in which its kernels do not run, and what runs instead."""

    copies: float = 0.0
    copy_bytes_per_s: float = 0.0  # read plus written
    pauses: float = 0.0
    pause: Run | None = None  # makes the device wait for PAUSE_S


@dataclass(frozen=True)
class Replayed:
    """Measured passes, and how far the clock fell."""

    passes: list[tuple[PassFacts, float]]
    first_s: float  # all kernels, in the first round
    settled_s: float  # and in those that count
    slowdown: float  # what a pause took, over what it was to take


def in_step_order(description: ModelDescription) -> Iterator[tuple[PassFacts, str]]:
    """The passes of one micro-batch with the direction their products run in."""
    for _, segment in description.segments:
        yield segment.forward, "forward"
    for _, segment in reversed(description.segments):
        if segment.checkpointed:
            yield segment.recompute, "forward"
        yield segment.backward, "backward"


def replay(
    description: ModelDescription,
    widths: Widths,
    device: str,
    beside: Beside,
    settle_s: float = SETTLE_S,
    timed_s: float = TIMED_S,
) -> Replayed:
    """Run the passes until the clock has settled, then time each: means, of equal passes too."""
    work = [(part, way) for part, way in in_step_order(description) if part.kernels]
    keys = [tuple((key_of(k, way, widths), k.count) for k in part.kernels) for part, way in work]
    rounds = _Rounds(work, keys, widths, torch.device(device), beside)
    first, timed = rounds.run(settle_s, timed_s)
    seconds: dict[Any, list[float]] = defaultdict(list)
    for taken in timed:
        for key, kernels in zip(keys, taken.kernels, strict=True):
            seconds[key].append(kernels)
    mean = {key: statistics.fmean(samples) for key, samples in seconds.items()}
    pauses = [pause for taken in timed for pause in taken.pauses]
    return Replayed(
        [(part, mean[key]) for (part, _), key in zip(work, keys, strict=True)],
        sum(first.kernels),
        statistics.fmean(sum(taken.kernels) for taken in timed),
        statistics.fmean(pauses) / PAUSE_S if pauses else 1.0,
    )


@dataclass(frozen=True)
class _Taken:
    """One round's seconds: of every pass's kernels, and of every pause."""

    kernels: list[float]
    pauses: list[float]


class _Rounds:
    """All that one round needs, on the device at once."""

    def __init__(
        self,
        work: list[tuple[PassFacts, str]],
        keys: list[tuple[tuple[str, int], ...]],
        widths: Widths,
        device: torch.device,
        beside: Beside,
    ) -> None:
        self.device, self.pause = device, beside.pause
        runs: dict[str, Run] = {}
        for (part, way), names in zip(work, keys, strict=True):
            for kernel, (key, _) in zip(part.kernels, names, strict=True):
                if key not in runs:
                    runs[key] = recipe(kernel, way, widths, device)
        self.passes = [[runs[key] for key, count in names for _ in range(count)] for names in keys]
        share = beside.copies / max(1, len(work))
        self.copy = _copy(int(share * beside.copy_bytes_per_s / 8), device)
        # Where in the round the pauses are: evenly among its passes.
        pauses = round(beside.pauses / PAUSE_S) if beside.pause is not None else 0
        self.pauses = Counter(i * len(work) // pauses for i in range(pauses))

    def run(self, settle_s: float, timed_s: float) -> tuple[_Taken, list[_Taken]]:
        """Rounds without a gap: the first, and those after `settle_s`."""
        _wait_for(self._issue()[-1])  # libraries load their kernels
        began = time.perf_counter()
        first = self._issue()
        before: deque[list[Moment]] = deque([first])
        timed: list[list[Moment]] = []
        while len(timed) < LEAST or time.perf_counter() - began < settle_s + timed_s:
            settled = time.perf_counter() - began >= settle_s
            marks = self._issue()
            if settled:
                timed.append(marks)
            before.append(marks)
            if len(before) > 1:  # the host stays one round ahead
                _wait_for(before.popleft()[-1])
        _wait_for(before[-1][-1])
        return self._read(first), [self._read(marks) for marks in timed]

    @torch.no_grad()
    def _issue(self) -> list[Moment]:
        marks = []
        for i, runs in enumerate(self.passes):
            marks.append(self._mark())
            for run in runs:
                run()
            marks.append(self._mark())
            if self.copy is not None:
                self.copy()
            for _ in range(self.pauses[i]):
                assert self.pause is not None
                marks.append(self._mark())
                self.pause()
                marks.append(self._mark())
        return marks

    def _mark(self) -> Moment:
        return mark_moment(self.device.type == "cuda")

    def _read(self, marks: list[Moment]) -> _Taken:
        """Marks come in pairs: of a pass's kernels, then of each pause after it."""
        taken = iter([seconds_between(a, b) for a, b in zip(marks[0::2], marks[1::2], strict=True)])
        kernels, pauses = [], []
        for i in range(len(self.passes)):
            kernels.append(next(taken))
            pauses += [next(taken) for _ in range(self.pauses[i])]
        return _Taken(kernels, pauses)


def _copy(count: int, device: torch.device) -> Callable[[], Any] | None:
    """Copies so many elements of 4 bytes."""
    if count < 1:
        return None
    source, target = (torch.ones(count, device=device) for _ in range(2))
    return lambda: target.copy_(source)


def _wait_for(mark: Moment) -> None:
    if isinstance(mark, torch.cuda.Event):
        mark.synchronize()
