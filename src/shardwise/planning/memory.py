"""What a Plan costs one rank: bytes kept by role, and bytes sent per step by collective.

Nothing here is a formula: the schedule of a step is run with an executor that only counts.
docs/formulas.md says in letters what comes out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from shardwise.planning.executor import PlannedExecutor, PlannedUnit
from shardwise.planning.rows import Rows
from shardwise.schedule.arena import Layout, Lives, lay_out
from shardwise.schedule.drive import Part, run_backward, run_forward, settle
from shardwise.schedule.moments import Schedule

if TYPE_CHECKING:
    from shardwise.planning.plan import Plan

# AdamW's two moments, in the master's dtype.
STATE_TENSORS = 2


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
    # All of it at the worst moment: less than the sum of the peaks, which are at different ones.
    at_once: int
    host_at_once: int


@dataclass(frozen=True)
class SentBytes:
    """Bytes that one rank sends in one step, by collective."""

    all_gather: float
    reduce_scatter: float
    all_reduce: float
    all_to_all: float = 0.0

    @property
    def total(self) -> float:
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.all_to_all


class Counter:
    """A listener that counts: bytes held and their peaks by role, bytes sent by collective."""

    phase = ""

    def __init__(self) -> None:
        self.held: dict[str, int] = defaultdict(int)
        self.peaks: dict[str, int] = defaultdict(int)
        self.sent: dict[str, float] = defaultdict(float)
        self.peak = 0

    def hold(self, role: str, nbytes: int) -> None:
        role = "full" if role == "temporary" else role  # staging is of full parameters
        self.held[role] += nbytes
        self.peaks[role] = max(self.peaks[role], self.held[role])
        self.peak = max(self.peak, sum(self.held.values()))

    def collective(self, kind: str, unit: str, axis: str, nbytes: int, ranks: int, *_: Any) -> int:
        self.sent[kind] += sent_bytes(kind, nbytes, ranks)
        return -1

    def copy(self, *_: Any) -> int:
        return -1

    def is_near(self, axis: str, ranks: int) -> bool:
        return False

    def engine_work(self, *_: Any) -> None: ...

    def behind_compute(self) -> tuple[int, ...]:
        return ()

    def join(self, number: int) -> None: ...


def sent_bytes(kind: str, nbytes: float, ranks: int) -> float:
    """A gather or scatter of S bytes over n ranks sends S(n-1)/n, an all-reduce twice that."""
    return (2 if kind == "all_reduce" else 1) * nbytes * (ranks - 1) / ranks


def lay_out_arena(plan: Plan, micro_batches: int = 1, streams: bool = True) -> Layout:
    """The block that a step of a Plan takes with `memory="arena"`, every unit a part of the
    model.
    """
    lives = Lives()
    count_step(plan, micro_batches, streams, lives)
    return lay_out(lives.end_step())


def count_step(
    plan: Plan,
    micro_batches: int = 1,
    streams: bool = True,
    lives: Lives | None = None,
    in_block: bool = False,
) -> tuple[Counter, int]:
    """One step of a Plan, every unit a part of the model, counted; and the bytes that reduces hold
    between micro-batches. `in_block`: what stands in an arena is left out.
    """
    counter = Counter()
    executor = PlannedExecutor(plan, counter, streams, lives, in_block)
    schedule = plan_schedule(plan, executor)
    parts = [Part((unit,)) for unit in schedule.units]
    settle(schedule, parts)
    between = 0
    for i in range(micro_batches):
        schedule.micro = (i, micro_batches)
        run_forward(schedule, parts, lambda _: None)
        run_backward(schedule, parts, lambda _: None)
        if i < micro_batches - 1:
            between = max(between, counter.held["slots"])
    return counter, between


def plan_schedule(plan: Plan, executor: PlannedExecutor) -> Schedule[PlannedUnit]:
    """The schedule of a Plan's step in the middle of training: what outlives a step is there, and
    stale.
    """
    units = [PlannedUnit(plan, i) for i in range(len(plan.require_units()))]
    schedule = Schedule(units, plan.policy, executor)
    schedule.set_gradients()
    for unit in units:
        unit.executor = executor
        if not plan.policy.frees_after_step and not unit.aliased:
            executor.keep_from_last_step(unit)
    schedule.renew(units)
    return schedule


def count_kept(plan: Plan, micro_batches: int = 1) -> KeptBytes:
    """Bytes one rank holds, by role."""
    device, between = count_step(plan, micro_batches, streams=True)
    host, between_on_host = count_step(plan, micro_batches, streams=False)
    accumulates = plan.sync == "last"
    sizes = [PlannedUnit(plan, i).sizes for i in range(len(plan.require_units()))]
    master = sum(u.master for u in sizes)
    state = STATE_TENSORS * sum(u.moment for u in sizes)
    return KeptBytes(
        master=master,
        gradients=sum(u.gradient for u in sizes),
        state=state,
        accumulators=between if accumulates else 0,
        full=device.peaks["full"],
        slots=device.peaks["slots"] - (between if accumulates else 0),
        host_slots=host.peaks["slots"] - (between_on_host if accumulates else 0),
        at_once=master + state + _most_at_once(plan, micro_batches, device),
        host_at_once=master + state + _most_at_once(plan, micro_batches, host, streams=False),
    )


def _most_at_once(plan: Plan, micro_batches: int, counted: Counter, streams: bool = True) -> int:
    """What a step takes beside master and state, at its worst moment. An arena is always there."""
    if not plan.has_arena(streams):
        return counted.peak
    others, _ = count_step(plan, micro_batches, streams, Lives(), in_block=True)
    return lay_out_arena(plan, micro_batches, streams).nbytes + others.peak


def count_sent(plan: Plan, micro_batches: int = 1) -> SentBytes:
    """Bytes one rank sends per step of `micro_batches`."""
    sent = count_step(plan, micro_batches)[0].sent
    kinds = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    return SentBytes(*(sent[kind] for kind in kinds))


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
        + (f", added in {plan.sum_dtype}" if plan.sum_dtype else "")
        + (f", gathered as {plan.gather_dtype}" if plan.gather_dtype else "")
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
        ("", "all of it at once", kept.at_once),
        ("", "all of it at once, on a CPU", kept.host_at_once),
        (f"sent, {micro_batches} {batches}", "all-gather", sent.all_gather),
        ("", "reduce-scatter", sent.reduce_scatter),
        ("", "all-reduce", sent.all_reduce),
    ]  # fmt: skip
    if sent.all_to_all:
        table.append(("", "all-to-all", sent.all_to_all))
    width = max(len(head) for head, _, _ in table)
    lines += [f"  {head:<{width}}  {what:<34} {show_bytes(n):>12}" for head, what, n in table]
    padding = explain_padding(plan)
    if padding:
        lines.append(f"  note: {padding}")
    if plan.has_arena(streams=True):
        device, host = (lay_out_arena(plan, micro_batches, s).nbytes for s in (True, False))
        on_host = f"{host:,}" if plan.has_arena(streams=False) else "none"
        lines.append(f"  arena: {device:,} bytes in one block; on a CPU {on_host}")
    return "\n".join(lines)


def explain_padding(plan: Plan) -> str:
    """What to do about parameters of fewer rows than a shard group has ranks, where those make more
    padding than there are parameters; else nothing.
    """
    most, padding = ("", 0, 0), 0
    for unit in plan.require_units():
        ranks = plan.axes_of(unit)[1]
        for parameter in unit.parameters:
            rows = Rows(parameter.shape, ranks)
            beside = 0 if rows.replicated else rows.part * ranks - rows.numel
            padding += beside
            if beside > most[1]:
                most = parameter.name, beside, parameter.shape[0]
    name, _, rows_of_it = most
    if padding <= sum(unit.numel for unit in plan.require_units()):
        return ""
    return (
        f"more than half of what is gathered is padding: {name!r} has {rows_of_it} rows for "
        f"{plan.shard} ranks. Keep shard groups to {rows_of_it} ranks (hsdp), or cut another dim "
        "through fully_shard(shard_placement_fn=...)"
    )


def show_bytes(count: float) -> str:
    """Bytes for people: 1,536 is 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:,.0f} B" if unit == "B" else f"{count:,.2f} {unit}"
        count /= 1024
    return f"{count:,.2f} TiB"


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
