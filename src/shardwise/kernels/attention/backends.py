"""Which implementation of attention runs: a small measured table, and a way to force one.

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

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.kernels.attention.reference import visible_pairs

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

_forced: str | None = None


@dataclass(frozen=True)
class Row:
    """From which shapes on which backends are fastest, best first. The first fitting row counts."""

    bits: int
    min_width: int
    min_keys: int
    order: tuple[str, ...]


# Measured on an H200 (torch 2.11, causal, forward + backward, 1 and 16 heads): benchmarks/results,
# attention-h200.json, and attention-step-h200.json for width 64 at 1,024 to 16,384 keys. Bounds lie
# between two lengths measured.
HOPPER = (
    Row(bits=16, min_width=65, min_keys=24576, order=("cudnn", "triton", "flash")),
    Row(bits=16, min_width=65, min_keys=2048, order=("triton", "cudnn", "flash")),
    Row(bits=16, min_width=33, min_keys=2048, order=("cudnn", "triton", "flash")),
    Row(bits=16, min_width=1, min_keys=2048, order=("triton", "cudnn", "flash")),
    Row(bits=16, min_width=33, min_keys=1024, order=("triton", "cudnn", "flash")),
    Row(bits=16, min_width=1, min_keys=0, order=("flash", "cudnn", "triton")),
    Row(bits=32, min_width=1, min_keys=512, order=("triton", "efficient")),
    Row(bits=32, min_width=1, min_keys=0, order=("efficient", "triton")),
)
TABLES = {(9, 0): HOPPER}  # by compute capability
UNMEASURED = ("flash", "efficient", "triton", "math")


@dataclass(frozen=True)
class Case:
    """What the choice depends on."""

    device: torch.device
    dtype: torch.dtype
    width: int
    queries: int
    keys: int
    causal: bool
    masked: bool  # a window or segments
    precision: str
    lse: bool = False  # wanted, not only o

    @classmethod
    def of(
        cls,
        q: Tensor,
        k: Tensor,
        causal: bool,
        window: bool,
        segments: bool,
        precision: str,
        lse: bool = False,
    ) -> Case:
        return cls(
            q.device, q.dtype, q.shape[-1], q.shape[-2], k.shape[-2], causal, window or segments,
            precision, lse,
        )  # fmt: skip


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


def choose(case: Case, backend: str | None = None) -> str:
    """The forced backend, or else the first of the table that can serve.

    Raises ValueError with the reason if a forced one cannot.
    """
    backend = backend or _forced
    if backend is not None:
        _check_name(backend)
        reason = _refusal(backend, case)
        if reason is not None:
            raise ValueError(f"the attention backend {backend!r} cannot serve: {reason}")
        return backend
    if case.lse:  # torch's backends keep it to themselves
        return "reference" if _refusal("triton", case) else "triton"
    if case.device.type != "cuda":
        return "math" if case.masked else "sdpa"
    # Of torch's backends these may sum gradients in an order that changes from run to run.
    deterministic = torch.are_deterministic_algorithms_enabled()
    unsteady = ("flash", "cudnn", "efficient") if deterministic else ()
    for name in _ranking(case):
        if name not in unsteady and _refusal(name, case) is None:
            return name
    return "math"


def triton_refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernels of this package cannot run here; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed (pip install triton)"
    if device.type != "cuda" and not INTERPRETED:
        return f"it needs CUDA tensors, got {device} (or TRITON_INTERPRET=1)"
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it takes bf16, fp16 and fp32, got {dtype}"
    return None


def run_torch(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    ids: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """One of torch's own, on (batch, heads, seq, dim)."""
    mask = None
    if window is not None or ids is not None:
        m = torch.arange(q.shape[2], device=q.device)
        n = torch.arange(k.shape[2], device=q.device)
        mask = visible_pairs(m, n, causal, window, *(ids or (None, None)))
        mask = mask.squeeze(1) if mask.dim() == 5 else mask
        causal = False
    grouped = q.shape[1] != k.shape[1]
    if grouped and backend in ("cudnn", "efficient"):  # they want a key head per query head
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        grouped = False
    if backend == "sdpa":
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    with sdpa_kernel(SDPA[backend]):
        return functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )


def _ranking(case: Case) -> tuple[str, ...]:
    for row in _rows(case.device):
        if (
            row.bits == 8 * case.dtype.itemsize
            and row.min_width <= case.width
            and row.min_keys <= case.keys
        ):
            return (*row.order, *UNMEASURED)
    return UNMEASURED


def _rows(device: torch.device) -> tuple[Row, ...]:
    """The table of this GPU."""
    if torch.compiler.is_compiling():
        return HOPPER  # a trace cannot ask for the GPU; a wrong guess costs time only
    return TABLES.get(_capability(device), ())


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _refusal(backend: str, case: Case) -> str | None:
    """Why this backend cannot serve the case; None if it can."""
    if backend == "reference":
        return None
    if backend == "triton":
        if case.width > MAX_WIDTH:
            return f"it takes head widths up to {MAX_WIDTH}, got {case.width}"
        return triton_refusal(case.device, case.dtype)
    if case.lse:
        return "it does not return the log-sum-exp; triton and reference do"
    if backend == "math":
        return None
    if case.masked:
        return "windows and segments need triton, math or reference"
    if backend == "sdpa":
        return None
    if case.device.type != "cuda":
        return f"it needs CUDA tensors, got {case.device}"
    if case.causal and case.queries != case.keys:
        return f"its causal mask needs equal lengths, got {case.queries} and {case.keys}"
    if backend in ("flash", "cudnn") and case.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, got {case.dtype}"
    widest = 128 if backend == "cudnn" else MAX_WIDTH
    if backend in ("flash", "cudnn") and (case.width > widest or case.width % 8):
        return f"it takes head widths up to {widest} in multiples of 8, got {case.width}"
    return None


def _check_name(backend: str) -> None:
    if backend not in BACKENDS:
        raise ValueError(f"unknown attention backend {backend!r}: use one of {BACKENDS}")
