"""Marks for engines that make none of their own: torch's FSDP2, DistributedDataParallel, plain
models.

FSDP2 names its work in ranges for torch's profiler, which become marks. For others the model's
repeated blocks are the units: hooks tell when their forward runs, and an operation of backward
belongs to the block whose forward made it, which autograd's sequence numbers tell.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.description.tracing import torch_private
from shardwise.engine.marks import Marks
from shardwise.predict.describe import find_blocks
from shardwise.profiling.trace import TorchTrace

ROOT = "root"
_NOTHING = nullcontext()
_FSDP = re.compile(r"FSDP::(\w+)(?: \((.*)\))?$")
_RANGES = {
    "all_gather": "gather",
    "all_gather_copy_out": "copy-out",
    "post_backward_reduce": "pack",
}
# torch.distributed's functions, what they are, and the argument that holds the whole message.
_FUNCTIONS = {
    "all_gather_single": ("all_gather", 0, "output_tensor"),
    "all_gather_into_tensor": ("all_gather", 0, "output_tensor"),
    "reduce_scatter_single": ("reduce_scatter", 1, "input"),
    "reduce_scatter_tensor": ("reduce_scatter", 1, "input"),
    "all_reduce": ("all_reduce", 0, "tensor"),
}


def uses_fsdp(model: nn.Module | None) -> bool:
    return model is not None and any(isinstance(m, FSDPModule) for m in model.modules())


def note_torch(marks: Marks, model: nn.Module | None, ours: bool, fsdp: bool) -> ExitStack:
    """Mark what torch does, until the stack closes: where backward begins and, unless an engine of
    `ours` marks them, collectives, the work of torch's FSDP2 and the forward of modules.
    """
    stack = ExitStack()

    def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        stack.callback(setattr, owner, name, original)
        setattr(owner, name, partial(wrapper, marks, original))

    wrap(torch.autograd, "backward", _note_backward)
    if ours:
        return stack
    open_calls: list[str] = []
    for name in _FUNCTIONS:
        if hasattr(dist, name):
            wrap(dist, name, partial(_note_call, name, open_calls))
    if fsdp:
        wrap(torch_private.fsdp_param_group_module(), "record_function", _note_range)
    if model is not None:
        _hang_hooks(model, marks, stack)
    return stack


def _note_backward(marks: Marks, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark where backward begins, before any hook of an engine does."""
    marks.turn(marks.contexts[-1][1], "backward")
    return original(*args, **kwargs)


def _note_call(
    name: str,
    open_calls: list[str],
    marks: Marks,
    original: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Mark a collective that Python issues through torch.distributed, but not those inside it."""
    kind, position, keyword = _FUNCTIONS[name]
    message = args[position] if len(args) > position else kwargs.get(keyword)
    if open_calls or not isinstance(message, torch.Tensor):
        return original(*args, **kwargs)
    axis = "replicate" if kind == "all_reduce" else "shard"
    group = kwargs.get("group") or dist.group.WORLD
    members = tuple(dist.get_process_group_ranks(group))
    marks.call(kind, axis, message.numel() * message.element_size(), members)
    noted = marks.calls[-1]
    open_calls.append(name)
    try:
        return original(*args, **kwargs)
    finally:
        open_calls.pop()
        marks.end_call(noted)


@contextmanager
def _note_range(marks: Marks, original: Callable[..., Any], label: str) -> Iterator[None]:
    """Let a range that torch's FSDP2 names for the profiler be a mark."""
    found = _FSDP.match(label)
    what, unit = (found[1], found[2] or ROOT) if found else ("", "")
    if what == "post_forward":
        marks.leave()
    elif what == "pre_backward":
        marks.turn(unit, "backward")
    with original(label), marks.range(_RANGES[what], unit) if what in _RANGES else _NOTHING:
        yield
    if what == "pre_forward":
        marks.enter(unit, "forward")


def _hang_hooks(model: nn.Module, marks: Marks, stack: ExitStack) -> None:
    """Mark the forward of the model and of its repeated blocks, until `stack` closes."""
    blocks = dict.fromkeys(find_blocks(model))

    def before(unit: str, is_root: bool, *_: Any) -> None:
        if is_root:
            marks.begin_forward()
        marks.enter(unit, "forward")

    for name, module in model.named_modules():
        is_root = module is model
        if name in blocks or is_root:
            # A step begins with the model's forward, also before what FSDP2 does there.
            hook = partial(before, name or ROOT, is_root)
            stack.callback(module.register_forward_pre_hook(hook, prepend=is_root).remove)
            stack.callback(module.register_forward_hook(lambda *_: marks.leave()).remove)


def find_backward(trace: TorchTrace, marks: Marks) -> list[tuple[int, str, str]]:
    """Contexts of backward, from the sequence numbers that forward's operations gave."""
    times = [time for time, _, _ in marks.contexts]
    units: dict[int, str] = {}
    for op in trace.operations:
        if op.sequence >= 0 and op.thread == trace.host:
            at = bisect_right(times, op.start) - 1
            if at >= 0 and marks.contexts[at][2] == "forward":
                units[op.sequence] = marks.contexts[at][1]
    last = ""
    found = []
    for node in trace.nodes:
        unit = units.get(node.sequence, last)
        if unit:
            found.append((node.start, unit, "backward"))
            last = unit
    return found
