# mypy: disable-error-code="import-not-found,import-untyped"
"""What a kernel gets for a tensor: a pointer, or a descriptor that the copy engine (TMA) reads.

A descriptor names a tensor's shape, strides and one tile's shape. The copy engine needs 16-byte
alignment of the base and of all strides but the last, which must be 1; other tensors go by pointer.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

try:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    HAS_GLUON = True
except ImportError:  # Gluon is experimental: a Triton without it still has all the other kernels
    HAS_GLUON = False

INTERPRETED = bool(triton.knobs.runtime.interpret)  # kernels run as Python, on CPU tensors
ALIGNMENT = 16  # bytes


def block_d(q: Tensor) -> int:
    """The head width as the kernels see it: a power of two, at least what a product needs."""
    return max(16, triton.next_power_of_2(q.shape[-1]))


def new_lines(B: int, H: int, M: int) -> Tensor:
    """The layout of a workspace (B, H, M) in fp32, where each head's start is aligned."""
    room = ALIGNMENT // torch.float32.itemsize
    row = triton.cdiv(M, room) * room
    strides = (H * row, row, 1)
    return torch.empty_strided((B, H, M), strides, dtype=torch.float32, device="meta")


def reach(ids: Tensor | None, other: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Per id, its first place in `other` and the place after its last; (length, 0) if absent.

    A stable sort keeps equal ids in the order of their places, so the ends of a run of equal ids
    are the first and last place, in whatever order the segments come.
    """
    if ids is None or other is None:
        return None, None
    length = other.shape[-1]
    ordered, places = torch.sort(other, dim=-1, stable=True)
    left = torch.searchsorted(ordered, ids)
    right = torch.searchsorted(ordered, ids, right=True)
    absent = left == right
    first = places.gather(-1, left.clamp(max=length - 1)).masked_fill(absent, length)
    last = places.gather(-1, (right - 1).clamp(min=0)).add(1).masked_fill(absent, 0)
    return first.int(), last.int()


def tma_serves(*tensors: Tensor) -> bool:
    """Whether all can be read through descriptors."""
    if not INTERPRETED and 0 < capability(tensors[0].device) < 90:
        return False
    return all(
        x.data_ptr() % ALIGNMENT == 0
        and all(
            size == 1 or (stride > 0 and stride * x.itemsize % ALIGNMENT == 0)
            for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
        )
        for x in tensors
    )


def descriptor(x: Tensor, block: list[int]) -> Any:
    return TensorDescriptor(x, list(x.shape), _strides(x), block)


def line_descriptor(x: Tensor, length: int) -> Any:
    """Of (B, H, M), `length` numbers of a head at a time."""
    return descriptor(x.flatten(0, 1), [1, length])


def gluon_descriptor(x: Tensor, *block: int) -> Any:
    """A Gluon kernel's view of (B, heads, length, D), or with two sizes of (heads, rows, columns).

    Every tile row is a multiple of 128 bytes, the width over which shared memory is swizzled.
    """
    sizes = [1, *block] if len(block) == 2 else [1, 1, *block, x.shape[-1]]
    layout = NVMMASharedLayout(128, 8 * x.itemsize, len(sizes))
    return GluonDescriptor(x, list(x.shape), _strides(x), sizes, layout)


def gluon_line_descriptor(x: Tensor, length: int) -> Any:
    flat = x.flatten(0, 1)
    return GluonDescriptor(
        flat, list(flat.shape), _strides(flat), [1, length], NVMMASharedLayout(0, 32, 2)
    )


def _strides(x: Tensor) -> list[int]:
    """x's strides; a dimension of size 1 gets a stride that no check can object to."""
    room = ALIGNMENT // x.itemsize
    row = triton.cdiv(x.shape[-1], room) * room
    return [
        row if size == 1 else stride
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ] + [1]


@lru_cache
def capability(device: torch.device) -> int:
    """90 for Hopper; 0 off CUDA, where kernels are interpreted or only compiled."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def memory(device: torch.device) -> int:
    """The device's bytes."""
    if device.type != "cuda":
        return 32 << 30
    return int(torch.cuda.get_device_properties(device).total_memory)


@lru_cache
def processors(device: torch.device) -> int:
    """The number of multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def on_device(x: Tensor) -> AbstractContextManager[object]:
    """Triton launches on the current device: make it x's, at no cost if it is."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
