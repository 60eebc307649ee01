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

from shardwise.comms import versions
from shardwise.comms.real import DONE, Group, Handle
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.route import Unpack
from shardwise.sharding.storage import Member, Parameters


def is_extended(parameter: nn.Parameter) -> bool:
    """Whether a parameter brings its own all-gather; an error if it brings half of one."""
    local = versions.local_of(parameter.data)
    has = [hasattr(local, f"fsdp_{when}_all_gather") for when in ("pre", "post")]
    if has[0] != has[1]:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: {type(local).__name__} has only one"
        )
    return has[0]


class Memory:
    """The gathered tensors and those made of them: taken and given back together."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._sizes: list[int] = []

    def hold(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._sizes = [tensor.untyped_storage().nbytes() for tensor in self.tensors]

    def allocate(self) -> None:
        for tensor, size in zip(self.tensors, self._sizes, strict=True):
            if tensor.untyped_storage().nbytes() != size:
                tensor.untyped_storage().resize_(size)

    def release(self) -> None:
        for tensor in self.tensors:
            tensor.untyped_storage().resize_(0)


class ExtendedParameters(Parameters):
    """One parameter with its own all-gather: `master` and `visible` are of its class, and `full` is
    what it makes of the tensors that travelled.
    """

    aliased = False

    def __init__(self, member: Member, mesh: Mesh, precision: Any) -> None:
        self.precision = precision
        super().__init__([member], mesh)

    def _make_master(self, like: torch.Tensor) -> torch.Tensor:
        """This rank's rows, inside of `padded`, which has as many on every rank and travels."""
        rows = self.layout.rows[0]
        self.padded = like.new_zeros(rows.local_shape(0))
        return self.padded.narrow(rows.dim, 0, rows.local_shape(self.mesh.shard.rank)[rows.dim])

    def _local(self, master: torch.Tensor, i: int) -> torch.Tensor:
        return master

    def prepare(self, compute_dtype: torch.dtype) -> None:
        """Gather once, because only then does the parameter say what it is whole."""
        self.compute_dtype = compute_dtype
        self.buffer = cast(Any, Memory())
        self.shown = []
        handle, unpack = ExtendedRoute(self).start()
        handle.wait()
        unpack()

    def make_route(self, mode: str, custom: Any) -> ExtendedRoute:
        return ExtendedRoute(self)


class ExtendedRoute:
    """The gather of such a parameter: its tensors' bytes in one call."""

    stages = False
    is_current = False  # nobody but the parameter could tell

    def __init__(self, parameters: ExtendedParameters) -> None:
        self.parameters = parameters
        self.group: Group = parameters.mesh.shard

    def take_back(self) -> None:
        """Nothing: how it is gathered is the parameter's own affair."""

    def start(self) -> tuple[Handle, Unpack]:
        p, ranks = self.parameters, self.group.size
        inputs, metadata = self._ask()
        pieces = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in inputs]
        sizes = [piece.numel() for piece in pieces]
        staging = torch.empty((ranks, sum(sizes)), dtype=torch.uint8, device=p.mesh.device)
        own = staging[self.group.rank]
        torch.cat(pieces, out=own)
        handle = self.group.all_gather(staging.view(-1), own) if ranks > 1 else DONE

        def unpack() -> None:
            gathered = self._gathered(inputs)
            for whole, part in zip(gathered, staging.split(sizes, dim=1), strict=True):
                whole.view(-1).view(torch.uint8).view(ranks, -1).copy_(part)
            self._tell(tuple(gathered), metadata)

        return handle, unpack

    def _ask(self) -> tuple[Sequence[torch.Tensor], Any]:
        """What the parameter wants to travel."""
        p = self.parameters
        local = cast(Any, p.padded)
        if len(inspect.signature(local.fsdp_pre_all_gather).parameters) == 1:
            answer = local.fsdp_pre_all_gather(self._mesh())
        else:
            rows, module = p.layout.rows[0], p.members[0].places[0][0]
            stride = torch.empty(rows.shape, device="meta").stride()
            answer = local.fsdp_pre_all_gather(
                self._mesh(), torch.Size(rows.shape), stride, module, p.precision
            )
        return cast(tuple[Sequence[torch.Tensor], Any], answer)

    def _mesh(self) -> Any:
        mesh = self.parameters.mesh.device_mesh
        names = mesh.mesh_dim_names
        return mesh if mesh.ndim == 1 or names is None else mesh[names[-1]]

    def _gathered(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Where what arrives goes: made at the first gather, found again later."""
        memory = cast(Memory, self.parameters.buffer)
        if self.parameters.shown:
            memory.allocate()
            return memory.tensors[: len(inputs)]
        ranks, device = self.group.size, self.parameters.mesh.device
        return [
            torch.empty((ranks * t.shape[0], *t.shape[1:]), dtype=t.dtype, device=device)
            for t in inputs
        ]

    def _tell(self, gathered: tuple[torch.Tensor, ...], metadata: Any) -> None:
        """Hand it what arrived; the first time it says what it is whole."""
        p = self.parameters
        local = cast(Any, p.padded)
        if p.shown:
            local.fsdp_post_all_gather(gathered, metadata, p.compute_dtype, out=p.shown[0])
            return
        tensor, inner = local.fsdp_post_all_gather(gathered, metadata, p.compute_dtype)
        cast(Memory, p.buffer).hold([*gathered, *inner])
        rows, nested = p.layout.rows[0], p.members[0].nested
        tensor = torch.as_strided(
            tensor, rows.shape, torch.empty(rows.shape, device="meta").stride(), 0
        )
        if nested is not None:
            with torch.no_grad():
                tensor = nested.whole.wrap(tensor)
        p.shown = [nn.Parameter(tensor, requires_grad=p.visible[0].requires_grad)]
