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
    re.compile(r"(got mixed torch\.Tensor and DTensor)"): (
        "outside of its forward a sharded model's parameters and gradients are DTensors, and so is "
        "what is computed from them. Call the model, not model.forward. For a loss, a log or an "
        "average beside plain tensors use value.full_tensor(), which all ranks call; to load plain "
        "weights after fully_shard torch's set_model_state_dict with "
        "StateDictOptions(full_state_dict=True). After "
        "a forward that no backward follows some parameters are plain: evaluate under "
        "torch.no_grad()"
    ),
}


def explain(error: BaseException) -> None:
    """Add to the message, once, what is probably the matter and what to do."""
    for says, hint in _HINTS.items():
        found = says.search(str(error)) if isinstance(error, RuntimeError) else None
        if found is not None and "shardwise:" not in str(error):
            error.args = (f"{error}\nshardwise: {hint.format(found[1])}",)
