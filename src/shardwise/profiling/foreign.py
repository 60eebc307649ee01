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
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from shardwise.engine import torch_private
from shardwise.engine.marks import Marks
from shardwise.predict.describe import find_blocks
from shardwise.profiling.trace import Trace

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


@contextmanager
def note_calls(marks: Marks) -> Iterator[None]:
    """Mark every collective that Python issues through torch.distributed."""
    originals = {name: getattr(dist, name) for name in _FUNCTIONS if hasattr(dist, name)}
    inside = False

    def wrap(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        kind, position, keyword = _FUNCTIONS[name]
        axis = "replicate" if kind == "all_reduce" else "shard"

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside
            message = args[position] if len(args) > position else kwargs.get(keyword)
            if inside or not isinstance(message, torch.Tensor):
                return original(*args, **kwargs)
            group = kwargs.get("group") or dist.group.WORLD
            members = tuple(dist.get_process_group_ranks(group))
            marks.call(kind, axis, message.numel() * message.element_size(), members)
            noted, inside = marks.calls[-1], True
            try:
                return original(*args, **kwargs)
            finally:
                inside = False
                marks.end_call(noted)

        return call

    for name, original in originals.items():
        setattr(dist, name, wrap(name, original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def hang_hooks(model: nn.Module, marks: Marks, stack: ExitStack) -> None:
    """Mark the forward of the model and of its repeated blocks, until `stack` closes."""
    blocks = dict.fromkeys(find_blocks(model))
    for name, module in model.named_modules():
        if name not in blocks and module is not model:
            continue
        unit = name or ROOT
        handles = [
            # A step begins with the model's forward, also before what FSDP2 does there.
            module.register_forward_pre_hook(
                _before(marks, unit, module is model), prepend=module is model
            ),
            module.register_forward_hook(lambda *_: marks.leave()),
        ]
        for handle in handles:
            stack.callback(handle.remove)


def _before(marks: Marks, unit: str, is_root: bool) -> Callable[..., None]:
    def before(*_: Any) -> None:
        if is_root:
            marks.begin_forward()
        marks.enter(unit, "forward")

    return before


@contextmanager
def note_backward(marks: Marks) -> Iterator[None]:
    """Mark where backward begins, before any hook of an engine does."""
    original = torch.autograd.backward

    def backward(*args: Any, **kwargs: Any) -> Any:
        marks.turn(marks.contexts[-1][1], "backward")
        return original(*args, **kwargs)

    torch.autograd.backward = backward
    try:
        yield
    finally:
        torch.autograd.backward = original


@contextmanager
def note_fsdp(marks: Marks) -> Iterator[None]:
    """Let the ranges that torch's FSDP2 names for the profiler be marks."""
    module = torch_private.fsdp_param_group_module()
    original = module.record_function

    @contextmanager
    def named(label: str) -> Iterator[None]:
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

    module.record_function = named
    try:
        yield
    finally:
        module.record_function = original


def uses_fsdp(model: nn.Module | None) -> bool:
    return model is not None and any(isinstance(m, FSDPModule) for m in model.modules())


def find_backward(trace: Trace, marks: Marks) -> list[tuple[int, str, str]]:
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
