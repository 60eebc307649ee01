"""Timing the kernels of a description, each alone: what a prediction of compute is summed from.

Each distinct kernel of a described model runs by itself, at its own shape and dtype, on random
values (a matrix product's power, and so its clock, depends on them). Nothing of a training step is
timed here. On a GPU the clock depends on what runs before and after, too: `accuracy_replay` runs
the same recipes in a step's order.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.description.model import KernelFact, ModelDescription, Pass
from shardwise.planning.plan import DTYPES

Run = Callable[[], object]
SPIN_CYCLES = 20_000_000  # about 10 ms: the host queues its launches behind it
GROUP_S = 0.01  # of kernels between two events
GROUPS = 3
COLD_BYTES = 2**26  # more than a CPU's last cache holds
UNARY = ("silu", "gelu", "relu", "sigmoid", "neg", "exp", "sqrt", "rsqrt", "clone", "copy", "copy_")


@dataclass(frozen=True)
class Sizes:
    """What an operator's bytes do not tell: the model's widths."""

    tokens: int
    width: int
    vocab: int


@dataclass
class KernelTable:
    """Measured seconds by kernel. Two kernels with one key take the same time."""

    device: str
    seconds: dict[str, float] = field(default_factory=dict)
    quickest: bool = False  # on a CPU: the sample that nothing disturbed, not the median

    def measure(self, description: ModelDescription, sizes: Sizes) -> int:
        """Time the kernels that are not known yet; gives how many those were."""
        new = 0
        for part, direction in passes(description):
            for kernel in part.kernels:
                key = key_of(kernel, direction, sizes)
                if key not in self.seconds:
                    self.seconds[key] = self._time(kernel, direction, sizes)
                    new += 1
        return new

    def _time(self, kernel: KernelFact, direction: str, sizes: Sizes) -> float:
        place = torch.device(self.device)
        # In a model, operands and results are rarely in a CPU's caches: take turns on many.
        sets = 1 if place.type == "cuda" else int(min(32, max(1, COLD_BYTES // (kernel.bytes + 1))))
        runs = [recipe(kernel, direction, sizes, place) for _ in range(sets)]
        return time_on(_in_turn(runs), place, quickest=self.quickest)

    def total(self, part: Pass, direction: str, sizes: Sizes, launch: float = 0.0) -> float:
        """Seconds of a pass: its kernels one after the other, and `launch` for each."""
        seconds = sum(self.seconds[key_of(k, direction, sizes)] * k.count for k in part.kernels)
        return seconds + part.launches * launch

    def passes(
        self, description: ModelDescription, sizes: Sizes, launch: float = 0.0
    ) -> list[tuple[Pass, float]]:
        """Every pass of the description with its seconds, for `Costs.set_passes`."""
        return [(p, self.total(p, d, sizes, launch)) for p, d in passes(description)]


def _in_turn(runs: list[Run]) -> Run:
    """One of the runs at each call; as many results as there are runs stay in memory."""
    if len(runs) == 1:
        return runs[0]
    turns, results = itertools.cycle(runs), deque[object](maxlen=len(runs))

    def run() -> None:
        results.append(next(turns)())

    return run


def passes(description: ModelDescription) -> Iterable[tuple[Pass, str]]:
    for _, segment in description.segments:
        yield segment.forward, "forward"
        yield segment.recompute, "forward"
        yield segment.backward, "backward"


def key_of(kernel: KernelFact, direction: str, sizes: Sizes) -> str:
    layout = _layout(kernel, direction, sizes) if kernel.kind == "matmul" else ""
    shape = "x".join(map(str, kernel.shape))
    size = f"{shape}:{kernel.batch}:{kernel.bytes:.0f}"
    return f"{kernel.kind}:{kernel.op}:{kernel.dtype}:{size}:{layout}"


def _layout(kernel: KernelFact, direction: str, sizes: Sizes) -> str:
    """How operands lie: forward x W^T, backward dY W for the input and dY^T x for the weight."""
    if direction == "forward":
        return "nt"
    return "tn" if kernel.shape[2] == sizes.tokens and kernel.shape[0] != sizes.tokens else "nn"


def recipe(kernel: KernelFact, direction: str, sizes: Sizes, device: torch.device) -> Run:
    """A function that runs this kernel once."""
    dtype = DTYPES.get(kernel.dtype, torch.float32)
    if kernel.kind == "matmul":
        return _matmul(kernel, _layout(kernel, direction, sizes), dtype, device)
    if kernel.kind == "attention":
        return _attention(kernel, dtype, device)
    special = _SPECIAL.get(kernel.op)
    if special is not None and kernel.bytes > 2**16:
        return special(kernel, sizes, dtype, device)
    return _elementwise(kernel, dtype, device)


def _matmul(kernel: KernelFact, layout: str, dtype: torch.dtype, device: torch.device) -> Run:
    m, n, k = kernel.shape
    batch = (kernel.batch,) if kernel.batch > 1 else ()

    def draw(*shape: int) -> Tensor:
        return torch.randn((*batch, *shape), device=device, dtype=dtype)

    if layout == "nt":
        left, right = draw(m, k), draw(n, k).transpose(-1, -2)
    elif layout == "tn":
        left, right = draw(k, m).transpose(-1, -2), draw(k, n)
    else:
        left, right = draw(m, k), draw(k, n)
    return lambda: left @ right


def _attention(kernel: KernelFact, dtype: torch.dtype, device: torch.device) -> Run:
    batch, heads, queries, keys, width = kernel.shape
    backward = "backward" in kernel.op

    def draw(length: int) -> Tensor:
        made = torch.randn((batch, length, heads, width), device=device, dtype=dtype)
        return made.transpose(1, 2).requires_grad_(backward)

    q, k, v = draw(queries), draw(keys), draw(keys)
    causal = queries == keys

    def attend() -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return _gradient(attend, (q, k, v)) if backward else attend


def _gradient(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Run:
    """Only the backward kernels of `forward`."""
    with torch.enable_grad():
        output = forward()
    incoming = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, incoming, retain_graph=True)


def _elementwise(kernel: KernelFact, dtype: torch.dtype, device: torch.device) -> Run:
    if kernel.op == "_to_copy":
        # From or to 16 bits: 6 bytes an element together.
        other = torch.bfloat16 if dtype is torch.float32 else torch.float32
        source = torch.randn(max(1, int(kernel.bytes // 6)), device=device).to(other)
        return lambda: source.to(dtype)
    arrays = 2 if kernel.op in UNARY else 3
    count = max(1, int(kernel.bytes // (arrays * dtype.itemsize)))
    first = torch.randn(count, device=device, dtype=dtype)
    if arrays == 2:
        return lambda: torch.nn.functional.silu(first)
    second = torch.randn(count, device=device, dtype=dtype)
    return lambda: first + second


def _norm(kernel: KernelFact, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    backward = kernel.op.endswith("backward")
    arrays = 3 if backward else 2
    rows = max(1, int(kernel.bytes // (arrays * dtype.itemsize * sizes.width)))
    x = torch.randn((rows, sizes.width), device=device, dtype=dtype, requires_grad=backward)
    weight = torch.ones(sizes.width, device=device, dtype=dtype, requires_grad=backward)

    def norm() -> Tensor:
        return functional.rms_norm(x, (sizes.width,), weight)

    return _gradient(norm, (x, weight)) if backward else norm


def _softmax(kernel: KernelFact, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    backward = kernel.op != "_log_softmax"
    arrays = 3 if backward else 2
    rows = max(1, int(kernel.bytes // (arrays * dtype.itemsize * sizes.vocab)))
    x = torch.randn((rows, sizes.vocab), device=device, dtype=dtype, requires_grad=backward)

    def softmax() -> Tensor:
        return functional.log_softmax(x, -1)

    return _gradient(softmax, (x,)) if backward else softmax


def _nll(kernel: KernelFact, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    backward = kernel.op.endswith("backward")
    x = torch.randn((sizes.tokens, sizes.vocab), device=device, dtype=dtype, requires_grad=backward)
    target = torch.randint(0, sizes.vocab, (sizes.tokens,), device=device)

    def loss() -> Tensor:
        return functional.nll_loss(x, target)

    return _gradient(loss, (x,)) if backward else loss


def _embedding(kernel: KernelFact, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    backward = kernel.op.endswith("backward")
    table = torch.randn(
        (sizes.vocab, sizes.width), device=device, dtype=dtype, requires_grad=backward
    )
    tokens = torch.randint(0, sizes.vocab, (sizes.tokens,), device=device)

    def look_up() -> Tensor:
        return functional.embedding(tokens, table)

    return _gradient(look_up, (table,)) if backward else look_up


def _cat(kernel: KernelFact, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> Run:
    rows = max(1, int(kernel.bytes // (2 * 3 * dtype.itemsize * sizes.width)))
    parts = [torch.randn((rows, sizes.width), device=device, dtype=dtype) for _ in range(3)]
    return lambda: torch.cat(parts, dim=-1)


_SPECIAL: Mapping[str, Callable[[KernelFact, Sizes, torch.dtype, torch.device], Run]] = {
    "fused_rms_norm": _norm,
    "fused_rms_norm_backward": _norm,
    "_log_softmax": _softmax,
    "_log_softmax_backward_data": _softmax,
    "nll_loss_forward": _nll,
    "nll_loss_backward": _nll,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding,
    "cat": _cat,
}


def time_on(run: Run, device: torch.device, groups: int = GROUPS, quickest: bool = False) -> float:
    """Seconds of one run on an otherwise idle device that is kept busy: the median of groups."""
    if device.type == "cuda":
        return _time_on_cuda(run, groups)
    with torch.no_grad():
        run()
        began = time.perf_counter()
        run()
        once = time.perf_counter() - began
        count = max(16, min(200, int(GROUP_S / max(once, 1e-7))))
        samples = []
        for _ in range(count):
            began = time.perf_counter()
            run()
            samples.append(time.perf_counter() - began)
    return min(samples) if quickest else statistics.median(samples)


def _time_on_cuda(run: Run, groups: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def timed(count: int) -> float:
        # Behind a spin the launches are all queued before the first one runs, so that the host's
        # own time is not measured.
        torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        for _ in range(count):
            run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    for _ in range(2):
        run()
    once = timed(2)
    count = max(3, min(200, int(GROUP_S / max(once, 1e-7))))
    return statistics.median(timed(count) for _ in range(groups))
