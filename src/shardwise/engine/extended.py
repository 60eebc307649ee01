"""Parameters that say themselves what travels (float8 and its kin): a tensor subclass with
`fsdp_pre_all_gather` and `fsdp_post_all_gather`, torch's protocol.

Such a parameter is a unit of its own. Its rows stay a tensor of its class; a gather moves the bytes
of the tensors that it names, and hands what arrived back to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from shardwise.engine import torch_private
from shardwise.engine.collectives import DONE, Buffer, Group, Handle, Unpack
from shardwise.engine.mesh import Mesh
from shardwise.engine.storage import Member, Parameters, Take

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


def is_extended(parameter: nn.Parameter) -> bool:
    """Whether a parameter brings its own all-gather, or may be given one while it is sharded: a
    tensor subclass keeps its class. An error if it brings half of one.
    """
    local = torch_private.local_of(parameter)
    return _has_hooks(local) or torch_private.is_wrapper(torch_private.local_of(parameter.data))


def _has_hooks(local: torch.Tensor) -> bool:
    has = [hasattr(local, name) for name in _HOOKS]
    if has[0] != has[1]:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: {type(local).__name__} has only one"
        )
    return has[0]


class ExtendedParameters(Parameters):
    """One parameter with its own all-gather: `master` and `visible` are of its class, and `full` is
    what it makes of the tensors that travelled.
    """

    aliased = False

    def __init__(self, member: Member, mesh: Mesh, precision: Any) -> None:
        self.precision = precision
        # Hooks on this very tensor, bound to it: it stays where it is.
        local = torch_private.local_of(member.original)
        self._bound = local if member.stays and _HOOKS[0] in local.__dict__ else None
        super().__init__([member], mesh)

    @property
    def moved_shown(self) -> list[int]:
        """None: its own gather says where it stands."""
        return []

    def _make_master(self, like: torch.Tensor) -> torch.Tensor:
        """This rank's rows, inside of `padded`, which has as many on every rank and travels."""
        rows = self.layout.rows[0]
        if self._bound is not None:
            self.padded, self._bound = self._bound, None
            return self.padded
        self.padded = like.new_zeros(rows.local_shape(0))
        own = rows.local_shape(self.mesh.shard.rank)[rows.dim]
        if own == self.padded.shape[rows.dim]:
            return self.padded
        return self.padded.narrow(rows.dim, 0, own)

    def _local(self, master: torch.Tensor, i: int) -> torch.Tensor:
        return master

    @property
    def hooked(self) -> torch.Tensor | None:
        """The tensor whose hooks say what travels, if any does now."""
        if _HOOKS[0] in self.master.__dict__:
            return self.master
        return self.padded if _has_hooks(self.padded) else None

    def prepare(self, compute_dtype: torch.dtype, take: Take) -> None:
        """What it is whole it says at its first gather only; until then something of the same shape
        stands in.
        """
        self.compute_dtype = compute_dtype
        self.buffer = Buffer()
        rows, device = self.layout.rows[0], self.mesh.device
        nothing = torch.zeros((), dtype=compute_dtype, device=device).expand(rows.shape)
        self.shown = [self._make_shown(0, nothing)]
        self.made = False

    def make(self, whole: torch.Tensor, inner: Sequence[torch.Tensor]) -> None:
        """It has said what it is whole, in the memory of `inner`."""
        shape = self.layout.rows[0].shape
        strides = torch.empty(shape, device="meta").stride()
        self.shown = [self._make_shown(0, torch.as_strided(whole, shape, strides, 0))]
        self.buffer, self.made = Buffer(*inner), True


class ExtendedGather:
    """The gather of such a parameter: its tensors' bytes in one call."""

    stages = False
    is_current = False  # nobody but the parameter could tell

    def __init__(self, parameters: ExtendedParameters) -> None:
        self.parameters = parameters
        self.group: Group = parameters.mesh.shard

    def give_staging(self) -> None:
        """It has none of an arena's."""

    def take_back(self) -> None:
        """Nothing: how it is gathered is the parameter's own affair."""

    @torch.no_grad()
    def start(self) -> tuple[Handle, Unpack]:
        p, ranks = self.parameters, self.group.size
        inputs, metadata = self._ask()
        pieces = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in inputs]
        sizes = [piece.numel() for piece in pieces]
        staging = torch.empty((ranks, sum(sizes)), dtype=torch.uint8, device=p.mesh.device)
        own = staging[self.group.rank]
        torch.cat(pieces, out=own)
        handle = self.group.all_gather(staging.view(-1), own) if ranks > 1 else DONE

        @torch.no_grad()
        def unpack() -> None:
            gathered = self._gathered(inputs)
            for whole, part in zip(gathered, staging.split(sizes, dim=1), strict=True):
                # By an alias: autograd must not take what returns in backward for a change.
                whole.data.view(-1).view(torch.uint8).view(ranks, -1).copy_(part)
            self._tell(tuple(gathered), metadata)

        return handle, unpack

    def _ask(self) -> tuple[list[torch.Tensor], Any]:
        """What the parameter wants to travel, as plain tensors: by its hooks, else its values."""
        p = self.parameters
        rows, module = p.layout.rows[0], p.members[0].places[0][0]
        hooked = cast(Any, p.hooked)
        if hooked is None:
            return [_plain(p.padded, p.compute_dtype)], None
        arguments: tuple[Any, ...] = (self._mesh(),)
        if len(inspect.signature(hooked.fsdp_pre_all_gather).parameters) > 1:
            stride = torch.empty(rows.shape, device="meta").stride()
            arguments += (torch.Size(rows.shape), stride, module, p.precision)
        inputs, metadata = hooked.fsdp_pre_all_gather(*arguments)
        inputs = [_plain(t) if torch_private.is_wrapper(t) else t for t in inputs]
        here, everywhere = hooked.shape[0], rows.local_shape(0)[0]
        if here != everywhere:
            inputs = [_filled(t, everywhere) if t.shape[0] == here else t for t in inputs]
        return inputs, metadata

    def _mesh(self) -> Any:
        mesh = self.parameters.mesh.device_mesh
        names = mesh.mesh_dim_names
        return mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]

    def _gathered(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where what arrives goes: made at the first gather, found again later."""
        buffer = self.parameters.buffer
        if self.parameters.made:
            buffer.allocate()
            return list(buffer.tensors[: len(inputs)])
        ranks, device = self.group.size, self.parameters.mesh.device
        return [
            torch.empty((ranks * t.shape[0], *t.shape[1:]), dtype=t.dtype, device=device)
            for t in inputs
        ]

    def _tell(self, gathered: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Hand it what arrived; the first time it says what it is whole."""
        p = self.parameters
        hooked = cast(Any, p.hooked)
        if hooked is None:
            if not p.made:
                p.make(gathered[0], gathered)
        elif p.made:
            hooked.fsdp_post_all_gather(gathered, metadata, p.compute_dtype, out=p.shown[0])
        else:
            whole, inner = hooked.fsdp_post_all_gather(gathered, metadata, p.compute_dtype)
            p.make(whole, [*gathered, *inner])


def _plain(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The values of a tensor subclass."""
    shape = tensor.shape
    return torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device).copy_(tensor)


def _filled(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Zeros after a rank's rows, so that every rank sends as many."""
    out = tensor.new_zeros((rows, *tensor.shape[1:]))
    out[: tensor.shape[0]].copy_(tensor)
    return out
