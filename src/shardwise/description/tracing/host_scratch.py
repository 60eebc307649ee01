"""What a CPU's operators allocate inside, for as long as they run: oneDNN lays tensors out anew.

It computes on blocks of channels, so a convolution copies plain images into such a layout, and its
result back. (A GPU's libraries have workspaces that are small, or stay.) As torch's profiler shows
it, allocation by allocation:

    forward                 image', weight', result'; result
    gradient of the image   gradient', weight', result'; result
    gradient of the weight  gradient', image', result'; result

where what has a ' is a copy, whose channels are filled up to whole blocks; those that were read are
gone when the result is copied back. An image of one dim lies as one of two. Where oneDNN is not
asked, torch multiplies by the image's columns: what a filter sees at every place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.description.tracing.torch_private import schema_of

_BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8  # channels
_FEW_CHANNELS = 3  # an image of no more is read as it is, also by the gradient of the weight
_SMALL = 20480  # numbers of an image for which oneDNN is not asked


def scratch_of(op: Any, args: tuple[Any, ...], out: Any) -> int:
    """The most bytes that `op` takes beside its results."""
    schema = schema_of(op)
    if schema.name == "aten::_fft_c2c" and torch.backends.mkl.is_available():
        return int(out.nbytes)  # what is transformed, in the order of its dims
    if schema.name not in ("aten::convolution", "aten::convolution_backward"):
        return 0
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    if not _is_laid_anew(given["input"]):
        return 0
    forward = schema.name == "aten::convolution"
    result = out if forward else given["grad_output"]
    if not _asks_onednn(given):
        return _columns(given, result)
    return _forward(given, result) if forward else _backward(given, result)


def _is_laid_anew(image: Tensor) -> bool:
    """Not where channels come last already, nor in 16 bits, which depends on the processor."""
    plain = image.dim() >= 3 and image.is_contiguous() and image.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()


def _asks_onednn(given: Mapping[str, Any]) -> bool:
    """As torch decides for a rank with one core, which has few samples of 1 x 1 filters, and one
    small image, multiplied by its own kernels.
    """
    image, weight = given["input"], given["weight"]
    samples, filters = image.shape[0], weight.shape[2:]
    usual = any(n != 1 for n in (*given["stride"], *given["dilation"], *filters[-2:]))
    wide = len(filters) > 1 and min(filters[-2:]) > 3
    large = samples > 1 or math.prod(image.shape[:4]) > _SMALL
    return (usual or samples >= 16) and (given["groups"] > 1 or wide or large)


def _forward(given: Mapping[str, Any], result: Tensor) -> int:
    image = given["input"]
    as_it_is = given["groups"] == 1 and image.shape[1] < _BLOCK
    read = (0 if as_it_is else _filled(image)) + given["weight"].nbytes
    return max(read + _filled(result) - result.nbytes, _filled(result))


def _backward(given: Mapping[str, Any], gradient: Tensor) -> int:
    image, weight = given["input"], given["weight"]
    of_image, of_weight, _ = given["output_mask"]
    copied = (
        0
        if image.shape[1] <= _FEW_CHANNELS
        else _filled(image, 8 if image.shape[1] < _BLOCK else _BLOCK)
    )
    beside = 0
    if of_image:
        results = image.nbytes + of_weight * weight.nbytes
        beside = _filled(gradient) + weight.nbytes + _filled(image) - results
    if of_weight:
        beside = max(beside, _filled(gradient) + copied, weight.nbytes)
    return max(beside, 0)


def _filled(image: Tensor, block: int = _BLOCK) -> int:
    """Bytes of an image's copy in whole blocks of channels."""
    channels = image.shape[1]
    return image.nbytes // channels * (math.ceil(channels / block) * block)


def _columns(given: Mapping[str, Any], result: Tensor) -> int:
    """What every filter sees at every place; 1 x 1 filters see the image itself."""
    weight = given["weight"]
    seen = math.prod(weight.shape[1:])
    if given["transposed"] or seen == weight.shape[1]:
        return 0
    places = result.shape[0] * math.prod(result.shape[2:])
    return int(seen * places * result.element_size())
