"""Collectives over torch.distributed. Sums on the wire, always: gloo's AVG has silently summed in
some versions (pytorch/pytorch 162338), so nobody asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardwise.engine import marks, recording, torch_private
from shardwise.engine.control import Control


class Handle(Protocol):
    """Something under way. On CUDA `wait` orders the current stream behind it; else it blocks."""

    def wait(self) -> Any: ...


class Done:
    """Nothing under way: a group of one rank, or an operation that has ended."""

    def wait(self) -> None:
        return None


DONE = Done()


class All:
    """Several handles as one."""

    def __init__(self, handles: Sequence[Handle]) -> None:
        self.handles = handles

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()


def allocate(custom: Any, numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a collective; that of `custom`, if it is called instead of torch.distributed."""
    if custom is None:
        return torch.empty(numel, dtype=dtype, device=device)
    made: torch.Tensor = custom.allocate((numel,), dtype=dtype, device=device)
    return made


@dataclass(eq=False)
class Group:
    """One axis of the mesh as this rank sees it: the ranks it shares that axis with."""

    axis: str
    group: dist.ProcessGroup | None
    size: int
    rank: int
    control: Control | None  # moves small host values

    def all_gather(self, output: torch.Tensor, input: torch.Tensor, custom: Any = None) -> Handle:
        """Every rank's `input`, one after the other, into `output`. `input` may be this rank's part
        of `output`. `custom` is called instead of torch.distributed, with torch's AllGather's
        arguments.
        """
        if self.size == 1:
            if output.data_ptr() != input.data_ptr():
                output.copy_(input)
            return DONE
        self._note("all_gather", output)
        if custom is not None:
            return marks.issued(custom(output, input, self.group, async_op=True) or DONE)
        return marks.issued(torch_private.all_gather(output, input, self.group))

    def all_gather_grouped(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> Handle:
        """Many gathers as one grouped call; each input may be this rank's part of its output."""
        self._note("all_gather", *outputs)
        return marks.issued(torch_private.all_gather_grouped(outputs, inputs, self.group))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, custom: Any = None
    ) -> Handle:
        """The sum over ranks of everybody's `input`; this rank gets its equal part of it."""
        self._note("reduce_scatter", input)
        if custom is not None:
            handle = custom(output, input, self.group, dist.ReduceOp.SUM, async_op=True)
            return marks.issued(handle or DONE)
        return marks.issued(torch_private.reduce_scatter(output, input, self.group))

    def all_reduce(self, tensor: torch.Tensor) -> Handle:
        """The sum over ranks, in place."""
        if self.size == 1:
            return DONE
        self._note("all_reduce", tensor)
        return marks.issued(dist.all_reduce(tensor, group=self.group, async_op=True))

    def broadcast(self, tensor: torch.Tensor) -> None:
        """The first rank's values on every rank."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def exchange(self, value: object) -> list[Any]:
        """Every rank's small Python value, on every rank. Blocks; for agreement, not for data."""
        if self.size == 1 or self.control is None:
            return [value] * self.size
        return self.control.exchange(value)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """The group's ranks in the world."""
        return tuple(dist.get_process_group_ranks(self.group))

    def gathers_grouped(self, device: torch.device) -> bool:
        """Whether a grouped call takes this device's tensors. gloo's does not, though its other
        calls do: it reads them as the host's, and the process dies.
        """
        backends = dist.get_backend_config(self.group).split(",")
        return device.type == "cpu" or f"{device.type}:gloo" not in backends

    def _note(self, name: str, *tensors: torch.Tensor) -> None:
        if recording.open_records or marks.on is not None:
            nbytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            recording.note(name, self.axis, nbytes, self.size)
            if marks.on is not None:
                marks.on.call(name, self.axis, nbytes, self.members)
