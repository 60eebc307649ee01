"""For a model that reads values: a copy of it with memory, where that fits, and inputs with values.

A forward with `.item()`, a branch on a tensor, `nonzero` or numpy has no way on the meta device. It
is traced while it runs for real then, once, on one micro-batch.
"""

from __future__ import annotations

import copy
import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import UserError

_SHARE = 0.5  # of the free memory that parameters and gradients may take: activations come on top
_OURS = tuple(
    str(Path(place).resolve()) for place in (torch.__path__[0], Path(__file__).parents[2])
)
_PYTHON = Path(sysconfig.get_paths()["stdlib"]).resolve()


def copy_with_values(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """A copy on `device`, its floating-point parameters in `dtype`; an error if it does not fit."""
    if any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise UserError(
            f"{type(model).__name__} is on the meta device and its forward reads values: give it "
            "as a model that has some, built on the host"
        )
    check_fits(model, dtype, device)
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        cast = dtype if parameter.is_floating_point() else None
        parameter.grad = None
        parameter.data = parameter.data.to(device, cast)
    for module in copied.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    return copied


def check_fits(model: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """Error if a copy's parameters and gradients fill more than half of the free memory."""
    free = free_bytes(device)
    sizes = (
        p.numel() * (dtype if dtype is not None and p.is_floating_point() else p.dtype).itemsize
        for p in model.parameters()
    )
    needed = 2 * sum(sizes)
    if needed > _SHARE * free:
        raise UserError(
            f"{type(model).__name__} reads values in forward, so that it can only be described by "
            f"a real run, and its parameters and gradients take {needed / 1e9:.1f} GB: more than "
            f"half of the {free / 1e9:.1f} GB that are free on {device}. Describe a smaller one "
            "(fewer layers), or a larger machine's (trace_on='cuda', --trace-on cuda)"
        )


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = free_memory()
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if free is None else free


def free_memory() -> int | None:
    """Of the host, in bytes; None where the system does not tell."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def choose_device(asked: str) -> torch.device:
    """Where a real run goes: as asked, else to a GPU if there is one."""
    if asked == "cuda" and not torch.cuda.is_available():
        raise UserError("trace_on is 'cuda', and torch finds no GPU here: use 'cpu', or 'auto'")
    gpu = asked == "cuda" or (asked == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if gpu else "cpu")


def with_values(value: Any, device: torch.device, count: int = 2) -> Any:
    """A copy of an input; what is on the meta device gets random values, of integers 0 to `count`:
    0 and 1 are valid tokens and classes of nearly all models.
    """
    if not isinstance(value, Tensor):
        return value
    if not value.is_meta:
        made = value.detach().to(device, copy=True)
    elif value.is_floating_point() or value.is_complex():
        made = torch.randn(value.shape, dtype=value.dtype, device=device)
    else:
        made = torch.randint(0, count, value.shape, device=device).to(value.dtype)
    return made.requires_grad_() if value.requires_grad else made


def tell(error: BaseException) -> str:
    """An error of somebody's code in one line: its kind, its first words, and where it arose."""
    words = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {words[0][:120]}" if words else type(error).__name__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_foreign(f.filename)]
    return f"{said} ({frames[-1].filename}:{frames[-1].lineno})" if frames else said


@contextmanager
def staying() -> Iterator[None]:
    """Around somebody's code: that it ends the program is an error as any other."""
    try:
        yield
    except SystemExit as error:
        said = RuntimeError(f"it ends the program, by sys.exit({error.code!r})")
        raise said.with_traceback(error.__traceback__) from None


def _is_foreign(file: str) -> bool:
    """Neither torch's, nor Python's, nor ours."""
    path = Path(file).resolve()
    packaged = "site-packages" in path.parts
    known = str(path).startswith(_OURS) or (not packaged and path.is_relative_to(_PYTHON))
    return path.exists() and not known
