"""What the kernels need of torch beyond its public names."""

from __future__ import annotations

import torch


def inside_backward() -> bool:
    """Whether a backward pass runs now: a forward in it recomputes, and begins no pass."""
    return torch._C._current_graph_task_id() != -1


# Keeps a GPU busy for so many cycles, while the host gets ahead. Without it a short kernel takes
# the time of its launch.
spin = torch.cuda._sleep
