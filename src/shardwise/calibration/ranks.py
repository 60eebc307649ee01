"""What `shardwise calibrate` measures, on each rank: rates of products, memory, collectives, host.

Every figure is the median of several samples; its error bar is their interquartile range. On a
busy machine, by request, it is the quickest of many short samples instead: those that nothing else
disturbed. Ranks measure together, each on its own cores, because that is how they train.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from shardwise.description.cluster import COLLECTIVES
from shardwise.engine import torch_private
from shardwise.profiling.timing import spread

Tell = Callable[[str], None]
LAUNCH_CYCLES = 40_000  # of a GPU, while its host launches one kernel: about 20 us
MOST_LAUNCHES = 400  # fewer than a stream holds before the host has to wait


@dataclass(frozen=True)
class Sampled:
    """A measured figure and the interquartile range of its samples."""

    value: float
    spread: float


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
    attention: tuple[int, int, int, int] = (1, 4, 512, 64)  # batch, heads, length, width
    longest_s: float = 2.0  # a product that takes longer is measured once
    quickest: bool = False  # take the quickest sample, not the median

    def pick(self, samples: list[float]) -> Sampled:
        """The figure that these times stand for."""
        value = min(samples) if self.quickest else statistics.median(samples)
        return Sampled(value, spread(samples))

    def for_a_busy_machine(self) -> Effort:
        """Many short samples, of which the quickest counts."""
        return dataclasses.replace(self, samples=60, seconds=0.002, quickest=True)


CPU = Effort(
    shapes=tuple(
        (m, n, k)
        for m in (64, 512, 2048)
        for n, k in ((128, 128), (384, 128), (128, 384), (512, 512), (2048, 512), (512, 2048))
    ),
    sizes=tuple(2**p for p in range(10, 25, 2)),
)
CUDA = Effort(
    samples=15,
    seconds=0.02,
    shapes=tuple(
        (m, n, k)
        for m in (1024, 4096, 16384)
        for n, k in (
            (1024, 1024),
            (4096, 1024),
            (1024, 4096),
            (4096, 4096),
            (14336, 4096),
            (4096, 14336),
            (32000, 4096),
        )
    ),
    dtypes=("bfloat16", "float16", "float32"),
    copy_bytes=2**30,
    attention=(4, 16, 2048, 128),
)
QUICK = Effort(
    samples=3,
    seconds=0.01,
    shapes=((64, 128, 128), (256, 256, 256)),
    dtypes=("float32",),
    copy_bytes=2**22,
    sizes=(2**10, 2**16, 2**20),
    attention=(1, 2, 64, 32),
)


@dataclass
class Findings:
    """What rank 0 tells."""

    matmul: dict[str, list[tuple[int, int, int, Sampled]]] = field(default_factory=dict)
    attention: dict[str, Sampled] = field(default_factory=dict)  # FLOP/s
    copy: Sampled | None = None  # bytes read and written per second
    kernel: Sampled | None = None
    collectives: list[tuple[str, int, Sampled]] = field(default_factory=list)
    issue: Sampled | None = None  # of one collective, host seconds
    share: Sampled | None = None


def measure_device(device: str, effort: Effort, ready: Callable[[], None], tell: Tell) -> Findings:
    """Products, attention, copies and the shortest kernel of one device. `ready` is called before
    each sample: a barrier of the ranks.
    """
    found = Findings()
    timer = _timer(device, effort, ready)
    for dtype in effort.dtypes:
        tell(f"matrix products in {dtype}")
        found.matmul[dtype] = _measure_products(device, dtype, effort, timer)
        tell(f"attention in {dtype}")
        found.attention[dtype] = _measure_attention(device, dtype, effort, timer)
    tell("memory bandwidth")
    source = torch.ones(effort.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.nbytes
    found.copy = _invert(timer(lambda: target.copy_(source)), moved)
    tell("the shortest kernel")
    tiny = torch.zeros(8, device=device)
    found.kernel = timer(lambda: tiny.add_(1.0))
    return found


def measure_links(found: Findings, effort: Effort, tell: Tell) -> None:
    """Collectives over the default group of gloo ranks; a collective call."""
    ranks = dist.get_world_size()
    for kind in COLLECTIVES:
        tell(kind.replace("_", "-"))
        for nbytes in effort.sizes:
            call = _collective(kind, nbytes, ranks)
            samples = [_slowest(call) for _ in range(effort.samples + 2)][2:]
            found.collectives.append((kind, nbytes, effort.pick(samples)))
    tell("issuing a collective")
    small = torch.zeros(ranks)
    issued = []
    for _ in range(effort.samples * 3):
        dist.barrier()
        began = time.perf_counter()
        work = dist.all_reduce(small, async_op=True)
        issued.append(time.perf_counter() - began)
        work.wait()
    found.issue = effort.pick(issued)
    tell("compute beside communication")
    found.share = _measure_share(effort)


def _slowest_of_all(seconds: float) -> float:
    """The same number on every rank: it decides how often they wait for each other."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return seconds
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _timer(device: str, effort: Effort, ready: Callable[[], None]) -> Timer:
    """What times calls on this device."""
    return _timer_on_cuda(effort) if device == "cuda" else _timer_on_host(effort, ready)


def _timer_on_host(effort: Effort, ready: Callable[[], None]) -> Timer:
    def timer(call: Callable[[], Any]) -> Sampled:
        """Seconds of one call, repeated often enough for the clock."""
        call()
        began = time.perf_counter()
        call()
        once = _slowest_of_all(time.perf_counter() - began)
        times = max(1, int(effort.seconds / max(once, 1e-7)))
        samples = []
        for _ in range(1 if once > effort.longest_s else effort.samples):
            ready()
            began = time.perf_counter()
            for _ in range(times):
                call()
            samples.append((time.perf_counter() - began) / times)
        return effort.pick(samples)

    return timer


def _timer_on_cuda(effort: Effort) -> Timer:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def sample(call: Callable[[], Any], times: int) -> float:
        # Launches queue up behind a spin, so that the host's own time is not measured. Between long
        # kernels it is next to nothing: the clock is that of a device under load.
        torch.cuda._sleep(times * LAUNCH_CYCLES)
        start.record()
        for _ in range(times):
            call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / times

    def timer(call: Callable[[], Any]) -> Sampled:
        """Device seconds of one call."""
        sample(call, 2)
        once = sample(call, 2)
        times = max(1, min(MOST_LAUNCHES, int(effort.seconds / max(once, 1e-7))))
        count = 1 if once > effort.longest_s else effort.samples
        return effort.pick([sample(call, times) for _ in range(count)])

    return timer


def _invert(seconds: Sampled, work: float) -> Sampled:
    """A rate from a time, its error bar at first order."""
    rate = work / seconds.value
    return Sampled(rate, rate * seconds.spread / seconds.value)


def _measure_products(
    device: str, dtype: str, effort: Effort, timer: Timer
) -> list[tuple[int, int, int, Sampled]]:
    rows = []
    for m, n, k in effort.shapes:
        a = torch.randn(m, k, device=device).to(getattr(torch, dtype))
        b = torch.randn(n, k, device=device).to(a.dtype)
        out = torch.empty(m, n, device=device, dtype=a.dtype)
        # The weight as it lies in a linear layer: transposed.
        seconds = timer(_bind(torch.mm, a, b.t(), out))
        rows.append((m, n, k, _invert(seconds, 2.0 * m * n * k)))
    return rows


def _bind(product: Any, a: Tensor, b: Tensor, out: Tensor) -> Callable[[], Any]:
    return lambda: product(a, b, out=out)


def _measure_attention(device: str, dtype: str, effort: Effort, timer: Timer) -> Sampled:
    """Causal attention, forward and backward; FLOPs as a description counts them."""
    batch, heads, length, width = effort.attention
    shape = (batch, heads, length, width)
    q, k, v = (
        torch.randn(shape, device=device, dtype=getattr(torch, dtype), requires_grad=True)
        for _ in range(3)
    )
    gradient = torch.randn_like(q)

    def step() -> None:
        functional.scaled_dot_product_attention(q, k, v, is_causal=True).backward(gradient)

    flops = (2 + 5) * 2.0 * batch * heads * length * length * width / 2
    return _invert(timer(step), flops)


def _collective(kind: str, nbytes: int, ranks: int) -> Callable[[], Any]:
    numel = max(ranks, nbytes // 4 // ranks * ranks)
    whole, part = torch.ones(numel), torch.ones(numel // ranks)
    if kind == "all_gather":
        return lambda: torch_private.all_gather(whole, part, None).wait()
    if kind == "reduce_scatter":
        return lambda: torch_private.reduce_scatter(part, whole, None).wait()
    return lambda: dist.all_reduce(whole)


def _slowest(call: Callable[[], Any]) -> float:
    """Seconds from a common start until the last rank is done."""
    dist.barrier()
    began = time.perf_counter()
    call()
    taken = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def _measure_share(effort: Effort) -> Sampled:
    """The share of compute that communication takes: products alone, then beside all-reduces."""
    a = torch.randn(256, 256)
    big = torch.ones(max(effort.sizes, default=2**20) // 4)

    def products(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            torch.mm(a, a)
        return time.perf_counter() - began

    shares = []
    dist.barrier()
    moving = _slowest(lambda: dist.all_reduce(big))
    count = max(1, int(moving / max(products(10) / 10, 1e-7)))
    for _ in range(effort.samples):
        dist.barrier()
        alone = products(count)
        dist.barrier()
        works = [dist.all_reduce(big, async_op=True) for _ in range(3)]
        beside = products(count)
        for work in works:
            work.wait()
        shares.append(min(0.95, max(0.0, 1 - alone / beside)))
    return Sampled(statistics.median(shares), spread(shares))  # a ratio: no sample is undisturbed


class Chain(nn.Module):
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
