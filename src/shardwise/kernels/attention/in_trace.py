"""Which backend a trace of torch.compile takes.

Imported by the trace alone: with this comes torch's compiler, which takes seconds, and Triton,
which decides then whether kernels are interpreted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import has_static_value

from shardwise.kernels.attention import measured
from shardwise.kernels.attention.backends import Request, rank


def choose_in_trace(request: Request) -> str:
    """With sizes that are symbols, by the table: to look one up would make it a number, and the
    next length another trace.
    """
    for field in request:
        if isinstance(field, int | torch.SymInt) and not has_static_value(field):
            return rank(request)[0]
    return _choose(*request)


@torch.compiler.assume_constant_result
def _choose(*fields: Any) -> str:
    """The choice that was measured before, or the table's. This runs as it stands, in the middle of
    the trace, where nothing can be timed.
    """
    request = Request(*fields)
    names = rank(request)
    return measured.recall(request, names) or names[0]
