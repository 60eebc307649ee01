"""`shardwise calibrate`: measures this machine and makes the Cluster that describes it.

On a CPU it starts gloo ranks by itself and measures on all of them at once; on a GPU it measures
one device, and takes the links from a packaged cluster, because one GPU has none.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import tempfile
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.multiprocessing.spawn import ProcessException

from shardwise.calibration.ranks import (
    CPU,
    CUDA,
    QUICK,
    Chain,
    Effort,
    Findings,
    Sampled,
    Tell,
    measure_device,
    measure_links,
)
from shardwise.children import describe_failure
from shardwise.description.cluster import (
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulPoint,
    MatmulRate,
    Protocol,
)
from shardwise.engine.api import shard
from shardwise.planning.plan import Plan
from shardwise.predict.describe import describe
from shardwise.profiling.timing import describe_environment

HOST_WORLD = 8  # ranks of the fake group that the host's own work is measured with
CAST_BYTES = 2**10  # of a bucket there: a block of the chain, as a unit is where things are sharded


class CalibrationError(Exception):
    """A rank failed while measuring."""


@dataclass(frozen=True)
class HostFindings:
    op: Sampled  # one operator, forward or backward
    unit: Sampled  # one gather, or one reduce, of a unit: the engine's own work
    cast: Sampled  # one cast of a unit that is not sharded


@dataclass(frozen=True)
class Calibrated:
    """A measured cluster, with error bars by the dotted keys of its file."""

    cluster: Cluster
    spreads: dict[str, float]


def calibrate(
    name: str,
    *,
    device: str = "cpu",
    ranks: int = 2,
    links: str = "h200x8",
    quick: bool = False,
    busy: bool = False,
    tell: Tell = lambda text: None,
) -> Calibrated:
    """Measure and describe. `tell` is called with what is measured next."""
    effort = QUICK if quick else CUDA if device == "cuda" else CPU
    if busy:
        effort = effort.for_a_busy_machine()
    how = "the quickest of many samples" if busy else "medians"
    if device == "cuda":
        found = measure_device("cuda", effort, lambda: None, tell)
        host = measure_host("cuda", effort, tell)
        return assemble(name, found, host, device, 1, Cluster.load(links), how)
    found, host = _measure_on_ranks(ranks, effort, tell)
    return assemble(name, found, host, device, ranks, None, how)


def _measure_on_ranks(ranks: int, effort: Effort, tell: Tell) -> tuple[Findings, HostFindings]:
    """Start the ranks, pass on what rank 0 tells, and give what it found."""
    context = torch.multiprocessing.get_context("spawn")
    said: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        running = torch.multiprocessing.spawn(
            _run_rank, args=(ranks, effort, folder, said), nprocs=ranks, join=False
        )
        assert running is not None  # only join=True gives none
        result: tuple[Findings, HostFindings] | None = None
        try:
            while not running.join(timeout=0.05):
                result = _listen(said, tell) or result
        except ProcessException as error:
            raise CalibrationError(describe_failure(error, ranks)) from error
        result = _listen(said, tell, patience=5.0) or result
    if result is None:
        raise CalibrationError("rank 0 ended without telling what it measured")
    return result


def _listen(said: Any, tell: Tell, patience: float = 0.0) -> Any:
    """Pass on what has been said; a result is given back. Waits for one up to `patience`."""
    until = time.monotonic() + patience
    while True:
        try:
            item = said.get(timeout=max(0.01, until - time.monotonic()) if patience else 0.01)
        except queue.Empty:
            return None
        if isinstance(item, str):
            tell(item)
        else:
            return item


def _run_rank(rank: int, ranks: int, effort: Effort, folder: str, said: Any) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    tell: Tell = said.put if rank == 0 else (lambda text: None)
    found = measure_device("cpu", effort, dist.barrier, tell)
    if ranks > 1:
        measure_links(found, effort, tell)
    dist.barrier()
    dist.destroy_process_group()
    host = measure_host("cpu", effort, tell)  # all ranks at once: they share the machine
    if rank == 0:
        said.put((found, host))
        said.close()
        said.join_thread()


def measure_host(device: str, effort: Effort, tell: Tell) -> HostFindings:
    """Host seconds of an operator of the model, and of the engine's work for a unit: a chain of
    tiny blocks, bare and sharded over a group in which nothing is sent; and, replicated there, cast
    before each forward.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    tell("the host: operators")
    x = torch.randn(4, 8, device=device)
    bare = Chain().to(device)
    described = describe(bare, x, device=device)
    launches = sum(s.forward.launches + s.backward.launches for _, s in described.segments)
    bare_s = [step for _, step in _time_steps(bare, x, effort)]
    low = x.bfloat16()
    low_s = [forward for forward, _ in _time_steps(Chain().to(device).bfloat16(), low, effort)]
    tell("the host: the engine's units")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=HOST_WORLD)
    try:
        sharded = shard(Chain().to(device), Plan.of("zero3", mesh=HOST_WORLD))
        sharded_s = [step for _, step in _time_steps(sharded, x, effort)]
        whole = Plan.of("ddp", HOST_WORLD, compute_dtype="bfloat16", bucket_bytes=CAST_BYTES)
        casts = len(whole.resolve(bare).require_units())
        replicated = shard(Chain().to(device), whole)
        cast_s = [forward for forward, _ in _time_steps(replicated, low, effort)]
    finally:
        dist.destroy_process_group()
    moves = 3 * len(bare.blocks)  # gathered for forward and for backward, reduced once
    return HostFindings(
        effort.pick([s / launches for s in bare_s]),
        _beyond(effort.pick(sharded_s), effort.pick(bare_s), moves),
        _beyond(effort.pick(cast_s), effort.pick(low_s), casts),
    )


def _beyond(taken: Sampled, bare: Sampled, times: int) -> Sampled:
    """What `taken` has above `bare`, for each of so many times."""
    return Sampled(max(0.0, taken.value - bare.value) / times, (taken.spread + bare.spread) / times)


def _time_steps(
    model: torch.nn.Module, x: torch.Tensor, effort: Effort
) -> list[tuple[float, float]]:
    """Host seconds of a forward, and of it and its backward, until the calls return."""
    samples = []
    for i in range(effort.samples + 3):
        if x.is_cuda:
            torch.cuda.synchronize()
        began = time.perf_counter()
        loss = model(x).sum()
        forward = time.perf_counter() - began
        loss.backward()
        taken = time.perf_counter() - began
        model.zero_grad()
        if i >= 3:
            samples.append((forward, taken))
    return samples


def assemble(
    name: str,
    found: Findings,
    host: HostFindings,
    device: str,
    ranks: int,
    links: Cluster | None,
    figures: str = "medians",
) -> Calibrated:
    """The Cluster of what was measured; with `links`, its levels and contention are that one's."""
    facts = describe_environment()
    where = facts["gpu"] if device == "cuda" else f"{facts['cpu']}, {facts['cores']} cores"
    how = f"{ranks} ranks at once" if ranks > 1 else "one process"
    measured = (
        f"measured by shardwise calibrate, {date.today().isoformat()}, torch {facts['torch']}, "
        f"{how}, {figures}, load {facts['load_at_start']} at the start"
    )
    book = _Book(measured)
    assert found.copy is not None and found.kernel is not None
    rates = tuple(_make_rate(dtype, rows, book) for dtype, rows in found.matmul.items())
    best = {rate.dtype: rate.peak for rate in rates}
    shares = [found.attention[dtype].value / best[dtype] for dtype in found.attention]
    made = Device(
        name=where,
        memory_bytes=book.note("device.memory_bytes", _memory(device, ranks), "the system says"),
        bandwidth_bytes_per_s=book.sample("device.bandwidth_bytes_per_s", found.copy),
        bandwidth_fraction=book.note("device.bandwidth_fraction", 1.0, "the rate was measured"),
        kernel_s=book.sample("device.kernel_s", found.kernel),
        matmul=rates,
        attention_fraction=book.note(
            "device.attention_fraction",
            min(1.0, max(1e-3, sum(shares) / len(shares))),
            f"{measured}: causal, forward and backward, over the best product",
        ),
    )
    # On a CPU the operator's time has its kernel in it.
    kernel_s = found.kernel.value if device == "cpu" else 0.0
    issue = found.issue or Sampled(0.0, 0.0)
    served = Host(
        op_s=book.sample(
            "host.op_s", dataclasses.replace(host.op, value=max(0.0, host.op.value - kernel_s))
        ),
        unit_s=book.sample("host.unit_s", host.unit),
        collective_s=book.sample("host.collective_s", issue),
        communicates=device == "cpu",
        cast_s=book.sample("host.cast_s", host.cast),
    )
    share = found.share or Sampled(0.0, 0.0)
    if links is None:
        levels: tuple[Level, ...] = (_make_level(found, ranks, book),)
        contention = book.sample("contention.communication_share_of_compute", share)
    else:
        levels, contention = _take_links(links, book)
        served = dataclasses.replace(served, collective_s=links.host.collective_s)
        book.take(links, "host.collective_s")
    cluster = Cluster(name, made, levels, served, contention, tuple(book.sources.items()))
    return Calibrated(cluster, book.spreads)


class _Book:
    """Sources and error bars, by key."""

    def __init__(self, measured: str) -> None:
        self.measured = measured
        self.sources: dict[str, str] = {}
        self.spreads: dict[str, float] = {}

    def note(self, key: str, value: float, source: str) -> float:
        self.sources[key] = source
        return value

    def sample(self, key: str, sampled: Sampled) -> float:
        self.sources[key] = self.measured
        self.spreads[key] = sampled.spread
        return sampled.value

    def take(self, cluster: Cluster, key: str) -> None:
        self.sources[key] = f"cluster {cluster.name}: {dict(cluster.sources)[key]}"
        self.spreads.pop(key, None)


def _make_rate(dtype: str, rows: list[tuple[int, int, int, Sampled]], book: _Book) -> MatmulRate:
    key = f"device.matmul.{dtype}"
    best = max((rate for *_, rate in rows), key=lambda rate: rate.value)
    book.sources[f"{key}.points"] = book.measured
    return MatmulRate(
        dtype,
        peak=book.sample(f"{key}.peak", best),
        fraction=book.note(f"{key}.fraction", 1.0, "the peak is the best measured rate"),
        points=tuple(MatmulPoint(m, n, k, rate.value, rate.spread) for m, n, k, rate in rows),
    )


def _make_level(found: Findings, ranks: int, book: _Book) -> Level:
    """gloo: the measured table; beyond it, the bandwidth of its largest all-gather."""
    points = tuple(
        CollectivePoint(kind, ranks, nbytes, sampled.value, sampled.spread)
        for kind, nbytes, sampled in found.collectives
    )
    gathers = sorted((p for p in points if p.kind == "all_gather"), key=lambda p: p.nbytes)
    bandwidth, step = 1e9, 1e-4
    told = "assumed: one rank has nobody to talk to"
    if gathers:
        largest, smallest = gathers[-1], gathers[0]
        bandwidth = largest.nbytes * (ranks - 1) / ranks / largest.seconds
        step = smallest.seconds / (ranks - 1)
        told = f"{book.measured}: from the largest and the smallest all-gather"
        book.sources["level.0.points"] = book.measured
    return Level(
        name="gloo",
        ranks=None,
        bandwidth_bytes_per_s=book.note("level.0.bandwidth_bytes_per_s", bandwidth, told),
        protocols=(
            Protocol(
                "gloo",
                start_s=book.note("level.0.protocol.0.start_s", 0.0, "in the step"),
                step_s=book.note("level.0.protocol.0.step_s", step, told),
            ),
        ),
        points=points,
    )


def _take_links(links: Cluster, book: _Book) -> tuple[tuple[Level, ...], float]:
    for key, _ in links.sources:
        if key.startswith(("level.", "contention.")):
            book.take(links, key)
    return links.levels, links.communication_share_of_compute


def _memory(device: str, ranks: int) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 8e9
    return float(pages * size // ranks)
