"""What a CPU's operators allocate inside, for as long as they run: oneDNN lays tensors out anew.

It computes on blocks of channels, so a convolution copies plain images into such a layout, and its
result back. (A GPU's libraries have workspaces that are small, or stay.) As torch's profiler shows
it, allocation by allocation:

    forward                 image', weight', result'; result
    gradient of the image   gradient', weight', result'; result
    gradient of the weight  gradient', image', result'; result

where what has a ' is a copy; those that were read are gone when the result is copied back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.description.tracing.torch_private import schema_of

_FEW_CHANNELS = 4  # an image of no more is read as it is


def scratch_of(op: Any, args: tuple[Any, ...], out: Any) -> int:
    """The most bytes that `op` takes beside its results."""
    name = schema_of(op).name
    if name == "aten::convolution" and _is_laid_anew(args[0]):
        image, weight = args[:2]
        copied = image.nbytes if image.shape[1] > _FEW_CHANNELS else 0
        return max(copied + weight.nbytes, out.nbytes)
    if name == "aten::convolution_backward" and _is_laid_anew(args[1]):
        gradient, image, weight = args[:3]
        return max(gradient.nbytes + image.nbytes, weight.nbytes)
    return 0


def _is_laid_anew(image: Tensor) -> bool:
    """Not where channels come last already, nor in 16 bits, which depends on the processor."""
    plain = image.dim() >= 4 and image.is_contiguous() and image.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()
