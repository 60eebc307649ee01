"""What the kernels need of torch beyond its public names."""

from __future__ import annotations

import torch

# The backward pass that runs now, by a number; -1: none does. A forward inside of one recomputes.
backward_pass = torch._C._current_graph_task_id

# Keeps a GPU busy for so many cycles, while the host gets ahead. Without it a short kernel takes
# the time of its launch.
spin = torch.cuda._sleep
