"""How well a device moves memory in kernels of each kind, beside a large copy.

Each case is one operator, or one and its backward, whose kernels are all of one kind; what it takes
over what a copy of its bytes takes is the kind's factor in the cluster's file, the median of its
cases. Two kinds get what they take beside, too: reductions, of which a step has many small ones,
and gradients of tables, whose rows are sorted first.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.calibration.images import TimedCase, kernels_of, step_of
from shardwise.description.cluster import Traffic
from shardwise.description.model import KernelKind
from shardwise.predict.cost import Costs
from shardwise.profiling.timing import spread

if TYPE_CHECKING:
    from shardwise.calibration.measure import Tell, Timer

STARTED = ("reduction", "lookup_gradient")  # kinds that take some time for any size
GROUPS = 8  # of channels, in a group norm
HEADS = 16
VOCABULARY = 32_000
LEAST_ROWS, LEAST_SIDE = 32, 8


@dataclass(frozen=True)
class Case:
    """An operator on random numbers of these shapes; `trains`: and its backward."""

    kind: KernelKind
    name: str
    run: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    trains: bool = False
    dtype: str = ""  # another than the usual one

    def draw(self, device: str, usual: str) -> list[Tensor]:
        dtype = getattr(torch, self.dtype or usual)
        return [
            torch.randn(shape, device=device, dtype=dtype, requires_grad=self.trains)
            for shape in self.shapes
        ]


def _heads_first(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(0, 1).contiguous()


def _all_but_the_last(x: Tensor) -> Tensor:
    return x[:, :-1].contiguous()


def _table_gradient(x: Tensor) -> Tensor:
    rows = torch.arange(x.shape[0], device=x.device) * 7919 % VOCABULARY
    return torch.ops.aten.embedding_dense_backward(x, rows, VOCABULARY, -1, False)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias)


def _rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x, x.shape[-1:], weight)


def _batch_norm(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.batch_norm(image, None, None, weight, bias, training=True)


def _group_norm(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return functional.group_norm(image, GROUPS, weight, bias)


def cases(usual: str = "bfloat16", fewer: int = 1, smaller: int = 1) -> Iterator[Case]:
    """The cases, in that dtype; with so many times fewer rows, and images whose sides are cut."""
    other = "float32" if usual != "float32" else "bfloat16"
    for rows, width in ((8192, 1024), (16384, 1024), (8192, 4096), (2048, 4096), (1024, 1024)):
        x = max(LEAST_ROWS, rows // fewer), width
        size = f"{x[0]} x {x[1]}"
        yield Case("reduction", f"columns of {size}", partial(torch.sum, dim=0), (x,))
        if rows < 8192:
            continue
        yield Case("strided", f"heads of {size} first", _heads_first, (x,))
        yield Case("strided", f"a row added to {size}", torch.add, (x, (width,)))
        yield Case("strided", f"{size} without its last column", _all_but_the_last, (x,))
        yield Case("cast", f"{size} to {other}", partial(_to, other), (x,))
        yield Case("layer_norm", f"layer norm of {size}", _layer_norm, (x, x[1:], x[1:]), True)
        yield Case("rms_norm", f"RMS norm of {size}", _rms_norm, (x, x[1:]), True)
        yield Case("lookup_gradient", f"a table's of {size}", _table_gradient, (x,))
    logits = max(LEAST_ROWS, 4096 // fewer), VOCABULARY
    log_softmax = partial(functional.log_softmax, dim=-1)
    yield Case("softmax", f"log softmax of {logits[0]}", log_softmax, (logits,), True, "float32")
    for batch, channels, side in ((64, 64, 112), (64, 256, 56), (64, 1024, 14), (16, 128, 128)):
        image = max(1, batch // fewer), channels, *[max(LEAST_SIDE, side // smaller)] * 2
        shapes = image, (channels,), (channels,)
        size = f"{image[0]} x {channels} x {image[2]}^2"
        yield Case("batch_norm", f"batch norm of {size}", _batch_norm, shapes, True)
        yield Case("group_norm", f"group norm of {size}", _group_norm, shapes, True)
        if side > 56:
            pool = partial(functional.max_pool2d, kernel_size=2)
            yield Case("pool", f"the greatest of 2 x 2 of {size}", pool, (image,), True)


def _to(dtype: str, x: Tensor) -> Tensor:
    return x.to(getattr(torch, dtype))


def measure_traffic(
    device: str, usual: str, cut: tuple[int, int], timer: Timer, tell: Tell
) -> list[TimedCase]:
    """Time every case, in the dtype that models compute in there."""
    tell(f"norms, sums and other movers of memory in {usual}")
    found = []
    for case in cases(usual, *cut):
        tensors = case.draw(device, usual)
        kernels = tuple(k for k in kernels_of(case.run, tensors) if k.kind == case.kind)
        if not kernels:  # the device has no such kernel
            continue
        taken = timer(step_of(case.run, tensors)).value
        found.append(TimedCase(case.name, case.dtype or usual, kernels, taken))
    return found


def fit_traffic(costs: Costs, timed: Sequence[TimedCase]) -> dict[KernelKind, tuple[Any, ...]]:
    """By kind: its Traffic, and the spread of its factor over the cases. `costs` are of a device
    without any.
    """
    found: dict[KernelKind, tuple[Any, ...]] = {}
    kinds = dict.fromkeys(one.kernels[0].kind for one in timed)
    for kind in kinds:
        here = [one for one in timed if one.kernels[0].kind == kind]
        start = _start_of(costs, here) if kind in STARTED else 0.0
        factors = [max(1e-3, (one.seconds - start) / one.copy_s(costs)) for one in here]
        found[kind] = Traffic(kind, statistics.median(factors), start), spread(factors)
    return found


def _start_of(costs: Costs, timed: Sequence[TimedCase]) -> float:
    """Seconds that no bytes explain: where the line through all cases begins that is nearest to
    them by shares of what they took.
    """
    rows = [[1 / one.seconds, one.copy_s(costs) / one.seconds] for one in timed]
    matrix, ones = torch.tensor(rows, dtype=torch.float64), torch.ones(len(rows), 1).double()
    start = float(torch.linalg.lstsq(matrix, ones).solution[0])
    return min(max(0.0, start), min(one.seconds for one in timed))
