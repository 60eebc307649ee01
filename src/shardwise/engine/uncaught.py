"""What torch's message cannot say, of errors that reach a program from torch's own code and end it.

Those that pass through a sharded module's forward are explained there (`checks.explain`).
"""

from __future__ import annotations

import re

_HINTS = {
    # A freed parameter counts one write more (`executor.free`).
    re.compile(r"modified by an inplace operation: \[[\w.]+ (\[[\d, ]*\])\]"): (
        "if nothing in the program changed a tensor of shape {}, it is a parameter that backward "
        "read while its unit was freed: a block has made a loss in its forward that is no part of "
        "its output. Return it with the output, or keep it on the block (self.aux_loss = ...)"
    ),
    re.compile(r"(inf\w*) norm on an empty tensor"): (
        "this rank has no rows of some sharded parameter, and torch asks every rank for the "
        "largest of its rows; use shardwise.clip_grad_norm(model, max_norm, norm_type=inf), which "
        "all ranks call"
    ),
}


def explain(error: BaseException) -> None:
    """Add to the message, once, what is probably the matter and what to do."""
    for says, hint in _HINTS.items():
        found = says.search(str(error)) if isinstance(error, RuntimeError) else None
        if found is not None and "shardwise:" not in str(error):
            error.args = (f"{error}\nshardwise: {hint.format(found[1])}",)
