"""Parameters that say themselves what travels (float8 and its kin): a tensor subclass with
`fsdp_pre_all_gather` and `fsdp_post_all_gather`, torch's protocol.

Such a parameter is a unit of its own. Its rows stay a tensor of its class; a gather moves the bytes
of the tensors that it names, and hands what arrived back to it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.comms import versions
from shardwise.comms.real import DONE, Group, Handle
from shardwise.planning.placement import lay_out
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

    @contextmanager
    def present(self) -> Iterator[None]:
        yield


class ExtendedParameters(Parameters):
    """One parameter with its own all-gather, in the place of a unit's flat buffers."""

    def __init__(self, member: Member, mesh: Mesh, precision: Any) -> None:
        self.mesh, self.plain, self.offload, self.precision = mesh, False, None, precision
        self.members = [member]
        self.layout = lay_out([member.shape], mesh.shard.size, [member.dim])
        rows = self.layout.rows[0]
        original = member.original
        values = versions.local_of(original.data)
        self.dtype = original.dtype
        with torch.no_grad():
            local = values if member.sharded else self._own_rows(values, rows)
            padded = values.new_zeros((rows.rows, *rows.shape[1:]) if not rows.dim else local.shape)
            inside = padded.narrow(rows.dim, 0, local.shape[rows.dim])
            inside.copy_(local)
            self.padded, self.master = padded, inside
            form = member.form(rows, mesh)
            visible = versions.make_parameter(form.wrap(inside), original.requires_grad)
        visible.__dict__.update(original.__dict__)
        self.visible = [visible]
        self._local_seen = versions.local_of(visible)
        self.shown = []
        self.aliased = False
        self._sums = None
        self.buffer = cast(Any, Memory())

    def prepare(self, compute_dtype: torch.dtype) -> None:
        """Gather once, because only then does the parameter say what it is whole."""
        self.compute_dtype = compute_dtype
        self.buffer = cast(Any, Memory())
        self.shown = []
        route = ExtendedRoute(self)
        handle, unpack = route.start()
        handle.wait()
        unpack()

    @property
    def unmoved(self) -> bool:
        same = self.members[0].registered is self.visible[0]
        return same and versions.local_of(self.visible[0]) is self._local_seen

    def follow(self) -> None:
        """Take over a parameter that was cast, moved or replaced."""
        found = self.members[0].registered
        self.visible = [found]
        self._local_seen = self.master = versions.local_of(cast(DTensor, found.data))
        self.padded, self.dtype = self.master, found.dtype


class ExtendedRoute:
    """The gather of such a parameter: its tensors' bytes in one call."""

    stages = False

    def __init__(self, parameters: ExtendedParameters) -> None:
        self.parameters = parameters
        self.group: Group = parameters.mesh.shard

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
