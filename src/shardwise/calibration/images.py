"""What convolutions take beside what their shapes say, on one device.

A handful of typical ones runs forward and backward, and the same calls are costed on the meta
device as a description costs them. Of the two come factors for the cluster's file, medians:

    convolution_fraction   of the rate of the matching product; images and weights channels-last,
                           where arithmetic takes longer than memory
    depthwise_fraction     the same of depthwise ones, which no layout is better for
    plain_image_traffic    what the same convolutions take longer where images are plain (NCHW)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwise.description.model import KernelFact
from shardwise.description.tracing.device_kernels import DeviceKernels
from shardwise.description.tracing.op_costs import cost_of
from shardwise.description.tracing.torch_private import TorchDispatchMode
from shardwise.predict.cost import Costs

if TYPE_CHECKING:
    from shardwise.calibration.measure import Tell, Timer

Run = Callable[..., Tensor]
LEAST_SIDE = 7


@dataclass(frozen=True)
class Convolution:
    """Of `batch` square images, padded to keep their side."""

    batch: int
    channels: int
    filters: int
    kernel: int
    side: int
    stride: int = 1
    groups: int = 1

    def __str__(self) -> str:
        size = f"{self.batch} x {self.channels} x {self.side}^2 to {self.filters}"
        return f"{self.kernel}x{self.kernel} {size}" + " depthwise" * (self.groups > 1)


CONVOLUTIONS = (
    Convolution(64, 3, 64, 7, 224, stride=2),  # ResNet-50: its first, its 3 x 3, its 1 x 1
    Convolution(64, 64, 64, 3, 56),
    Convolution(64, 128, 128, 3, 28),
    Convolution(64, 256, 256, 3, 14),
    Convolution(64, 512, 512, 3, 7),
    Convolution(64, 256, 64, 1, 56),
    Convolution(64, 256, 1024, 1, 14),
    Convolution(64, 2048, 512, 1, 7),
    Convolution(16, 64, 64, 3, 256),  # a U-Net
    Convolution(16, 256, 256, 3, 64),
    Convolution(64, 192, 192, 3, 56, groups=192),
    Convolution(64, 96, 96, 7, 56, groups=96),
)


@dataclass(frozen=True)
class TimedCase:
    """What some calls took, and the kernels that a description has for them."""

    name: str
    dtype: str
    kernels: tuple[KernelFact, ...]
    seconds: float
    channels_last: bool = False

    @property
    def is_depthwise(self) -> bool:
        return any(kernel.is_depthwise for kernel in self.kernels)

    def product_s(self, costs: Costs) -> float:
        """Seconds of the matching products at the rate that `costs` has for these kernels."""
        return sum(kernel.flops / costs.flops_per_s(kernel) for kernel in self.kernels)

    def copy_s(self, costs: Costs) -> float:
        """Seconds of reading and writing everything once."""
        moved = sum(kernel.bytes for kernel in self.kernels)
        return moved / costs.cluster.device.copy_bytes_per_s


def measure_images(
    device: str, dtypes: Iterable[str], cut: tuple[int, int], timer: Timer, tell: Tell
) -> list[TimedCase]:
    """Time every case; batches and sides are `cut` by so much."""
    found = []
    for dtype in dtypes:
        tell(f"convolutions in {dtype}")
        for name, run, shapes, channels_last in _cases(*cut):
            tensors = _draw(shapes, device, getattr(torch, dtype), channels_last)
            taken = timer(step_of(run, tensors)).value
            found.append(TimedCase(name, dtype, kernels_of(run, tensors), taken, channels_last))
    return found


def _cases(
    fewer: int, smaller: int
) -> Iterator[tuple[str, Run, tuple[tuple[int, ...], ...], bool]]:
    """Each with a name, its function, the shapes of its arguments, and how they lie."""

    def images(batch: int, channels: int, side: int) -> tuple[int, ...]:
        cut = max(LEAST_SIDE, side // smaller)
        return max(1, batch // fewer), channels, cut, cut

    for case in CONVOLUTIONS:
        run = partial(
            functional.conv2d, stride=case.stride, padding=case.kernel // 2, groups=case.groups
        )
        weight = case.filters, case.channels // case.groups, case.kernel, case.kernel
        shapes = images(case.batch, case.channels, case.side), weight
        yield str(case), run, shapes, False
        if case.groups == 1:
            yield str(case), run, shapes, True


def _draw(
    shapes: Sequence[tuple[int, ...]], device: str, dtype: torch.dtype, channels_last: bool
) -> list[Tensor]:
    """Random arguments. Pictures, which have 3 channels, need no gradient."""
    tensors = []
    for shape in shapes:
        tensor = torch.randn(shape, device=device, dtype=dtype)
        if channels_last:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        tensors.append(tensor)
    for tensor in tensors[shapes[0][1] == 3 :]:
        tensor.requires_grad_()
    return tensors


def step_of(run: Run, tensors: Sequence[Tensor]) -> Callable[[], Any]:
    """Forward and backward; forward alone where nothing has a gradient."""
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    if not wanted:
        return lambda: run(*tensors)
    gradient = torch.randn_like(run(*tensors))
    return lambda: torch.autograd.grad(run(*tensors), wanted, gradient)


def kernels_of(run: Run, tensors: Sequence[Tensor]) -> tuple[KernelFact, ...]:
    """The kernels of a step, as they are traced: with what these tensors' device fuses."""
    on_meta = [
        torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]
    step = step_of(run, on_meta)
    device = "cpu" if tensors[0].device.type == "cpu" else "cuda"
    with _Kernels() as seen, DeviceKernels(device, None, seen.kernels.append).active():
        step()
    return tuple(seen.kernels)


class _Kernels(TorchDispatchMode):
    """Notes what every operator costs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels: list[KernelFact] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        kernel = cost_of(func, args, kwargs or {}, out)
        if kernel is not None:
            self.kernels.append(kernel)
        return out


def fit(costs: Costs, timed: Sequence[TimedCase]) -> dict[str, list[float]]:
    """What each factor is the median of, by the dotted keys of a cluster's file. `costs` are those
    without them.
    """
    samples = {}
    for dtype in dict.fromkeys(one.dtype for one in timed):
        here = [one for one in timed if one.dtype == dtype]
        dense = [one for one in here if one.channels_last]
        # What memory bounds tells nothing of the arithmetic.
        bound = [one for one in dense if one.product_s(costs) >= one.copy_s(costs)] or dense
        for key, cases in (
            ("convolution_fraction", bound),
            ("depthwise_fraction", [one for one in here if one.is_depthwise]),
        ):
            shares = [one.product_s(costs) / one.seconds for one in cases]
            samples[f"device.matmul.{dtype}.{key}"] = shares
    # What moves images is one number for all dtypes: that of the usual one.
    usual = costs.cluster.device.compute_dtype
    moved = [one for one in timed if one.dtype == usual] or timed
    last = {(one.name, one.dtype): one.seconds for one in moved if one.channels_last}
    samples["device.plain_image_traffic"] = [
        max(0.0, one.seconds - last[one.name, one.dtype]) / one.copy_s(costs)
        for one in moved
        if not one.is_depthwise and not one.channels_last
    ]
    return samples
