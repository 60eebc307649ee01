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
              reduce-scatter reads                                  until the scatter is done; on a
                                                                    host with n = 1 from the first
                                                                    gradient on, and then the sums
    sent,     a slot as it travels, and everybody's    reduce   while gradients that travel as 16
    received  part for this rank                                bits are added in 32
    sums      this rank's rows of every summed gradient    own      taken anew in every step; with
              (`flat`), and who produced one (`counts`)             whoever keeps a gradient
    summed    visible.grad: DTensors, or plain in ddp      own      views of flat, made anew

Two parameters on n = 2 ranks, A of 5 rows (3 + 2, one row of padding `..`), B of 4 rows (2 + 2):

    rank 0  master    | A0 A1 A2 | B0 B1 |
    rank 1  master    | A3 A4 .. | B2 B3 |

                      from rank 0        from rank 1
    staging           | A0 A1 A2 | B0 B1 | A3 A4 .. | B2 B3 |   as an all-gather writes it
                        copy-out, one kernel per unit
    full              | A0 A1 A2 A3 A4 .. | B0 B1 B2 B3 |       parameter after parameter
    shown               A: 5 rows           B: 4 rows

                      for rank 0              for rank 1
    slot              | A0 A1 A2 | B0 B1 | cc | A3 A4 .. | B2 B3 | cc |   packed by one kernel
    rank 0  sums      | A0 A1 A2 | B0 B1 | cc |                 as the reduce-scatter writes it

`c` is 1 where this rank produced a gradient of the parameter, else 0: the sum tells a rank without
one whether any other had. The rule for all memory: what a user can hold is never resized or reused
under them. `full` is the one exception, as in torch: what was read of it while it was gathered has
no memory when it is freed.

Who has what memory: master, full, kept and sums come and go in compute's order; staging and
slots belong to the lane that uses them (`engine/executor.py`). A unit of one parameter needs no
staging. With n = 1 the full buffer is the master itself, or its cast.

Because `full` only ever loses its bytes and never its identity, what autograd saved of a shown
parameter in forward is still the same tensor in backward; the gather that brings the bytes back
writes through `full_bytes`, an alias with a version counter of its own, so that autograd does not
take the write for a change.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.engine.collectives import Buffer
from shardwise.engine.mesh import DTensorParameter, Mesh, MeshPlacement
from shardwise.engine.torch_private import (
    MemoryIdentity,
    Standing,
    count_writes,
    local_of,
    make_parameter,
    parameters_of,
    set_local,
)
from shardwise.planning.rows import Rows, lay_out

if TYPE_CHECKING:
    from shardwise.engine.engine import Engine

# Gives memory for so many elements of a dtype on a device, and what takes and frees it.
Take = Callable[[int, torch.dtype, torch.device], tuple[torch.Tensor, Buffer]]

_KEEPER = "_shardwise_parameters"  # on a visible parameter: who keeps its master


@dataclass(frozen=True)
class Offload:
    """Masters and gradients live on the host, in pinned memory or not."""

    pin_memory: bool = True


@dataclass
class Member:
    """One parameter of a unit: its names and the places in modules where it hangs."""

    names: list[str]
    places: list[tuple[nn.Module, str]]
    original: nn.Parameter
    dim: int = 0  # the dim that is cut
    dtensor: DTensorParameter | None = None  # a DTensor by itself (tensor parallel)
    sharded: bool = False  # `original` holds this rank's rows already (a copy of a sharded model)
    # What is cut: the parameter's own shape, or that of its local tensor on the other mesh.
    shape: tuple[int, ...] = ()
    stays: bool = False  # `original`, sharded, is what users have seen so far, and stays that

    def __post_init__(self) -> None:
        if not self.shape:
            self.shape = tuple(local_of(self.original.data).shape)

    @property
    def name(self) -> str:
        return self.names[0]

    def registered(self, visible: nn.Parameter) -> nn.Parameter:
        """What hangs in the module now, where `visible` did.

        In a tie's places it must be one parameter. `load_state_dict(assign=True)` gives each place
        its own: if all were replaced by equal ones, the first is meant; places still on the meta
        device follow those with memory.
        """
        found = [parameters_of(module).get(key) for module, key in self.places]
        if found[0] is None:
            raise RuntimeError(
                f"parameter {self.name!r} was removed after sharding; change the model before it "
                "is sharded"
            )
        first = next((each for each in found if each is not None and not _is_meta(each)), found[0])
        replaced = all(each is not visible for each in found)
        for name, other in zip(self.names, found, strict=False):
            if other is first or (other is not None and _is_meta(other) and not _is_meta(first)):
                continue
            if other is None or not (replaced and _are_equal(first, other)):
                raise RuntimeError(
                    f"parameter {name!r} was tied to {self.name!r} when the model was sharded, and "
                    "is another one now; untie them before sharding, or change both together"
                )
        return first

    def placement(self, rows: Rows, mesh: Mesh) -> MeshPlacement:
        """How users see it."""
        return MeshPlacement.of_rows(rows, mesh) if self.dtensor is None else self.dtensor.sharded


class Parameters:
    """The parameter buffers of one unit: `master` with `visible` over it from the start, `full`
    with `shown` over it once the unit is first used.
    """

    def __init__(
        self,
        members: Sequence[Member],
        mesh: Mesh,
        plain: bool = False,
        offload: Offload | None = None,
    ) -> None:
        self.mesh, self.plain, self.offload = mesh, plain, offload
        self.layout = lay_out([m.shape for m in members], mesh.shard.size, [m.dim for m in members])
        self.members = [members[i] for i in self.layout.order]
        originals = [local_of(member.original.data) for member in self.members]
        self._checksums = None if any(m.sharded for m in members) else _checksums(originals)
        self.master = self._make_master(originals[0])
        self.dtype = self.master.dtype
        with torch.no_grad():
            self.visible = [self._make_visible(i) for i in range(len(self.members))]
        self.shown: list[nn.Parameter] = []
        # Members, by number, in whose places a parameter of another member was hung after sharding.
        # The other one keeps the master; these rows are copied from it before every gather, and
        # their gradient is added to its own.
        self.tied: set[int] = set()
        self.engine: weakref.ref[Engine] | None = None  # that they are trained by
        self._remember()
        self._writes_at_birth = count_writes(self.master, self.visible)

    @property
    def checksums(self) -> dict[str, int] | None:
        """Of each whole parameter as this rank had it; None once the values were changed."""
        writes = count_writes(self.master, self.visible)
        if self._checksums is None or writes != self._writes_at_birth:
            return None
        return dict(zip([m.name for m in self.members], self._checksums.tolist(), strict=True))

    def forget_checksums(self) -> None:
        self._checksums = None

    def _make_master(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the dtype of `like`, where that is or offloaded."""
        numel, dtype = self.layout.shard_numel, like.dtype
        if self.offload is None or like.is_meta:
            return torch.zeros(numel, dtype=dtype, device=like.device)
        return torch.zeros(numel, dtype=dtype, pin_memory=self.offload.pin_memory)

    def _make_visible(self, i: int) -> nn.Parameter:
        """Copy this rank's rows into `master`, and make the parameter that users see over them."""
        member, rows, local = self.members[i], self.layout.rows[i], self._local(self.master, i)
        original = member.original
        if not local.is_meta:
            own = local_of(original.data)
            if not (member.sharded or rows.replicated):
                start, stop = rows.span(self.mesh.shard.rank)
                own = own.narrow(rows.dim, start, stop - start)
            local.copy_(own)
        if self.plain:
            original.data = local
            return original
        if member.stays:
            set_local(cast(DTensor, original), local)
            return original
        wrapped = member.placement(rows, self.mesh).wrap(local)
        visible = make_parameter(wrapped, original.requires_grad)
        visible.__dict__.update(original.__dict__)
        if member.sharded:
            visible.grad = original.grad
        # Whoever still holds the original (an optimizer made too early) must not train or keep it
        # silently.
        if type(original.data) is torch.Tensor:
            original.data = torch.empty(0, dtype=original.dtype, device=original.device)
        original.__dict__["_shardwise_moved"] = member.name
        return visible

    def _local(self, master: torch.Tensor, i: int) -> torch.Tensor:
        """This rank's rows of the i-th parameter, in a master."""
        start, shape = self.layout.offsets[i], self.layout.rows[i].local_shape(self.mesh.shard.rank)
        return master[start : start + torch.Size(shape).numel()].view(shape)

    def _whole(self, i: int) -> torch.Tensor:
        """The i-th parameter in `full`."""
        start, rows = self.layout.offsets[i] * self.layout.ranks, self.layout.rows[i]
        return self.full[start : start + rows.numel].view(rows.shape)

    def prepare(self, compute_dtype: torch.dtype, take: Take) -> None:
        """Make `full`, of memory that `take` gives, and what modules compute with. Needs parameters
        with memory.
        """
        self.compute_dtype = compute_dtype
        self.aliased = (
            self.mesh.shard.size == 1 and self.dtype == compute_dtype and self.offload is None
        )
        if self.aliased:
            self.full = self.master
        else:
            self.full, self.buffer = take(self.layout.full_numel, compute_dtype, self.mesh.device)
        # Writing through `.data` leaves the version counter that autograd checks alone.
        self.full_bytes = self.full.data
        self.shown = []
        for i, member in enumerate(self.members):
            shown = self._make_shown(i, self._whole(i))
            # An optimizer built while it is in its place would train nothing.
            shown.__dict__.update(_shardwise_moved=member.name, _shardwise_full=True)
            self.shown.append(shown)

    def stand_on(self, full: torch.Tensor, buffer: Buffer) -> None:
        """Let `full`, and what modules compute with, be other memory, which holds nothing yet."""
        self.full, self.buffer, self.full_bytes = full, buffer, full.data
        for i, shown in enumerate(self.shown):
            shown.data = self._whole(i)

    def _make_shown(self, i: int, whole: torch.Tensor) -> nn.Parameter:
        """What the i-th parameter's modules compute with, over `whole`."""
        dtensor = self.members[i].dtensor
        if dtensor is not None:
            with torch.no_grad():
                whole = dtensor.whole.wrap(whole)
        return nn.Parameter(whole, requires_grad=self.visible[i].requires_grad)

    @property
    def moved_shown(self) -> list[int]:
        """Which shown parameters were given other memory than in `full` (`p.data = `)."""
        return [
            i
            for i, (member, shown) in enumerate(zip(self.members, self.shown, strict=True))
            if member.dtensor is None and shown.data_ptr() != self._whole(i).data_ptr()
        ]

    def restore_shown(self) -> None:
        """Let the shown parameters stand on `full` again, with the values they have now."""
        for i in self.moved_shown:
            member, shown, whole = self.members[i], self.shown[i], self._whole(i)
            if (shown.shape, shown.dtype) != (whole.shape, whole.dtype):
                raise RuntimeError(
                    f"parameter {member.name!r} became a {shown.dtype} of shape "
                    f"{tuple(shown.shape)} while it was gathered; call reshard() and change the "
                    "sharded one"
                )
            whole.data.copy_(shown.data)
            shown.data = whole

    def _registered(self) -> list[nn.Parameter]:
        """What hangs in the members' places now."""
        pairs = zip(self.members, self.visible, strict=True)
        return [member.registered(visible) for member, visible in pairs]

    def are_alike(self) -> bool:
        """Whether what hangs in the modules has one dtype and one device."""
        locals_ = [local_of(parameter.data) for parameter in self._registered()]
        return len({(local.dtype, local.device) for local in locals_}) == 1

    def adopt(self) -> None:
        """Take over parameters that were moved, cast, given memory, replaced or tied in their
        modules.
        """
        found = self._registered()
        locals_ = [local_of(parameter.data) for parameter in found]
        for i, parameter in enumerate(found):
            self._check_adoptable(i, parameter, locals_[i], locals_[0])
        self.tied = {i for i in range(len(found)) if self._is_tied(found, i)}
        with torch.no_grad():
            master = self._make_master(locals_[0])
            for i, (visible, parameter) in enumerate(zip(self.visible, found, strict=True)):
                rows = self._local(master, i)
                if not rows.is_meta:
                    rows.copy_(locals_[i])
                if i in self.tied:
                    continue
                if parameter is not visible:
                    parameter.requires_grad_(visible.requires_grad)
                    parameter.__dict__.update(visible.__dict__)
                if self.plain:
                    parameter.data = rows
                else:
                    set_local(cast(DTensor, parameter), rows)
        self.visible, self.master, self.dtype = found, master, master.dtype
        self._remember()
        self.forget_checksums()

    def _is_tied(self, found: list[nn.Parameter], i: int) -> bool:
        """Whether what hangs in the i-th member's place is the parameter of another member, here or
        in another unit, and hangs there too.
        """
        parameter = found[i]
        if any(parameter is other for other in found[:i]):
            return True
        keeper = keeper_of(parameter)
        return keeper is not None and keeper is not self and keeper._holds(parameter)

    def _holds(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter is one of ours, and in its place."""
        return any(
            visible is parameter and i not in self.tied and member.registered(visible) is visible
            for i, (member, visible) in enumerate(zip(self.members, self.visible, strict=True))
        )

    @torch.no_grad()
    def copy_tied_rows(self) -> None:
        """Bring the rows of tied members up to date; through `.data`, because autograd may have
        saved them.
        """
        for i in self.tied:
            self._local(self.master.data, i).copy_(local_of(self.visible[i]))

    def _remember(self) -> None:
        """Tell the visible parameters who keeps them; note where they hang and on what memory."""
        keeper = weakref.ref(self)
        for i, visible in enumerate(self.visible):
            if i not in self.tied:
                visible.__dict__[_KEEPER] = keeper
        self._memory = [MemoryIdentity(visible) for visible in self.visible]
        self.hung: list[tuple[dict[str, Any], str, nn.Parameter, MemoryIdentity]] = [
            (parameters_of(module), key, visible, memory)
            for member, visible, memory in zip(
                self.members, self.visible, self._memory, strict=True
            )
            for module, key in member.places
        ]
        self.standing = Standing(self.hung)

    def _check_adoptable(
        self, i: int, parameter: nn.Parameter, local: torch.Tensor, first: torch.Tensor
    ) -> None:
        """What stands in for a parameter must be sharded as it was, and all of a unit alike."""
        name, wanted = self.members[i].name, self.layout.rows[i].local_shape(self.mesh.shard.rank)
        if parameter is self.visible[i] and self._memory[i].lost_data(parameter):
            raise RuntimeError(
                f"parameter {name!r} was given other memory by `p.data = `, which does nothing to "
                "the values of a DTensor; write p.data.copy_(values), or put another parameter in "
                "its place"
            )
        if tuple(local.shape) != wanted or isinstance(parameter.data, DTensor) == self.plain:
            kind = "plain" if self.plain else "sharded"
            raise RuntimeError(
                f"parameter {name!r} was replaced after sharding by a "
                f"{type(parameter.data).__name__} whose local shape is {tuple(local.shape)}, "
                f"expected a {kind} one of {wanted}; it would be neither sharded nor trained. "
                "Change parameters in place, or change the model before it is sharded"
            )
        if (local.dtype, local.device) != (first.dtype, first.device):
            raise RuntimeError(
                f"parameter {name!r} is {local.dtype} on {local.device} now, but "
                f"{self.members[0].name!r} of the same unit is {first.dtype} on {first.device}; "
                "move or cast the parameters of a unit together"
            )


def keeper_of(parameter: torch.Tensor) -> Parameters | None:
    """Who keeps the master of a parameter that users see; None for any other tensor."""
    keeper: weakref.ref[Parameters] | None = parameter.__dict__.get(_KEEPER)
    return None if keeper is None else keeper()


def _is_meta(parameter: nn.Parameter) -> bool:
    return local_of(parameter.data).is_meta


def _are_equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether this rank's rows of two parameters are the same to the bit."""
    a, b = local_of(one.data), local_of(other.data)
    if any(t.is_meta or type(t) is not torch.Tensor for t in (a, b)):
        return False
    alike = (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device)
    return alike and torch.equal(_bits(a), _bits(b))


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDTH = 1024  # of the table that a fingerprint takes a flat tensor for


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as a flat row of integers."""
    return tensor.contiguous().view(-1).view(_BITS.get(tensor.itemsize, torch.uint8))


@torch.no_grad()
def _checksums(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One number for each tensor; None where one has no memory yet, or a class of its own."""
    if any(tensor.is_meta or type(tensor) is not torch.Tensor for tensor in tensors):
        return None
    return torch.stack([_bits(tensor).sum(dtype=torch.int64) for tensor in tensors])


@torch.no_grad()
def fingerprint(flat: torch.Tensor) -> torch.Tensor:
    """What the rows and the columns of a flat tensor, laid out as a table, add up to: other values,
    or the same in another order, give another one.
    """
    bits = _bits(flat)
    cut = len(bits) // _WIDTH * _WIDTH
    table = bits[:cut].view(-1, _WIDTH)
    sums = [table.sum(dim, dtype=torch.int64) for dim in (0, 1)]
    return torch.cat([*sums, bits[cut:].to(torch.int64)])
