"""Where the tensors of a unit live.

A unit is the parameters that travel together. Each role has ONE flat buffer per unit; every tensor
that anybody sees is a permanent view of one, made once. Taking and giving back memory is one
storage resize per unit.

    name      what it holds                                dtype    when its memory is there
    --------  -------------------------------------------  -------  --------------------------------
    master    this rank's rows of every parameter          own      always
    visible   what users and optimizers see: DTensors,     own      views of master
              or plain parameters in ddp
    full      every row of every parameter                 compute  from a gather to the next free
    shown     what the module computes with: plain         compute  views of full; in the modules'
              parameters                                            places while the unit runs
    staging   a packed gather's output, rank after rank    compute  while that gather is under way
    kept      1/k of full, for keep_after_forward = k      compute  from forward to backward
    slot      all gradients, rank after rank: what a       reduce   from the end of its backward
              reduce-scatter reads                                  until the scatter is done
    gradient  this rank's rows of every summed gradient    own      from the reduce until zero_grad
    summed    visible.grad: DTensors, or plain in ddp      own      views of gradient

Two parameters on n = 2 ranks, A of 5 rows (3 + 2, one row of padding `..`), B of 4 rows (2 + 2):

    rank 0  master    | A0 A1 A2 | B0 B1 |
    rank 1  master    | A3 A4 .. | B2 B3 |

                      from rank 0        from rank 1
    staging           | A0 A1 A2 | B0 B1 | A3 A4 .. | B2 B3 |   as an all-gather writes it
                        copy-out, one kernel per unit
    full              | A0 A1 A2 A3 A4 .. | B0 B1 B2 B3 |       parameter after parameter
    shown               A: 5 rows           B: 4 rows

                      for rank 0         for rank 1
    slot              | A0 A1 A2 | B0 B1 | A3 A4 .. | B2 B3 |   gradients, packed by one kernel
    rank 0  gradient  | A0 A1 A2 | B0 B1 |                      as the reduce-scatter writes it

Who has what memory: master, full, kept and gradient come and go in compute's order; staging and
slots belong to the lane that uses them (`comms/lanes.py`). A unit of one parameter needs no
staging. With n = 1 the full buffer is the master itself, or its cast.

Because `full` only ever loses its bytes and never its identity, what autograd saved of a shown
parameter in forward is still the same tensor in backward; the gather that brings the bytes back
writes through `full_bytes`, an alias with a version counter of its own, so that autograd does not
take the write for a change.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.planning.placement import Layout, Rows, lay_out
from shardwise.sharding.mesh import Mesh


class Buffer:
    """A flat tensor whose memory comes and goes while its views stay."""

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._storage = self.flat.untyped_storage()
        self._nbytes = self._storage.nbytes()
        self.allocated = True

    def allocate(self) -> None:
        if not self.allocated:
            self._storage.resize_(self._nbytes)
            self.allocated = True

    def release(self) -> None:
        if self.allocated:
            self._storage.resize_(0)
            self.allocated = False

    @contextmanager
    def present(self) -> Iterator[None]:
        """Memory is there inside; views can only be made while it is."""
        was = self.allocated
        self.allocate()
        yield
        if not was:
            self.release()


@dataclass
class Member:
    """One parameter of a unit: its names and the places in modules where it hangs."""

    names: list[str]
    places: list[tuple[nn.Module, str]]
    original: nn.Parameter

    @property
    def name(self) -> str:
        return self.names[0]


class Parameters:
    """The parameter buffers of one unit: `master` and `full`, `visible` and `shown` over them."""

    def __init__(
        self, members: Sequence[Member], mesh: Mesh, compute_dtype: torch.dtype, plain: bool
    ) -> None:
        self.mesh = mesh
        self.layout = lay_out([tuple(m.original.shape) for m in members], mesh.shard.size)
        self.members = [members[i] for i in self.layout.order]
        own = members[0].original
        self.dtype, self.compute_dtype = own.dtype, compute_dtype
        self.master = torch.zeros(self.layout.shard_numel, dtype=own.dtype, device=own.device)
        self.aliased = mesh.shard.size == 1 and self.dtype == compute_dtype
        with torch.no_grad():
            self.visible = [
                self._make_visible(member, i, plain) for i, member in enumerate(self.members)
            ]
            if self.aliased:
                self.full = self.master
            else:
                self.buffer = Buffer(self.layout.full_numel, compute_dtype, own.device)
                self.full = self.buffer.flat
        # Writing through `.data` leaves the version counter that autograd checks alone.
        self.full_bytes = self.full.data
        self.shown = [
            nn.Parameter(
                whole(self.full, self.layout, i), requires_grad=self.visible[i].requires_grad
            )
            for i in range(len(self.members))
        ]

    def _make_visible(self, member: Member, i: int, plain: bool) -> nn.Parameter:
        """Copy this rank's rows into `master`, and make the parameter that users see over them."""
        rows, rank = self.layout.rows[i], self.mesh.shard.rank
        local = local_rows(self.master, self.layout, i, rank)
        start, stop = rows.span(rank)
        original = member.original
        local.copy_(original.data if rows.replicated else original.data[start:stop])
        if plain:
            original.data = local
            return original
        tensor = as_dtensor(local, rows, self.mesh)
        visible = nn.Parameter(tensor, requires_grad=original.requires_grad)
        visible.__dict__.update(original.__dict__)
        # Whoever still holds the original (an optimizer made too early) must not train or keep it
        # silently.
        original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        original.__dict__["_shardwise_moved"] = member.name
        return visible


class Gradients:
    """The gradient buffer of one unit's trainable parameters: `gradient`, with `summed` over it."""

    def __init__(
        self,
        parameters: Parameters,
        trainable: Sequence[int],
        plain: bool,
        reduce_dtype: torch.dtype,
    ) -> None:
        mesh = parameters.mesh
        shapes = [parameters.layout.rows[i].shape for i in trainable]
        self.layout = lay_out(shapes, mesh.shard.size)
        order = [trainable[i] for i in self.layout.order]
        self.members = [parameters.members[i] for i in order]
        self.visible = [parameters.visible[i] for i in order]
        self.shown = [parameters.shown[i] for i in order]
        self.buffer = Buffer(self.layout.shard_numel, parameters.dtype, parameters.master.device)
        self.flat = self.buffer.flat
        locals_ = [
            local_rows(self.flat, self.layout, i, mesh.shard.rank) for i in range(len(order))
        ]
        self.summed = [
            local if plain else as_dtensor(local, rows, mesh)
            for local, rows in zip(locals_, self.layout.rows, strict=True)
        ]
        self.locals = locals_
        # Some parameters have no rows to cut (0-d) or nothing in them.
        self.odd = any(rows.replicated or rows.part == 0 for rows in self.layout.rows)
        self.slot = self._make_slot(reduce_dtype)
        # A norm counts what every rank holds whole (0-d parameters) on the first rank only.
        counted = self.layout.shard_numel if mesh.shard.rank == 0 else self.layout.counted_numel
        self.counted = self.flat[:counted]
        self.buffer.release()

    def _make_slot(self, dtype: torch.dtype) -> Slot | None:
        """A slot with permanent pieces, where one multi-tensor copy can pack it: on a GPU, with
        every gradient cut evenly among several ranks.
        """
        even = all(rows.even and rows.part for rows in self.layout.rows)
        if self.flat.is_cuda and even and self.layout.ranks > 1:
            return Slot(self.layout, dtype, self.flat.device)
        return None

    @property
    def cleared(self) -> bool:
        """No parameter of the unit has a gradient: what comes next overwrites."""
        return all(parameter.grad is None for parameter in self.visible)

    def adopt(self) -> None:
        """Take over gradients that hang on the parameters from a buffer of another layout."""
        if self.cleared:
            return
        self.buffer.allocate()
        for parameter, local, summed in zip(self.visible, self.locals, self.summed, strict=True):
            grad = parameter.grad
            if grad is not None:
                local.copy_(grad.to_local() if isinstance(grad, DTensor) else grad)
                parameter.grad = summed

    def clear_missing(self) -> None:
        """Zero the rows of parameters whose gradient was set to None while others of the unit kept
        theirs.
        """
        for parameter, local in zip(self.visible, self.locals, strict=True):
            if parameter.grad is None:
                local.zero_()

    def attach(self, absent: frozenset[str]) -> None:
        """Hang the summed gradients on the visible parameters, but for those of names `absent`."""
        for member, parameter, summed in zip(self.members, self.visible, self.summed, strict=True):
            if not absent or member.name not in absent:
                parameter.grad = summed


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


def whole(full: torch.Tensor, layout: Layout, i: int) -> torch.Tensor:
    """The i-th parameter in a full buffer."""
    start, rows = layout.offsets[i] * layout.ranks, layout.rows[i]
    return full[start : start + rows.numel].view(rows.shape)


def local_rows(shard: torch.Tensor, layout: Layout, i: int, rank: int) -> torch.Tensor:
    """The rows of the i-th parameter that `rank` keeps, in a shard-sized buffer."""
    start, shape = layout.offsets[i], layout.rows[i].local_shape(rank)
    return shard[start : start + torch.Size(shape).numel()].view(shape)


def as_dtensor(local: torch.Tensor, rows: Rows, mesh: Mesh) -> DTensor:
    """A DTensor over this rank's rows; shares their memory."""
    return DTensor.from_local(
        local,
        mesh.device_mesh,
        mesh.placements(rows.replicated),
        run_check=False,
        shape=torch.Size(rows.shape),
        stride=_contiguous_stride(rows.shape),
    )


def _contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
