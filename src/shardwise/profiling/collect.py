"""Profiling real steps into a Timeline.

    with sw.profile(model, steps=3) as measured:
        train(3)
    print(measured.timeline.breakdown())
    measured.write("run")

A step ends when its optimizer step does (`measured.step()` says so by hand), and begins where the
last one ended, so that data loading is part of it. The step with the median time, as its slowest
rank took it, is the one that is shown; every rank is in it.

Tracing lengthens a step, so steps that are traced are not those that are timed: on a CPU the last
one is traced, on CUDA the first two, of which the second counts. `carry.py` brings what it knows to
the timed one that is shown, `retime.py` does so for the device.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from shardwise.engine import marks as marking
from shardwise.engine.api import engine_of, is_sharded
from shardwise.engine.engine import Engine
from shardwise.engine.local_step import watch_steps
from shardwise.engine.marks import Marks
from shardwise.profiling import foreign as profile_foreign
from shardwise.profiling import memory as profile_memory
from shardwise.profiling.files import write_profile, write_raw
from shardwise.profiling.labels import describe, find_device
from shardwise.profiling.memory import Owners
from shardwise.profiling.merge import Message, merge
from shardwise.profiling.ranks import Peers
from shardwise.profiling.reading import Collected, choose, read_step
from shardwise.profiling.steps import Steps
from shardwise.profiling.trace import Tracer
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
        """Without a model, `engines` are what is profiled, or torch's FSDP2 if `fsdp`, on
        `device`.
        """
        if type(steps) is not int or steps < 1:
            raise ValueError(f"profile: steps is {steps!r}, expected a whole number >= 1")
        if not isinstance(model, nn.Module | None):
            raise ValueError(
                f"profile: model is a {type(model).__name__}, expected the nn.Module that trains"
            )
        self.model, self.steps, self.title, self.traces = model, steps, title, traces
        if engines is None:
            engines = [engine_of(model)] if model is not None and is_sharded(model) else []
        self.engines = engines
        self._fsdp = fsdp or (not engines and profile_foreign.uses_fsdp(model))
        self.seconds = 0.0  # that starting, stopping and reading took beside the steps
        self._device = device or find_device(model, engines)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._stepping: list[int] = []  # optimizers that step now, one inside the other
        self._timeline: Timeline | None = None
        self.messages: list[Message] = []
        self.memory: list[dict[str, Any]] = []  # one for each rank, as memory.json has it

    # Running

    def __enter__(self) -> Profile:
        self.start()  # first: where it raises, nothing is left on the optimizers
        self._hooks = watch_steps(self.before_optimizer, self.after_optimizer)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.close()
        if error is None:
            self.finish()
        else:
            self.cancel()

    def close(self) -> None:
        """Take the hooks off; not where the last step ends, which is inside them."""
        for hook in self._hooks:
            hook.remove()

    def start(self) -> None:
        """Begin with the first step. Without the `with` block, whoever calls this also tells of
        the optimizers' steps.
        """
        with self._costs():
            if marking.on is not None:
                raise RuntimeError("a profile runs already in this process; end it first")
            cuda = self._device == "cuda"
            self._peers = Peers()
            self._ahead, self._clock_error = self._peers.compare_clocks()
            # Marks tell whose a kernel is; without them autograd's operations do.
            operations = not cuda or self.traces or not (self.engines or self._fsdp)
            self._tracer = Tracer(cuda, operations, memory=not cuda)
            self._tracing = False
            self._traced = self._choose_traced(cuda)
            self._history = profile_memory.CudaHistory() if cuda else None
            self.marks = Marks(self._device, Nvtx() if cuda else None)
            self.marks.turn("", "forward")  # the first step begins as the others do
            self.marks.on_forward = self._at_forward
            self._running = ExitStack()
            self._running.enter_context(profile_foreign.note_backward(self.marks))
            if not self.engines:
                self._running.enter_context(profile_foreign.note_calls(self.marks))
                if self._fsdp:
                    self._running.enter_context(profile_foreign.note_fsdp(self.marks))
                if self.model is not None:
                    profile_foreign.hang_hooks(self.model, self.marks, self._running)
            try:
                self._before = self._find_owners()
                if not self._traced.start:
                    self._begin_trace()
            except BaseException:
                self._running.close()
                raise
            marking.on = self.marks
        self.taken = Steps(self._device)
        self.taken.begin()

    def _choose_traced(self, cuda: bool) -> range:
        """Which steps are traced: as few as can be, because it lengthens them."""
        if cuda:
            return range(min(TRACED_ON_CUDA, self.steps))
        return range(self.steps - 1, self.steps)

    def _begin_trace(self) -> None:
        self._before = self._find_owners()
        if self._history is not None:
            torch.cuda.synchronize()
            self._history.start()
        self._tracer.start()
        self._tracing = self.marks.traced = True

    def _end_trace(self) -> None:
        self._tracing = self.marks.traced = False
        self._tracer.stop()
        self._owners = self._find_owners()
        if self._history is not None:
            self._history.stop()

    def before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """An optimizer is about to step, maybe inside another one's step."""
        if id(optimizer) in self._stepping:  # its last step raised
            self._stepping.clear()
        self._stepping.append(id(optimizer))
        self._optimizers[id(optimizer)] = optimizer
        if marking.on is self.marks:
            self.marks.turn("", "optimizer")

    def after_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """It has stepped; where it is the outermost, a step ends."""
        if self._stepping:
            self._stepping.pop()
        if not self._stepping and marking.on is self.marks:
            self.marks.turn("", "forward")
            self.step()

    def step(self) -> None:
        """A step ends here. Optimizers say so by themselves."""
        if marking.on is not self.marks:
            return
        self.taken.end(len(self.marks.roots) if self._knows_forwards else None)
        count = len(self.bounds)
        if not self.taken.whole:
            return
        if count >= self.steps:
            self._stop()
        elif self._tracing and count >= self._traced.stop:
            with self._costs():
                self._end_trace()
            self.taken.begin()
        elif not self._knows_forwards:  # the next step begins here
            self._trace_if_next()

    def _at_forward(self) -> None:
        """A forward begins: of the first step that is traced, it may be, or of one too many."""
        if len(self.bounds) >= self.steps:
            self._stop()
        else:
            self._trace_if_next()

    def _trace_if_next(self) -> None:
        if len(self.bounds) == self._traced.start and not self._tracing:
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
        """All steps have been taken."""
        return marking.on is not self.marks

    def cancel(self) -> None:
        """End without a result; other ranks need not."""
        self._stop()

    def _stop(self) -> None:
        if marking.on is not self.marks:
            return
        with self._costs():
            marking.on = None
            self._running.close()
            if self._tracing or len(self.bounds) <= self._traced.start:
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
            traced = any(i < count for i in self._traced)
            seen = Collected(
                device=self._device,
                marks=self.marks,
                marked=bool(self.engines or self._fsdp),
                waits_marked=bool(self.engines),
                steps=self.taken,
                traced=self._traced,
                history=self._history,
                before=self._before,
                owners=self._owners,
                ahead=self._ahead,
            )
            choice = choose(seen, self._tracer.read() if traced else None, count, self._peers)
            steps = self._peers.collect(read_step(seen, choice, self._peers.rank))
            merged = None
            if steps is not None:
                if choice.warns:
                    warnings.warn(f"profile: {choice.note}", stacklevel=2)
                labels = describe(self.engines, self.model, self._device, self._peers.fake)
                labels["title"] = self.title or labels["title"]
                labels |= {"steps": str(count), **choice.labels}
                labels["clock_error_us"] = f"{self._clock_error / 1e3:.1f}"
                merged = merge(steps, labels | ({"note": choice.note} if choice.note else {}))
            self._timeline, self.messages, self.memory = self._peers.share(merged)

    def _find_owners(self) -> Owners:
        return profile_memory.find_owners(
            self.engines, self.model, self._optimizers.values(), self._device
        )

    # Results

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError(
                "the profile has no timeline: leave its `with` block first, without an error"
            )
        return self._timeline

    def write(self, directory: str | Path, cluster: str = "") -> None:
        """Write timeline.json, memory.json, messages.json and trace.json; all ranks may call it,
        the first one writes. `cluster` is the one whose model of collectives messages are compared
        with. Every rank adds torch's own trace, if `traces` kept it, and CUDA's memory snapshot.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        if self._peers.leads:
            write_profile(directory, self.timeline, self.messages, self.memory, cluster)
        snapshot = self._history.snapshot if self._history is not None else None
        profiler = self._tracer.profiler if self.traces else None
        write_raw(directory, self._peers.rank, profiler, snapshot)


class Nvtx:
    """Shows marks in NVIDIA's tools."""

    def start(self, text: str) -> Any:
        return torch.cuda.nvtx.range_start(text)

    def end(self, token: Any) -> None:
        torch.cuda.nvtx.range_end(token)
