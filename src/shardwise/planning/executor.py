"""The schedule's verbs in bytes: what each takes and gives back, and what it moves.

`PlannedExecutor` says it to a `Listener`. One that only counts gives `explain` its figures; one
that also asks what things cost gives the predictor its operations.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shardwise.description.parameters import UnitSpec
from shardwise.planning.blocks import Message
from shardwise.planning.rows import lay_out
from shardwise.planning.strategies import choose_gather
from shardwise.schedule.arena import Key, Lives
from shardwise.schedule.executor import Held, Reduction
from shardwise.schedule.unit import ScheduledUnit, State

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan

COMPUTE = "compute"
# Ranks of one host send through memory that they share: groups of so many, messages of so many
# bytes at most. That memory is the messages' own, and counted nowhere, as gloo's own is not.
NEAR_RANKS, NEAR_BYTES = 8, 64 * 2**20


@dataclass(frozen=True)
class UnitBytes:
    """One unit's sizes in bytes on one rank, padding included."""

    master: int  # this rank's rows, original dtype
    full: int  # the gathered unit, compute dtype
    parts: tuple[int, ...]  # of it, each parameter that is not empty
    message: int  # one rank's rows as codes and scales, where they travel so; else 0
    gradient: int  # this rank's rows of the trainable parameters, original dtype, and the counts
    slot: int  # all gradients of the unit as they travel, and the counts: the reduce's input
    held_slot: int  # the same in the dtype they are added in
    rows: int  # one rank's part of that
    sent_size: int  # bytes of an element that travels
    sum_size: int  # and of one that is added
    moment: int  # one tensor of optimizer state: of this rank's rows, without the counts
    aliased: bool  # the full unit is the master itself: nothing to gather, nothing more to hold

    @property
    def exchanges(self) -> bool:
        """Gradients are added here, in another dtype than they travel in."""
        return self.sent_size != self.sum_size

    def exchanged_rows(self, ranks: int) -> int:
        """Bytes of the rows as `ranks` replicas exchange them, an equal part each."""
        return -(-self.rows // self.sum_size // ranks) * ranks * self.sent_size


def size_of_unit(plan: Plan, unit: UnitSpec) -> UnitBytes:
    """S x m, n x S x c, (T + C) x m, n x (T + C) x d of docs/formulas.md."""
    dtypes = plan.dtypes(unit.parameters[0].dtype)
    shapes = tuple(p.shape for p in unit.parameters)
    trained = tuple(p.shape for p in unit.parameters if p.trainable)
    added = plan.sum_dtype_of(unit.parameters[0].dtype).itemsize
    ranks, coded = plan.axes_of(unit)[1], plan.gather_dtype is not None
    return _sizes(shapes, trained, ranks, dtypes, added, coded, plan.world > 1)


@functools.lru_cache(maxsize=1024)  # blocks are alike, and a search asks for them again and again
def _sizes(
    shapes: tuple[tuple[int, ...], ...],
    trained_shapes: tuple[tuple[int, ...], ...],
    ranks: int,
    dtypes: tuple[torch.dtype, torch.dtype, torch.dtype],
    sum_size: int,
    coded: bool,
    counts: bool,
) -> UnitBytes:
    own, compute, reduce = dtypes
    everything, trained = lay_out(shapes, ranks), lay_out(trained_shapes, ranks)
    reduced = trained.shard_numel + (trained.counts if counts else 0)
    parts = [rows.part * ranks * compute.itemsize for rows in everything.rows if rows.part]
    message = 0
    if coded and ranks > 1 and compute.is_floating_point:
        message = Message(everything, compute.itemsize).nbytes
    return UnitBytes(
        master=everything.shard_numel * own.itemsize,
        full=everything.full_numel * compute.itemsize,
        parts=tuple(parts),
        message=message,
        gradient=reduced * own.itemsize,
        slot=reduced * ranks * reduce.itemsize,
        held_slot=reduced * ranks * sum_size,
        rows=reduced * sum_size,
        sent_size=reduce.itemsize,
        sum_size=sum_size,
        moment=trained.shard_numel * own.itemsize,
        aliased=ranks == 1 and own == compute,
    )


def size_of_moment(plan: Plan, unit: UnitSpec, idle: Collection[str]) -> int:
    """One tensor of optimizer state of a unit, without those parameters that get no gradient."""
    own, _, _ = plan.dtypes(unit.parameters[0].dtype)
    kept = [p.shape for p in unit.parameters if p.trainable and p.name not in idle]
    return lay_out(kept, plan.axes_of(unit)[1]).shard_numel * own.itemsize


class PlannedUnit(ScheduledUnit):
    """A unit of a Plan, with its sizes instead of its tensors."""

    def __init__(self, plan: Plan, number: int) -> None:
        spec = plan.require_units()[number]
        replicate, shard = plan.axes_of(spec)
        is_root = spec.modules == ("",)
        super().__init__(
            spec.name,
            plan.unit_policy(is_root, spec.name),
            is_root=is_root,
            module_count=len(spec.modules),
            shard=shard,
            replicate=replicate,
        )
        own, compute, _ = plan.dtypes(spec.parameters[0].dtype)
        keep = plan.keep_after_forward
        self.sizes = size_of_unit(plan, spec)
        self.casts = own != compute
        self.same_reduce = plan.sum_dtype_of(spec.parameters[0].dtype) == own
        self.replicas_axis = "all" if spec.whole else "replicate"
        self.aliased = self.sizes.aliased
        # The smaller group that holds it from forward to backward, or 0.
        self.piece_ranks = 0 if keep is None or isinstance(keep, bool) or shard == 1 else keep
        self.keeps_piece = self.piece_ranks > 0
        self.gradient_count = sum(p.trainable for p in spec.parameters)
        self.trains_all = self.gradient_count == len(spec.parameters)
        self.state = State.READY if self.aliased else State.FREE
        self.allocated = False
        self.arrives = -1  # the operation that compute must wait for
        self.staged = 0  # bytes of staging that live until then (hosts)
        self.grads = 0  # bytes of gradients that backward has left
        self.held_grads = 0  # and those of them that are still held
        self.summed = False  # the gradient buffer holds a sum of this step
        self.loans: dict[str, Key] = {}  # by role: what it has of an arena

    @property
    def sums_take_reduces(self) -> bool:
        return self.same_reduce


class Listener(Protocol):
    """Hears what an executor does. Operations have numbers; -1 is none."""

    phase: str

    def hold(self, role: str, nbytes: int) -> None:
        """Bytes come (or, negative, go)."""

    def copy(self, name: str, unit: str, stream: str, nbytes: float, after: Any = ()) -> int:
        """A kernel that only moves bytes."""

    def collective(
        self, kind: str, unit: str, axis: str, nbytes: int, ranks: int, after: Any, written: float
    ) -> int:
        """A collective on its group's stream; `written` bytes arrive on this rank."""

    def is_near(self, axis: str, ranks: int) -> bool:
        """Whether the ranks of a group are on one host, which moves the data itself."""

    def engine_work(self, name: str, unit: str) -> None:
        """The engine's own work to gather or reduce one unit."""

    def behind_compute(self) -> tuple[int, ...]:
        """All that compute has been given so far."""

    def join(self, number: int) -> None:
        """Compute waits for an operation."""


@dataclass(eq=False)
class PlannedReduction(Reduction):
    last: int = -1  # its last operation
    # Bytes that an exchange holds until what came is added, and what it has of an arena.
    exchanged: int = 0
    loans: tuple[Key | None, ...] = ()


class PlannedExecutor:
    """Tells a listener what the engine's executor does with tensors."""

    def __init__(
        self,
        plan: Plan,
        listener: Listener,
        ordered: bool,
        lives: Lives | None = None,
        in_block: bool = False,
    ) -> None:
        """`lives` notes what the engine's arena would hold. `in_block`: that is there all the time,
        and is not said piece by piece.
        """
        self.plan, self.listener, self.ordered = plan, listener, ordered
        self.lives, self.in_block = lives, in_block
        self._ends: dict[str, int] = {}  # the last operation of each lane: scatter, replica

    def _hold(self, role: str, nbytes: int, loan: Key | None) -> None:
        """Bytes come or go, unless they are a piece of the block."""
        if loan is None or not self.in_block:
            self.listener.hold(role, nbytes)

    def _take(self, unit: PlannedUnit, role: str, nbytes: int, stream: str) -> Key | None:
        return None if self.lives is None else self.lives.take(role, unit.name, nbytes, stream)

    def _borrow(self, unit: PlannedUnit, role: str, nbytes: int, stream: str) -> None:
        """Of what a unit has at most one."""
        loan = self._take(unit, role, nbytes, stream)
        if loan is not None:
            unit.loans[role] = loan

    def _return(self, unit: PlannedUnit, role: str) -> None:
        if self.lives is not None:
            self.lives.give(unit.loans.pop(role))

    # A unit

    def gather(self, unit: PlannedUnit) -> None:
        listener, sizes, ranks = self.listener, unit.sizes, unit.shard_ranks
        mode = choose_gather(self.plan.gather, len(sizes.parts), sizes.full, self.ordered)
        coded = sizes.message > 0 and not unit.piece
        axis, group = ("keep", unit.piece_ranks) if unit.piece else ("shard", ranks)
        direct = self.plan.gather == "auto" and not coded and self.lives is None
        near = direct and self._is_near(axis, group, sizes.full // group)
        mode = "packed" if coded else "near" if near else mode
        stages = mode == "packed" and ranks > 1
        listener.engine_work("gather" if ranks > 1 else "cast", unit.name)
        if self.ordered or not (stages or near):
            self._allocate(unit)
        before = listener.behind_compute()
        if ranks == 1:
            moved = sizes.master + sizes.full
            unit.arrives = listener.copy("cast", unit.name, "gather", moved, before)
            return
        message = sizes.message * ranks if coded else sizes.full
        staging = message if stages else 0
        if staging:
            self._borrow(unit, "staging", staging, "gather")
            self._hold("temporary", staging, unit.loans.get("staging"))
        if (unit.casts or coded) and not (unit.piece or near):
            moved = sizes.master + message // ranks
            name = "quantise" if coded else "cast"
            before = (listener.copy(name, unit.name, "gather", moved, before),)
        for nbytes in sizes.parts if mode == "each" else (message,):
            unit.arrives = listener.collective(
                "all_gather", unit.name, axis, nbytes, group, before, nbytes
            )
        if not self.ordered:
            unit.staged = staging
        elif stages:
            done = (unit.arrives,)
            moved = staging + sizes.full
            unit.arrives = listener.copy("copy-out", unit.name, "gather", moved, done)
            self._hold("temporary", -staging, unit.loans.get("staging"))
            self._return(unit, "staging")

    def wait(self, unit: PlannedUnit) -> None:
        listener = self.listener
        listener.join(unit.arrives)
        unit.arrives = -1
        self._allocate(unit)
        if unit.staged:
            listener.copy("copy-out", unit.name, COMPUTE, unit.staged + unit.sizes.full)
            self._hold("temporary", -unit.staged, unit.loans.get("staging"))
            self._return(unit, "staging")
            unit.staged = 0

    def _is_near(self, axis: str, ranks: int, nbytes: int) -> bool:
        """As the engine's groups: a message of so many bytes goes through shared memory."""
        fits = 1 < ranks <= NEAR_RANKS and nbytes <= NEAR_BYTES
        return fits and not self.ordered and self.listener.is_near(axis, ranks)

    def keep_from_last_step(self, unit: PlannedUnit) -> None:
        """Its full parameters were never freed."""
        self._allocate(unit)
        unit.state = State.READY

    def _allocate(self, unit: PlannedUnit) -> None:
        if not unit.allocated:
            unit.allocated = True
            self._borrow(unit, "full", unit.sizes.full, COMPUTE)
            self._hold("full", unit.sizes.full, unit.loans.get("full"))

    def show(self, unit: PlannedUnit) -> None: ...

    def hide(self, unit: PlannedUnit) -> None: ...

    def free(self, unit: PlannedUnit) -> None:
        unit.allocated = False
        self._hold("full", -unit.sizes.full, unit.loans.get("full"))
        self._return(unit, "full")

    def shrink(self, unit: PlannedUnit) -> None:
        piece = unit.sizes.full // unit.piece_ranks
        self._borrow(unit, "piece", piece, "kept")
        self._hold("full", piece, unit.loans.get("piece"))
        self.listener.copy("keep", unit.name, COMPUTE, 2 * piece)

    def forget_piece(self, unit: PlannedUnit) -> None:
        self._hold("full", -(unit.sizes.full // unit.piece_ranks), unit.loans.get("piece"))
        self._return(unit, "piece")

    # A reduce

    def open(self, unit: PlannedUnit) -> bool:
        """The step's first reduce overwrites; a later micro-batch's adds."""
        if unit.summed:
            return False
        self._let_placed_go(unit)
        self.listener.hold("gradients", unit.sizes.gradient)
        unit.summed = True
        return True

    def _let_placed_go(self, unit: PlannedUnit) -> None:
        """As the engine's `Gradients`: a host copies data parallel's to the slot as they come."""
        if not self.ordered and unit.shard_ranks == 1:
            self.listener.hold("gradients", -unit.held_grads)
            unit.held_grads = 0

    def pack(self, unit: PlannedUnit, into_sums: bool, passes: bool) -> PlannedReduction:
        listener, sizes, grads = self.listener, unit.sizes, unit.grads
        slot = sizes.slot if passes and unit.shard_ranks > 1 else sizes.held_slot
        listener.engine_work("reduce", unit.name)
        self._let_placed_go(unit)
        on_compute = self._packs_on_compute(unit)
        lane, after = (COMPUTE, ()) if on_compute else ("scatter", listener.behind_compute())
        placed = not self.ordered and unit.shard_ranks == 1  # in memory of its own
        loan = None if into_sums or placed else self._take(unit, "slot", slot, lane)
        self._hold("slots", 0 if into_sums else slot, loan)
        packed = listener.copy("pack", unit.name, lane, grads + slot, after)
        left, unit.grads, unit.held_grads = unit.held_grads, 0, 0
        if on_compute or not self.ordered:  # they are packed, and go
            listener.hold("gradients", -left)
            left = 0
        held = Held(slot, into_sums, loan)
        if on_compute:
            return PlannedReduction(unit, 0, held, freed=-1, last=packed)
        self._ends["scatter"] = packed
        return PlannedReduction(unit, left, held, freed=packed, last=packed)

    def _packs_on_compute(self, unit: PlannedUnit) -> bool:
        """As the engine's executor: data parallel's own copies, where there are streams."""
        return self.ordered and unit.shard_ranks == 1 and unit.replicas > 1

    def zeros(self, unit: PlannedUnit) -> PlannedReduction:
        self.listener.hold("slots", unit.sizes.rows)
        return PlannedReduction(unit, 0, Held(unit.sizes.rows))

    def scatter(self, reduction: PlannedReduction, into_sums: bool) -> None:
        unit = reduction.unit
        if unit.shard_ranks == 1:
            return
        rows, slot, ranks = unit.sizes.rows, unit.sizes.slot, unit.shard_ranks
        loan = None if into_sums else self._take(unit, "rows", rows, "scatter")
        self._hold("slots", 0 if into_sums else rows, loan)
        if unit.sizes.exchanges:
            sent = 0 if reduction.held.content == slot else slot
            self._prepare_exchange(reduction, sent, slot, "scatter")
            if sent:
                self._copy(reduction, "cast", "scatter", reduction.held.content + sent)
            self._collective(reduction, "all_to_all", "scatter", "shard", slot, ranks, slot)
        else:
            self._collective(reduction, "reduce_scatter", "scatter", "shard", slot, ranks, rows)
            if not (self.ordered or self._is_near("shard", ranks, slot)):
                # gloo's ranks get parts and add them, in the collective's time
                reduction.exchanged = slot
                self.listener.hold("slots", slot)
        reduction.held = Held(rows, into_sums, loan)
        if self.ordered:
            self._end_exchange(reduction)

    def _prepare_exchange(
        self, reduction: PlannedReduction, sent: int, received: int, lane: str
    ) -> None:
        """Memory for what goes out, where that is no slot that is there already, and comes in."""
        unit, reduction.exchanged = reduction.unit, sent + received
        of = "" if lane == "scatter" else "copies "
        loans = [self._take(unit, f"{of}sent", sent, lane)] if sent else []
        reduction.loans = (*loans, self._take(unit, f"{of}received", received, lane))
        self._hold("slots", reduction.exchanged, reduction.loans[-1])

    def _end_exchange(self, reduction: PlannedReduction) -> None:
        """Add what came, if something did, and let its memory go."""
        if not reduction.exchanged:
            return
        sizes = reduction.unit.sizes
        if sizes.exchanges:
            self._copy(reduction, "sum", "scatter", sizes.slot + sizes.rows)
        self._drop_exchange(reduction)

    def _drop_exchange(self, reduction: PlannedReduction) -> None:
        self._hold("slots", -reduction.exchanged, (*reduction.loans, None)[0])
        for loan in reduction.loans:
            if self.lives is not None and loan is not None:
                self.lives.give(loan)
        reduction.exchanged, reduction.loans = 0, ()

    def all_reduce(self, reduction: PlannedReduction) -> None:
        unit, rows = reduction.unit, reduction.unit.sizes.rows
        axis, ranks = unit.replicas_axis, unit.replicas
        if not unit.sizes.exchanges:
            self._collective(reduction, "all_reduce", "replica", axis, rows, ranks, 0)
            return
        message = unit.sizes.exchanged_rows(ranks)
        self._prepare_exchange(reduction, message, message, "replica")
        self._copy(reduction, "cast", "replica", rows + message)
        self._collective(reduction, "all_to_all", "replica", axis, message, ranks, message)
        self._wait_on_host(reduction)
        self._copy(reduction, "sum", "replica", message + (rows + message) // ranks)
        self._collective(reduction, "all_gather", "replica", axis, message, ranks, message)
        self._wait_on_host(reduction)
        self._copy(reduction, "cast", "replica", message + rows)
        self._drop_exchange(reduction)

    def _wait_on_host(self, reduction: PlannedReduction) -> None:
        if not self.ordered:
            self.listener.join(reduction.pending)
            reduction.pending = None

    def _collective(
        self,
        reduction: PlannedReduction,
        kind: str,
        lane: str,
        axis: str,
        nbytes: int,
        ranks: int,
        written: int,
    ) -> None:
        listener, name = self.listener, reduction.unit.name
        after = self._after(reduction)
        if lane == "replica":
            after = (*after, *listener.behind_compute())
        reduction.last = listener.collective(kind, name, axis, nbytes, ranks, after, written)
        self._ends[lane] = reduction.last
        if not self.ordered:
            reduction.pending = reduction.last

    def _after(self, reduction: PlannedReduction) -> tuple[int, ...]:
        """What the next operation of a reduce comes after."""
        if not self.ordered:
            return self.listener.behind_compute()
        return (reduction.last,) if reduction.last >= 0 else ()

    def add(self, reduction: PlannedReduction, to: Held) -> None:
        lane = COMPUTE if self._packs_on_compute(reduction.unit) else "scatter"
        self._copy(reduction, "add", lane, 3 * reduction.held.content)

    def _copy(self, reduction: PlannedReduction, name: str, lane: str, nbytes: int) -> None:
        unit = reduction.unit
        after = self._after(reduction)
        reduction.last = self.listener.copy(name, unit.name, lane, nbytes, after)
        self._ends[lane] = reduction.last

    def add_to_sums(self, reduction: PlannedReduction, overwrites: bool) -> None:
        unit, rows = reduction.unit, reduction.unit.sizes.rows
        lane = "replica" if unit.replicas > 1 else "scatter"
        if self.plan.average and self.plan.world > 1:
            self._copy(reduction, "divide", lane, 2 * rows)
        if not reduction.held.in_sums:
            self._copy(reduction, "add", lane, (2 if overwrites else 3) * rows)

    def drop(self, held: Held) -> None:
        self._hold("slots", -held.content, held.loan)
        if self.lives is not None and held.loan is not None:
            self.lives.give(held.loan)

    def join(self, reduction: PlannedReduction) -> None:
        self.listener.join(reduction.pending)
        reduction.pending = None
        self._end_exchange(reduction)

    def hold(self, reduction: PlannedReduction) -> None:
        reduction.freed = reduction.last

    def retire(self, reduction: PlannedReduction) -> None:
        if self.ordered:
            self.listener.join(reduction.freed)
        self.listener.hold("gradients", -reduction.gradients)

    def finish(self) -> None:
        if self.ordered:
            for end in self._ends.values():
                self.listener.join(end)
        self._ends.clear()
