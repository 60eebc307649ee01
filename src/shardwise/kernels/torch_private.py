"""What the kernels need of torch beyond its public names."""

from __future__ import annotations

import torch


def inside_backward() -> bool:
    """Whether a backward pass runs now: a forward in it recomputes, and begins no pass."""
    return torch._C._current_graph_task_id() != -1


def is_static(*sizes: int) -> bool:
    """Whether a trace knows these sizes as numbers: asking for a symbol's would make it one."""
    from torch.fx.experimental.symbolic_shapes import has_static_value

    return all(has_static_value(size) for size in sizes)
