"""What a CPU's operators allocate inside, for as long as they run: oneDNN lays tensors out anew.

It computes on blocks of channels, so a convolution copies plain images into such a layout, and its
result back. (A GPU's libraries have workspaces that are small, or stay.) As torch's profiler shows
it, allocation by allocation:

    forward                 image', weight', result'; result
    gradient of the image   gradient', weight', result'; result
    gradient of the weight  gradient', image', result'; result

where what has a ' is a copy, whose channels are filled up to whole blocks; those that were read are
gone when the result is copied back. An image of one dim lies as one of two. What a filter of larger
steps spreads (the gradient of an image, a transposed result) is there once more. Images whose
channels come last are read as they are; then weights are copied, and the gradient of one is made in
blocks, for every group of its own. Where oneDNN is not asked, torch multiplies by the image's
columns: what a filter sees at every place. For groups of few channels oneDNN makes the gradient of
the weight so, too.
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
_NARROW = 3  # filters of one channel up to so wide have a kernel of their own in every pass
_FEW_IN_GROUP = 8  # a group of fewer channels is not laid out anew for the gradient of the weight
_SMALL = 20480  # numbers of an image for which oneDNN is not asked


def scratch_of(op: Any, args: tuple[Any, ...], out: Any) -> int:
    """The most bytes that `op` takes beside its results."""
    schema = schema_of(op)
    if schema.name == "aten::_fft_c2c" and torch.backends.mkl.is_available():
        return int(out.nbytes)  # what is transformed, in the order of its dims
    if schema.name not in ("aten::convolution", "aten::convolution_backward"):
        return 0
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False))
    last = _comes_last(given["input"])
    if not (last or _is_laid_anew(given["input"])):
        return 0
    forward = schema.name == "aten::convolution"
    result = out if forward else given["grad_output"]
    if not _asks_onednn(given):
        columns = _columns(given, result)
        return columns + _copied_weight(given) if last and columns else columns
    if last:
        return _channels_last(given, result, forward)
    return _forward(given, result) if forward else _backward(given, result)


def _is_laid_anew(image: Tensor) -> bool:
    """Not where channels come last already, nor in 16 bits, which depends on the processor."""
    plain = image.dim() >= 3 and image.is_contiguous() and image.dtype == torch.float32
    return plain and torch.backends.mkldnn.is_available()


def _comes_last(image: Tensor) -> bool:
    """Its channels do, and it is no plain image as well; of such weights is known with AVX512."""
    last = image.dim() == 4 and image.is_contiguous(memory_format=torch.channels_last)
    known = _BLOCK == 16 and image.dtype == torch.float32 and torch.backends.mkldnn.is_available()
    return known and last and not image.is_contiguous()


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
    again = result.nbytes if given["transposed"] and _skips(given) else 0
    return max(read + _filled(result) - result.nbytes, _filled(result) + again)


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
        read = _filled(gradient) + weight.nbytes
        again = image.nbytes if not given["transposed"] and _skips(given) else 0
        beside = max(read, image.nbytes + again) + _filled(image) - results
    if of_weight and _reads_columns(given):
        beside = max(beside, weight.nbytes)
    elif of_weight:
        beside = max(beside, _filled(gradient) + copied, weight.nbytes)
    return max(beside, 0)


def _reads_columns(given: Mapping[str, Any]) -> bool:
    """The gradient of the weight is a product with the columns of one group, which are few."""
    weight, groups = given["weight"], given["groups"]
    few = min(weight.shape[1], weight.shape[0] // groups) < _FEW_IN_GROUP
    return groups > 1 and few and not (_is_depthwise(given) and _has_kernel(given))


def _skips(given: Mapping[str, Any]) -> bool:
    """Whether what its gradient's kernel gives comes with channels last, and is copied twice."""
    return given["groups"] == 1 and any(step > 1 for step in given["stride"])


def _is_depthwise(given: Mapping[str, Any]) -> bool:
    weight, groups = given["weight"], given["groups"]
    return bool(groups > 1 and weight.shape[1] == 1 and weight.shape[0] == groups)


def _has_kernel(given: Mapping[str, Any]) -> bool:
    """A depthwise convolution that oneDNN has a kernel for in every pass."""
    narrow = all(width <= _NARROW for width in given["weight"].shape[2:])
    return narrow and all(n == 1 for n in given["dilation"])


def _copied_weight(given: Mapping[str, Any]) -> int:
    """A weight is first laid channels-last, where that is another order than it has."""
    weight = given["weight"]
    alike = weight.shape[1] == 1 or math.prod(weight.shape[2:]) == 1
    return 0 if alike else int(weight.nbytes)


def _channels_last(given: Mapping[str, Any], result: Tensor, forward: bool) -> int:
    """Copies of weights: channels-last and in blocks; of the gradient in blocks, and channels-last.
    The gradient of the result is copied if its channels do not come last.
    """
    image, weight, groups = given["input"], given["weight"], given["groups"]
    copied = _copied_weight(given)
    filled = _filled(weight.transpose(0, 1))
    sides = (weight.shape[0] // groups, weight.shape[1])
    widened = math.prod(math.ceil(side / _BLOCK) * _BLOCK / side for side in sides)
    if forward:
        apart = groups > 1 and min(sides) < _FEW_IN_GROUP and not _is_depthwise(given)
        return copied + (round(weight.nbytes * widened) if apart else filled)
    of_image, of_weight, _ = given["output_mask"]
    beside = filled if of_image else 0
    if of_weight:
        small = image.shape[1] <= _FEW_CHANNELS or (_is_depthwise(given) and _has_kernel(given))
        blocked = filled if small else round(weight.nbytes * widened)
        beside = max(beside, blocked + weight.nbytes)
    arranged = result.is_contiguous(memory_format=torch.channels_last)
    return int(copied + beside + (0 if arranged else result.nbytes))


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
