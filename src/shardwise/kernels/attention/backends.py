"""Which implementation of attention runs: what this shape's own trial says (`measured`), else a
small table; and a way to force one.

triton     the kernels of this package: every mask, deterministic
flash      torch's FlashAttention-2
cudnn      cuDNN through torch
efficient  torch's memory-efficient attention
math       torch's plain attention, quadratic memory: every mask, everywhere
sdpa       whatever torch's scaled_dot_product_attention picks; the choice off CUDA
reference  the tiled algorithm in plain torch, to learn from and to test against
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.kernels.attention import measured
from shardwise.kernels.attention.mask import Mask, visible_pairs

BACKENDS = ("triton", "flash", "cudnn", "efficient", "math", "sdpa", "reference")
MAX_WIDTH = 256
SDPA = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # kernels run as Python, on CPU tensors

MOST_CHOSEN = 4096

_forced: str | None = None
_chosen: dict[Request, str] = {}


@dataclass(frozen=True)
class Preference:
    """From which shapes on which backends are fastest, best first. The first that fits counts."""

    bits: int
    min_width: int
    min_keys: int
    order: tuple[str, ...]


# Measured on an H200 (torch 2.11, causal, forward + backward, 1 and 16 heads): benchmarks/results,
# attention-h200.json, and attention-step-h200.json for width 64 at 1,024 to 16,384 keys. Bounds lie
# between two lengths measured. Only widths 64 and 128 have kernels for Hopper: with 8 heads of
# 16,384 tokens of width 96 cuDNN has 1.3 times their rate, with 16 of 8,192 of width 256 1.9 times.
HOPPER: tuple[Preference, ...] = (
    Preference(bits=16, min_width=129, min_keys=2048, order=("cudnn", "triton", "flash")),
    Preference(bits=16, min_width=128, min_keys=24576, order=("cudnn", "triton", "flash")),
    Preference(bits=16, min_width=128, min_keys=2048, order=("triton", "cudnn", "flash")),
    Preference(bits=16, min_width=33, min_keys=2048, order=("cudnn", "triton", "flash")),
    Preference(bits=16, min_width=1, min_keys=2048, order=("triton", "cudnn", "flash")),
    Preference(bits=16, min_width=33, min_keys=1024, order=("triton", "cudnn", "flash")),
    Preference(bits=16, min_width=1, min_keys=0, order=("flash", "cudnn", "triton")),
    Preference(bits=32, min_width=1, min_keys=512, order=("triton", "efficient")),
    Preference(bits=32, min_width=1, min_keys=0, order=("efficient", "triton")),
)
TABLES = {(9, 0): HOPPER}  # by compute capability
UNMEASURED = ("flash", "efficient", "triton", "cudnn")


class Request(NamedTuple):
    """What the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    width: int
    queries: int
    keys: int
    causal: bool
    window: int | None = None
    segments: bool = False
    precision: str = "fp32"
    lse: bool = False  # wanted, not only o
    grad: bool = False  # wanted of q, k or v
    transposed: bool = False  # (batch, seq, heads, dim) in memory

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        window: int | None = None,
        segments: bool = False,
        precision: str = "fp32",
        lse: bool = False,
    ) -> Request:
        heads = (q.shape[1], k.shape[1]) if q.dim() == 4 else (1, 1)
        sizes = (q.shape[0], *heads, q.shape[-1], q.shape[-2], k.shape[-2])
        differentiable = q.requires_grad or k.requires_grad or v.requires_grad
        grad = differentiable and torch.is_grad_enabled()
        transposed = q.dim() == 4 and q.stride(1) < q.stride(2)
        mask = (causal, window, segments)
        return cls(q.device, q.dtype, *sizes, *mask, precision, lse, grad, transposed)

    @property
    def masked(self) -> bool:
        return self.window is not None or self.segments


@contextmanager
def forced(backend: str) -> Iterator[None]:
    """Make every `attention` inside use this backend, where its caller names none."""
    global _forced
    _check_name(backend)
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def choose(request: Request, backend: str | None = None, plain: bool = False) -> str:
    """The forced backend, or else the fastest that can serve: as measured, or by the table.

    `plain`: the call's tensors are torch's own, so that a trial of it tells something.
    Raises ValueError with the reason if a forced one cannot.
    """
    backend = backend or _forced
    if backend is not None:
        _check_name(backend)
        reason = _refusal(backend, request)
        if reason is not None:
            raise ValueError(f"the attention backend {backend!r} cannot serve: {reason}")
        return backend
    if request.lse:  # torch's backends keep it to themselves
        return "reference" if _refusal("triton", request) else "triton"
    if request.device.type != "cuda":
        return "math" if request.masked else "sdpa"
    if torch.are_deterministic_algorithms_enabled():
        # Torch's fast backends may sum gradients in an order that changes from run to run.
        return "math" if _refusal("triton", request) else "triton"
    if torch.compiler.is_compiling():
        from shardwise.kernels.attention.in_trace import choose_in_trace

        return choose_in_trace(request)
    if not plain:
        return rank(request)[0]
    chosen = _chosen.get(request)
    if chosen is None:
        if len(_chosen) >= MOST_CHOSEN:  # shapes that never come back
            _chosen.clear()
        chosen = _chosen[request] = measured.decide(request, rank(request))
    return chosen


def rank(request: Request) -> list[str]:
    """All that can serve, the fastest first by the table of this GPU; `math` only if no other."""
    names = (*_preferred(request), *UNMEASURED)
    fit = [name for name in dict.fromkeys(names) if _refusal(name, request) is None]
    return fit or ["math"]


def triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels of this package cannot run here; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors, got {device} (or TRITON_INTERPRET=1)"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bf16, fp16 and fp32, got {dtype}"
    return None


def run_torch(backend: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> Tensor:
    """One of torch's own, on (batch, heads, seq, dim)."""
    seen = None
    if mask.window is not None or mask.q_ids is not None:
        m = torch.arange(q.shape[2], device=q.device)
        n = torch.arange(k.shape[2], device=q.device)
        seen = visible_pairs(m, n, mask)
        seen = seen.squeeze(1) if seen.dim() == 5 else seen
    grouped = q.shape[1] != k.shape[1]
    if grouped and backend == "efficient":  # it wants a key head per query head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    options: dict[str, Any] = {
        "attn_mask": seen,
        "is_causal": mask.causal and seen is None,
        "scale": mask.scale,
        "enable_gqa": grouped,
    }
    if backend == "sdpa":
        return functional.scaled_dot_product_attention(q, k, v, **options)
    with sdpa_kernel(SDPA[backend]):
        return functional.scaled_dot_product_attention(q, k, v, **options)


def _preferred(request: Request) -> tuple[str, ...]:
    """The table's order for this shape; nothing for a GPU that nobody has measured."""
    table = HOPPER  # a trace cannot ask for the GPU; a wrong guess costs time only
    if not torch.compiler.is_compiling():
        table = TABLES.get(capability(request.device), ())
    for preference in table:
        if (
            preference.bits == 8 * request.dtype.itemsize
            and preference.min_width <= request.width
            and preference.min_keys <= request.keys
        ):
            return preference.order
    return ()


@lru_cache
def capability(device: torch.device) -> tuple[int, int]:
    """(9, 0) for Hopper; (0, 0) off CUDA, where kernels are interpreted or only compiled."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)


def _refusal(backend: str, request: Request) -> str | None:
    """Why this backend cannot serve; None if it can."""
    if backend == "reference":
        return None
    if backend == "triton":
        if request.width > MAX_WIDTH:
            return f"it takes head widths up to {MAX_WIDTH}, got {request.width}"
        return triton_refusal(request.device, request.dtype)
    if request.lse:
        return "it does not return the log-sum-exp; triton and reference do"
    if backend == "math":
        return None
    if request.masked:
        return "windows and segments need triton, math or reference"
    if backend == "sdpa":
        return None
    if request.device.type != "cuda":
        return f"it needs CUDA tensors, got {request.device}"
    if request.causal and request.queries != request.keys:
        return f"its causal mask needs equal lengths, got {request.queries} and {request.keys}"
    if backend in ("flash", "cudnn") and request.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, got {request.dtype}"
    widest = _widest_of_cudnn(request.device) if backend == "cudnn" else MAX_WIDTH
    if backend in ("flash", "cudnn") and (request.width > widest or request.width % 8):
        return f"it takes head widths up to {widest} in multiples of 8, got {request.width}"
    return None


def _widest_of_cudnn(device: torch.device) -> int:
    """As torch has it; in a trace, which cannot ask for the GPU, what all take."""
    if torch.compiler.is_compiling():
        return 128
    new = (torch.backends.cudnn.version() or 0) >= 91000
    return 256 if new and capability(device) == (9, 0) else 128


def _check_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: use one of {BACKENDS}")
