"""Timing the kernels of a description, each alone: what a prediction of compute is summed from.

Each distinct kernel of a described model runs by itself, at its own shape and dtype, on random
values (a matrix product's power, and so its clock, depends on them). Nothing of a training step is
timed here. On a GPU the clock depends on what runs before and after, too: `replay` runs the
same recipes in a step's order.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.description.model import PRODUCTS, KernelFact, ModelDescription, PassFacts
from shardwise.description.preset import Size
from shardwise.planning.plan import DTYPES
from shardwise.profiling.timing import time_launches

Run = Callable[[], object]
Draw = Callable[..., Tensor]  # random numbers of a shape
Forward = tuple[Callable[[], Tensor], tuple[Tensor, ...]]
SPIN_CYCLES = 20_000_000  # about 10 ms: the host queues its launches behind it
GROUP_S = 0.01  # of kernels between two events
GROUPS = 3
COLD_BYTES = 2**26  # more than a CPU's last cache holds
UNARY = ("silu", "gelu", "relu", "sigmoid", "neg", "exp", "sqrt", "rsqrt", "clone", "copy", "copy_")


@dataclass(frozen=True)
class Widths:
    """What an operator's bytes do not tell: the model's widths."""

    tokens: int
    width: int
    vocab: int

    @classmethod
    def of(cls, size: Size, batch: int, length: int) -> Widths:
        return cls(batch * length, size.d_model, size.vocab)


@dataclass
class KernelTable:
    """Seconds by kernel, measured on a CPU. Two kernels with one key take the same time."""

    seconds: dict[str, float] = field(default_factory=dict)
    quickest: bool = False  # the sample that nothing disturbed, not the median

    def measure(self, description: ModelDescription, widths: Widths) -> int:
        """Time the kernels that are not known yet; gives how many those were."""
        new = 0
        for part, direction in passes(description):
            for kernel in part.kernels:
                key = key_of(kernel, direction, widths)
                if key not in self.seconds:
                    self.seconds[key] = self._time(kernel, direction, widths)
                    new += 1
        return new

    def _time(self, kernel: KernelFact, direction: str, widths: Widths) -> float:
        device = torch.device("cpu")
        # In a model, operands and results are rarely in a CPU's caches: take turns on many.
        sets = int(min(32, max(1, COLD_BYTES // (kernel.bytes + 1))))
        runs = [recipe(kernel, direction, widths, device) for _ in range(sets)]
        return time_on(_in_turn(runs), device, quickest=self.quickest)

    def total(self, part: PassFacts, direction: str, widths: Widths, launch: float = 0.0) -> float:
        """Seconds of a pass: its kernels one after the other, and `launch` for each."""
        seconds = sum(self.seconds[key_of(k, direction, widths)] * k.count for k in part.kernels)
        return seconds + part.launches * launch

    def passes(
        self, description: ModelDescription, widths: Widths, launch: float = 0.0
    ) -> list[tuple[PassFacts, float]]:
        """Every pass of the description with its seconds, for `Costs.set_passes`."""
        return [(p, self.total(p, d, widths, launch)) for p, d in passes(description)]


def _in_turn(runs: list[Run]) -> Run:
    """One of the runs at each call; as many results as there are runs stay in memory."""
    if len(runs) == 1:
        return runs[0]
    turns, results = itertools.cycle(runs), deque[object](maxlen=len(runs))

    def run() -> None:
        results.append(next(turns)())

    return run


def passes(description: ModelDescription) -> Iterable[tuple[PassFacts, str]]:
    for _, segment in description.segments:
        yield segment.forward, "forward"
        yield segment.recompute, "forward"
        yield segment.backward, "backward"


def key_of(kernel: KernelFact, direction: str, widths: Widths) -> str:
    layout = _layout(kernel, direction, widths) if kernel.kind in PRODUCTS else ""
    shape = "x".join(map(str, kernel.shape))
    size = f"{shape}:{kernel.batch}:{kernel.bytes:.0f}"
    return f"{kernel.kind}:{kernel.op}:{kernel.dtype}:{size}:{layout}"


def _layout(kernel: KernelFact, direction: str, widths: Widths) -> str:
    """How operands lie: forward x W^T, backward dY W for the input and dY^T x for the weight."""
    if direction == "forward":
        return "nt"
    return "tn" if kernel.shape[2] == widths.tokens and kernel.shape[0] != widths.tokens else "nn"


def recipe(kernel: KernelFact, direction: str, widths: Widths, device: torch.device) -> Run:
    """A function that runs this kernel once."""
    dtype = DTYPES.get(kernel.dtype, torch.float32)
    draw: Draw = partial(torch.randn, device=device, dtype=dtype)
    if kernel.kind in PRODUCTS:
        return _matmul(kernel, _layout(kernel, direction, widths), draw)
    special = kernel.op if kernel.bytes > 2**16 else ""
    make = _SPECIAL.get(kernel.kind if kernel.kind == "attention" else special)
    if make is None:
        return _elementwise(kernel, dtype, draw)
    forward, inputs = make(kernel, widths, draw)
    return _gradient(forward, inputs) if "backward" in kernel.op else forward


def _matmul(kernel: KernelFact, layout: str, draw: Draw) -> Run:
    m, n, k = kernel.shape
    batch = (kernel.batch,) if kernel.batch > 1 else ()
    if layout == "nt":
        left, right = draw(*batch, m, k), draw(*batch, n, k).transpose(-1, -2)
    elif layout == "tn":
        left, right = draw(*batch, k, m).transpose(-1, -2), draw(*batch, k, n)
    else:
        left, right = draw(*batch, m, k), draw(*batch, k, n)
    return lambda: left @ right


def _elementwise(kernel: KernelFact, dtype: torch.dtype, draw: Draw) -> Run:
    if kernel.op == "_to_copy":
        # From or to 16 bits: 6 bytes an element together.
        other = torch.bfloat16 if dtype is torch.float32 else torch.float32
        source = draw(max(1, int(kernel.bytes // 6)), dtype=torch.float32).to(other)
        return lambda: source.to(dtype)
    arrays = 2 if kernel.op in UNARY else 3
    count = max(1, int(kernel.bytes // (arrays * dtype.itemsize)))
    first = draw(count)
    if arrays == 2:
        return lambda: functional.silu(first)
    second = draw(count)
    return lambda: first + second


def _gradient(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Run:
    """Only the backward kernels of `forward`."""
    for tensor in inputs:
        tensor.requires_grad_()
    with torch.enable_grad():
        output = forward()
    incoming = torch.randn_like(output)
    return lambda: torch.autograd.grad(output, inputs, incoming, retain_graph=True)


# What a kernel's forward is, and the tensors that its backward gives gradients of.


def _attention(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    batch, heads, queries, keys, width = kernel.shape
    q, k, v = (draw(batch, n, heads, width).transpose(1, 2) for n in (queries, keys, keys))
    attend = functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, is_causal=queries == keys), (q, k, v)


def _draw_rows(kernel: KernelFact, width: int, draw: Draw) -> Tensor:
    """As many rows of this width as the kernel's bytes hold, in each tensor that it moves."""
    tensors = 3 if "backward" in kernel.op else 2
    itemsize = DTYPES.get(kernel.dtype, torch.float32).itemsize
    return draw(max(1, int(kernel.bytes // (tensors * itemsize * width))), width)


def _norm(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    x = _draw_rows(kernel, widths.width, draw)
    weight = torch.ones_like(x[0])
    return lambda: functional.rms_norm(x, (widths.width,), weight), (x, weight)


def _softmax(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    x = _draw_rows(kernel, widths.vocab, draw)
    return lambda: functional.log_softmax(x, -1), (x,)


def _nll(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    x = draw(widths.tokens, widths.vocab)
    target = torch.randint(0, widths.vocab, (widths.tokens,), device=x.device)
    return lambda: functional.nll_loss(x, target), (x,)


def _embedding(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    table = draw(widths.vocab, widths.width)
    tokens = torch.randint(0, widths.vocab, (widths.tokens,), device=table.device)
    return lambda: functional.embedding(tokens, table), (table,)


def _cat(kernel: KernelFact, widths: Widths, draw: Draw) -> Forward:
    whole = _draw_rows(kernel, 3 * widths.width, draw)
    parts = tuple(part.contiguous() for part in whole.chunk(3, dim=-1))
    return lambda: torch.cat(parts, dim=-1), parts


_SPECIAL: Mapping[str, Callable[[KernelFact, Widths, Draw], Forward]] = {
    "attention": _attention,
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


def time_on(run: Run, device: torch.device, quickest: bool = False) -> float:
    """Seconds of one run on an otherwise idle device that is kept busy: the median of groups."""
    if device.type == "cuda":
        return _time_on_cuda(run)
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


def _time_on_cuda(run: Run) -> float:
    for _ in range(2):
        run()
    once = time_launches(run, 2, SPIN_CYCLES)
    count = max(3, min(200, int(GROUP_S / max(once, 1e-7))))
    return statistics.median(time_launches(run, count, SPIN_CYCLES) for _ in range(GROUPS))
