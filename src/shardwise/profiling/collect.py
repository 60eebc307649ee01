"""Profiling real steps into a Timeline.

    with sw.profile(model, steps=3) as measured:
        train(3)
    print(measured.timeline.breakdown())
    measured.write("run")

A step ends when its optimizer step does (`measured.step()` says so by hand), and begins where the
last one ended, so that data loading is part of it. The step with the median time, as its slowest
rank took it, is the one that is shown; every rank is in it.

Tracing lengthens a step, so steps that are traced are not those that are timed: on a CPU the last
one is traced, on CUDA the first two, of which the second counts. `traced_to_timed.py` brings what
the trace knows to the timed step that is shown.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine import marks as marking
from shardwise.engine.engine import Engine, engine_of, is_sharded
from shardwise.engine.hooks import watch_steps
from shardwise.engine.marks import Marks
from shardwise.profiling.foreign import note_torch, uses_fsdp
from shardwise.profiling.memory import CudaHistory, Owners, find_owners
from shardwise.profiling.merge import MeasuredMessage, Peers, merge
from shardwise.profiling.shown_step import Collected, choose, read_kernels, read_step
from shardwise.profiling.step_times import OptimizerNesting, StepTimes
from shardwise.profiling.trace import Tracer
from shardwise.profiling.write import write_profile, write_raw
from shardwise.timeline import Timeline

TRACED_ON_CUDA = 2  # steps; the first finds the device idle


class NothingProfiled(RuntimeError):
    """No step ended while the profile ran."""


def profile(
    model: nn.Module | None, steps: int = 3, *, title: str = "", traces: bool = False
) -> Profile:
    """Profile up to `steps` steps of what runs inside; all ranks call it, at the same step.

    `model` is sharded by a Plan or by `fully_shard`, or runs under torch's own FSDP2 or
    DistributedDataParallel. `traces` keeps torch's own trace too, for `write`.
    """
    return Profile(model, steps, title, traces)


class Profile:
    """A profile under way, and then what it measured."""

    def __init__(
        self,
        model: nn.Module | None,
        steps: int = 3,
        title: str = "",
        traces: bool = False,
        engines: list[Engine] | None = None,
        fsdp: bool = False,
        device: str = "",
    ) -> None:
        """Without a model, `engines` on `device` are profiled, or torch's FSDP2 if `fsdp`."""
        if type(steps) is not int or steps < 1:
            raise ValueError(f"profile: steps is {steps!r}, expected a whole number >= 1")
        if not isinstance(model, nn.Module | None):
            kind = type(model).__name__
            raise ValueError(f"profile: model is a {kind}, expected the nn.Module that trains")
        self.model, self.steps, self.title, self.traces = model, steps, title, traces
        if engines is None:
            engines = [engine_of(model)] if model is not None and is_sharded(model) else []
        self.engines = engines
        self._fsdp = fsdp or (not engines and uses_fsdp(model))
        self.seconds = 0.0  # of starting, stopping and reading, beside the steps' own time
        self._device = device or _find_device(model, engines)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._nesting = OptimizerNesting()
        self._timeline: Timeline | None = None
        self.messages: list[MeasuredMessage] = []
        # One for each rank, as memory.json and kernels.json have it.
        self.memory: list[dict[str, Any]] = []
        self.kernels: list[dict[str, Any]] = []

    # Running

    def __enter__(self) -> Profile:
        self.start()  # before the hooks: if it raises, none is left on the optimizers
        self._hooks = watch_steps(self.before_optimizer, self.after_optimizer)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
        if error is None:
            self.finish()
        else:
            self.cancel()

    def close(self) -> None:
        """Take the hooks off the optimizers. Not at the last step's end: that is inside a hook."""
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Begin with the first step. Whoever calls this without the `with` block also calls
        `before_optimizer` and `after_optimizer`.
        """
        with self._costs():
            if marking.on is not None:
                raise RuntimeError("a profile runs already in this process; end it first")
            cuda, ours = self._device == "cuda", bool(self.engines)
            self._peers = Peers()
            ahead, self._clock_error = self._peers.compare_clocks()
            # Marks tell whose a kernel is; without them autograd's operations do.
            marked = ours or self._fsdp
            self._tracer = Tracer(cuda, operations=self.traces or not marked)
            self.marks = Marks(self._device, Nvtx() if cuda else None)
            self.marks.turn("", "forward")  # the first step begins as the others do
            self.marks.on_forward = self._at_forward
            self.taken = StepTimes(self._device)
            # As few steps as can be, because tracing lengthens them.
            traced = range(self.steps)[:TRACED_ON_CUDA] if cuda else range(self.steps)[-1:]
            history = CudaHistory() if cuda else None
            self._running = note_torch(self.marks, self.model, ours, self._fsdp)
            try:
                owners = self._find_owners()
                self._seen = Collected(
                    self._device, self.marks, marked, ours, self.taken, traced, history, ahead,
                    before=owners, owners=owners,
                )  # fmt: skip
                if not self._seen.traced.start:
                    self._begin_trace()
            except BaseException:
                self._running.close()
                raise
            marking.on = self.marks
        self.taken.begin()

    def _begin_trace(self) -> None:
        self._seen.before = self._find_owners()
        if self._seen.history is not None:
            torch.cuda.synchronize()
            self._seen.history.start()
        self._tracer.start()
        self.marks.traced = True

    def _end_trace(self) -> None:
        if self.marks.traced:
            self.marks.traced = False
            self._tracer.stop()
        self._seen.owners = self._find_owners()
        if self._seen.history is not None:
            self._seen.history.stop()

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step, maybe inside another one's step."""
        self._nesting.begin(optimizer)
        self._optimizers[id(optimizer)] = optimizer
        if not self.stopped:
            self.marks.turn("", "optimizer")

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """It has stepped; where it is the outermost, a step ends."""
        if self._nesting.end() and not self.stopped:
            self.marks.turn("", "forward")
            self.step()

    def step(self) -> None:
        """A step ends here. Called at the end of each outermost optimizer step."""
        if self.stopped:
            return
        self.taken.end(len(self.marks.roots) if self._knows_forwards else None)
        count = len(self.bounds)
        if not self.taken.whole:
            return
        if count >= self.steps:
            self._stop()
        elif self.marks.traced and count >= self._seen.traced.stop:
            with self._costs():
                self._end_trace()
            self.taken.begin()
        elif not self._knows_forwards:  # the next step begins here
            self._trace_if_next()

    def _at_forward(self) -> None:
        """An outermost forward begins. Tracing begins with it where its step is the first that is
        traced; after the last step it ends the profile.
        """
        if len(self.bounds) >= self.steps:
            self._stop()
        else:
            self._trace_if_next()

    def _trace_if_next(self) -> None:
        if len(self.bounds) == self._seen.traced.start and not self.marks.traced:
            with self._costs():
                self._begin_trace()
            self.taken.begin()

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """When the steps that ended began and ended, by the host's clock."""
        return self.taken.bounds

    @property
    def _knows_forwards(self) -> bool:
        return bool(self.engines) or self.model is not None

    @property
    def stopped(self) -> bool:
        """All steps have been taken, or the profile was ended."""
        return marking.on is not self.marks

    def cancel(self) -> None:
        """End without a result; other ranks need not."""
        self._stop()

    def _stop(self) -> None:
        if self.stopped:
            return
        with self._costs():
            marking.on = None
            self._running.close()
            # Also where the trace never began: it ends with who owns memory.
            if self.marks.traced or len(self.bounds) <= self._seen.traced.start:
                self._end_trace()

    @contextmanager
    def _costs(self) -> Iterator[None]:
        began = perf_counter_ns()
        yield
        self.seconds += (perf_counter_ns() - began) / 1e9

    # Reading

    def finish(self) -> None:
        """Stop, and turn what was collected into a Timeline; all ranks meet here."""
        self._stop()
        with self._costs():
            counts = self._peers.exchange(len(self.bounds))
            count = min(counts)
            if count < 1:
                raise NothingProfiled(
                    "no training step ended inside the profile: it counts the ends of optimizer "
                    f"steps, and the ranks took {counts}; run at least one step in it, or call "
                    "its step() where a step ends without a torch optimizer"
                )
            traced = count > self._seen.traced.start
            trace = self._tracer.read() if traced else None
            choice = choose(self._seen, trace, count, self._peers)
            labels = self._describe() | {"steps": str(count), **choice.labels}
            labels["clock_error_us"] = f"{self._clock_error / 1e3:.1f}"
            if choice.note:
                labels["note"] = choice.note
            if choice.warns and self._peers.leads:
                warnings.warn(f"profile: {choice.note}", stacklevel=2)
            mine = read_step(self._seen, choice, self._peers.rank)
            ran = read_kernels(self._seen, choice, trace)
            told = self._peers.exchange((labels, mine, ran))
            merged = merge([step for _, step, _ in told], labels=told[0][0])
            self._timeline, self.messages, self.memory = merged
            self.kernels = [{"rank": step.rank, "rows": rows} for _, step, rows in told if rows]

    def _find_owners(self) -> Owners:
        return find_owners(self.engines, self.model, self._optimizers.values(), self._device)

    def _describe(self) -> dict[str, str]:
        """The labels of the timeline: engine, plan and device, and whether the network is real."""
        engine = "shardwise" if self.engines else "torch"
        plans = [engine.plan.title for engine in self.engines if engine.plan is not None]
        plan = plans[0] if plans else _wrapping(self.model, self.engines)
        emulation = getattr(dist.all_reduce, "__self__", None)  # it stands in for torch's functions
        emulated = self._peers.fake or hasattr(emulation, "network")
        device = torch.cuda.get_device_name() if self._device == "cuda" else "cpu"
        return {
            "title": self.title or f"{engine}, {plan}, {device}",
            "source": "emulated" if emulated else "measured",
            "engine": engine,
            "plan": plan,
            "device": device,
        }

    # Results

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError(
                "the profile has no timeline: leave its `with` block first, without an error"
            )
        return self._timeline

    def write(self, directory: str | Path, cluster: str = "") -> None:
        """Write timeline.json, memory.json, messages.json, kernels.json and trace.json; all ranks
        may call it, the first one writes. `cluster` is the one whose model of collectives messages
        are compared with. Every rank adds torch's own trace, if `traces` kept it, and CUDA's memory
        snapshot.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self._peers.leads:
            write_profile(
                directory, self.timeline, self.messages, self.memory, self.kernels, cluster
            )
        history = self._seen.history
        snapshot = history.snapshot if history is not None else None
        profiler = self._tracer.profiler if self.traces else None
        write_raw(directory, self._peers.rank, profiler, snapshot)


class Nvtx:
    """Shows marks in NVIDIA's tools."""

    start = staticmethod(torch.cuda.nvtx.range_start)
    end = staticmethod(torch.cuda.nvtx.range_end)


def _find_device(model: nn.Module | None, engines: list[Engine]) -> str:
    if engines:
        return engines[0].mesh.device.type
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wrapping(model: nn.Module | None, engines: list[Engine]) -> str:
    """What a model without a Plan runs under."""
    if engines or isinstance(model, FSDPModule):
        return "fully_shard"
    if model is None:
        return "torch"
    return "DistributedDataParallel" if isinstance(model, DistributedDataParallel) else "unsharded"
