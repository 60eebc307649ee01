"""Collectives of traced graphs over an emulated network.

A compiled graph calls operators of torch, not functions of `torch.distributed`. While an emulation
is open these kernels stand in their places: they allocate what the operators return, hand it to the
same `Emulation`, and keep what is under way until the graph waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardwise.graph.torch_private import group_named, override_collectives

if TYPE_CHECKING:
    from shardwise.emulation.collectives import Emulation


@dataclass(eq=False)
class _UnderWay:
    """A collective's work, and its inputs: a real one keeps their memory until it is waited for."""

    work: Any
    inputs: Sequence[Tensor]

    def wait(self) -> None:
        if self.work is not None:
            self.work.wait()
            self.work, self.inputs = None, ()


class GraphCollectives:
    """The kernels. What is under way is found again by the memory that it fills."""

    def __init__(self, emulation: Emulation) -> None:
        self._emulation = emulation
        self._under_way: dict[int, _UnderWay] = {}

    def _start(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], work: Any) -> None:
        under_way = _UnderWay(work, inputs)
        for output in outputs:
            self._under_way[output.data_ptr()] = under_way

    def _gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], group: str) -> None:
        sources = [source.contiguous() for source in inputs]
        work = self._emulation.all_gather_grouped(
            [output.view(-1) for output in outputs],
            [source.view(-1) for source in sources],
            group_named(group),
            lasts=False,
        )
        self._start(outputs, sources, work)

    def all_gather_into_tensor(self, input: Tensor, size: int, group: str) -> Tensor:
        return self.all_gather_into_tensor_coalesced([input], size, group)[0]

    def all_gather_into_tensor_out(
        self, input: Tensor, size: int, group: str, *, out: Tensor
    ) -> Tensor:
        self._gather([out], [input], group)
        return out

    def all_gather_into_tensor_coalesced(
        self, inputs: Sequence[Tensor], size: int, group: str
    ) -> list[Tensor]:
        outputs = [source.new_empty(source.shape[0] * size, *source.shape[1:]) for source in inputs]
        self._gather(outputs, inputs, group)
        return outputs

    def reduce_scatter_tensor(self, input: Tensor, op: str, size: int, group: str) -> Tensor:
        return self.reduce_scatter_tensor_coalesced([input], op, size, group)[0]

    def reduce_scatter_tensor_coalesced(
        self, inputs: Sequence[Tensor], op: str, size: int, group: str
    ) -> list[Tensor]:
        outputs = [whole.new_empty(whole.shape[0] // size, *whole.shape[1:]) for whole in inputs]
        sources = [whole.contiguous() for whole in inputs]
        work = self._emulation.reduce_scatter_grouped(outputs, sources, group_named(group))
        self._start(outputs, sources, work)
        return outputs

    def all_reduce(self, input: Tensor, op: str, group: str) -> Tensor:
        return self.all_reduce_coalesced_([input.clone()], op, group)[0]

    def all_reduce_(self, input: Tensor, op: str, group: str) -> Tensor:
        return self.all_reduce_coalesced_([input], op, group)[0]

    def all_reduce_coalesced(self, inputs: Sequence[Tensor], op: str, group: str) -> list[Tensor]:
        return self.all_reduce_coalesced_([tensor.clone() for tensor in inputs], op, group)

    def all_reduce_coalesced_(self, inputs: Sequence[Tensor], op: str, group: str) -> list[Tensor]:
        work = self._emulation.all_reduce_grouped(inputs, group_named(group))
        self._start(inputs, (), work)
        return list(inputs)

    def wait_tensor(self, tensor: Tensor) -> Tensor:
        found = self._under_way.pop(tensor.data_ptr(), None)
        if found is not None:
            found.wait()
        return tensor


NAMES = tuple(name for name in vars(GraphCollectives) if not name.startswith("_"))


@contextmanager
def graph_collectives(emulation: Emulation) -> Iterator[None]:
    """Graphs that run meanwhile send over `emulation`."""
    kernels = GraphCollectives(emulation)
    with override_collectives({name: getattr(kernels, name) for name in NAMES}):
        yield
