"""`shardwise calibrate`: measures this machine and makes the Cluster that describes it.

On a CPU it starts gloo ranks by itself, or takes those that torchrun has started, on one host or
several, and measures on all of them at once; on a GPU it measures one device, and takes the links
from a packaged cluster, because one GPU has none.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardwise.calibration.images import fit
from shardwise.calibration.measure import (
    CPU,
    CUDA,
    QUICK,
    Effort,
    Findings,
    HostFindings,
    Sampled,
    Tell,
    TimedAttention,
    measure_device,
    measure_host,
    measure_links,
)
from shardwise.calibration.traffic import fit_traffic
from shardwise.description.cluster import (
    BESIDE,
    Cluster,
    CollectivePoint,
    Device,
    Host,
    Level,
    MatmulPoint,
    MatmulRate,
    Protocol,
    fastest_dtype,
)
from shardwise.errors import UserError
from shardwise.predict.cost import Costs
from shardwise.profiling.timing import describe_environment, spread
from shardwise.trainer.group import open_group
from shardwise.trainer.launch import joined, start_ranks

T = TypeVar("T", Device, MatmulRate)


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
    hosts = 1
    if joined():
        open_group("gloo")
        ranks, hosts = dist.get_world_size(), count_hosts()
        quiet: Tell = lambda text: None  # noqa: E731
        found, host = measure_as_rank(effort, tell if dist.get_rank() == 0 else quiet)
    else:
        found, host = ask_ranks(_run_rank, (effort,), ranks, tell)
    return assemble(name, found, host, device, ranks, None, how, hosts)


def ask_ranks(
    target: Callable[..., None], args: tuple[Any, ...], ranks: int, tell: Tell = lambda text: None
) -> Any:
    """Call `target(*args, writer)` on so many new local ranks, with a group of gloo and their share
    of the cores; pass on the words that rank 0 writes, and give the last other thing.
    """
    reader, writer = multiprocessing.get_context("spawn").Pipe(duplex=False)
    results: list[Any] = []

    def listen() -> None:
        try:
            while True:
                told = reader.recv()
                if isinstance(told, str):
                    tell(told)
                else:
                    results.append(told)
        except EOFError:  # nobody is left to tell anything
            return

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    try:
        start_ranks(_join, (target, args, writer), ranks)
    finally:
        writer.close()
    listener.join()
    return results[-1]


def _join(target: Callable[..., None], args: tuple[Any, ...], writer: Connection) -> None:
    open_group("gloo")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // dist.get_world_size()))
    target(*args, writer)


def _run_rank(effort: Effort, writer: Connection) -> None:
    rank = dist.get_rank()
    found = measure_as_rank(effort, writer.send if rank == 0 else (lambda text: None))
    if rank == 0:
        writer.send(found)


def measure_as_rank(effort: Effort, tell: Tell) -> tuple[Findings, HostFindings]:
    """What the ranks of a group measure together, with the threads that they have. Its group is
    left: the host's own work is measured without one.
    """
    ranks, hosts = dist.get_world_size(), count_hosts()
    found = measure_device("cpu", effort, dist.barrier, tell)
    if ranks > 1:
        measure_links(found, effort, tell, hosts)
    dist.barrier()
    dist.destroy_process_group()
    return found, measure_host("cpu", effort, tell)  # all ranks at once: they share the machine


def count_hosts() -> int:
    """On how many hosts the ranks are; the launcher says how many are on this one."""
    ranks, here = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks % here:
        raise UserError(
            f"{here} of {ranks} ranks are on this host; calibrate needs the same number on each"
        )
    return ranks // here


def assemble(
    name: str,
    found: Findings,
    host: HostFindings,
    device: str,
    ranks: int,
    links: Cluster | None,
    figures: str = "medians",
    hosts: int = 1,
) -> Calibrated:
    """The Cluster of what was measured; with `links`, its levels and contention, and what a device
    holds beside a step's tensors, are that one's.
    """
    facts = describe_environment()
    where = facts["gpu"] if device == "cuda" else f"{facts['cpu']}, {facts['cores']} cores"
    how = f"{ranks} ranks at once" if ranks > 1 else "one process"
    how += f" on {hosts} hosts" if hosts > 1 else ""
    measured = (
        f"measured by shardwise calibrate, {date.today().isoformat()}, torch {facts['torch']}, "
        f"{how}, {figures}, load {facts['load_at_start']} at the start"
    )
    book = _Book(measured)
    rates = tuple(_make_rate(dtype, points, book) for dtype, points in found.matmul.items())
    share, half = fit_attention(found.attention, rates)
    made = Device(
        name=where,
        memory_bytes=book.note(
            "device.memory_bytes", memory_of_rank(device, ranks // hosts), "the system says"
        ),
        bandwidth_bytes_per_s=book.sample("device.bandwidth_bytes_per_s", found.copy),
        bandwidth_fraction=book.note("device.bandwidth_fraction", 1.0, "the rate was measured"),
        kernel_s=book.sample("device.kernel_s", found.kernel),
        matmul=rates,
        attention_fraction=book.note(
            "device.attention_fraction",
            share,
            f"{measured}: causal, forward and backward, over the best product",
        ),
        attention_half=book.note(
            "device.attention_half", half, f"{measured}: the same by length and width"
        ),
    )
    kernel_s = found.kernel.value if device == "cpu" else 0.0
    served = Host(
        # On a CPU the operator's time has its kernel in it.
        op_s=book.sample("host.op_s", host.op.above(Sampled(kernel_s, 0.0))),
        unit_s=book.sample("host.unit_s", host.unit),
        collective_s=book.sample("host.collective_s", found.issue),
        communicates=device == "cpu",
        cast_s=book.sample("host.cast_s", host.cast),
    )
    if links is None:
        levels: tuple[Level, ...] = _make_levels(found, ranks // hosts, hosts, book)
        contention = book.sample("contention.communication_share_of_compute", found.share)
    else:
        levels, contention = links.levels, links.communication_share_of_compute
        made = dataclasses.replace(made, **{key: getattr(links.device, key) for key in BESIDE})
        taken = ("level.", "contention.", "host.collective_s", *(f"device.{b}" for b in BESIDE))
        served = dataclasses.replace(served, collective_s=links.host.collective_s)
        for key, source in links.sources:
            if key.startswith(taken):
                book.sources[key] = f"cluster {links.name}: {source}"
                book.spreads.pop(key, None)
    cluster = Cluster(name, made, levels, served, contention)
    made = _with_factors(cluster, found, book)
    return Calibrated(
        dataclasses.replace(cluster, device=made, sources=tuple(book.sources.items())),
        book.spreads,
    )


def fit_attention(
    timed: Sequence[TimedAttention], rates: Sequence[MatmulRate]
) -> tuple[float, float]:
    """`attention_fraction` and `attention_half`: a call takes its FLOPs at that share of the peak,
    and as long again as its FLOPs there times half over what a query sees. The nearest by shares.
    """
    if not timed:
        return Device.attention_fraction, Device.attention_half
    peaks = {rate.dtype: rate.peak for rate in rates}
    peak = peaks[fastest_dtype(peaks)]
    ideal = [one.flops / peak / one.seconds.value for one in timed]
    rows = [[share, share / one.seen] for share, one in zip(ideal, timed, strict=True)]
    matrix, ones = torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1).double()
    whole, more = torch.linalg.lstsq(matrix, ones).solution.flatten().tolist()
    if len(timed) < 2 or more < 0 or whole <= 0:  # no lengths to tell apart
        whole, more = 1 / statistics.median(ideal), 0.0
    return min(1.0, max(1e-3, 1 / whole)), more / whole


def _with_factors(cluster: Cluster, found: Findings, book: _Book) -> Device:
    """The cluster's device with the factors of convolutions, of products whose rows are not
    aligned, and of the kinds of kernels that move memory.
    """
    taken: dict[str, Any] = {}
    costs = Costs.of(cluster)
    for key, samples in fit(costs, found.images).items() if found.images else ():
        taken[key] = book.sample(key, Sampled(statistics.median(samples), spread(samples)))
        book.sources[key] += ": images forward and backward, median of the cases"
    for dtype, fractions in found.unaligned.items():
        for nbytes, sampled in fractions.items():
            key = f"device.matmul.{dtype}.aligned_{nbytes}_fraction"
            told = f"{book.measured}: a linear layer's products, forward and backward"
            # Nothing gains by it: more than the whole rate is noise.
            taken[key] = book.note(key, min(1.0, sampled.value), told)
    traffic = []
    for kind, (made, apart) in fit_traffic(costs, found.traffic).items():
        key = f"device.traffic.{kind}"
        book.sample(f"{key}.times", Sampled(made.times, apart))
        book.sources[f"{key}.times"] += ": over a copy of the same bytes, median of the cases"
        if made.start_s:
            book.note(f"{key}.start_s", made.start_s, f"{book.measured}: by size")
        traffic.append(made)

    def with_its_own(held: T, path: str) -> T:
        named = {f.name: f"{path}.{f.name}" for f in dataclasses.fields(held)}
        return dataclasses.replace(held, **{n: taken[k] for n, k in named.items() if k in taken})

    device = with_its_own(cluster.device, "device")
    rates = [with_its_own(rate, f"device.matmul.{rate.dtype}") for rate in device.matmul]
    return dataclasses.replace(device, matmul=tuple(rates), traffic=tuple(traffic))


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


def _make_rate(dtype: str, points: list[MatmulPoint], book: _Book) -> MatmulRate:
    key = f"device.matmul.{dtype}"
    best = max(points, key=lambda point: point.flops_per_s)
    book.sources[f"{key}.points"] = book.measured
    return MatmulRate(
        dtype,
        peak=book.sample(f"{key}.peak", Sampled(best.flops_per_s, best.spread)),
        fraction=book.note(f"{key}.fraction", 1.0, "the peak is the best measured rate"),
        points=tuple(points),
    )


def _make_levels(found: Findings, local: int, hosts: int, book: _Book) -> tuple[Level, ...]:
    """Ranks of one host, then the hosts."""
    if hosts == 1:
        return (_make_level("level.0", "gloo", None, found.collectives, book),)
    if local == 1:
        return (_make_level("level.0", "between hosts", None, found.between_hosts, book),)
    book.sources["level.0.ranks"] = f"{book.measured}: ranks of a host"
    return (
        _make_level("level.0", "in a host", local, found.collectives, book),
        _make_level("level.1", "between hosts", None, found.between_hosts, book),
    )


def _make_level(
    key: str, name: str, ranks: int | None, points: list[CollectivePoint], book: _Book
) -> Level:
    """gloo: the measured table; beyond it, the bandwidth of its largest all-gather."""
    gathers = [p for p in points if p.kind == "all_gather" and p.inside == 1]
    bandwidth, step = 1e9, 1e-4
    told = "assumed: one rank has nobody to talk to"
    if gathers:
        smallest, largest = gathers[0], gathers[-1]
        others = largest.ranks - 1
        bandwidth = largest.nbytes * others / largest.ranks / largest.seconds
        step = smallest.seconds / others
        told = f"{book.measured}: from the largest and the smallest all-gather"
        book.sources[f"{key}.points"] = book.measured
    return Level(
        name=name,
        ranks=ranks,
        bandwidth_bytes_per_s=book.note(f"{key}.bandwidth_bytes_per_s", bandwidth, told),
        protocols=(
            Protocol(
                "gloo",
                start_s=book.note(f"{key}.protocol.0.start_s", 0.0, "in the step"),
                step_s=book.note(f"{key}.protocol.0.step_s", step, told),
            ),
        ),
        points=tuple(points),
    )


def memory_of_rank(device: str, ranks: int) -> float:
    """Bytes of a GPU, or of a host that so many ranks share."""
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 8e9
    return float(pages * size // ranks)
