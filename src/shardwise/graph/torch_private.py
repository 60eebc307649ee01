"""torch's private names that graphs need, each with why and what breaks without it.

No other file of this room touches one (`tests/unit/test_torch_private.py`).
"""

from __future__ import annotations

from typing import Any

import torch

# Collectives that return tensors, and the wait for them: what a traced graph holds. They are how
# torch's own tensor parallelism appears in graphs, and what its compiler knows how to run.
collectives: Any = torch.ops._c10d_functional


def is_operator(target: Any) -> bool:
    """Whether a node calls one of torch's operators, whose schema says what it costs."""
    return isinstance(target, torch._ops.OpOverload)
