"""All ranks of a running job choose a Plan together: the first one searches and says what to try,
every rank tries it, and all end with the same answer, or with the same error.
"""

from __future__ import annotations

import dataclasses
import gc
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from shardwise.calibration.trial import (
    HOST_TIMED,
    HOST_WARM,
    TIMED_S,
    WARM_S,
    WARMUP,
    Program,
    count_steps,
    sum_up,
    try_captured,
)
from shardwise.description.cluster import Cluster
from shardwise.description.tracing.real_run import tell
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import emulate
from shardwise.emulation.networks import ClusterNetwork
from shardwise.engine.mesh import watch_ranks
from shardwise.engine.separate import separate_world
from shardwise.engine.words import control_of
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict.ranking import Captured, Trial
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample
from shardwise.watch.hub import LOST_PEER

Value = TypeVar("Value")
Attempt = Callable[[Plan, Workload], Trial]
ON_GPU = (WARM_S, 50), (TIMED_S, 50)  # seconds, and steps at most: warm-up, timed


class TrialFailed(Exception):
    """The model does not run on some rank."""


@dataclass(frozen=True)
class _Failure:
    """What a rank raised in a trial."""

    text: str
    lost: bool  # it complains that another rank has gone
    memory: bool

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        text = str(error) if isinstance(error, UserError) else tell(error)
        lost = bool(LOST_PEER.search(str(error)))
        return cls(text, lost, isinstance(error, torch.OutOfMemoryError))


@dataclass(frozen=True)
class _Taken:
    samples: list[Sample]
    peak: int
    reserved: int | None
    captured: Captured | None = None
    uncaptured: str = ""


class Ranks:
    """This rank among all of its world, or by itself."""

    device = torch.device("cpu")  # which it trains on

    def __init__(self) -> None:
        self.fake = False
        self.rank, self.world, self._control = 0, 1, None
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.fake = self.world > 1 and dist.get_backend() == "fake"
            watch_ranks()
            self._control = control_of(dist.group.WORLD)

    def exchange(self, value: Any) -> list[Any]:
        """Every rank's value; in a fake world, this one's alone."""
        return [value] if self._control is None else self._control.exchange(value)

    def agree(self, doing: str, action: Callable[[], Value]) -> list[Value]:
        """`action()` of every rank; if it raised on some, the same UserError on all."""
        raised: Exception | None = None
        try:
            said: Any = action()
        except Exception as error:
            raised, said = error, _Failure.of(error)
        everybody = self.exchange(said)
        failed = {rank: f for rank, f in enumerate(everybody) if isinstance(f, _Failure)}
        if failed:
            raise UserError(f"{doing}: {self._name(failed)}") from raised
        return everybody

    def _name(self, failed: dict[int, _Failure]) -> str:
        """Those that began it; the others lost them."""
        first = {rank: f for rank, f in failed.items() if not f.lost} or failed
        texts = dict.fromkeys(f.text for f in first.values())
        if self.world == 1:
            return next(iter(texts))
        told = []
        for text in texts:
            ranks = [str(rank) for rank, f in first.items() if f.text == text]
            told.append(f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:8])}: {text}")
        return "; ".join(told[:4])

    def count_local(self) -> int:
        """The most ranks on one host; in a fake world all are on this one."""
        names = Counter(self.exchange(socket.gethostname()))
        return self.world if self.fake else max(names.values())

    def lead(self, program: Program, cluster: Cluster, action: Callable[[Attempt], Value]) -> Value:
        """What `action` gave on rank 0, which alone runs it. It may call what it is given to let
        all ranks try a Plan.
        """
        raised: Exception | None = None
        if self.rank == 0 or self.fake:

            def attempt(plan: Plan, workload: Workload) -> Trial:
                self.exchange(("try", plan, workload))
                return self._try(program, plan, workload, cluster)

            try:
                last: tuple[Any, ...] = ("done", action(attempt))
            except Exception as error:
                raised = error
                kept = isinstance(error, UserError | TrialFailed | ValueError)
                last = ("failed", str(error) if kept else tell(error))
            self.exchange(last)
        else:
            last = self.exchange(None)[0]
            while last[0] == "try":
                with suppress(UserError, TrialFailed):  # rank 0 hears it too, and decides
                    self._try(program, last[1], last[2], cluster)
                last = self.exchange(None)[0]
        if last[0] == "failed":
            raise UserError(last[1]) from raised
        found: Value = last[1]
        return found

    def _try(self, program: Program, plan: Plan, workload: Workload, cluster: Cluster) -> Trial:
        """What a Plan takes, on all ranks at once. UserError where memory does not suffice,
        TrialFailed where the model does not run.
        """
        try:
            mine: _Taken | _Failure = self._run(program, plan, workload, cluster)
        except Exception as error:
            mine = _Failure.of(error)
            del error
        finally:
            gc.collect()  # what was tried, and its connections
            if self.device.type == "cuda":
                footprint.free_device()
        everybody = self.exchange(mine)
        failed = {rank: f for rank, f in enumerate(everybody) if isinstance(f, _Failure)}
        if failed:
            if any(f.memory for f in failed.values()):
                raise UserError("it ran out of memory")
            raise TrialFailed(f"{plan.title} was tried, and failed: {self._name(failed)}")
        slowest = [
            max(each, key=lambda s: s.step_ms)
            for each in zip(*(taken.samples for taken in everybody), strict=True)
        ]
        worst = max(everybody, key=lambda taken: taken.peak)
        how = f"{self.world} ranks, {dist.get_backend()}" if self.world > 1 else "one process"
        if self.fake:
            how = "one rank, its network emulated"
        trial = sum_up(slowest, worst.peak, worst.reserved, how)
        return dataclasses.replace(trial, captured=worst.captured, uncaptured=worst.uncaptured)

    def _run(self, program: Program, plan: Plan, workload: Workload, cluster: Cluster) -> _Taken:
        cuda, device = self.device.type == "cuda", self.device
        if cuda:
            footprint.meet_libraries(device)
        left = footprint.free_device() if cuda else 0
        network = emulate(ClusterNetwork(cluster)) if self.fake else nullcontext()
        with (
            untouched(device),
            separate_world(),
            network,
            timing.no_garbage_collection(),
            torch.enable_grad(),
        ):
            step = program.start(plan, workload, device)
            timer = timing.time_together(cuda)
            timing.repeat(step, timer, WARMUP)
            once = self._slowest(timer(step).step_ms) / 1e3
            warm, timed = ON_GPU if cuda else (HOST_WARM, HOST_TIMED)
            timing.repeat(step, timer, count_steps(once, *warm))
            samples = timing.repeat(step, timer, count_steps(once, *timed))
            if cuda:
                allocated, reserved = footprint.peaks_on_cuda(step)
                replayed: tuple[Captured | None, str] = None, ""
                if self.world == 1 or self.fake:  # NCCL of several ranks has not been tried so
                    replayed = try_captured(program, step, samples, left)
                del step
                return _Taken(samples, allocated - left, reserved - left, *replayed)
            del step
            peak = footprint.peak_on_cpu(lambda: program.start(plan, workload, device))
            return _Taken(samples, peak, None)

    def _slowest(self, value: float) -> float:
        """Of all ranks, which then repeat something equally often."""
        if self.world == 1 or self.fake:
            return value
        found = torch.tensor(value, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Random states are afterwards as they were."""
    python, numbers = random.getstate(), np.random.get_state()
    index = device.index if device.index is not None else 0
    with torch.random.fork_rng([index] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numbers)
