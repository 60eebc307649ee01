"""How large one unit of a Plan is on one rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.description.parameters import UnitSpec
from shardwise.planning.rows import lay_out

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan


@dataclass(frozen=True)
class UnitBytes:
    """One unit's sizes in bytes on one rank, padding included."""

    master: int  # this rank's rows, original dtype
    full: int  # the gathered unit, compute dtype
    parts: tuple[int, ...]  # of it, each parameter that is not empty
    gradient: int  # this rank's rows of the trainable parameters, original dtype, and the counts
    slot: int  # all gradients of the unit, reduce dtype, and the counts: the reduce's input
    rows: int  # one rank's part of that
    moment: int  # one tensor of optimizer state: of this rank's rows, without the counts
    aliased: bool  # the full unit is the master itself: nothing to gather, nothing more to hold


def size_of_unit(plan: Plan, unit: UnitSpec) -> UnitBytes:
    """S x m, n x S x c, (T + C) x m, n x (T + C) x d of docs/formulas.md."""
    own, compute, reduce = plan.dtypes(unit.parameters[0].dtype)
    _, ranks = plan.axes_of(unit)
    everything = lay_out([p.shape for p in unit.parameters], ranks)
    trained = lay_out([p.shape for p in unit.parameters if p.trainable], ranks)
    reduced = trained.shard_numel + (trained.counts if plan.world > 1 else 0)
    parts = [rows.part * ranks * compute.itemsize for rows in everything.rows if rows.part]
    return UnitBytes(
        master=everything.shard_numel * own.itemsize,
        full=everything.full_numel * compute.itemsize,
        parts=tuple(parts),
        gradient=reduced * own.itemsize,
        slot=reduced * ranks * reduce.itemsize,
        rows=reduced * reduce.itemsize,
        moment=trained.shard_numel * own.itemsize,
        aliased=ranks == 1 and own == compute,
    )
