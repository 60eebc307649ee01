"""Profiling real steps into a Timeline.

    with sw.profile(model, steps=3) as measured:
        train(3)
    print(measured.timeline.breakdown())
    measured.write("run")

A step ends when its optimizer step does (`measured.step()` says so by hand), and begins where the
last one ended, so that data loading is part of it. The step with the median time, as its slowest
rank took it, is the one that is shown; every rank is in it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwise.comms import marks as marking
from shardwise.comms.marks import Marks
from shardwise.measurement.profile import device as profile_device
from shardwise.measurement.profile import foreign as profile_foreign
from shardwise.measurement.profile import host as profile_host
from shardwise.measurement.profile import memory as profile_memory
from shardwise.measurement.profile.files import write_profile, write_raw
from shardwise.measurement.profile.memory import Curve, Owners
from shardwise.measurement.profile.merge import Message, RankStep, merge
from shardwise.measurement.profile.ranks import Peers
from shardwise.measurement.profile.spans import HostPieces, carry_over, cut_host
from shardwise.measurement.profile.trace import Trace, Tracer, unix_offset
from shardwise.runtime.api import engine_of, is_sharded
from shardwise.runtime.engine import Engine
from shardwise.timeline import Timeline


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
        if steps < 1:
            raise ValueError(f"profile: steps is {steps}, expected at least 1")
        self.model, self.steps, self.title, self.traces = model, steps, title, traces
        if engines is None:
            engines = [engine_of(model)] if model is not None and is_sharded(model) else []
        self.engines = engines
        self._fsdp = fsdp or (not engines and profile_foreign.uses_fsdp(model))
        self.seconds = 0.0  # that starting, stopping and reading took beside the steps
        self._device = device or _find_device(model, engines)
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._stepping: list[int] = []  # optimizers that step now, one inside the other
        self._timeline: Timeline | None = None
        self.messages: list[Message] = []
        self.memory: list[dict[str, Any]] = []  # one for each rank, as memory.json has it

    # Running

    def __enter__(self) -> Profile:
        self._hooks = [
            register_optimizer_step_pre_hook(self.before_optimizer),
            register_optimizer_step_post_hook(self.after_optimizer),
        ]
        self.start()
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
            # On a host, following every allocation is most of the cost: only the last step does,
            # and is not timed. Without a model nothing tells where that step begins.
            self._apart = not cuda and self.steps > 1 and bool(self.engines or self.model)
            self._tracers = [Tracer(cuda, operations, memory=not cuda and not self._apart)]
            self._history = profile_memory.CudaHistory() if cuda else None
            self.marks = Marks(self._device, Nvtx() if cuda else None)
            self.marks.on_forward = self._follow_memory
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
            self._tracers[0].start()
            marking.on = self.marks
        self._bounds: list[tuple[int, int]] = []  # of the steps that ended
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
        knows_forwards = bool(self.engines) or self.model is not None
        if self._bounds and knows_forwards and forwards == self._forwards:
            self._bounds[-1] = self._bounds[-1][0], now  # another optimizer of the same step
        else:
            self._bounds.append((self._begun, now))
        self._begun, self._forwards = now, forwards
        if len(self._bounds) >= self.steps:
            self._stop()
        elif self._apart and len(self._bounds) == self.steps - 1:
            with self._costs():
                self._tracers[0].stop()

    def _follow_memory(self) -> None:
        """A forward begins. torch's profiler cannot start again inside an optimizer's step."""
        if self._apart and len(self._bounds) == self.steps - 1 and len(self._tracers) == 1:
            with self._costs():
                self._before = self._find_owners()
                self._tracers.append(Tracer(cuda=False, memory=True))
                self._tracers[1].start()
            self._begun = perf_counter_ns()

    def cancel(self) -> None:
        """End without a result; other ranks need not."""
        self._stop()

    def _stop(self) -> None:
        if marking.on is not self.marks:
            return
        with self._costs():
            marking.on = None
            self._running.close()
            self._tracers[-1].stop()
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
            counts = self._peers.exchange(len(self._bounds))
            count = min(counts)
            if count < 1:
                raise NothingProfiled(
                    "no training step ended inside the profile: it counts the ends of optimizer "
                    f"steps, and the ranks took {counts}; run at least one step in it, or call "
                    "its step() where a step ends without a torch optimizer"
                )
            traces = [tracer.read() for tracer in self._tracers]
            if not self.engines and not self._fsdp:
                for trace in traces:
                    profile_foreign.add_backward(trace, self.marks)
            timed = min(count, self.steps - 1) if self._apart else count
            windows = [self._window(traces[0], *self._bounds[i]) for i in range(timed)]
            took = self._peers.exchange([end - start for start, end in windows])
            slowest = [max(times) for times in zip(*took, strict=True)]
            chosen = sorted(range(timed), key=slowest.__getitem__)[(timed - 1) // 2]
            seen = self._peers.collect(self._read_step(traces, chosen))
            merged = None
            if seen is not None:
                merged = merge(seen, self._labels(slowest, count))
            self._timeline, self.messages, self.memory = self._peers.share(merged)

    def _window(self, trace: Trace, start: int, end: int) -> tuple[int, int]:
        if self._device == "cpu":
            return start, end
        kernels = trace.kernels
        return profile_device.device_end(kernels, start), profile_device.device_end(kernels, end)

    def _read_step(self, traces: list[Trace], number: int) -> RankStep:
        (start, end), trace = self._bounds[number], traces[0]
        rank, marks = self._peers.rank, self.marks
        if self._device == "cpu":
            transfers, unmarked = profile_host.host_transfers(trace, marks, start, end, rank)
            if not self.engines:
                unmarked += [(t.span.start, t.span.end) for t in transfers]
            spans = profile_host.host_spans(trace, marks, start, end, rank, unmarked)
            opened = start
        else:
            spans, transfers, opened, _ = profile_device.device_spans(
                trace, marks, start, end, rank
            )
        memory = self._read_memory(traces[-1], start, end)
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

    def _read_memory(self, trace: Trace, start: int, end: int) -> Curve:
        marks, owners = self.marks, self._owners
        pieces = HostPieces(cut_host(marks, self._bounds[0][0], self._bounds[-1][1]))
        if self._history is None:
            # The step in which they were followed; the chosen one, if that did not come.
            followed = self._bounds[-1] if len(self._tracers) > 1 else (start, end)
            since = followed[0] if len(self._tracers) > 1 else 0
            noted = [mark for mark in marks.buffers if mark.time >= since]
            blocks = profile_memory.host_blocks(trace.allocations, self._before, owners, noted)
            profile_memory.assign_roles(blocks, owners, self._before, marks, pieces)
            curve = profile_memory.draw_curve(blocks, *followed)
            curve.times = carry_over(curve.times, marks, followed, (start, end))
            return curve
        blocks, others = self._history.blocks(unix_offset())
        profile_memory.assign_roles(blocks, owners, self._before, marks, pieces)
        curve = profile_memory.draw_curve(blocks, start, end, others, self._history.reserved)
        curve.times = profile_device.when_needed(trace.kernels, curve.times, start, end)
        return curve

    def _find_owners(self) -> Owners:
        return profile_memory.find_owners(
            self.engines, self.model, self._optimizers.values(), self._device
        )

    def _labels(self, took: list[int], count: int) -> dict[str, str]:
        engine = "shardwise" if self.engines else "torch"
        plans = [e.plan.title for e in self.engines if e.plan is not None]
        if not plans:
            plans = ["fully_shard"] if self.engines else [_wrapping(self.model)]
        emulated = self._peers.fake or hasattr(
            getattr(dist.all_reduce, "__self__", None), "network"
        )
        name = torch.cuda.get_device_name() if self._device == "cuda" else "cpu"
        step_ms = statistics.median(took) / 1e6
        return {
            "title": self.title or f"{engine}, {plans[0]}, {name}",
            "source": "emulated" if emulated else "measured",
            "engine": engine,
            "plan": plans[0],
            "device": name,
            "steps": str(count),
            "step_ms": f"{step_ms:.3f}",
            "clock_error_us": f"{self._clock_error / 1e3:.1f}",
        }

    # Results

    @property
    def timeline(self) -> Timeline:
        if self._timeline is None:
            raise RuntimeError("the profile has no timeline yet: leave its `with` block first")
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
        profiler = self._tracers[-1].profiler if self.traces else None
        write_raw(directory, self._peers.rank, profiler, snapshot)


class Nvtx:
    """Shows marks in NVIDIA's tools."""

    def start(self, text: str) -> Any:
        return torch.cuda.nvtx.range_start(text)

    def end(self, token: Any) -> None:
        torch.cuda.nvtx.range_end(token)


def _find_device(model: nn.Module | None, engines: list[Engine]) -> str:
    if engines:
        return engines[0].mesh.device.type
    parameter = next(model.parameters(), None) if model is not None else None
    if parameter is not None:
        return parameter.device.type
    return "cuda" if torch.cuda.is_available() else "cpu"


def _wrapping(model: nn.Module | None) -> str:
    if model is None:
        return "torch"
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    kinds = {base.__name__ for base in type(model).__mro__}
    return "fully_shard" if "FSDPModule" in kinds else "unsharded"
