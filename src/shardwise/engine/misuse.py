"""Where a sharded parameter was read outside its unit's forward: torch only says that tensors were
mixed; here the error gets the parameter's name and what to do.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.guard import engine_of

_SAYS = "got mixed torch.Tensor and DTensor"
_PARTS = re.compile(r"\.(\w+)|\[(\w+)\]")
_CHAIN = re.compile(r"[A-Za-z_]\w*(?:\.\w+|\[\w+\])+")


def explain(error: BaseException, advice: str) -> None:
    """Add to torch's own message, once, which parameter was read and what to do."""
    if not isinstance(error, RuntimeError) or _SAYS not in str(error) or advice in str(error):
        return
    names = list(dict.fromkeys(_read(error.__traceback__)))
    what = f"the sharded parameter {names[0]!r}" if names else "a sharded parameter"
    error.args = (
        f"{error}\nshardwise: {what} was read outside the forward of its unit, while only this "
        f"rank's rows are here. {advice}",
    )


def _read(trace: TracebackType | None) -> Iterator[str]:
    """Names of sharded parameters that the innermost frames mention, the innermost first."""
    frames: list[tuple[FrameType, int]] = []
    while trace is not None:
        frames.append((trace.tb_frame, trace.tb_lineno))
        trace = trace.tb_next
    for frame, line in reversed(frames):
        for chain in _CHAIN.findall(linecache.getline(frame.f_code.co_filename, line)):
            name = _name_of(_look_up(frame, chain))
            if name is not None:
                yield name


def _look_up(frame: FrameType, chain: str) -> Any:
    """The value of `self.a.b[0]` in a frame, through modules only; None if it cannot be told."""
    value = frame.f_locals.get(_PARTS.sub("", chain))
    for attribute, index in _PARTS.findall(chain):
        if not isinstance(value, nn.Module):
            break  # a method of what was found
        key = attribute or str(frame.f_locals.get(index, index))
        value = value._modules.get(key, value._parameters.get(key))
    return value


def _name_of(value: Any) -> str | None:
    engine = engine_of(value) if isinstance(value, DTensor) else None
    for unit in engine.units if engine is not None else ():
        for member, visible in zip(unit.parameters.members, unit.parameters.visible, strict=True):
            if visible is value:
                return member.name
    return None
