"""What a Plan costs one rank, from formulas: bytes kept by role, and bytes sent per step by
collective.

docs/formulas.md shows the same formulas with their letters; every function here names the one it
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from shardwise.description.parameters import UnitSpec
from shardwise.planning.rows import lay_out
from shardwise.planning.strategies import choose_gather

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan

# AdamW's two moments, in the master's dtype.
STATE_TENSORS = 2


@dataclass(frozen=True)
class UnitBytes:
    """One unit's sizes in bytes on one rank, padding included."""

    master: int  # this rank's rows, original dtype
    full: int  # the gathered unit, compute dtype
    gradient: int  # this rank's rows of the trainable parameters, original dtype, and the counts
    slot: int  # all gradients of the unit, reduce dtype, and the counts: the reduce's input
    moment: int  # one tensor of optimizer state: of this rank's rows, without the counts
    aliased: bool  # the full unit is the master itself: nothing to gather, nothing more to hold
    packs: bool  # a gather needs staging of the unit's size
    whole: bool  # one rank has all rows: nothing to scatter, and the gradient buffer may be reduced

    def in_buffer(self, ranks: int) -> bool:
        """A rank's part of a reduce has the gradients' own dtype: their buffer takes the sum."""
        return self.slot == (1 if self.whole else ranks) * self.gradient


@dataclass(frozen=True)
class KeptBytes:
    """Bytes that one rank holds, by role. `full` and the slots are peaks, the rest is there all the
    time.
    """

    master: int
    gradients: int
    state: int
    accumulators: int
    full: int
    slots: int  # of a device with streams
    host_slots: int  # of a CPU, which does the reduces itself


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in one step, by collective."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float

    @property
    def total(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce


def size_of_unit(plan: Plan, unit: UnitSpec) -> UnitBytes:
    """S x m, n x S x c, (T + C) x m, n x (T + C) x d of docs/formulas.md."""
    own, compute, reduce = plan.dtypes(unit.parameters[0].dtype)
    _, ranks = plan.axes_of(unit)
    everything = lay_out([p.shape for p in unit.parameters], ranks)
    trained = lay_out([p.shape for p in unit.parameters if p.trainable], ranks)
    full = everything.full_numel * compute.itemsize
    reduced = trained.shard_numel + (trained.counts if plan.world > 1 else 0)
    gather = choose_gather(plan.gather, len(unit.parameters), full)
    return UnitBytes(
        master=everything.shard_numel * own.itemsize,
        full=full,
        gradient=reduced * own.itemsize,
        slot=reduced * ranks * reduce.itemsize,
        moment=trained.shard_numel * own.itemsize,
        aliased=ranks == 1 and own == compute,
        packs=ranks > 1 and gather == "packed",
        whole=ranks == 1,
    )


def count_kept(plan: Plan, micro_batches: int = 1) -> KeptBytes:
    """Bytes one rank holds, by role."""
    units = [size_of_unit(plan, unit) for unit in plan.require_units()]
    return KeptBytes(
        master=sum(u.master for u in units),
        gradients=sum(u.gradient for u in units),
        state=STATE_TENSORS * sum(u.moment for u in units),
        accumulators=_accumulators(plan, units),
        full=peak_full(plan, units),
        slots=peak_slots(plan, units, micro_batches, streams=True),
        host_slots=peak_slots(plan, units, micro_batches, streams=False),
    )


def _accumulators(plan: Plan, units: list[UnitBytes]) -> int:
    """With sync = last, slots in which micro-batches add up. Data parallel adds up in the gradient
    buffer itself, where that has the reduce dtype.
    """
    if plan.sync != "last":
        return 0
    return sum(u.slot for u in units if not (u.whole and u.in_buffer(1)))


def peak_slots(plan: Plan, units: list[UnitBytes], micro_batches: int, streams: bool) -> int:
    """The most bytes that reduces hold at any moment: what the ring has under way, and rows that
    stay longer, for the replicas. A slot or rows that are the gradient buffer itself take nothing.
    """
    n, ring = plan.shard, _ring(plan, len(units), streams)
    several = micro_batches > 1
    parts = [u.slot // (1 if u.whole else n) for u in units]
    own = [0 if u.in_buffer(n) else part for u, part in zip(units, parts, strict=True)]
    rows = parts if several and plan.sync != "last" else own
    slots = [0 if u.whole else u.slot for u in units]
    if several and plan.sync == "last":
        # A slot is packed and added. At the end accumulators are scattered, and go one by one.
        scattered = sorted(rows, reverse=True)[: ring - 1] if n > 1 else []
        return max((u.slot for u in units), default=0) + sum(scattered)
    if several and plan.sync == "scatter_each_reduce_last" and plan.replicate > 1:
        # The sums over micro-batches stay; the rows that are added to them pass.
        return sum(own) + _largest(slots, rows, ring)
    if plan.replicate > 1 and streams and n > 1:
        return sum(rows) + _largest(slots, [0] * len(units), ring)
    return _largest(slots, rows, ring)


def _largest(slots: list[int], rows: list[int], count: int) -> int:
    """Bytes of the `count` largest reduces."""
    return sum(sorted((s + r for s, r in zip(slots, rows, strict=True)), reverse=True)[:count])


def _ring(plan: Plan, units: int, streams: bool) -> int:
    """How many reduces hold memory at once. On streams a slot is free behind its reduce-scatter, in
    the lane's order; without shards it is what the all-reduce reads, and waits for that.
    """
    if plan.name == "ddp" and plan.reduce == "naive":
        return 1
    if plan.strategy.gradients == "shard":
        depth = plan.reduce_depth
    else:
        depth = max(plan.reduce_depth, 2) if streams else units
    return 1 if streams and plan.shard > 1 else depth


def peak_full(plan: Plan, units: list[UnitBytes]) -> int:
    """The most full-parameter bytes at any moment: what stays gathered, the window in use, and one
    staging buffer.
    """
    staging = max((u.full for u in units if u.packs), default=0)
    held = [0 if u.aliased else u.full for u in units]
    if plan.strategy.parameters != "shard" or plan.keep_after_forward is True:
        return sum(held) + staging
    specs = plan.require_units()
    root = sum(full for full, spec in zip(held, specs, strict=True) if spec.modules == ("",))
    blocks = [full for full, spec in zip(held, specs, strict=True) if spec.modules != ("",)]
    depth = 1 + max(plan.forward_prefetch, plan.backward_prefetch)
    window = max((sum(blocks[i : i + depth]) for i in range(len(blocks))), default=0)
    kept = sum(_kept_pieces(plan, u) for u in units)
    return root + window + staging + kept


def _kept_pieces(plan: Plan, unit: UnitBytes) -> int:
    """With keep_after_forward = k, every rank keeps 1/k of each unit from forward to backward."""
    k = plan.keep_after_forward
    if unit.whole or k is None or isinstance(k, bool):
        return 0
    return unit.full // k


def count_sent(plan: Plan, micro_batches: int = 1) -> SentBytes:
    """Bytes one rank sends per step of `micro_batches`: a gather or scatter of S bytes over n ranks
    sends S(n-1)/n.
    """
    scatters = 1 if plan.sync == "last" else micro_batches
    reduces = micro_batches if plan.sync == "each" else 1
    gathered = scattered = reduced = 0.0
    for spec in plan.require_units():
        unit, (r, n) = size_of_unit(plan, spec), plan.axes_of(spec)
        if n > 1:
            gathered += unit.full * _gather_share(plan, spec.modules == ("",), micro_batches)
        scattered += unit.slot * (n - 1) / n * scatters
        reduced += 2 * (unit.slot / n) * (r - 1) / r * reduces
    return SentBytes(gathered, scattered, reduced)


def _gather_share(plan: Plan, is_root: bool, micro_batches: int) -> float:
    """Sent bytes of a step's gathers of one unit, as a multiple of the full unit."""
    once = (plan.shard - 1) / plan.shard
    if plan.strategy.parameters != "shard":
        return once
    keep = plan.keep_after_forward
    if keep is True or (keep is None and is_root):
        return once * micro_batches
    again = once if isinstance(keep, bool) or keep is None else (keep - 1) / keep
    return (once + again) * micro_batches


def explain(plan: Plan, micro_batches: int = 1) -> str:
    """The lines of `Plan.explain`."""
    row = plan.strategy
    lines = [
        f"{plan.title}: mesh {plan.replicate} x {plan.shard} (replicate x shard)",
        f"  parameters {row.parameters}, gradients {row.gradients}, optimizer state {row.state}; "
        f"sync {plan.sync}"
        + (f"; reduce {plan.reduce}" if plan.name == "ddp" else "")
        + (f"; gradients averaged over {plan.world} ranks" if plan.average else ""),
    ]
    if plan.units is None:
        lines.append("  no model yet: plan.resolve(model).explain() gives bytes")
        return "\n".join(lines)
    kept, sent = count_kept(plan, micro_batches), count_sent(plan, micro_batches)
    count = sum(p.numel for unit in plan.units for p in unit.parameters)
    own, compute, reduce = (
        plan.dtypes(plan.units[0].parameters[0].dtype) if plan.units else (None,) * 3
    )
    lines.append(
        f"  {count:,} parameters in {len(plan.units)} units; kept as {_name(own)}, computed in "
        f"{_name(compute)}, reduced in {_name(reduce)}"
    )
    kept_whole = [p for unit in plan.units if unit.whole for p in unit.parameters]
    if kept_whole:
        lines.append(
            f"  whole on every rank: {len(kept_whole)} tensors, "
            f"{show_bytes(sum(p.nbytes for p in kept_whole))}"
        )
    batches = "micro-batch" if micro_batches == 1 else "micro-batches"
    table = [
        ("kept per rank", "master parameters", kept.master),
        ("", "gradients", kept.gradients),
        ("", f"optimizer state ({STATE_TENSORS} per parameter)", kept.state),
        ("", "gradient accumulators", kept.accumulators),
        ("peak per rank", "full parameters", kept.full),
        ("", "reduce slots", kept.slots),
        ("", "reduce slots, on a CPU", kept.host_slots),
        (f"sent, {micro_batches} {batches}", "all-gather", sent.all_gather),
        ("", "reduce-scatter", sent.reduce_scatter),
        ("", "all-reduce", sent.all_reduce),
    ]  # fmt: skip
    width = max(len(head) for head, _, _ in table)
    lines += [f"  {head:<{width}}  {what:<34} {show_bytes(n):>12}" for head, what, n in table]
    return "\n".join(lines)


def show_bytes(count: float) -> str:
    """Bytes for people: 1,536 is 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
