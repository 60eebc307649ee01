"""Profiling real steps into a Timeline.

    with sw.profile(model, steps=3) as measured:
        train(3)
    print(measured.timeline.breakdown())
    measured.write("run")

A step ends when its optimizer step does (`measured.step()` says so by hand), and begins where the
last one ended, so that data loading is part of it. The step with the median time, as its slowest
rank took it, is the one that is shown; every rank is in it. On a CPU the last step alone is traced,
and is not timed: `carry.py` brings what it knows to the one that is shown.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
from torch import nn

from shardwise.comms import marks as marking
from shardwise.comms.marks import Marks
from shardwise.measurement.profile import device as profile_device
from shardwise.measurement.profile import foreign as profile_foreign
from shardwise.measurement.profile import host as profile_host
from shardwise.measurement.profile import memory as profile_memory
from shardwise.measurement.profile.carry import Carry
from shardwise.measurement.profile.files import write_profile, write_raw
from shardwise.measurement.profile.labels import describe, find_device
from shardwise.measurement.profile.memory import Curve, Owners
from shardwise.measurement.profile.merge import Message, RankStep, merge
from shardwise.measurement.profile.ranks import Peers
from shardwise.measurement.profile.spans import HostPieces, cut_host
from shardwise.measurement.profile.trace import Trace, Tracer, unix_offset
from shardwise.runtime.api import engine_of, is_sharded
from shardwise.runtime.engine import Engine
from shardwise.runtime.local_step import watch_steps
from shardwise.timeline import Timeline

NO_TRACE = (
    "the profile ended before its last step, the traced one: what the host did between operations "
    "counts as compute, and memory is the engine's own buffers"
)
TRACED = (
    "the traced step is shown, which tracing made longer, because the timed one went another way"
)


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
            self._before = self._find_owners()
            # Marks tell whose a kernel is; without them autograd's operations do.
            operations = self.traces or not (self.engines or self._fsdp)
            # On a host, tracing costs too much for a step that is timed: only the last one is
            # traced. Without a model nothing tells where that step begins.
            self._apart = not cuda and self.steps > 1 and self._knows_forwards
            self._tracer: Tracer | None = None
            if not self._apart:
                self._tracer = Tracer(cuda, operations, memory=not cuda)
            self._history = profile_memory.CudaHistory() if cuda else None
            self.marks = Marks(self._device, Nvtx() if cuda else None)
            self.marks.on_forward = self._trace_last
            self._running = ExitStack()
            self._running.enter_context(profile_foreign.note_backward(self.marks))
            if not self.engines:
                self._running.enter_context(profile_foreign.note_calls(self.marks))
                if self._fsdp:
                    self._running.enter_context(profile_foreign.note_fsdp(self.marks))
                if self.model is not None:
                    profile_foreign.hang_hooks(self.model, self.marks, self._running)
            if cuda:
                torch.cuda.synchronize()
            if self._history is not None:
                self._history.start()
            if self._tracer is not None:
                self._tracer.start()
            marking.on = self.marks
        self.bounds: list[tuple[int, int]] = []  # of the steps that ended
        self._ends: list[int] = []  # of optimizers, in each of them
        self._begun = perf_counter_ns()
        self._forwards = 0  # of the marks' outermost forwards, those in steps that ended

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
        now, forwards = perf_counter_ns(), len(self.marks.roots)
        if self.bounds and self._knows_forwards and forwards == self._forwards:
            self.bounds[-1] = self.bounds[-1][0], now  # another optimizer of the same step
            self._ends[-1] += 1
        else:
            self.bounds.append((self._begun, now))
            self._ends.append(1)
        self._begun, self._forwards = now, forwards
        # The last step has as many optimizers as the one before it.
        if len(self.bounds) >= self.steps and self._ends[-1] >= self._ends[-2:][0]:
            self._stop()

    def _trace_last(self) -> None:
        """A forward begins: of the last step, it may be, or of one after it."""
        if len(self.bounds) >= self.steps:
            self._stop()
        elif self._apart and len(self.bounds) == self.steps - 1 and self._tracer is None:
            with self._costs():
                self._before = self._find_owners()
                self._tracer = Tracer(cuda=False, memory=True)
                self._tracer.start()
            self._begun = perf_counter_ns()

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
            if self._tracer is not None:
                self._tracer.stop()
            self._owners = self._find_owners()
            if self._history is not None:
                self._history.stop()

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
            trace = None
            if self._tracer is not None and (count == self.steps or not self._apart):
                trace = self._tracer.read()
            traced_last = self._apart and trace is not None
            timed = count - traced_last
            windows = [self._window(trace, *self.bounds[i]) for i in range(timed)]
            took = self._peers.exchange([end - start for start, end in windows])
            slowest = [max(times) for times in zip(*took, strict=True)]
            chosen = sorted(range(timed), key=slowest.__getitem__)[(timed - 1) // 2]
            carry, note = None, NO_TRACE if trace is None else ""
            if traced_last:
                carry = Carry(self.marks, self.bounds[count - 1], self.bounds[chosen])
                note = next((d for d in self._peers.exchange(carry.difference) if d), "")
            if traced_last and note:
                chosen, carry, note = count - 1, None, f"{TRACED}: {note}"
            if trace is not None and not self.engines and not self._fsdp:
                self._add_contexts(trace, carry)
            seen = self._peers.collect(self._read_step(trace, chosen, carry))
            merged = None
            if seen is not None:
                if note:
                    warnings.warn(f"profile: {note}", stacklevel=2)
                labels = describe(self.engines, self.model, self._device, self._peers.fake)
                labels["title"] = self.title or labels["title"]
                labels |= {
                    "steps": str(count),
                    "step_ms": f"{statistics.median(slowest) / 1e6:.3f}",
                    "clock_error_us": f"{self._clock_error / 1e3:.1f}",
                }
                merged = merge(seen, labels | ({"note": note} if note else {}))
            self._timeline, self.messages, self.memory = self._peers.share(merged)

    def _add_contexts(self, trace: Trace, carry: Carry | None) -> None:
        """Backward's, where no mark tells them, in the traced step and in the shown one."""
        found = profile_foreign.find_backward(trace, self.marks)
        moved = [(carry.time(at), unit, phase) for at, unit, phase in found] if carry else []
        self.marks.contexts[:] = sorted([*self.marks.contexts, *found, *moved])

    def _window(self, trace: Trace | None, start: int, end: int) -> tuple[int, int]:
        if self._device == "cpu" or trace is None:
            return start, end
        kernels = trace.kernels
        return profile_device.device_end(kernels, start), profile_device.device_end(kernels, end)

    def _read_step(self, trace: Trace | None, number: int, carry: Carry | None) -> RankStep:
        start, end = self.bounds[number]
        rank, marks = self._peers.rank, self.marks
        if self._device == "cpu":
            spans, transfers = profile_host.host_step(
                trace, marks, (start, end), rank, carry, waits_marked=bool(self.engines)
            )
            opened = start
        else:
            assert trace is not None
            spans, transfers, opened, _ = profile_device.device_spans(
                trace, marks, start, end, rank
            )
        memory = self._read_memory(trace, start, end, carry)
        shift = -self._ahead
        spans = [replace(s, start=s.start + shift, end=s.end + shift) for s in spans]
        transfers = [
            replace(t, span=replace(t.span, start=t.span.start + shift, end=t.span.end + shift))
            for t in transfers
        ]
        memory.times = [time + shift for time in memory.times]
        limit = None
        if self._device == "cuda":
            limit = torch.cuda.get_device_properties("cuda").total_memory
        return RankStep(opened + shift, spans, transfers, memory, limit)

    def _read_memory(self, trace: Trace | None, start: int, end: int, carry: Carry | None) -> Curve:
        marks, owners = self.marks, self._owners
        pieces = HostPieces(cut_host(marks, self.bounds[0][0], self.bounds[-1][1]))
        if self._history is None:
            followed = carry.source if carry is not None else (start, end)
            since = self.bounds[-1][0] if self._apart and trace is not None else 0
            noted = [mark for mark in marks.buffers if mark.time >= since]
            allocations = trace.allocations if trace is not None else []
            blocks = profile_memory.host_blocks(allocations, self._before, owners, noted)
            profile_memory.assign_roles(blocks, owners, self._before, marks, pieces)
            curve = profile_memory.draw_curve(blocks, *followed)
            if carry is not None:
                curve.times = carry.times(curve.times)
            return curve
        assert trace is not None
        blocks, others = self._history.blocks(unix_offset())
        profile_memory.assign_roles(blocks, owners, self._before, marks, pieces)
        curve = profile_memory.draw_curve(blocks, start, end, others, self._history.reserved)
        curve.times = profile_device.when_needed(trace.kernels, curve.times, start, end)
        return curve

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
        profiler = self._tracer.profiler if self.traces and self._tracer is not None else None
        write_raw(directory, self._peers.rank, profiler, snapshot)


class Nvtx:
    """Shows marks in NVIDIA's tools."""

    def start(self, text: str) -> Any:
        return torch.cuda.nvtx.range_start(text)

    def end(self, token: Any) -> None:
        torch.cuda.nvtx.range_end(token)
