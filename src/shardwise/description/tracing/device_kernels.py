"""What the target device would run, while tracing on the meta device.

The meta device takes the plain path through operators that a GPU fuses, and no autocast. Both
change what autograd keeps, so they are put right here, one level above: attention, RMSNorm and
dropout become the device's fused kernels, and autocast's casts are done as its lists say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwise.description.model import KernelFact
from shardwise.description.parameters import dtype_name
from shardwise.description.tracing.op_costs import matmul_kernel
from shardwise.description.tracing.torch_private import (
    efficient_attention,
    flash_attention,
    flash_attention_for_cpu,
    pytree,
)

aten = torch.ops.aten

# torch's documented lists of autocast, for CUDA.
_LOWER = frozenset((
    "linear", "matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "addmm", "baddbmm", "addbmm",
    "mv", "addmv", "addr", "chain_matmul", "multi_dot", "einsum", "conv1d", "conv2d", "conv3d",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "prelu",
    "scaled_dot_product_attention", "multi_head_attention_forward",
))  # fmt: skip
_FULL = frozenset((
    "pow", "__pow__", "__rpow__", "__rdiv__", "__rtruediv__", "acos", "asin", "cosh", "sinh",
    "tan", "exp", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "erfinv",
    "layer_norm", "group_norm", "norm", "normalize", "renorm", "dist", "cdist", "pdist",
    "cosine_similarity", "cosine_embedding_loss", "hinge_embedding_loss", "kl_div", "l1_loss",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss", "nll_loss",
    "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "softplus", "triplet_margin_loss",
    "binary_cross_entropy_with_logits", "cross_entropy",
))  # fmt: skip
# What a CPU's autocast raises, too; its other operators stay in the lower dtype.
_LOSSES = frozenset(name for name in _FULL if "loss" in name or "cross_entropy" in name)
# These convert inside the kernel.
_FULL_INSIDE = frozenset((
    "softmax", "log_softmax", "softmin", "sum", "prod", "cumsum", "cumprod",
))  # fmt: skip


# Recurrent networks with the gates of a cell, and which of them a device fuses: cuDNN all, oneDNN
# on a CPU the LSTM (in 32 bits; what it does in 16 depends on the processor).
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_FUSES = {
    "cuda": frozenset(_GATES),
    "cpu": frozenset(["lstm"] if torch.backends.mkldnn.is_available() else []),
}


def _linear(plain: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Of rows that do not lie one behind the other torch adds the bias in place, but under a mode
    that sees operators.
    """
    if bias is None or x.dim() < 3 or x.is_contiguous():
        return plain(x, weight, bias)
    return torch.matmul(x, weight.t()).add_(bias)


class DeviceKernels(TorchFunctionMode):
    """Replaces what `device` fuses, and casts as autocast to `autocast` would; `note` is told the
    kernels that no operator stands for.
    """

    def __init__(
        self, device: str, autocast: torch.dtype | None, note: Callable[[KernelFact], None]
    ) -> None:
        super().__init__()
        self.device, self.autocast, self.note = device, autocast, note
        self._casts: dict[int, Tensor] = {}  # a parameter is cast once per forward
        self.notes: tuple[str, ...] = ()

    def forget_casts(self) -> None:
        """As autocast does when its context ends: after forward, and after each recomputation."""
        self._casts.clear()

    @contextmanager
    def active(self) -> Iterator[None]:
        """The mode, and attention replaced also where torch's own functions (multi-head attention)
        call it: inside of those a mode is not asked.
        """
        plain = functional.scaled_dot_product_attention

        def attend(*args: Any, **kwargs: Any) -> Tensor:
            return self._attend(plain, *args, **kwargs)

        functional.scaled_dot_product_attention = attend
        try:
            with self:
                yield
        finally:
            functional.scaled_dot_product_attention = plain

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.autocast is not None:
            args, kwargs = self._cast(name, args, kwargs)
        if name == "scaled_dot_product_attention":
            return self._attend(func, *args, **kwargs)
        if name == "flex_attention":
            return self._flex(*args, **kwargs)
        if name == "linear" and not kwargs and len(args) == 3:
            return _linear(func, *args)
        if name in _FUSES[self.device]:
            return self._recurrent(func, name, args, kwargs)
        if self.device == "cuda" and name == "rms_norm":
            return self._rms_norm(func, *args, **kwargs)
        if self.device == "cuda" and func is functional.dropout:
            return self._dropout(*args, **kwargs)
        return func(*args, **kwargs)

    def _cast(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in _LOWER:
            return pytree.tree_map(self._lower, (args, kwargs))
        if name in _LOSSES or (name in _FULL and self.device == "cuda"):
            return pytree.tree_map(_raise, (args, kwargs))
        if name in _FULL_INSIDE and self.device == "cuda" and args and isinstance(args[0], Tensor):
            low = args[0].dtype in (torch.bfloat16, torch.float16)
            if low and kwargs.get("dtype") is None:
                kwargs = {**kwargs, "dtype": torch.float32}
        return args, kwargs

    def _lower(self, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.dtype == torch.float32):
            return value
        assert self.autocast is not None
        if not (value.is_leaf and value.requires_grad):
            return value.to(self.autocast)
        cached = self._casts.get(id(value))
        if cached is None:
            cached = self._casts[id(value)] = value.to(self.autocast)
        return cached

    def _attend(
        self,
        plain: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """The kernel that torch's own choice would fall on; the plain path where it fuses none."""
        grouped = enable_gqa and query.shape[1] != key.shape[1]
        low = query.dtype in (torch.bfloat16, torch.float16)
        usual = query.dim() == 4 and query.dtype == key.dtype == value.dtype
        settings = {"scale": scale, "enable_gqa": enable_gqa}
        if not usual or not query.is_meta:
            return plain(query, key, value, attn_mask, dropout_p, is_causal, **settings)
        even = query.shape[-1] == value.shape[-1]  # DeepSeek's are not
        # A CPU's kernel gives a mask no gradient, and takes none of three dims.
        fixed = attn_mask is None or (not attn_mask.requires_grad and attn_mask.dim() in (2, 4))
        if self.device == "cpu" and dropout_p == 0 and even and fixed:
            return flash_attention_for_cpu(
                query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )[0]
        fuses = self.device == "cuda" and _rows_lie_dense(query, key, value, attn_mask)
        if fuses and low and even and attn_mask is None and query.shape[-1] <= 256:
            return flash_attention(query, key, value, dropout_p, is_causal, False, scale=scale)[0]
        step = 16 // query.element_size()
        aligned = query.shape[-1] % step == value.shape[-1] % step == 0
        if fuses and aligned and not grouped:
            return efficient_attention(
                query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale
            )[0]
        if self.device == "cuda" and dropout_p > 0 and attn_mask is not None and not grouped:
            return self._attend_by_products(query, key, value, attn_mask, dropout_p, scale)
        return plain(query, key, value, attn_mask, dropout_p, is_causal, **settings)

    def _attend_by_products(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor,
        dropout_p: float,
        scale: float | None,
    ) -> Tensor:
        """As torch does where nothing is fused: in 32 bits. On the meta device its dropout would
        keep a mask of 32 bits, where a GPU's keeps a byte.
        """
        each = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
        q, k, v = (t.float() for t in (query, key, value))
        scores = (q * each) @ (k * each).transpose(-2, -1)
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=scores.dtype).masked_fill(~mask, -math.inf)
        found = aten.native_dropout((scores + mask.to(scores.dtype)).softmax(-1), dropout_p, True)
        return (found[0] @ v).to(query.dtype)

    def _flex(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        score_mod: Any,
        block_mask: Any,
        scale: float | None = None,
        *_: Any,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Flex attention as a fused kernel over all pairs of a query and a key; it gives the sums
        and the maxima of the scores too.
        """
        self.notes = ("Flex attention is counted over all pairs: a sparse mask takes less.",)
        if query.shape[1] != key.shape[1]:
            times = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(times, dim=1) for t in (key, value))
        plain = functional.scaled_dot_product_attention
        rows = query.new_empty(query.shape[:-1], dtype=torch.float32)
        return plain(query, key, value, scale=scale), rows, rows.clone()

    def _recurrent(self, plain: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A recurrent network as cuDNN and oneDNN run it: for each layer and direction one product
        of all inputs, one small product for each step, and what backward needs in one reserve.
        """
        packed = len(args) > 2 and not isinstance(args[2], bool) and isinstance(args[1], Tensor)
        if not args or kwargs or not args[0].is_meta or (packed and args[1].dim() == 1):
            return plain(*args, **kwargs)
        x, state, weights, _, layers, _, _, both_ways, batch_first = args
        states = tuple(state) if isinstance(state, list | tuple) else (state,)
        projected = states[0].shape != states[-1].shape
        if self.device == "cpu" and (x.dtype != torch.float32 or projected):
            return plain(*args)
        shape = (layers, 2 if both_ways else 1, batch_first)
        told = (self.note, self.device == "cpu")
        return _FusedRecurrent.apply(told, name, shape, len(states), x, *states, *weights)

    def _rms_norm(
        self,
        plain: Any,
        input: Tensor,
        normalized_shape: tuple[int, ...],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:
        if not input.is_meta or (weight is not None and weight.dtype != input.dtype):
            return plain(input, normalized_shape, weight, eps)  # torch fuses equal dtypes only
        result: Tensor = _FusedRmsNorm.apply(input, weight, len(normalized_shape), self.note)
        return result

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        if not training or p == 0 or inplace or not input.is_meta:
            return functional.dropout(input, p, training, inplace)
        return aten.native_dropout(input, p, True)[0]


def _rows_lie_dense(*tensors: Tensor | None) -> bool:
    """As torch's fused attention asks: a mask too. T5's bias is a permuted lookup, so it is not."""
    return all(t is None or t.stride(-1) == 1 for t in tensors)


def _raise(value: Any) -> Any:
    low = isinstance(value, Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if low else value


class _FusedRmsNorm(torch.autograd.Function):
    """One kernel each way; keeps its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int, note: Any) -> Tensor:
        rows = x.new_empty((*x.shape[: x.dim() - dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(x, weight, rows)
        ctx.note = note
        note(_rms_kernel(2 * x.numel() * x.element_size(), x.dtype, "fused_rms_norm"))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        note_bytes = 3 * x.numel() * x.element_size()
        ctx.note(_rms_kernel(note_bytes, x.dtype, "fused_rms_norm_backward"))
        return (
            torch.empty_like(x) if ctx.needs_input_grad[0] else None,
            torch.empty_like(weight) if ctx.needs_input_grad[1] else None,
            None,
            None,
        )


def _host_reserve(steps: int, batch: int, width: int, hidden: int) -> int:
    """Numbers that a layer of oneDNN's LSTM keeps for backward, one way: fitted to the workspaces
    of torch 2.13, which pads rows by up to 3 % more. States are as wide as the wider of the two.
    """
    wide = max(width, hidden)
    return batch * (steps * (9 * hidden + 6 * wide) + 4 * hidden + 6 * wide)


class _FusedRecurrent(torch.autograd.Function):
    """cuDNN's: the output, and the last state of each layer. On a CPU (`told[1]`) oneDNN's, which
    keeps more, and takes memory while it runs: weights in its own layout, gates of all steps.
    """

    @staticmethod
    def forward(
        ctx: Any,
        told: tuple[Callable[[KernelFact], None], bool],
        name: str,
        shape: tuple[int, int, bool],
        count: int,
        *given: Tensor,
    ) -> Any:
        note, on_host = told
        x, states = given[0], given[1 : 1 + count]
        layers, ways, batch_first = shape
        hidden = states[0].shape[-1]
        steps, batch = x.shape[:2] if not batch_first else (x.shape[1], x.shape[0])
        gates = _GATES[name] * hidden
        products = []
        for layer in range(layers):
            width = x.shape[-1] if layer == 0 else ways * hidden
            products += [(steps * batch, width, ways), (batch, hidden, ways * steps)]
        ctx.note, ctx.products, ctx.gates = note, products, gates
        rows = steps * batch
        kept = layers * ways * rows * (gates + hidden * (1 + count))
        ctx.scratch = 0
        if on_host:
            widths = [width for _, width, _ in products[::2]]
            kept = sum(ways * _host_reserve(steps, batch, width, hidden) for width in widths)
            kept += (layers - 1) * rows * ways * hidden  # what layers give each other,
            kept += layers * rows * ways * hidden * (ways - 1)  # each way before both are joined,
            kept += x.numel() * batch_first  # and the input, step by step
            weights = gates * (max(widths) + hidden)
            scratch = weights + rows * gates
            ctx.scratch = scratch + weights + 2 * rows * hidden  # their gradients too
        reserve = x.new_empty(kept)
        ctx.save_for_backward(*given, reserve)
        _note_products(note, products, gates, x.dtype, name, 1)
        output = x.new_empty((*x.shape[:2], ways * hidden))
        if on_host:
            x.new_empty(scratch)
        return (output, *(torch.empty_like(state) for state in states))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        given = ctx.saved_tensors[:-1]
        _note_products(ctx.note, ctx.products, ctx.gates, given[0].dtype, "recurrent_backward", 2)
        needed = ctx.needs_input_grad[4:]
        grads = [torch.empty_like(t) if n else None for t, n in zip(given, needed, strict=True)]
        if ctx.scratch:
            given[0].new_empty(ctx.scratch)
        return (None, None, None, None, *grads)


def _note_products(
    note: Any, products: Any, gates: int, dtype: torch.dtype, op: str, times: int
) -> None:
    """Rows x width x gates, each `count` times: of the inputs at once, of the states one after the
    other. cuDNN issues one kernel for many steps, so that they are one here.
    """
    for rows, width, count in products * times:
        note(matmul_kernel(rows, gates, width, dtype, count, op, kind="recurrent"))


def _rms_kernel(nbytes: int, dtype: torch.dtype, op: str) -> KernelFact:
    return KernelFact("rms_norm", 0.0, float(nbytes), dtype_name(dtype), op=op)
