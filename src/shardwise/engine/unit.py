"""The unit: parameters that are gathered and reduced together."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

from shardwise.engine import torch_private
from shardwise.engine.arena import COMPUTE, GATHERS, KEPT, SCATTERS, Loan, place
from shardwise.engine.collectives import DONE, All, Group, Handle, Unpack, allocate, let_go
from shardwise.engine.executor import TensorExecutor, lent
from shardwise.engine.extended import ExtendedGather, ExtendedParameters, is_extended
from shardwise.engine.gradients import Gradients, slices_of
from shardwise.engine.mesh import Mesh, MeshPlacement
from shardwise.engine.storage import Member, Parameters, Take, fingerprint
from shardwise.engine.torch_private import parameters_of
from shardwise.planning.executor import NEAR_BYTES
from shardwise.planning.rows import Layout
from shardwise.planning.strategies import choose_gather
from shardwise.schedule.unit import ScheduledUnit, State

if TYPE_CHECKING:
    from shardwise.engine.attach import Options


# Gives memory for so many elements of a dtype, and what gives it back.
Lend = Callable[[int, torch.dtype], tuple[torch.Tensor, Loan | None]]


class UnitGather:
    """From `source`, this rank's piece of every parameter, to `full` by gathers over `group`."""

    def __init__(
        self,
        group: Group,
        layout: Layout,
        source: torch.Tensor,
        full: torch.Tensor,
        mode: str,
        custom: Any = None,
        whole: bool = False,
        lend: Lend | None = None,
    ) -> None:
        """Make every view once: `parts[i]` is the i-th parameter in `full` as (ranks, piece).

        `custom` moves the data instead of the group's own all-gather. `whole`: pieces are stretches
        of `full`, whatever dims the parameters are cut along. `lend` gives memory for staging.
        """
        self.lend = lend if custom is None else None
        self.staging: Loan | None = None  # of the gather under way
        self.group, self.source, self.full, self.custom = group, source, full, custom
        # 1, or the n/k shards that make one piece of a smaller group.
        factor = layout.ranks // group.size
        moved = [i for i, rows in enumerate(layout.rows) if rows.part > 0]
        self.sizes = [layout.rows[i].part * factor for i in moved]
        starts = [layout.offsets[i] * layout.ranks for i in moved]
        self.flats = [
            full[start : start + size * group.size]
            for start, size in zip(starts, self.sizes, strict=True)
        ]
        self.parts = [flat.view(group.size, -1) for flat in self.flats]
        self.pieces = list(source.split(self.sizes))
        self.own = [part[group.rank] for part in self.parts]
        # How many ranks' pieces of each have rows in them; the rest is padding.
        self._holders = [-(-layout.rows[i].holders // factor) for i in moved]
        cut_inside = [not whole and layout.rows[i].dim > 0 for i in moved]
        self.scattered = any(cut_inside) and group.size > 1
        if self.scattered:
            for at, (i, flat) in enumerate(zip(moved, self.flats, strict=True)):
                if cut_inside[at]:
                    rows = layout.rows[i]
                    self.parts[at] = slices_of(flat.view(rows.shape), rows)
        self.copies = source.dtype != full.dtype or source.device != full.device
        self.mode = self._choose(mode)
        # What arrives has to be copied out: `full` is not written before `unpack`.
        self.stages = self.mode in ("packed", "near") and group.size > 1
        self._places = [
            [part[rank] for part in self.parts]
            for rank in range(group.size if self.mode == "near" else 0)
        ]
        # A host leaves padding where it is; for a GPU one kernel that copies all is less work.
        self._sparse = layout.mostly_padding and full.device.type == "cpu" and not self.scattered

    def _choose(self, asked: str) -> str:
        if self.scattered or self.custom is not None:
            return "packed"
        device, ranks = self.full.device, self.group.size
        # An arena has a place for staging, which was said to be there.
        free = asked == "auto" and self.lend is None
        if free and self.group.near is not None and self.full.nbytes <= NEAR_BYTES * ranks:
            return "near"
        mode = choose_gather(asked, len(self.parts), self.full.nbytes, device.type != "cpu")
        return "packed" if mode == "grouped" and not self.group.groups_calls(device) else mode

    @property
    def is_current(self) -> bool:
        """This rank's piece of `full` is what the source holds now. For dims other than 0 nobody
        looks.
        """
        here, sent = self._here, self._pieces_as_gathered()
        return not self.scattered and all(torch.equal(self.own[i], sent[i]) for i in here)

    @property
    def has_bits_of_source(self) -> bool:
        """The same, where what is not a number counts as equal to itself."""
        here, sent = self._here, self._pieces_as_gathered()
        pairs = [(self.own[i].view(torch.uint8), sent[i].view(torch.uint8)) for i in here]
        return self.scattered or all(torch.equal(own, piece) for own, piece in pairs)

    @property
    def _here(self) -> list[int]:
        """Parameters of which this rank has rows."""
        return [i for i, holders in enumerate(self._holders) if self.group.rank < holders]

    def _pieces_as_gathered(self) -> list[torch.Tensor]:
        """What a gather makes of this rank's pieces."""
        return [piece.to(self.full) for piece in self.pieces]

    @torch.no_grad()
    def take_back(self) -> None:
        """Copy this rank's piece of `full` to the source; what the gather itself changed stays."""
        sent = self._pieces_as_gathered()
        for i in self._here:
            own, piece = self.parts[i][self.group.rank].reshape(-1), self.pieces[i]
            piece.copy_(torch.where(own == sent[i], piece, own.to(piece)))

    def start(self) -> tuple[Handle, Unpack]:
        """Issue the gather; `unpack` is to run when it has ended."""
        if not self.parts:  # parameters without elements
            return DONE, None
        if self.group.size == 1:
            self.full.copy_(self.source)
            return DONE, None
        if self.mode == "near" and not torch_private.emulated:
            return self._start_near()
        if self.mode in ("near", "packed"):
            return self._start_packed()
        inputs = self.pieces
        if self.copies:
            inputs = self.own
            if len(inputs) == 1:
                inputs[0].copy_(self.pieces[0], non_blocking=True)
            else:
                torch_private.foreach_copy_(inputs, self.pieces, non_blocking=True)
        if self.mode == "grouped":
            return self.group.all_gather_grouped(self.flats, inputs), None
        handles = [
            self.group.all_gather(flat, piece)
            for flat, piece in zip(self.flats, inputs, strict=True)
        ]
        return (handles[0] if len(handles) == 1 else All(handles)), None

    def give_staging(self) -> None:
        """What arrived is in its place, or nobody wants it."""
        give, self.staging = self.staging, None
        if give is not None:
            give()

    def _start_near(self) -> tuple[Handle, Unpack]:
        """The others' pieces are read where they lie, straight to their places."""
        handle, message = self.group.post(self.source, self.full.dtype)
        self.staging = message.end

        def unpack() -> None:
            pieces, places = list(self.pieces), list(self._places[self.group.rank])
            for rank, found in enumerate(message.found):
                if rank != self.group.rank:
                    pieces += found.view(self.full.dtype).split(self.sizes)
                    places += self._places[rank]
            torch_private.foreach_copy_(places, pieces)
            self.give_staging()

        return handle, unpack

    def _start_packed(self) -> tuple[Handle, Unpack]:
        ranks, numel = self.group.size, self.source.numel()
        if self.lend is not None:
            flat, self.staging = self.lend(ranks * numel, self.full.dtype)
        else:
            flat = allocate(self.custom, ranks * numel, self.full.dtype, self.full.device)
            if self.custom is None and flat.device.type == "cpu":
                self.staging = functools.partial(let_go, flat)
        staging = flat.view(ranks, numel)
        own = self.source
        if self.copies or self.custom is not None:
            own = staging[self.group.rank]
            own.copy_(self.source, non_blocking=True)

        def unpack() -> None:
            if self.scattered:
                split = staging.split(self.sizes, dim=1)
                torch_private.foreach_copy_(
                    self.parts, [s.reshape(p.shape) for s, p in zip(split, self.parts, strict=True)]
                )
            elif self._sparse:
                split = staging.split(self.sizes, dim=1)
                torch_private.foreach_copy_(
                    [part[:held] for part, held in zip(self.parts, self._holders, strict=True)],
                    [piece[:held] for piece, held in zip(split, self._holders, strict=True)],
                )
            else:
                torch.split_with_sizes_copy(staging, self.sizes, dim=1, out=self.parts)
            self.give_staging()

        return self.group.all_gather(flat, own, self.custom), unpack


class KeptPiece:
    """The piece, and the `gather` from the group's pieces back to the full parameters."""

    def __init__(
        self,
        parameters: Parameters,
        group: Group,
        mesh: DeviceMesh | None,
        mode: str,
        take: Take,
        lend: Lend | None,
    ) -> None:
        """Needs full parameters with memory. With `mesh` users see the pieces meanwhile."""
        layout, full = parameters.layout, parameters.full_bytes
        piece, self.buffer = take(layout.full_numel // group.size, full.dtype, full.device)
        self.gather = UnitGather(group, layout, piece, full, mode, whole=True, lend=lend)
        # What hangs in the modules meanwhile: the module's own dict, the key in it, the parameter.
        self.places: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        if mesh is not None:
            self._make_visible(parameters, mesh)
        self.buffer.release()

    def _make_visible(self, parameters: Parameters, mesh: DeviceMesh) -> None:
        """DTensors on the smaller groups' mesh, for parameters whose pieces are the rows such a
        DTensor has.
        """
        moved = [i for i, rows in enumerate(parameters.layout.rows) if rows.part > 0]
        for i, piece in zip(moved, self.gather.pieces, strict=True):
            rows, member = parameters.layout.rows[i], parameters.members[i]
            if not rows.even or rows.dim or member.dtensor is not None:
                continue
            form = MeshPlacement(mesh, (Replicate(), Shard(0)), torch.Size(rows.shape))
            with torch.no_grad():
                tensor = form.wrap(piece.view(-1, *rows.shape[1:]))
            kept = nn.Parameter(tensor, requires_grad=parameters.visible[i].requires_grad)
            self.places += [(parameters_of(module), key, kept) for module, key in member.places]

    def fill(self) -> None:
        """Take this rank's piece from the full parameters."""
        self.buffer.allocate()
        torch_private.foreach_copy_(self.gather.pieces, self.gather.own)


class Unit(ScheduledUnit):
    """One unit on this rank: its tensors, and where they hang."""

    executor: TensorExecutor
    options: Options

    def __init__(
        self,
        name: str,
        modules: Sequence[nn.Module],
        members: Sequence[Member],
        mesh: Mesh,
        options: Options,
        is_root: bool = False,
    ) -> None:
        super().__init__(
            name,
            options,
            is_root=is_root,
            module_count=len(modules),
            shard=mesh.shard.size,
            replicate=mesh.replicate.size,
        )
        self.modules, self.mesh = list(modules), mesh
        self.parameters = (
            ExtendedParameters(members[0], mesh, options.precision)
            if len(members) == 1 and is_extended(members[0].original)
            else Parameters(members, mesh, options.plain, options.offload)
        )
        self.register()
        self.prepared = False
        self.gradients: Gradients | None = None
        self.gathered_version = -1  # of the masters, when they were last gathered
        self.attached_version = -1  # and when gradients were last hung on
        self.arriving: tuple[Handle, Unpack] = DONE, None  # the gather under way
        self._noted: torch.Tensor | None = None
        self._looked = False  # whether a first training forward wrote to the shown parameters
        self._writes = 0  # to the shown parameters, before the forward that runs
        self.trainable: tuple[bool, ...] = ()
        self.touched = False  # shown since nothing waited for a backward: autograd may have views

        self.freed_at: int | None = None  # how often the full parameters had been written by then
        self.discards = False  # a gather under way is waited for in order to be freed
        # Frozen weights in its modules, and trained parameters of other units.
        self.leads_to_others = False

    def is_inside(self, other: Unit) -> bool:
        """Whether parameters of this unit hang in modules of `other`."""
        members = self.parameters.members
        mine = {id(module) for member in members for module, _ in member.places}
        return any(id(module) in mine for top in other.modules for module in top.modules())

    @property
    def sums_take_reduces(self) -> bool:
        gradients = self.gradients
        assert gradients is not None
        return gradients.sums_as_reduced and self.options.custom_scatter is None

    def register(self) -> None:
        """Hang the visible parameters in their modules."""
        for member, visible in zip(self.parameters.members, self.parameters.visible, strict=True):
            for module, key in member.places:
                parameters_of(module)[key] = visible

    @torch_private.outside_transforms
    def prepare(self, executor: TensorExecutor) -> None:
        """Make all that only a running unit needs: full parameters, gathers, gradients."""
        p, options = self.parameters, self.options
        self.executor = executor
        p.prepare(options.dtypes(p.dtype)[0], self._take("full", COMPUTE))
        self.arrived = executor.make_event()  # a gather's end, recorded anew each time
        self.packed = executor.make_event()
        self._make_gathers()
        self.keeps_piece = self.kept_piece is not None
        # Where each parameter hangs: the module's own dict, the key in it, and the two it swaps.
        self.places = [
            (parameters_of(module), key, shown, visible)
            for member, shown, visible in zip(p.members, p.shown, p.visible, strict=True)
            for module, key in member.places
        ]
        # With n = 1 and no cast the full parameters are the master: always there, nothing to move.
        self.aliased = p.aliased
        self.state = State.READY if p.aliased else State.FREE
        self.stale = self.piece = False
        self.freed_at = None
        self.gathered_version = -1
        self.trainable = ()
        self.prepared = True
        self.adopt_requires_grad()

    def _make_gathers(self) -> None:
        """From the shards to the full parameters, and from kept pieces."""
        p, options = self.parameters, self.options
        self._from_shards: UnitGather | ExtendedGather | None = None
        self.kept_piece: KeptPiece | None = None
        if p.aliased:
            return
        self._from_shards = self._make_gather()
        if self.mesh.keep is not None and isinstance(self._from_shards, UnitGather):
            mesh = self.mesh.keep_mesh if options.stays_shown else None
            take, lend = self._take("piece", KEPT), self._lend("staging", GATHERS)
            self.kept_piece = KeptPiece(p, self.mesh.keep, mesh, options.gather, take, lend)
        p.buffer.release()  # every view is made; the bytes come with the first gather

    def _take(self, role: str, stream: str) -> Take:
        """Gives memory for what of the unit has views that stay."""
        return functools.partial(place, self.executor.arena, role, self.name, stream)

    def _lend(self, role: str, stream: str) -> Lend | None:
        """Gives memory for a while; None where no arena does."""
        arena = self.executor.arena
        return None if arena is None else functools.partial(arena.borrow, role, self.name, stream)

    def move(self, alone: bool = False) -> None:
        """Stand where the executor's memory is now, with nothing gathered; `alone`: in memory of
        the allocator's.
        """
        p = self.parameters
        if p.aliased or isinstance(p, ExtendedParameters):
            return
        numel, dtype, device = p.layout.full_numel, p.compute_dtype, self.mesh.device
        arena = None if alone else self.executor.arena
        p.stand_on(*place(arena, "full", self.name, COMPUTE, numel, dtype, device))
        self._make_gathers()
        if self.gradients is not None and not alone:
            self.gradients.make_slot(self._take("slot", SCATTERS))

    def _make_gather(self) -> UnitGather | ExtendedGather:
        """How a gather fills the full parameters."""
        p, options = self.parameters, self.options
        if isinstance(p, ExtendedParameters):
            return ExtendedGather(p)
        with p.buffer.present():
            group, mode, custom = self.mesh.shard, options.gather, options.custom_gather
            lend = self._lend("staging", GATHERS)
            code = options.gather_dtype
            if code is not None and group.size > 1 and p.full.is_floating_point():
                from shardwise.engine.quantised import QuantisedGather

                return QuantisedGather(code, group, p.layout, p.master, p.full_bytes, lend)
            return UnitGather(group, p.layout, p.master, p.full_bytes, mode, custom, lend=lend)

    def remake_gather(self) -> None:
        """Gather by the options as they are now."""
        if self.prepared and self._from_shards is not None:
            self.free()
            self._from_shards = self._make_gather()

    def adopt_changes(self) -> bool:
        """Take over parameters that were cast, moved or replaced since; true if they were, and the
        unit has to be prepared again.
        """
        shown = self.is_shown and self.state is not State.FREE  # else a kept piece is
        self.hide()
        if self.prepared and not self.in_place:
            for places, key, full, visible in self.places:
                if places.get(key) is full:  # put back by who has lent something, as it was then
                    places[key] = visible
        if self.in_place:
            if shown:
                self.show()
            return False
        self.free()
        self.parameters.adopt()
        self.register()
        self.prepared = False
        return True

    @property
    def version(self) -> int:
        """Grows with every write to the masters."""
        return torch_private.count_writes(self.parameters.master, self.parameters.visible)

    @property
    def in_place(self) -> bool:
        """What hangs in the modules is what was put there, on the same memory, or is lent."""
        for own, key, visible, memory in self.parameters.hung:
            found = own.get(key)
            if (found is not visible and not lent(found, visible)) or not memory.is_of(visible):
                return False
        return True

    @property
    def stands(self) -> bool:
        """As `in_place`, looked at quickly: before every replay of a recorded step."""
        return self.parameters.standing.is_same

    @property
    def trains_others(self) -> bool:
        """Other visible parameters are trainable now than were taken over."""
        return self.trainable != tuple([each.requires_grad for each in self.parameters.visible])

    def adopt_requires_grad(self) -> bool:
        """Take over which visible parameters are trainable now; true if that changed."""
        p = self.parameters
        trainable = tuple([visible.requires_grad for visible in p.visible])
        if trainable == self.trainable:
            return False
        self.trainable = trainable
        for shown, trains in zip(p.shown, trainable, strict=True):
            shown.requires_grad_(trains)
        trained = [i for i, trains in enumerate(trainable) if trains]
        dtypes = self.options.dtypes(p.dtype)[1], self.options.sums_in(p.dtype)
        take = self._take("slot", SCATTERS)
        self.gradients = Gradients(p, trained, *dtypes, take) if trained else None
        self.gradient_count, self.trains_all = len(trained), all(trainable)
        return True

    @property
    def changed(self) -> bool:
        """The masters were written since the last gather."""
        return self.version != self.gathered_version

    @property
    def is_current(self) -> bool:
        """This rank's own rows, as they were gathered, are those of the masters now."""
        self.wait()
        self.parameters.copy_tied_rows()
        return self._from_shards is not None and self._from_shards.is_current

    def keep_evaluated(self) -> None:
        """After an evaluation: stay gathered, and shown unless the optimizer's step is still to
        come, before which a program asks the parameters for their gradients. Remember the masters:
        what it writes to them until the next pass is told so from what it writes to the shown ones.
        """
        gradients = self.gradients
        stepped = self.attached_version != self.version
        if gradients is not None and not stepped and not gradients.cleared:
            self.hide()
        elif self.is_shown and isinstance(self._from_shards, UnitGather):
            self._noted = fingerprint(self.parameters.master)

    def note_writes(self) -> None:
        """From now on `is_written` tells whether a module writes to the shown parameters."""
        self._writes = torch_private.writes_of(self.parameters.shown[0])

    def is_written(self, all_ran: bool) -> bool:
        """As autograd counts it, so not through `.data`: once, when all modules of the unit have
        run, this rank's own rows are compared, and on which memory the shown parameters stand.
        Masters that are shown themselves keep what is written to them.
        """
        if not self.aliased and torch_private.writes_of(self.parameters.shown[0]) != self._writes:
            return True
        if self._looked or self.running or not all_ran:
            return False
        self._looked, gather = True, self._from_shards
        if self.parameters.moved_shown:
            return True
        if (
            self.aliased
            or type(gather) is not UnitGather
            or gather.group.control is None
            or torch_private.emulated
        ):
            return False  # what was gathered is not what was sent
        return not gather.has_bits_of_source

    def take_writes(self) -> None:
        """Carry what was written to the shown parameters since an evaluation to the masters."""
        noted, self._noted = self._noted, None
        if noted is None or self._from_shards is None:
            return
        self.wait()
        self.parameters.restore_shown()
        if not self.is_current and torch.equal(noted, fingerprint(self.parameters.master)):
            self._from_shards.take_back()

    def let_go(self) -> None:
        """Free what an evaluation left gathered, with what was written to it carried over."""
        self.take_writes()
        self.free()

    @property
    def next_gather(self) -> UnitGather | ExtendedGather:
        """How the next gather goes: from the shards, or from pieces that a smaller group keeps."""
        if self.piece and self.kept_piece is not None:
            return self.kept_piece.gather
        assert self._from_shards is not None
        return self._from_shards

    def gather(self) -> None:
        if self.parameters.tied:
            self.parameters.copy_tied_rows()
        super().gather()

    def free(self) -> None:
        self.discards = True
        try:
            super().free()
        finally:
            self.discards = False

    def shrink(self) -> None:
        super().shrink()
        if self.piece and self.kept_piece is not None:
            for places, key, parameter in self.kept_piece.places:
                places[key] = parameter
            self.is_shown = bool(self.kept_piece.places)

    def take_over(self, shown: nn.Parameter) -> None:
        """What stood in for an extended parameter's whole, which its first gather made, gives it
        its hooks and its places.
        """
        stood_in = self.places[0][2]
        shown.__dict__.update(stood_in.__dict__)
        for hook in (torch_private.accumulated_hooks(stood_in) or {}).values():
            shown.register_post_accumulate_grad_hook(hook)
        self.places = [(places, key, shown, visible) for places, key, _, visible in self.places]
        if self.gradients is not None:
            self.gradients.shown = [shown]
