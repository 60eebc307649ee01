"""The gradients of one unit: where the sums land, what hangs on the parameters, and what a reduce
reads. `storage.py` opens with the note that names these tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from sys import getrefcount

import torch

from shardwise.comms import versions
from shardwise.planning.placement import Layout, lay_out
from shardwise.sharding.storage import Buffer, Parameters, local_rows

# References to a gradient that only its own buffer holds: the list, the loop, the call.
_UNSHARED = 3


class Gradients:
    """The gradient buffer of one unit's trainable parameters: `gradient`, with `summed` over it."""

    def __init__(
        self,
        parameters: Parameters,
        trainable: Sequence[int],
        reduce_dtype: torch.dtype,
    ) -> None:
        mesh = parameters.mesh
        rows = [parameters.layout.rows[i] for i in trainable]
        self.layout = lay_out([r.shape for r in rows], mesh.shard.size, [r.dim for r in rows])
        order = [trainable[i] for i in self.layout.order]
        self.members = [parameters.members[i] for i in order]
        self.visible = [parameters.visible[i] for i in order]
        self.shown = [parameters.shown[i] for i in order]
        self.plain, self.offload = parameters.plain, parameters.offload
        self.rank, self.device = mesh.shard.rank, mesh.device
        self._forms = [m.form(r, mesh) for m, r in zip(self.members, self.layout.rows, strict=True)]
        # Some parameters have no rows to cut (0-d), nothing in them, or another dim cut.
        self.odd = any(r.replicated or r.part == 0 or r.dim for r in self.layout.rows)
        self.nested = any(member.nested for member in self.members)
        self._make_buffer(parameters.dtype)
        self.slot = self._make_slot(reduce_dtype)
        # A norm counts what every rank holds whole (0-d parameters) on the first rank only.
        counted = self.layout.shard_numel if mesh.shard.rank == 0 else self.layout.counted_numel
        self.counted = self.flat[:counted]
        self.buffer.release()

    def _make_buffer(self, dtype: torch.dtype) -> None:
        """`gradient` and `summed`: beside the master, so on the host where that is offloaded."""
        pin = self.offload is not None and self.offload.pin_memory
        device = self.device if self.offload is None else torch.device("cpu")
        self.buffer = Buffer(self.layout.shard_numel, dtype, device, pin)
        self.flat = self.buffer.flat
        self.locals = [
            local_rows(self.flat, self.layout, i, self.rank) for i in range(len(self.members))
        ]
        self.summed = (
            self.locals
            if self.plain
            else [form.wrap(local) for form, local in zip(self._forms, self.locals, strict=True)]
        )

    def _make_slot(self, dtype: torch.dtype) -> Slot | None:
        """A slot with permanent pieces, where one multi-tensor copy can pack it: on a GPU, with
        every gradient cut evenly among several ranks.
        """
        even = all(r.even and r.part and not r.dim for r in self.layout.rows)
        if self.device.type == "cuda" and even and self.layout.ranks > 1:
            return Slot(self.layout, dtype, self.device)
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
            self.counted = self.flat[: self.counted.numel()]
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
