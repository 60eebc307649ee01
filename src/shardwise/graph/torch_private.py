"""torch's private names that graphs need, each with why and what breaks without it.

No other file of this room touches one (`tests/unit/test_torch_private.py`).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.testing._internal.distributed.fake_pg import FakeStore

# Collectives that return tensors, and the wait for them: what a traced graph holds. They are how
# torch's own tensor parallelism appears in graphs, and what its compiler knows how to run.
collectives: Any = torch.ops._c10d_functional
_differentiable: Any = _functional_collectives  # takes a group's name, whatever its types say


def is_operator(target: Any) -> bool:
    """Whether a node calls one of torch's operators, whose schema says what it costs."""
    return isinstance(target, torch._ops.OpOverload)


def gather_rows(x: Tensor, group: str) -> Tensor:
    """All ranks' rows, one rank's after the other's; backward scatters the sum of their gradients.
    Without these two tensor parallelism would need rules of autograd of its own.
    """
    gathered: Tensor = _differentiable.all_gather_tensor_autograd(x, 0, group)
    return gathered


def scatter_rows(x: Tensor, group: str) -> Tensor:
    """This rank's rows of the sum over all ranks; backward gathers."""
    scattered: Tensor = _differentiable.reduce_scatter_tensor_autograd(x, "sum", 0, group)
    return scattered


def join_imagined_world(ranks: int) -> None:
    """Be rank 0 of a world whose collectives do nothing. Without it a graph of many ranks could be
    traced on many ranks only.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def name_of_group(group: dist.ProcessGroup) -> str:
    """What the nodes of a graph call it."""
    return str(group.group_name)
