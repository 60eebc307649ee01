"""torch's private names that tracing and measuring need, each with what is lost without it.

What the engine and the rooms above it need stands in `engine/torch_private.py`, which this room
lies below. `tests/unit/test_torch_private.py` lists both, and tells whether a torch has them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["TorchDispatchMode", "pytree"]  # torch's own, from here

# `pytree` finds the tensors in what a module takes and gives. Without it: our own walk over lists
# and dicts, which would not know the containers that users register with torch.
# `TorchDispatchMode` sees every operator below autograd, those of backward too. Without it there is
# no trace.

# An operator's name, its arguments with their defaults, and which of its results are views. Without
# it no operator could be told from another, and views would cost what copies do.
schema_of = attrgetter("_schema")

# A storage's address, which two tensors over the same memory share; on the meta device `data_ptr`
# is always 0. Without it a view would count as memory of its own.
storage_id = attrgetter("_cdata")

# How often a tensor was written. Without it a kept result that was changed in place would be taken
# for what it was.
version_of = attrgetter("_version")


def unwrapped(tensor: Tensor) -> Tensor:
    """The tensor, with memory, that functions of `torch.func` (vmap, grad) have wrapped. Without it
    a model that calls them could not be traced.
    """
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def parts_of(tensor: Tensor) -> tuple[Tensor, ...]:
    """The tensor itself, or those that a sparse one is made of. Without it a model that multiplies
    by a sparse matrix could not be traced.
    """
    if tensor.layout == torch.strided:
        return (tensor,)
    if tensor.layout == torch.sparse_coo:
        return tensor._indices(), tensor._values()
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()  # a library's own layout, such as oneDNN's


def detach_below_autograd(tensor: Tensor) -> Tensor:
    """A view that counts writes with its tensor, also below autograd. Without it such a view would
    count its own alone.
    """
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


# The node of autograd's graph that runs now, the number that forward gave it, and the number that
# forward would give next. Without them no backward operator would belong to a module.
current_node = torch._C._current_autograd_node
node_number = methodcaller("_sequence_nr")
next_node_number = torch.autograd._get_sequence_nr

# A stretch in which no mode of functions is asked. Without it a trace asks `DeviceKernels` whenever
# it looks at a tensor's shape, which takes a fifth of its time.
without_functions = torch._C.DisableTorchFunction

# What a device fuses attention to. Without them the meta device takes the plain path, which keeps
# the whole matrix of scores for backward.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention
flash_attention_for_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
efficient_attention = torch.ops.aten._scaled_dot_product_efficient_attention


def _operators(*names: str) -> frozenset[Any]:
    """Those that this torch has, in all of their forms."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(
        getattr(packet, form) for packet in packets if packet is not None
        for form in packet.overloads() if form != "out"
    )  # fmt: skip


# What recomputation of chosen operators tells apart: products, and attention as one kernel.
product_operators = _operators(
    "mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm", "_scaled_mm"
)
# The products of groups of rows, which experts are. Without it experts in float32 could not be
# traced on the meta device, for torch's rule there knows bfloat16 only.
grouped_products = _operators("_grouped_mm")
attention_operators = _operators(
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable", "_flash_attention_forward",
    "_efficient_attention_forward",
)  # fmt: skip

_FLEX = "torch.nn.attention.flex_attention"
_autograd = torch.autograd.Variable._execution_engine


def run_backward(scalar: Tensor) -> None:
    """As scalar.backward(), which would suspend `DeviceKernels`; recomputation needs it."""
    _autograd.run_backward(
        (scalar,), (torch.ones_like(scalar),), False, False, (),
        allow_unreachable=True, accumulate_grad=True,
    )  # fmt: skip


def is_compiled(module: Any) -> bool:
    """Whether `module.compile()` was called, or it is what `torch.compile` gave. Without it blocks
    whose operators cannot be told apart would be recomputed whole where some were to be kept.
    """
    called = getattr(module, "_compiled_call_impl", None) is not None
    return called or type(module).__name__ == "OptimizedModule"


def loaded_compilers() -> int:
    """How many of two have been imported, which takes seconds: if none, nothing is compiled."""
    return sum(name in sys.modules for name in ("torch._dynamo", _FLEX))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Compiled parts of a model run as they were written, and flex attention asks the modes alone
    (`DeviceKernels` answers it). Without it a trace would see a graph's kernels, or an error.
    """
    if not loaded_compilers():
        yield
        return
    flex, check = sys.modules.get(_FLEX), "_validate_device"  # refuses the meta device
    known = getattr(flex, check, None)
    if known is not None:
        setattr(flex, check, lambda *_: None)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        if known is not None:
            setattr(flex, check, known)


@contextmanager
def whole_sequences() -> Iterator[None]:
    """Transformers looks at the positions' values for several sequences packed into one, before
    every mask. Without it none of its models could be traced on the meta device.
    """
    masks, look = sys.modules.get("transformers.masking_utils"), "find_packed_sequence_indices"
    known = getattr(masks, look, None)
    if known is not None:
        setattr(masks, look, lambda *_, **__: None)
    try:
        yield
    finally:
        if known is not None:
            setattr(masks, look, known)


# Measuring: of the rooms above

# Whether torch's profiler runs; a process has only one. Without it a second start fails somewhere
# inside torch, with an error that does not say so.
profiler_runs = torch.autograd._profiler_enabled

# The history of CUDA's allocator, block by block. Without it memory has no curve on a GPU, only a
# peak.
record_allocations = torch.cuda.memory._record_memory_history
allocator_snapshot = torch.cuda.memory._snapshot

# The communication hooks of a DistributedDataParallel model. Without it an emulated network would
# put its hook over a user's.
comm_hooks_of = attrgetter("_comm_hooks")


def fsdp_param_group_module() -> Any:
    """Where torch's FSDP2 looks up the `record_function` that names its work. Without it a profile
    of torch's engine has no gathers and reduces.
    """
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    return _fsdp_param_group


def fake_store() -> Any:
    """A store for the "fake" backend, whose groups send nothing; the import registers the backend.
    Without it a process cannot be one rank of an emulated cluster.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()
