"""What one operator costs: its kind, its FLOPs and the bytes it moves, from the shapes it is given.

Only matrix products, convolutions and fused attention have FLOPs; what everything else costs is the
memory it reads and writes. What a device makes of a kind is in `predict/cost.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from shardwise.description.model import ALIGNED, KernelFact, KernelKind
from shardwise.description.parameters import dtype_name
from shardwise.description.tracing.torch_private import parts_of, pytree, schema_of

aten = torch.ops.aten

# Allocate or relabel, but run nothing.
_FREE_OPS = {
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::empty",
    "aten::empty_like",
    "aten::empty_strided",
    "aten::new_empty",
    "aten::new_empty_strided",
    "aten::set_",
    "aten::resize_",
    "aten::is_same_size",
    "aten::_local_scalar_dense",
    "prim::device",
}
# Read a few rows of a large table: the table's size does not count.
_LOOKUPS = {"aten::embedding", "aten::index", "aten::gather", "aten::index_select"}
# Look at one number of each row of the scores; the place of those among the arguments.
_PICKS = {"aten::nll_loss_forward": "self", "aten::nll_loss_backward": "self"}
_COPIES = {"aten::copy_", "aten::_to_copy", "aten::clone"}  # not tagged as pointwise
_JOINS = {"aten::cat", "aten::stack"}
_SLICES = {"aten::slice_backward", "aten::select_backward"}
_NORMS: Mapping[str, KernelKind] = {
    "aten::native_batch_norm": "batch_norm",
    "aten::_native_batch_norm_legit": "batch_norm",
    "aten::_native_batch_norm_legit_functional": "batch_norm",
    "aten::_batch_norm_with_update": "batch_norm",
    "aten::cudnn_batch_norm": "batch_norm",
    "aten::native_batch_norm_backward": "batch_norm",
    "aten::batch_norm_backward": "batch_norm",
    "aten::cudnn_batch_norm_backward": "batch_norm",
    "aten::native_group_norm": "group_norm",
    "aten::native_group_norm_backward": "group_norm",
}
_KINDS: Mapping[str, KernelKind] = {
    "aten::embedding_dense_backward": "lookup_gradient",
    **dict.fromkeys(("aten::native_layer_norm", "aten::native_layer_norm_backward"), "layer_norm"),
    **dict.fromkeys(
        (f"aten::{pool}{way}" for pool in ("max_pool2d_with_indices", "max_pool3d_with_indices")
         for way in ("", "_backward")),
        "pool",
    ),
    **dict.fromkeys(
        (f"aten::{name}" for name in (
            "sum", "mean", "prod", "amax", "amin", "var", "std", "var_mean", "std_mean", "norm",
            "linalg_vector_norm", "logsumexp", "argmax", "argmin",
        )),
        "reduction",
    ),
}  # fmt: skip
_SOFTMAXES = {
    "aten::_softmax", "aten::_log_softmax", "aten::_safe_softmax",
    "aten::_softmax_backward_data", "aten::_log_softmax_backward_data",
}  # fmt: skip
LONG_ROW = 4096  # numbers: a block of threads holds no more, and reads a longer row again


def cost_of(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
) -> KernelFact | None:
    """The kernel that `op` launches for these arguments, or None if it launches none."""
    name = schema_of(op).name
    if name in _FREE_OPS or _is_view(op):
        return None
    outputs = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if not outputs and not inputs:
        return None
    formula = _FORMULAS.get(name)
    if formula is not None and all(t.layout == torch.strided for t in (*inputs, *outputs)):
        return formula(_bind(op, args, kwargs), outputs, name.partition("::")[2])
    given = _bind(op, args, kwargs)
    if name in _LOOKUPS:
        inputs = [*outputs, *inputs[1:]]
    elif name in _PICKS:
        inputs = [tensor for tensor in inputs if tensor is not given[_PICKS[name]]]
    return KernelFact(
        kind=_kind_of(op, name, given, inputs, outputs),
        flops=0.0,
        bytes=float(sum(map(_bytes, (*inputs, *outputs)))),
        dtype=dtype_name((outputs or inputs)[0].dtype),
        op=name.partition("::")[2],
    )


def _kind_of(
    op: Any, name: str, given: Mapping[str, Any], inputs: list[Tensor], outputs: list[Tensor]
) -> KernelKind:
    """Of what moves memory and has no FLOPs."""
    if torch.Tag.pointwise in op.tags or name in _COPIES:
        return _pointwise_kind([*inputs, *outputs])
    if name in _SLICES or (name in _JOINS and not all(t.is_contiguous() for t in inputs)):
        return "strided"
    if name in _SOFTMAXES:
        scores = inputs[0]
        long = scores.dim() > 0 and _is_known(scores) and scores.shape[given["dim"]] > LONG_ROW
        return "softmax" if long else "other"
    if name in _NORMS:
        return _NORMS[name] if _trains(given) else "other"
    return _KINDS.get(name, "other")


def _pointwise_kind(tensors: list[Tensor]) -> KernelKind:
    """Vectors of numbers are moved at once only where all tensors lie alike, and are as wide."""
    if not all(t.layout == torch.strided and _is_known(t) for t in tensors):
        return "elementwise"
    large = [t for t in tensors if t.numel() > 1]
    if len({(t.shape, t.stride()) for t in large}) > 1 or not all(map(_is_dense, large)):
        return "strided"
    return "cast" if len({t.element_size() for t in large}) > 1 else "elementwise"


def _is_known(tensor: Tensor) -> bool:
    """Not where a size stands for several: to compare it would fix it."""
    return all(isinstance(n, int) for n in (*tensor.shape, *tensor.stride()))


def _is_dense(tensor: Tensor) -> bool:
    """Whether it fills its memory, in whatever order of dims."""
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _trains(given: Mapping[str, Any]) -> bool:
    """Not where a batch norm is given its statistics."""
    return bool(given.get("training", given.get("train", True)))


def _is_view(op: Any) -> bool:
    """Its outputs are other looks at its inputs."""
    returns = schema_of(op).returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )


def _bytes(tensor: Tensor) -> int:
    """Bytes that reading or writing it moves; an expanded dim is read once."""
    if tensor.layout != torch.strided:
        return sum(part.nbytes for part in parts_of(tensor))
    real = [n for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or n == 1]
    return math.prod(real) * tensor.element_size()


def _bind(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    names = [argument.name for argument in schema_of(op).arguments]
    defaults = {a.name: a.default_value for a in schema_of(op).arguments if a.has_default_value()}
    return {**defaults, **dict(zip(names, args, strict=False)), **kwargs}


def matmul_kernel(
    m: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    batch: int = 1,
    op: str = "mm",
    kind: KernelKind = "matmul",
    alignment: int = ALIGNED,
) -> KernelFact:
    """The kernel of `batch` products (m, k) x (k, n)."""
    return KernelFact(
        kind=kind,
        flops=2.0 * batch * m * n * k,
        bytes=float(batch * (m * k + k * n + m * n) * dtype.itemsize),
        dtype=dtype_name(dtype),
        shape=(m, n, k),
        batch=batch,
        op=op,
        alignment=alignment,
    )


def _alignment(*matrices: Tensor) -> int:
    """The most bytes, up to ALIGNED, by a multiple of which the rows of all of them lie apart."""
    apart = [ALIGNED]
    for matrix in matrices:
        if _is_known(matrix) and min(matrix.shape) > 1:
            apart.append(max(matrix.stride()[-2:]) * matrix.element_size())
    return math.gcd(*apart)


Formula = Callable[[dict[str, Any], list[Tensor], str], KernelFact]


def _mm(given: dict[str, Any], outputs: list[Tensor], op: str) -> KernelFact:
    a, b = _factors(given)
    lie = _alignment(a, b, *outputs)
    return matmul_kernel(a.shape[0], b.shape[1], a.shape[1], a.dtype, op=op, alignment=lie)


def _bmm(given: dict[str, Any], outputs: list[Tensor], op: str) -> KernelFact:
    a, b = _factors(given)
    (batch, m, k), n, lie = a.shape, b.shape[2], _alignment(a, b, *outputs)
    return matmul_kernel(m, n, k, a.dtype, batch, op, alignment=lie)


def _grouped_mm(given: dict[str, Any], outputs: list[Tensor], op: str) -> KernelFact:
    """Products of groups of rows, as a mixture of experts has them: all rows take part once, the
    groups' matrices are all read.
    """
    a, b = given["self"], given["mat2"]
    moved = float(sum(_bytes(t) for t in (a, b, *outputs)))
    groups = max((t.shape[0] for t in (a, b, *outputs) if t.dim() == 3), default=1)
    m, k, n = a.shape[-2], a.shape[-1], b.shape[-1]
    if a.dim() == b.dim() == 2:  # the gradients of the matrices: rows are what is summed over
        k = max(1, k // groups)
    elif a.dim() == 2:
        m = max(1, m // groups)
    elif b.dim() == 2:
        n = max(1, n // groups)
    once = matmul_kernel(m, n, k, a.dtype, batch=groups, op=op)
    return dataclasses.replace(once, bytes=moved)


def _factors(given: dict[str, Any]) -> tuple[Tensor, Tensor]:
    for left, right in (("mat1", "mat2"), ("batch1", "batch2"), ("self", "mat2")):
        if left in given and right in given:
            return given[left], given[right]
    raise AssertionError(f"a matrix product with the arguments {sorted(given)}")


def _convolution(given: dict[str, Any], outputs: list[Tensor], op: str) -> KernelFact:
    return _as_product(given, outputs[0], 1, op)


def _convolution_backward(given: dict[str, Any], _: list[Tensor], op: str) -> KernelFact:
    """The gradients of the input and of the weight: each is a product of forward's size."""
    return _as_product(given, given["grad_output"], max(1, sum(given["output_mask"][:2])), op)


def _as_product(given: dict[str, Any], result: Tensor, times: int, op: str) -> KernelFact:
    """A convolution as the matrix product it is: one row for every place of the smaller image. It
    moves both images and the weight, whichever of the three it makes.
    """
    source, weight, groups = given["input"], given["weight"], given["groups"]
    image = source if given["transposed"] else result
    rows = image.shape[0] * math.prod(image.shape[2:])
    filters, width = weight.shape[0] // groups, math.prod(weight.shape[1:])
    once = matmul_kernel(rows, max(1, filters), width, result.dtype, batch=groups, op=op)
    made = dataclasses.replace(
        once,
        kind="convolution",
        flops=once.flops * times,
        bytes=float((source.nbytes + result.nbytes + weight.nbytes) * times),
    )
    # As cuDNN: one of the two is enough. On the meta device results are plain in any case.
    last = _has_channels_last(source) or _has_channels_last(weight)
    return dataclasses.replace(made, plain=not (last or made.is_depthwise))


def _has_channels_last(tensor: Tensor) -> bool:
    several = math.prod(tensor.shape[1:]) > 1
    return several and tensor.stride(1) == 1 and tensor.stride(-1) == tensor.shape[1]


def attention_kernel(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, products: int, tensors: int, op: str
) -> KernelFact:
    """Fused attention that does `products` matrix products over queries x keys and moves `tensors`
    tensors of the size of q. (batch, heads, length, width) each; causal halves the products.
    """
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    flops = 2.0 * products * batch * heads * queries * keys * (width + v.shape[3]) / 2
    return KernelFact(
        kind="attention",
        flops=flops / 2 if causal else flops,
        bytes=float(q.numel() * q.element_size() * tensors),
        dtype=dtype_name(q.dtype),
        shape=(batch, heads, queries, keys, width),
        op=op,
        causal=causal,
    )


def _attention(given: dict[str, Any], _: list[Tensor], op: str) -> KernelFact:
    return attention_kernel(*_attended(given), 2, 4, op)


def _attention_backward(given: dict[str, Any], _: list[Tensor], op: str) -> KernelFact:
    # The scores once more, then the gradients of v, of the scores, of q and of k.
    return attention_kernel(*_attended(given), 5, 8, op)


def _attended(given: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Query, key, value and whether causal, of torch's own operators or this project's."""
    if "q" in given:
        return given["q"], given["k"], given["v"], given["causal"]
    return given["query"], given["key"], given["value"], bool(given.get("is_causal"))


_ATTENTION = (
    "flash_attention",
    "efficient_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
)

_FORMULAS: dict[str, Formula] = {
    "aten::mm": _mm,
    "aten::addmm": _mm,
    "aten::bmm": _bmm,
    "aten::baddbmm": _bmm,
    "aten::_grouped_mm": _grouped_mm,
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_overrideable": _convolution,
    "aten::convolution_backward": _convolution_backward,
    "shardwise::attention": _attention,
    "shardwise::attention_backward": _attention_backward,
    **{f"aten::_scaled_dot_product_{name}": _attention for name in _ATTENTION},
    **{f"aten::_scaled_dot_product_{name}_backward": _attention_backward for name in _ATTENTION},
}
