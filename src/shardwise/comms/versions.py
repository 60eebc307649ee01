"""Where torch versions differ (2.11 to 2.13), and names that torch keeps private and may move.

Three stay where they are used, because they are the thing itself: a module's `_parameters` dict
(`sharding/unit.py`), its `_compiled_call_impl` (`runtime/hooks.py`), and torch's `_foreach_` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

# 2.13 renamed the two calls that take one flat tensor; the old names warn there. Looked up in
# `dist` at each call, so that whatever wraps them there (an emulated network, a recorder) is met by
# torch's engines and by ours alike.
ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


def all_gather(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    return getattr(dist, ALL_GATHER)(output, input, group=group, async_op=True)


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, group: Any) -> Any:
    return getattr(dist, REDUCE_SCATTER)(output, input, group=group, async_op=True)


def coalescing(group: Any, device: torch.device) -> Any:
    """A context whose collectives are issued as one grouped call; its value has `wait()`."""
    return dist._coalescing_manager(group=group, device=device, async_ops=True)


def chunk_cat(tensors: list[torch.Tensor], ranks: int, output: torch.Tensor) -> None:
    """Cut each tensor into `ranks` equal row blocks (zero-padded) and lay them side by side,
    casting: one kernel.
    """
    torch._chunk_cat(tensors, 0, ranks, out=output)


def call_after_backward(callback: Callable[[], None]) -> None:
    """Run `callback` when the backward pass that is running now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def inside_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


_streams: dict[tuple[int, int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """torch.cuda.current_stream without making a new object each time (8 us of it, measured)."""
    key = torch._C._cuda_getCurrentStream(device.index or 0)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


def supported_devices(group: Any) -> set[str]:
    """Device types that a process group can move, by the backends it was made with."""
    backends = group._device_types
    return {device.type for device in backends}
