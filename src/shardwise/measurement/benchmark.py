"""Comparing candidates: timed in turn in one run, so that what disturbs one disturbs the others.

A step has two times: `step` ends when its result is there, `cpu` when the call returns and the host
could issue the next one. On a CPU the two are the same moment; both are reported anyway.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

Step = Callable[[], None]


@dataclass(frozen=True)
class Sample:
    """The two times of one step, in milliseconds."""

    step_ms: float
    cpu_ms: float


Timer = Callable[[Step], Sample]


@dataclass(frozen=True)
class Side:
    """One candidate's figures: medians, with the spread of the values they are the medians of."""

    step_ms: float
    step_spread_ms: float
    cpu_ms: float
    cpu_spread_ms: float
    peak_bytes: int
    collectives: int | None = None  # per step, where an emulated network counts them

    @classmethod
    def of(cls, samples: Sequence[Sample], peak_bytes: int, collectives: int | None = None) -> Side:
        steps, cpus = [s.step_ms for s in samples], [s.cpu_ms for s in samples]
        return cls(
            statistics.median(steps),
            spread(steps),
            statistics.median(cpus),
            spread(cpus),
            peak_bytes,
            collectives,
        )


@dataclass(frozen=True)
class Row:
    """One comparison. Ratios are ours over the peer's: below 1 is better."""

    case: str
    strategy: str
    peer: str
    step_ratio: float
    cpu_ratio: float
    memory_ratio: float
    ours: Side
    theirs: Side
    parity: float | None  # largest relative difference of a parameter or gradient; None: no values
    settings: dict[str, Any]

    @classmethod
    def of(cls, ours: Side, theirs: Side, **facts: Any) -> Row:
        return cls(
            step_ratio=ours.step_ms / theirs.step_ms,
            cpu_ratio=ours.cpu_ms / theirs.cpu_ms,
            memory_ratio=ours.peak_bytes / theirs.peak_bytes,
            ours=ours,
            theirs=theirs,
            **facts,
        )


def spread(values: Sequence[float]) -> float:
    """The interquartile range; of fewer than four values, the whole range."""
    if len(values) < 4:
        return max(values) - min(values)
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def alternate(
    steps: Mapping[str, Step], rounds: int, warmup: int, timer: Timer
) -> dict[str, list[Sample]]:
    """Time every candidate once per round; each round starts with another one.

    Python's garbage collector is off meanwhile, as in `timeit`: whom it strikes is chance.
    """
    for step in steps.values():
        for _ in range(warmup):
            step()
    names = list(steps)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for i in range(rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(timer(steps[name]))
    finally:
        gc.enable()
    return samples


def time_on_host(ready: Callable[[], object]) -> Timer:
    """A timer for steps that end when their call returns. `ready` runs before, untimed."""

    def timer(step: Step) -> Sample:
        ready()
        began = time.perf_counter()
        step()
        issued = time.perf_counter()
        ended = time.perf_counter()
        return Sample((ended - began) * 1e3, (issued - began) * 1e3)

    return timer


def time_on_cuda(step: Step) -> Sample:
    """Time a step from an idle device until the device is idle again."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    torch.cuda.synchronize()
    ended = time.perf_counter()
    return Sample((ended - began) * 1e3, (issued - began) * 1e3)


def describe_environment(commit: str | None = None) -> dict[str, Any]:
    """What a figure depends on beside the code: versions, hardware, date, and how busy it was."""
    return {
        "commit": commit or find_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def find_commit() -> str:
    """The commit of this code, with + if the tree has changes; `unknown` outside a repository."""
    head = _git("rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return asked.stdout.strip() if asked.returncode == 0 else ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
