"""What `shardwise calibrate` measures on each rank: rates of products, memory, collectives, host.

Every figure is the median of several samples; its error bar is their interquartile range. On a
busy machine, by request, it is the quickest of many short samples instead: those that nothing else
disturbed. Ranks measure together, each on its own cores, because that is how they train.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

from shardwise.calibration.images import TimedCase, measure_images
from shardwise.calibration.traffic import measure_traffic
from shardwise.description.cluster import (
    COLLECTIVES,
    CollectivePoint,
    MatmulPoint,
    fastest_dtype,
)
from shardwise.emulation.run import fake_group
from shardwise.engine.api import shard
from shardwise.engine.collectives import Group
from shardwise.planning.plan import Plan
from shardwise.predict.describe import describe
from shardwise.profiling.timing import (
    issue_collective,
    spread,
    time_calls,
    time_launches,
    time_passes,
)

Tell = Callable[[str], None]
MOST_SHARE = 0.95  # of the compute, that communication may take beside it
LAUNCH_CYCLES = 40_000  # of a GPU, while its host launches one kernel: about 20 us
CASE_LAUNCHES = 20  # what an operator and its backward take the host, as launches
UNALIGNED = (8, 4, 2)  # bytes that rows lie apart by a multiple of, and not of more
MOST_LAUNCHES = 400  # fewer than a stream holds before the host has to wait
HOST_WORLD = 8  # ranks of the fake group that the host's own work is measured with
CAST_BYTES = 2**10  # of a bucket there: a block of the chain, as a unit is where things are sharded


@dataclass(frozen=True)
class Sampled:
    """A measured figure and the interquartile range of its samples."""

    value: float
    spread: float

    def above(self, less: Sampled, times: int = 1) -> Sampled:
        """What this has above `less`, for each of so many times."""
        return Sampled(
            max(0.0, self.value - less.value) / times, (self.spread + less.spread) / times
        )

    def as_rate(self, work: float) -> Sampled:
        """So much work per second, where this is seconds; its error bar at first order."""
        rate = work / self.value
        return Sampled(rate, rate * self.spread / self.value)


NOTHING = Sampled(0.0, 0.0)
Timer = Callable[[Callable[[], Any]], Sampled]


@dataclass(frozen=True)
class Effort:
    """How much to measure."""

    samples: int = 7
    seconds: float = 0.2  # of one sample, at least, for what is quick
    shapes: tuple[tuple[int, int, int], ...] = ()
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    copy_bytes: int = 2**26
    sizes: tuple[int, ...] = ()
    attention: tuple[tuple[int, int, int, int], ...] = ((1, 4, 512, 64), (1, 4, 128, 64))
    unaligned: tuple[int, int, int] = (512, 1024, 512)  # a product, and with n a little longer
    case_cut: tuple[int, int] = (1, 1)  # of batches and rows, and the sides of images
    longest_s: float = 2.0  # a product that takes longer is measured once
    quickest: bool = False  # take the quickest sample, not the median

    def pick(self, samples: list[float]) -> Sampled:
        """The figure that these times stand for."""
        value = min(samples) if self.quickest else statistics.median(samples)
        return Sampled(value, spread(samples))

    def of_cases(self) -> Effort:
        """A few short samples: many cases, whose median counts."""
        return dataclasses.replace(
            self, samples=min(5, self.samples), seconds=min(0.005, self.seconds)
        )

    def for_a_busy_machine(self) -> Effort:
        """Many short samples, of which the quickest counts."""
        return dataclasses.replace(self, samples=60, seconds=0.002, quickest=True)


def _products(
    rows: tuple[int, ...], sizes: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int, int], ...]:
    return tuple((m, n, k) for m in rows for n, k in sizes)


CPU = Effort(
    shapes=_products(
        (64, 512, 2048),
        ((128, 128), (384, 128), (128, 384), (512, 512), (2048, 512), (512, 2048)),
    ),
    sizes=tuple(2**p for p in range(10, 25, 2)),
    case_cut=(32, 4),
)
CUDA = Effort(
    samples=15,
    seconds=0.02,
    shapes=(
        *_products((64, 512), ((384, 384), (1536, 384), (384, 1536), (1024, 1024), (4096, 1024))),
        *_products(
            (1024, 4096, 16384),
            (
                (1024, 1024),
                (4096, 1024),
                (1024, 4096),
                (4096, 4096),
                (14336, 4096),
                (4096, 14336),
                (32000, 4096),
            ),
        ),
    ),
    dtypes=("bfloat16", "float16", "float32"),
    copy_bytes=2**30,
    attention=(
        (1, 16, 16384, 64),
        (4, 16, 2048, 128),
        (8, 16, 2048, 64),
        (8, 16, 1024, 64),
        (32, 16, 256, 64),
    ),
    unaligned=(8192, 32000, 1024),
)
QUICK = Effort(
    samples=3,
    seconds=0.01,
    shapes=((64, 128, 128), (256, 256, 256)),
    dtypes=("float32",),
    copy_bytes=2**22,
    sizes=(2**10, 2**16, 2**20),
    attention=((1, 2, 64, 32), (1, 2, 16, 32)),
    unaligned=(32, 64, 32),
    case_cut=(64, 8),
)


@dataclass(frozen=True)
class TimedAttention:
    """Causal attention, forward and backward: what a query sees on average, keys times a head's
    width, its FLOPs as a description counts them, and what it took.
    """

    seen: float
    flops: float
    seconds: Sampled


@dataclass
class Findings:
    """What was measured of a device, and of its links if there are any."""

    matmul: dict[str, list[MatmulPoint]] = field(default_factory=dict)
    attention: list[TimedAttention] = field(default_factory=list)  # in the usual dtype
    copy: Sampled = NOTHING  # bytes read and written per second
    kernel: Sampled = NOTHING  # seconds of the shortest one
    # By dtype and bytes: what is left of a product's rate.
    unaligned: dict[str, dict[int, Sampled]] = field(default_factory=dict)
    traffic: list[TimedCase] = field(default_factory=list)
    images: list[TimedCase] = field(default_factory=list)
    collectives: list[CollectivePoint] = field(default_factory=list)  # of each kind, by bytes
    between_hosts: list[CollectivePoint] = field(default_factory=list)  # where there are several
    issue: Sampled = NOTHING  # of one collective, host seconds
    share: Sampled = NOTHING  # of the compute, that communication takes


@dataclass(frozen=True)
class HostFindings:
    """Seconds of the host."""

    op: Sampled  # one operator, forward or backward
    unit: Sampled  # one gather, or one reduce, of a unit: the engine's own work
    cast: Sampled  # one cast of a unit that is not sharded


def measure_device(device: str, effort: Effort, ready: Callable[[], None], tell: Tell) -> Findings:
    """Products, attention, copies, the shortest kernel and images of one device. `ready` is called
    before each sample: a barrier of the ranks.
    """
    timer = _timer(device, effort, ready)
    brief = _timer(device, effort.of_cases(), ready, CASE_LAUNCHES)
    matmul, unaligned = {}, {}
    for dtype in effort.dtypes:
        tell(f"matrix products in {dtype}")
        matmul[dtype] = _measure_products(device, dtype, effort, timer)
        unaligned[dtype] = _measure_unaligned(device, dtype, effort, brief)
    usual = fastest_dtype({dtype: _best(points) for dtype, points in matmul.items()})
    tell(f"attention in {usual}")
    attention = [_measure_attention(device, usual, shape, brief) for shape in effort.attention]
    tell("memory bandwidth")
    source = torch.ones(effort.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source)).as_rate(2 * source.nbytes)
    tell("the shortest kernel")
    tiny = torch.zeros(8, device=device)
    kernel = timer(lambda: tiny.add_(1.0))
    images = measure_images(device, effort.dtypes, effort.case_cut, brief, tell)
    traffic = measure_traffic(device, usual, effort.case_cut, brief, tell)
    return Findings(matmul, attention, copy, kernel, unaligned, traffic, images)


def _best(points: list[MatmulPoint]) -> float:
    return max(point.flops_per_s for point in points)


def measure_links(
    found: Findings, effort: Effort, tell: Tell, hosts: int = 1, plain: bool = False
) -> None:
    """Collectives of gloo ranks, and a collective call, as the engine makes them under a Plan; if
    `plain`, as torch's engines do. With several hosts by axis of the mesh
    (hosts, ranks of one): inside each host, one rank of each, and all ranks. All groups of an axis
    are busy at once, as in training; so ranks of one host share its link.
    """
    ranks, measure = dist.get_world_size(), functools.partial(_measure_group, plain)
    local = ranks // hosts
    if hosts == 1:
        found.collectives += measure(None, 1, effort, tell, "")
    else:
        mesh = init_device_mesh("cpu", (hosts, local))
        if local > 1:
            found.collectives += measure(mesh.get_group(1), 1, effort, tell, " in a host")
        across = measure(mesh.get_group(0), 1, effort, tell, " between hosts")
        if local > 1:
            across += measure(None, local, effort, tell, " of all ranks")
        found.between_hosts += across
    tell("issuing a collective")
    calls = time_calls("all_reduce", 4 * ranks, effort.samples * 3, plain=plain)
    found.issue = effort.pick(calls)
    tell("compute beside communication")
    found.share = _measure_share(effort, plain)


def _measure_group(
    plain: bool, group: Any, inside: int, effort: Effort, tell: Tell, where: str
) -> list[CollectivePoint]:
    """Every collective of a group by size; all ranks call it, each with its own group."""
    ranks = dist.get_world_size(group)
    points = []
    for kind in COLLECTIVES:
        tell(kind.replace("_", "-") + where)
        for nbytes in effort.sizes:
            numel = max(ranks, nbytes // 4 // ranks * ranks)
            whole, part = torch.ones(numel), torch.ones(numel // ranks)
            message = kind, whole, part, group, plain
            samples = [_time_together(*message) for _ in range(effort.samples + 2)]
            taken = effort.pick(samples[2:])
            points.append(CollectivePoint(kind, ranks, nbytes, taken.value, taken.spread, inside))
    return points


def measure_host(device: str, effort: Effort, tell: Tell) -> HostFindings:
    """Host seconds of an operator of the model, and of the engine's work for a unit: a chain of
    tiny blocks, bare and sharded over a group in which nothing is sent; and, replicated there, cast
    before each forward.
    """
    tell("the host: operators")
    x = torch.randn(4, 8, device=device)
    low = x.bfloat16()
    bare = _Chain().to(device)
    described = describe(bare, x, device=device)
    launches = sum(s.forward.launches + s.backward.launches for _, s in described.segments)
    _, bare_step = _time_steps(bare, x, effort)
    low_forward, _ = _time_steps(_Chain().to(device).bfloat16(), low, effort)
    tell("the host: the engine's units")
    plan = Plan.of("zero3", mesh=HOST_WORLD)
    unit = measure_unit(bare, x, len(bare.blocks), lambda model: shard(model, plan), effort)
    with fake_group(0, HOST_WORLD):
        whole = Plan.of("ddp", HOST_WORLD, compute_dtype="bfloat16", bucket_bytes=CAST_BYTES)
        casts = len(whole.resolve(bare).require_units())
        cast_forward, _ = _time_steps(shard(_Chain().to(device), whole), low, effort)
    return HostFindings(
        op=bare_step.above(NOTHING, launches),
        unit=unit,
        cast=cast_forward.above(low_forward, casts),
    )


def measure_unit(
    bare: nn.Module,
    x: Tensor,
    units: int,
    wrap: Callable[[nn.Module], nn.Module],
    effort: Effort,
) -> Sampled:
    """Host seconds of an engine's own work to gather, or to reduce, one unit of a tiny model: what
    a step takes beyond the bare model's, over a group in which nothing is sent.
    """
    _, alone = _time_steps(bare, x, effort)
    with fake_group(0, HOST_WORLD):
        _, sharded = _time_steps(wrap(copy.deepcopy(bare)), x, effort)
    return sharded.above(alone, 3 * units)  # gathered for forward and for backward, reduced once


def _time_steps(model: nn.Module, x: Tensor, effort: Effort) -> tuple[Sampled, Sampled]:
    """Host seconds of a forward, and of it and its backward, until the calls return."""
    forwards, steps = time_passes(model, lambda: model(x).sum(), effort.samples, warmup=3)
    return effort.pick(forwards), effort.pick(steps)


def _slowest_of_all(seconds: float) -> float:
    """The longest that any rank took: the same number on every rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _time_together(
    kind: str, whole: Tensor, part: Tensor, group: Any = None, plain: bool = False
) -> float:
    """Seconds of a collective from a common start of all ranks until the last one is done."""
    dist.barrier()
    began = time.perf_counter()
    issue_collective(kind, whole, part, group, plain).wait()
    return _slowest_of_all(time.perf_counter() - began)


def _timer(device: str, effort: Effort, ready: Callable[[], None], launches: int = 1) -> Timer:
    """What times calls on this device, which take the host as long as so many launches."""
    cuda = device == "cuda"
    sample: Callable[[Callable[[], Any], int], float] = (
        functools.partial(_sample_on_cuda, launches)
        if cuda
        else functools.partial(_sample_on_host, ready)
    )
    first, most = (2, MOST_LAUNCHES // launches) if cuda else (1, math.inf)

    def timer(call: Callable[[], Any]) -> Sampled:
        """Seconds of one call, repeated often enough for the clock."""
        sample(call, first)
        # Ranks repeat it equally often: they wait for each other.
        once = _slowest_of_all(sample(call, first))
        times = max(1, int(min(most, effort.seconds / max(once, 1e-7))))
        count = 1 if once > effort.longest_s else effort.samples
        return effort.pick([sample(call, times) for _ in range(count)])

    return timer


def _sample_on_host(ready: Callable[[], None], call: Callable[[], Any], times: int) -> float:
    ready()
    began = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - began) / times


def _sample_on_cuda(launches: int, call: Callable[[], Any], times: int) -> float:
    # Between long kernels the host's time is next to nothing: the clock is that of a device under
    # load.
    return time_launches(call, times, times * launches * LAUNCH_CYCLES)


def _measure_products(device: str, dtype: str, effort: Effort, timer: Timer) -> list[MatmulPoint]:
    points = []
    for m, n, k in effort.shapes:
        a = torch.randn(m, k, device=device).to(getattr(torch, dtype))
        b = torch.randn(n, k, device=device).to(a.dtype)
        out = torch.empty(m, n, device=device, dtype=a.dtype)
        # The weight as it lies in a linear layer: transposed.
        rate = timer(functools.partial(torch.mm, a, b.t(), out=out)).as_rate(2.0 * m * n * k)
        points.append(MatmulPoint(m, n, k, rate.value, rate.spread))
    return points


def _measure_unaligned(device: str, dtype: str, effort: Effort, timer: Timer) -> dict[int, Sampled]:
    """What the products of a linear layer, forward and backward, keep of their rate where it has a
    few more outputs, so that the rows of its results no longer lie apart by a multiple of 16 bytes.
    """
    m, n, k = effort.unaligned

    def products(n: int) -> float:
        draw = functools.partial(torch.randn, device=device, dtype=getattr(torch, dtype))
        x, weight, gradient = draw(m, k), draw(n, k), draw(m, n)
        calls: tuple[Callable[[], Any], ...] = (
            functools.partial(torch.mm, x, weight.t()),
            functools.partial(torch.mm, gradient, weight),
            functools.partial(torch.mm, gradient.t(), x),
        )
        return sum(timer(call).value for call in calls) / n

    whole, size = products(n), getattr(torch, dtype).itemsize
    return {
        nbytes: Sampled(whole / products(n + nbytes // size), 0.0)
        for nbytes in UNALIGNED
        if nbytes >= size
    }


def _measure_attention(
    device: str, dtype: str, shape: tuple[int, int, int, int], timer: Timer
) -> TimedAttention:
    batch, heads, length, width = shape
    q, k, v = (
        torch.randn(shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def step() -> None:
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        torch.autograd.grad(out, (q, k, v), gradient)

    flops = (2 + 5) * 2.0 * batch * heads * length * length * width / 2
    return TimedAttention(length * width / 2, flops, timer(step))


def _measure_share(effort: Effort, plain: bool) -> Sampled:
    """The share of compute that communication takes: products alone, then beside all-reduces. All
    of it where the ranks move what they send themselves.
    """
    if Group.of("all", None, torch.device("cpu"), plain).near is not None:
        return Sampled(MOST_SHARE, 0.0)
    a = torch.randn(256, 256)
    big = torch.ones(max(effort.sizes, default=2**20) // 4)

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(a, a)
        return time.perf_counter() - began

    shares = []
    dist.barrier()
    moving = _time_together("all_reduce", big, big, plain=True)
    count = max(1, int(moving / max(products(10) / 10, 1e-7)))
    for _ in range(effort.samples):
        dist.barrier()
        alone = products(count)
        dist.barrier()
        works = [dist.all_reduce(big, async_op=True) for _ in range(3)]
        beside = products(count)
        for work in works:
            work.wait()
        shares.append(min(MOST_SHARE, max(0.0, 1 - alone / beside)))
    return Sampled(statistics.median(shares), spread(shares))  # a ratio: no sample is undisturbed


class _Chain(nn.Module):
    """Small blocks, so that what counts is the host."""

    def __init__(self, blocks: int = 8, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*[nn.Linear(width, width) for _ in range(4)]) for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = functional.silu(block(x)) + x
        return x
