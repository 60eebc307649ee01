"""Runs of neighbouring parameters, each of which an optimizer steps as one plain tensor.

Optimizers that treat every element alike may see neighbouring parameters of a unit as one flat
tensor over the unit's buffers: a handful of kernels per step, and little work per parameter. Here
is which parameters those are, and how their tensors are joined and cut; `local_step.py` steps them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardwise.engine.gradients import Gradients
from shardwise.engine.mesh import MeshPlacement
from shardwise.engine.torch_private import foreach_copy_, is_wrapper, local_of

ELEMENTWISE: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad,
    torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
)  # fmt: skip

# A CPU's kernels end with another arithmetic for what fills no vector. Parameters whose rows fill
# whole ones meet the same arithmetic, to the last bit, alone and side by side.
_VECTOR = 64


class ParameterRun:
    """Parameters of a unit that lie side by side in its master and in its gradients, where they are
    those from number `first` on. `tensor` is the memory of all of them.
    """

    def __init__(self, gradients: Gradients, first: int, count: int) -> None:
        self.gradients, self.indices = gradients, slice(first, first + count)
        self.members = gradients.visible[self.indices]
        self.locals = list(map(local_of, self.members))
        self.sharded = [each for each in self.members if isinstance(each, DTensor)]  # all, or none
        layout = gradients.layout
        start, size = layout.offsets[first], sum(r.part for r in layout.rows[self.indices])
        self.span = slice(start, start + size)
        self._offsets = [offset - start for offset in layout.offsets[self.indices]]
        # An alias, so that the gradient it carries is not seen on what `to_local` gives.
        alias = self.locals[0].detach()
        self.tensor = alias if count == 1 else alias.as_strided((size,), (1,))

    def fit(self, tensors: Sequence[Any], dtype: torch.dtype) -> bool:
        """They are of this dtype, and laid out as the parameters are."""
        return all(
            isinstance(tensor, torch.Tensor)
            and tensor.dtype == dtype
            and _is_laid_out_as(tensor, member)
            for tensor, member in zip(tensors, self.members, strict=True)
        )

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """A copy of the parameters' tensors, laid out as `tensor` is."""
        flat = torch.zeros_like(self.tensor, dtype=tensors[0].dtype)
        foreach_copy_(self._cut(flat), list(map(local_of, tensors)))
        return flat

    def parts_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a tensor that is laid out as `tensor` is, placed as it is."""
        rows = self._cut(flat)
        if not self.sharded:
            return rows
        pairs = zip(self.sharded, rows, strict=True)
        return [MeshPlacement.of(member).wrap(each) for member, each in pairs]

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        if len(self.members) == 1:
            return [flat]
        return [
            flat[start : start + local.numel()].view(local.shape)
            for start, local in zip(self._offsets, self.locals, strict=True)
        ]


def find_runs(gradients: Gradients, wanted: dict[int, torch.Tensor]) -> list[tuple[int, int]]:
    """Those of a unit's trained parameters that are wanted, by id, and lie side by side in its
    master: the number of the first among the gradients, and how many they are.
    """
    runs: list[tuple[int, int]] = []
    end: tuple[Any, ...] | None = None  # where the next one would have to start
    pairs = zip(gradients.visible, gradients.layout.rows, strict=True)
    for i, (parameter, rows) in enumerate(pairs):
        if id(parameter) not in wanted or i in gradients.tied:
            end = None
            continue
        local = local_of(parameter)
        if is_wrapper(local):  # of a class of its own: nothing lies beside it
            runs.append((i, 1))
            end = None
            continue
        memory, start = local.untyped_storage().data_ptr(), local.storage_offset()
        whole_vectors = local.numel() % _VECTOR == 0 and rows.part % _VECTOR == 0
        joins = whole_vectors or local.device.type != "cpu"
        if joins and end == (memory, start):
            first, count = runs[-1]
            runs[-1] = first, count + 1
        else:
            runs.append((i, 1))
        end = (memory, start + rows.part) if joins else None
    return runs


def _is_laid_out_as(tensor: torch.Tensor, member: torch.Tensor) -> bool:
    if isinstance(tensor, DTensor) and isinstance(member, DTensor):
        return tensor.placements == member.placements and tensor.shape == member.shape
    return type(tensor) is not DTensor and tensor.shape == local_of(member).shape
