"""Comparing candidates: timed in turn in one run, so that what disturbs one disturbs the others.

A step has three times: `step` ends when its result is there, `cpu` when the call returns and the
host could issue the next one; `device`, on a GPU, is what the device takes for it when its host is
a step ahead, so that a slow host is not in it. On a CPU the first two are the same moment; both are
reported anyway.
"""

from __future__ import annotations

import gc
import os
import platform
import statistics
import subprocess
import time
import timeit
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine import torch_private
from shardwise.engine.collectives import Group
from shardwise.engine.executor import marked
from shardwise.engine.regions import OFF
from shardwise.kernels.torch_private import spin

Step = Callable[[], None]
Watched = TypeVar("Watched")
Moment = torch.cuda.Event | float  # of a CUDA device's current stream, or of the host
AHEAD = 1.3  # the head start of the host, in times it takes to issue a step

foreach_copy_ = torch_private.foreach_copy_  # for whoever times what the engine does
SHARED_MEMORY = OFF  # "0" in the environment: ranks of one host talk by gloo alone


@dataclass(frozen=True)
class Sample:
    """The two times of one step, in milliseconds."""

    step_ms: float
    cpu_ms: float


Timer = Callable[[Step], Sample]


@dataclass(frozen=True)
class Side:
    """One candidate's figures: medians, with the spread of the values they are the medians of. None
    is what this kind of device cannot tell.
    """

    step_ms: float
    step_spread_ms: float
    cpu_ms: float
    cpu_spread_ms: float
    peak_bytes: int
    collectives: int | None = None  # per step, where an emulated network counts them
    device_ms: float | None = None
    device_spread_ms: float | None = None
    reserved_bytes: int | None = None  # that the allocator holds at the step's peak

    @classmethod
    def of(
        cls,
        samples: Sequence[Sample],
        peak_bytes: int,
        collectives: int | None = None,
        device: Sequence[float] = (),
        reserved_bytes: int | None = None,
    ) -> Side:
        steps, cpus = [s.step_ms for s in samples], [s.cpu_ms for s in samples]
        return cls(
            statistics.median(steps),
            spread(steps),
            statistics.median(cpus),
            spread(cpus),
            peak_bytes,
            collectives,
            statistics.median(device) if device else None,
            spread(device) if device else None,
            reserved_bytes,
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
    """Time every candidate once per round; each round starts with another one."""
    for step in steps.values():
        for _ in range(warmup):
            step()
    names = list(steps)
    samples: dict[str, list[Sample]] = {name: [] for name in names}
    with no_garbage_collection():
        for i in range(rounds):
            first = i % len(names)
            for name in names[first:] + names[:first]:
                samples[name].append(timer(steps[name]))
    return samples


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Python's collector is off meanwhile, as in `timeit`: whom it strikes is chance."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def repeat(step: Step, timer: Timer, least: int, seconds: float = 0.0) -> list[Sample]:
    """Time a step so many times, and for so long."""
    samples: list[Sample] = []
    began = time.perf_counter()
    while len(samples) < least or time.perf_counter() - began < seconds:
        samples.append(timer(step))
    return samples


def time_on_host(ready: Callable[[], object]) -> Timer:
    """A timer for steps that end when their call returns. `ready` runs before, untimed."""

    return partial(_time, ready, lambda: None)


def time_on_cuda(step: Step) -> Sample:
    """Time a step from an idle device until the device is idle again."""
    return _time(torch.cuda.synchronize, torch.cuda.synchronize, step)


def time_together(on_cuda: bool) -> Timer:
    """A timer for steps of all ranks of the world, which begin them together."""
    settle = torch.cuda.synchronize if on_cuda else lambda: None
    alone = dist.get_world_size() == 1 or dist.get_backend() == "fake"

    def begin() -> None:
        if not alone:
            dist.barrier()
        settle()

    return partial(_time, begin, settle)


def timer_on(device: str) -> Timer:
    """The timer of steps of one process on this kind of device."""
    return time_on_cuda if device.startswith("cuda") else time_on_host(lambda: None)


def _time(before: Callable[[], object], after: Callable[[], object], step: Step) -> Sample:
    before()
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    after()
    ended = time.perf_counter()
    return Sample((ended - began) * 1e3, (issued - began) * 1e3)


def time_ahead(
    step: Step,
    hold: Callable[[float], object],
    samples: Sequence[Sample],
    watch: AbstractContextManager[Watched],
) -> tuple[float, Watched]:
    """Milliseconds that a CUDA device takes for a step when its host is ahead, and what `watch`
    saw of it. `hold` keeps the device waiting first, for longer than issuing the step took in
    `samples`; that time does not count.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    hold(AHEAD * max(sample.cpu_ms for sample in samples) / 1e3)
    start.record()
    with watch as watched:
        step()
        end.record()
    end.synchronize()
    return start.elapsed_time(end), watched


def mark_moment(on_cuda: bool) -> Moment:
    """Now, by the clock of whoever computes."""
    if not on_cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: Moment, end: Moment) -> float:
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1e3


def issue_collective(
    kind: str, whole: torch.Tensor, part: torch.Tensor, group: Any = None, plain: bool = False
) -> Any:
    """One collective of a group (None: of all ranks) as the engine calls it under a Plan, or, if
    `plain`, as torch's engines do; to be waited for. `part` is this rank's of `whole`.
    """
    ranks = Group.of("all", group, whole.device, plain)
    if kind == "all_gather":
        return ranks.all_gather(whole, part)
    if kind == "reduce_scatter":
        return ranks.reduce_scatter(part, whole)
    return ranks.all_reduce(whole)


def time_calls(
    kind: str, nbytes: int, count: int, group: Any = None, plain: bool = False
) -> list[float]:
    """Seconds that the calls of a collective of `nbytes` take, over a group (None: all ranks),
    before anything is waited for; all ranks call it. `plain`: by torch's own calls.
    """
    ranks = dist.get_world_size(group)
    whole = torch.ones(nbytes // 4)
    part = torch.ones(whole.numel() // ranks)
    samples = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        handle = issue_collective(kind, whole, part, group, plain)
        samples.append(time.perf_counter() - began)
        handle.wait()
    return samples


def time_launches(call: Callable[[], object], times: int, cycles: int) -> float:
    """Seconds of one of so many calls on a CUDA device. Behind a spin of `cycles` the launches are
    all queued before the first one runs, so that the host's own time is not measured.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    spin(cycles)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def time_passes(
    model: nn.Module, loss: Callable[[], torch.Tensor], rounds: int, warmup: int
) -> tuple[list[float], list[float]]:
    """Seconds until the calls of a forward, and of it and its backward, return; before each the
    device is idle. The first `warmup` rounds do not count.
    """
    forwards, steps = [], []
    for _ in range(warmup + rounds):
        if next(model.parameters()).is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        result = loss()
        forwards.append(time.perf_counter() - began)
        result.backward()
        steps.append(time.perf_counter() - began)
        model.zero_grad()
    return forwards[warmup:], steps[warmup:]


def time_idle_mark() -> float:
    """Nanoseconds of a mark that no profile listens to."""

    def mark() -> None:
        with marked("gather", "unit"):
            pass

    count = 100_000
    return min(timeit.repeat(mark, number=count, repeat=5)) / count * 1e9


def describe_environment(commit: str | None = None) -> dict[str, Any]:
    """What a figure depends on beside the code: versions, hardware, date, and how busy it was."""
    return {
        "commit": commit or find_commit(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "virtual": _is_virtual(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "load_at_start": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def find_commit() -> str:
    """The commit of this code, with + if the tree has changes; `unknown` outside a repository."""
    here = Path(__file__).parent
    head = ask_git(here, "rev-parse", "--short=12", "HEAD")
    if not head:
        return "unknown"
    return head + ("+" if ask_git(here, "status", "--porcelain") else "")


def ask_git(folder: Path, *arguments: str) -> str:
    """What git says in this folder; nothing where it cannot."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return asked.stdout.strip()


def version_of(package: str) -> str | None:
    """None where it is not installed, as in a source tree."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    named = (line.partition(":")[2].strip() for line in _cpuinfo() if "model name" in line)
    return next(named, platform.processor() or platform.machine())


def _is_virtual() -> bool:
    """Whether this is a virtual machine, whose cores others may share."""
    return any(line.startswith("flags") and " hypervisor" in line for line in _cpuinfo())


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
