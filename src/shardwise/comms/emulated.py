"""An emulated network: one process is a rank of an N-rank group, for torch's engines and ours
alike.

While `emulate(network)` is open, torch.distributed's collectives copy what would arrive (own shard
repeated into a gather's output, own part of a reduce), wait the modelled time on one stream per
group, and return work whose `wait()` orders streams without blocking the host. Both engines look
these functions up in `torch.distributed` at each call, so both meet the same network.

The values are fabricated: read no loss from them, and label every figure `emulated`. It does not
show what a real library does beside moving bytes (NCCL's kernels take multiprocessors from
compute), nor collectives that C++ issues by itself (DistributedDataParallel's).
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from shardwise.comms.versions import current_stream


@dataclass(frozen=True)
class Network:
    """What every group of ranks is joined by. The default is free: data arrives, nobody waits."""

    bandwidth: float = math.inf  # bytes per second that one rank sends
    latency: float = 0.0  # seconds per collective

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ValueError(f"Network.bandwidth is {self.bandwidth}, expected bytes/s above 0")
        if not self.latency >= 0:
            raise ValueError(f"Network.latency is {self.latency}, expected seconds, at least 0")

    def seconds(self, nbytes: int, ranks: int, rounds: int = 1) -> float:
        """A ring's time for a message of `nbytes`; an all-reduce goes round twice."""
        return self.latency + rounds * nbytes * (ranks - 1) / ranks / self.bandwidth


class EmulatedWork(Work):
    """A collective under way. torch's FSDP2 waits only for instances of torch's own `Work`, which
    take 70 us to make: those that were waited for serve again, with their event.
    """

    idle: ClassVar[list[EmulatedWork]] = []
    device: torch.device
    arrived: torch.cuda.Event | None = None
    ready = 0.0  # on a CPU: the clock when the data is there
    waited_for = False

    @classmethod
    def start(cls, device: torch.device) -> EmulatedWork:
        work = cls.idle.pop() if cls.idle else cls()
        work.device, work.waited_for = device, False
        if device.type == "cuda" and work.arrived is None:
            work.arrived = torch.cuda.Event()
        return work

    def wait(self, timeout: Any = None) -> bool:
        if self.arrived is not None:
            current_stream(self.device).wait_event(self.arrived)
        else:
            time.sleep(max(0.0, self.ready - time.perf_counter()))
        if not self.waited_for:
            self.waited_for = True
            self.idle.append(self)
        return True


class Emulation:
    """The collectives of one open emulation, and how often each was called."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.calls: Counter[str] = Counter()
        self._streams: dict[Any, tuple[torch.cuda.Stream, torch.cuda.Event]] = {}
        self._busy_until: dict[Any, float] = {}  # on a CPU: when the group's wire is free again

    def all_gather(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        rows = output_tensor.view(dist.get_world_size(group), -1)

        def copy() -> None:
            rows.copy_(input_tensor.reshape(1, -1).expand_as(rows))

        return self._run("all_gather", rows, copy, rows.numel(), group, async_op)

    def reduce_scatter(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        op: Any = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Work | None:
        rows = input.view(dist.get_world_size(group), -1)
        own = rows[dist.get_rank(group)]

        def copy() -> None:
            output.view(-1).copy_(own)

        return self._run("reduce_scatter", rows, copy, own.numel(), group, async_op)

    def all_reduce(
        self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
    ) -> Work | None:
        return self._run("all_reduce", tensor, _nothing, 0, group, async_op, rounds=2)

    def _run(
        self,
        name: str,
        message: torch.Tensor,
        copy: Callable[[], None],
        written: int,
        group: Any,
        async_op: bool,
        rounds: int = 1,
    ) -> Work | None:
        """Queue the copy, which writes `written` elements, and the wait for the whole message."""
        self.calls[name] += 1
        group = group or dist.group.WORLD
        size = message.element_size()
        seconds = self.network.seconds(message.numel() * size, dist.get_world_size(group), rounds)
        # Autograd does not record a collective.
        with torch.no_grad():
            if message.is_cuda:
                work = self._on_stream(group, message.device, copy, written * size, seconds)
            else:
                work = self._on_host(group, copy, seconds)
        if async_op:
            return work
        work.wait()
        return None

    def _on_stream(
        self,
        group: Any,
        device: torch.device,
        copy: Callable[[], None],
        written_bytes: int,
        seconds: float,
    ) -> Work:
        if group not in self._streams:
            self._streams[group] = torch.cuda.Stream(device), torch.cuda.Event()
        (stream, moment), caller = self._streams[group], current_stream(device)
        work = EmulatedWork.start(device)
        moment.record(caller)
        stream.wait_event(moment)
        torch.cuda.set_stream(stream)
        try:
            copy()
            # The copy takes a share of the modelled time already.
            cycles, copy_seconds = _calibrate(device)
            spin = int((seconds - written_bytes * copy_seconds) * cycles) if seconds else 0
            if spin > 0:
                torch.cuda._sleep(spin)
        finally:
            torch.cuda.set_stream(caller)
        assert work.arrived is not None
        work.arrived.record(stream)
        return work

    def _on_host(self, group: Any, copy: Callable[[], None], seconds: float) -> Work:
        copy()
        now = time.perf_counter()
        work = EmulatedWork.start(torch.device("cpu"))
        work.ready = max(now, self._busy_until.get(group, now)) + seconds
        self._busy_until[group] = work.ready
        return work


@contextmanager
def emulate(network: Network) -> Iterator[Emulation]:
    """Put the emulated collectives in torch.distributed's place; restore them at the end."""
    emulation = Emulation(network)
    replaced = {
        "all_gather_single": emulation.all_gather,
        "all_gather_into_tensor": emulation.all_gather,
        "reduce_scatter_single": emulation.reduce_scatter,
        "reduce_scatter_tensor": emulation.reduce_scatter,
        "all_reduce": emulation.all_reduce,
    }
    # Which of the names exist depends on torch's version.
    originals = {name: getattr(dist, name) for name in replaced if hasattr(dist, name)}
    for name in originals:
        setattr(dist, name, replaced[name])
    try:
        yield emulation
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _nothing() -> None:
    return None


@cache
def _calibrate(device: torch.device) -> tuple[float, float]:
    """Spin cycles per second of a busy GPU, and seconds that a copy takes per byte written."""
    rows = torch.empty((8, 2**25), dtype=torch.uint8, device=device)
    source = torch.zeros((1, 2**25), dtype=torch.uint8, device=device).expand_as(rows)
    spins = 10**8
    # First at whatever clock the GPU idles at, then again at the one it runs at.
    for _ in range(2):
        spun = _time_on_device(device, lambda: torch.cuda._sleep(spins))
        copied = _time_on_device(device, lambda: rows.copy_(source))
    return spins / spun, copied / rows.numel()


def _time_on_device(device: torch.device, work: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    start.record()
    work()
    end.record()
    torch.cuda.synchronize(device)
    return start.elapsed_time(end) / 1e3
