"""The gradients of one unit: what backward leaves, what a reduce reads, where the sums land, and
what hangs on the parameters. `storage.py` opens with the note that names these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import torch

from shardwise.comms import versions
from shardwise.planning.placement import Layout, Rows, lay_out
from shardwise.sharding.storage import Buffer, Parameters, local_rows

# References to a gradient that only its own buffer holds: the list, the loop, the call.
_UNSHARED = 3


class Gradients:
    """The gradient buffer of one unit's trainable parameters: `gradient`, with `summed` over it."""

    def __init__(
        self, parameters: Parameters, trainable: Sequence[int], reduce_dtype: torch.dtype
    ) -> None:
        self._mesh, self._plain = parameters.mesh, parameters.plain
        self.offload, self.reduce_dtype = parameters.offload, reduce_dtype
        rows = [parameters.layout.rows[i] for i in trainable]
        shapes, dims = [r.shape for r in rows], [r.dim for r in rows]
        self.layout = lay_out(shapes, self._mesh.shard.size, dims)
        order = [trainable[i] for i in self.layout.order]
        self.members = [parameters.members[i] for i in order]
        self.visible = [parameters.visible[i] for i in order]
        self.shown = [parameters.shown[i] for i in order]
        # Some parameters have no rows to cut (0-d), nothing in them, or another dim cut.
        self._odd = any(r.replicated or r.part == 0 or r.dim for r in self.layout.rows)
        self.nested = any(member.nested for member in self.members)
        self._make_buffer(parameters.dtype)
        self.slot = self._make_slot()
        self.buffer.release()

    def _make_buffer(self, dtype: torch.dtype) -> None:
        """`gradient` and `summed`: beside the master, so on the host where that is offloaded."""
        layout, mesh = self.layout, self._mesh
        pin = self.offload is not None and self.offload.pin_memory
        device = mesh.device if self.offload is None else torch.device("cpu")
        self.buffer = Buffer(layout.shard_numel, dtype, device, pin)
        self.flat = self.buffer.flat
        # A norm counts what every rank holds whole (0-d parameters) on the first rank only.
        first = mesh.shard.rank == 0
        self.counted = self.flat[: layout.shard_numel if first else layout.counted_numel]
        self.locals = [
            local_rows(self.flat, layout, i, mesh.shard.rank) for i in range(len(self.members))
        ]
        self.summed = self.locals
        if not self._plain:
            forms = [m.form(r, mesh) for m, r in zip(self.members, layout.rows, strict=True)]
            pairs = zip(forms, self.locals, strict=True)
            self.summed = [form.wrap(local) for form, local in pairs]

    def _make_slot(self) -> Slot | None:
        """A slot with permanent pieces, where one multi-tensor copy can pack it: on a GPU, with
        every gradient cut evenly among several ranks.
        """
        even = all(r.even and r.part and not r.dim for r in self.layout.rows)
        if self._mesh.device.type == "cuda" and even and self.layout.ranks > 1:
            return Slot(self.layout, self.reduce_dtype, self._mesh.device)
        return None

    @property
    def cleared(self) -> bool:
        """No parameter of the unit has a gradient: what comes next overwrites."""
        return all(parameter.grad is None for parameter in self.visible)

    def adopt(self) -> None:
        """Take over gradients that hang on the parameters from another buffer; zero the rows of
        parameters without one.
        """
        self.buffer.allocate()
        for parameter, local, summed in zip(self.visible, self.locals, self.summed, strict=True):
            grad = parameter.grad
            if grad is None:
                local.zero_()
            elif grad is not summed:
                local.copy_(versions.local_of(grad))
                parameter.grad = summed

    def release(self) -> bool:
        """Give back the memory of gradients that nobody has any more. True if somebody still keeps
        one beyond zero_grad: that memory stays with them, and the buffer is another one now.
        """
        if not self.buffer.allocated:
            return False
        kept = any(getrefcount(summed) > _UNSHARED for summed in self.summed)
        if kept:
            self._make_buffer(self.flat.dtype)
        self.buffer.release()
        return kept

    def attach(self, absent: frozenset[str]) -> None:
        """Hang the summed gradients on the visible parameters, but for those of names `absent`."""
        for member, parameter, summed in zip(self.members, self.visible, self.summed, strict=True):
            if not absent or member.name not in absent:
                parameter.grad = summed
                hooks = parameter._post_accumulate_grad_hooks
                for hook in hooks.values() if hooks else ():
                    hook(parameter)

    def take(self) -> list[torch.Tensor]:
        """Take the gradients off the shown parameters; a parameter without one counts as zeros."""
        found = []
        for shown in self.shown:
            grad = shown.grad
            found.append(torch.zeros_like(shown) if grad is None else grad)
            shown.grad = None
        if self.nested:
            found = [
                member.nested.local_gradient(grad) if member.nested is not None else grad
                for member, grad in zip(self.members, found, strict=True)
            ]
        return found

    def pack(
        self, found: list[torch.Tensor], into: torch.Tensor | None, borrow: bool
    ) -> torch.Tensor:
        """Lay gradients rank after rank in the reduce dtype: one kernel for the unit.

        A single evenly cut gradient of the right dtype can be its own slot, if it is only borrowed.
        """
        layout, only = self.layout, found[0]
        rows = layout.rows[0]
        alone = borrow and len(found) == 1 and into is None and rows.even and not rows.dim
        if alone and only.dtype == self.reduce_dtype and only.is_contiguous():
            return only.view(-1)
        slot = into
        if slot is None:
            slot = torch.empty(layout.full_numel, dtype=self.reduce_dtype, device=only.device)
        if self._odd:
            found = [
                _rank_after_rank(grad, rows)
                for grad, rows in zip(found, layout.rows, strict=True)
                if rows.part > 0
            ]
        if found:
            versions.chunk_cat(found, layout.ranks, slot.view(layout.ranks, -1))
        return slot


def _rank_after_rank(grad: torch.Tensor, rows: Rows) -> torch.Tensor:
    """A gradient whose rows of dim 0 are what the ranks get."""
    if rows.replicated:
        return grad.expand(rows.ranks)
    if rows.dim:
        return grad.unflatten(rows.dim, (rows.ranks, -1)).movedim(rows.dim, 0).flatten(1)
    return grad


class Slot:
    """A reduce's input whose pieces, one for every parameter and rank, are made once."""

    def __init__(self, layout: Layout, dtype: torch.dtype, device: torch.device) -> None:
        self.buffer = Buffer(layout.full_numel, dtype, device)
        self.flat = self.buffer.flat
        by_rank = self.flat.view(layout.ranks, -1)
        self.pieces = [
            by_rank[rank, start : start + rows.part]
            for rows, start in zip(layout.rows, layout.offsets, strict=True)
            for rank in range(layout.ranks)
        ]
        self.ranks = layout.ranks
        self.buffer.release()

    def pack(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """Copy every gradient's rows to their ranks' places, cast on the way."""
        self.buffer.allocate()
        cut = [piece for grad in gradients for piece in grad.reshape(self.ranks, -1).unbind(0)]
        torch._foreach_copy_(self.pieces, cut)
        return self.flat
