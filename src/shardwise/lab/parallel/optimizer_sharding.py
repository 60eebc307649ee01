"""`shardwise bench optimizer-sharding`: data parallel with and without a sharded optimizer state.

A replicated model with torch's DistributedDataParallel and AdamW whole, with shardwise's
ShardedOptimizer, with torch's ZeroRedundancyOptimizer; and shardwise's zero1, which shards by
itself. Time is that of a whole step and of the update alone. Memory is taken in the second step,
when all state is there: after initialisation, before the update, at its peak, after it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import shardwise as sw
from shardwise.description.language_model import OPTIMIZER, compute_loss, draw_tokens, make_model
from shardwise.emulation.collectives import Network, emulate
from shardwise.emulation.run import Taken, fake_group, time_step
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises.memory.trace import PHASE, read_trace
from shardwise.lab.exercises.models import tell_device
from shardwise.lab.parallel import document
from shardwise.lab.parallel.ddp import (
    PARITY_STEPS,
    TOLERANCE,
    WARMUP,
    Case,
    choose_case,
    describe_network,
    short_ms,
    sum_up,
)
from shardwise.lab.processes import ask_ranks, explain_failure, run_fresh, time_on_ranks
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.lab.steps.engines import Wrapped, largest_difference, wrap_plan
from shardwise.profiling.footprint import open_profiler, read_events
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import alternate, spread, timer_on

WHOLE = "AdamW, whole"
WAYS = {"whole": WHOLE, "sharded": "ShardedOptimizer", "zero1": "zero1", "torch": "ZeroRedundancy"}
MOMENTS = ("init", "before", "peak", "after")
ROLES = ("parameters", "gradients", "state")
K = 12  # bytes of the paper's mixed precision: fp32 weights and two moments


def wrap(way: str, model: Any, ranks: int) -> Wrapped:
    """The model, its gradients averaged over the ranks, and the optimizer."""
    if way == "zero1":
        return wrap_plan(model, sw.Plan.of("zero1", mesh=ranks))
    # Gradients are views of the buckets that they travel in: one copy of them.
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    parameters, kind = replicated.parameters(), torch.optim.AdamW
    optimizer: torch.optim.Optimizer
    if way == "torch":
        optimizer = ZeroRedundancyOptimizer(parameters, kind, **OPTIMIZER)
    elif way == "sharded":
        optimizer = sw.ShardedOptimizer(parameters, kind, **OPTIMIZER)
    else:
        optimizer = kind(parameters, **OPTIMIZER)
    return Wrapped(replicated, optimizer, 1, {})


def run(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, draw the picture, print the tables."""
    if only_draw(arguments, draw):
        return
    tell_device()
    on_gpu = torch.cuda.is_available()
    case = choose_case(arguments)
    network, told = describe_network(arguments)
    file = RowFile.of(arguments, network=told)
    base = f"{told}/{case.size_name}/{case.batch}x{case.context}/{case.ranks}"
    missing = list(file.missing(arguments.ways, lambda way: f"{base}/{way}"))
    answers: dict[str, Row] = {}
    if missing and not on_gpu:
        say(f"{case.ranks} gloo ranks: {', '.join(WAYS[way] for way in missing)} in turn")
        answers = ask_ranks(measure_on_ranks, case, missing, world=case.ranks)
    for way in missing:
        if on_gpu and file.time_is_up():
            break
        found = run_fresh(measure_emulated, case, way, network) if on_gpu else answers[way]
        row: Row = {"key": f"{base}/{way}", "way": WAYS[way], **case.describe(), **found}
        row["formula_bytes"] = count_by_formula(case, way)
        said = "whole" if way == "whole" else "sharded"
        row["document"] = document.OPTIMIZER_SHARDING[said] if way in ("whole", "sharded") else {}
        file.add(row)
        say(f"{WAYS[way]}: " + found.get("failure", f"{found.get('step_ms', 0):.1f} ms"))
    file.tell(arguments.plot, draw, show)


def count_by_formula(case: Case, way: str) -> dict[str, float]:
    """Bytes of parameters, gradients and state, P of them over n ranks: here all in fp32, and the
    paper's 4 P + K P / n of mixed precision, which the document quotes.
    """
    count = case.gradient_bytes / 4
    shares = 1 if way == "whole" else case.ranks
    return {"fp32": 8 * count + 8 * count / shares, "mixed": 4 * count + K * count / shares}


# Real ranks


def measure_on_ranks(case: Case, ways: list[str]) -> dict[str, Row]:
    """What each of the ranks runs: parity, steps in turn, updates in turn, then memory."""

    def build(way: str) -> Wrapped:
        return wrap(way, make_model(case.size, "cpu", case.context), case.ranks)

    tokens = draw_tokens(case.size, case.batch, case.context, "cpu")
    candidates = {way: build(way) for way in dict.fromkeys(("whole", *ways))}
    steps = {way: trial.step_on(*tokens) for way, trial in candidates.items()}
    for step in steps.values():
        for _ in range(PARITY_STEPS):
            step()
    parity = {way: _check_parity(way, candidates) for way in ways}
    taken = alternate(steps, case.steps, WARMUP, time_on_ranks)
    updates = {way: _update_of(trial.optimizer) for way, trial in candidates.items()}
    updated = alternate(updates, case.steps, 1, time_on_ranks)
    held = {way: count_roles(trial) for way, trial in candidates.items()}
    del candidates, steps, updates
    found: dict[str, Row] = {}
    for way in ways:
        times = [sample.step_ms for sample in taken[way]]
        found[way] = {
            "step_ms": statistics.median(times),
            "step_spread_ms": spread(times),
            "update_ms": statistics.median(sample.step_ms for sample in updated[way]),
            "parity": parity[way],
            "held_bytes": held[way],
            "memory_bytes": follow_on_cpu(partial(build, way), tokens),
        }
    return found


def _update_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def update() -> None:
        optimizer.step()

    return update


def _check_parity(way: str, candidates: dict[str, Wrapped]) -> float:
    """The largest relative difference from the whole optimizer's; an error on every rank if it
    parts. Gradients are compared too.
    """
    worst, where = largest_difference(candidates[way].model, candidates["whole"].model)
    if worst > TOLERANCE:
        raise RuntimeError(
            f"{WAYS[way]}: after {PARITY_STEPS} steps {where} differs from {WHOLE} by {worst:.1e} "
            f"(allowed {TOLERANCE:.0e}); nothing was timed"
        )
    return worst


def count_roles(trial: Wrapped) -> dict[str, int]:
    """Bytes that a rank holds between a backward and the update."""
    parameters = list(trial.model.parameters())
    inner = getattr(trial.optimizer, "optim", trial.optimizer)  # ZeroRedundancyOptimizer's own
    values = [value for state in inner.state.values() for value in state.values()]
    return {
        "parameters": _count(parameters),
        "gradients": _count(p.grad for p in parameters if p.grad is not None),
        "state": _count(value for value in values if isinstance(value, Tensor)),
    }


def _count(tensors: Iterable[Tensor]) -> int:
    """Bytes of the memory under these tensors, each storage once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    storages = {s.data_ptr(): s.nbytes() for s in (t.untyped_storage() for t in local)}
    return sum(storages.values())


def _go(trial: Wrapped, tokens: tuple[Tensor, Tensor]) -> None:
    """Forward and backward; what the last step left goes first."""
    trial.optimizer.zero_grad()
    (compute_loss(trial.model, *tokens) / trial.divisor).backward()


def follow_on_cpu(build: Callable[[], Wrapped], tokens: tuple[Tensor, Tensor]) -> dict[str, int]:
    """Bytes given out by torch's CPU allocator since before the model was made, by moment."""
    with open_profiler() as profiled:
        with record_function(f"{PHASE}init"):
            trial = build()
        _go(trial, tokens)
        trial.optimizer.step()
        with record_function(f"{PHASE}backward"):
            _go(trial, tokens)
        with record_function(f"{PHASE}update"):
            trial.optimizer.step()
    trace = read_trace(read_events(profiled), on_gpu=False, before=0)
    init, backward, update = trace.phases
    return {
        "init": trace.peak(init.end, init.end)[1],
        "before": trace.peak(backward.end, backward.end)[1],
        "peak": trace.peak(update.start, update.end)[1],
        "step_peak": trace.peak(backward.start, update.end)[1],
        "after": trace.peak(update.end, update.end)[1],
    }


# One rank of an emulated group


def measure_emulated(case: Case, way: str, network: Network) -> Row:
    """Memory of the second step, then steps; in a process of its own."""
    try:
        device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
        with fake_group(0, case.ranks), emulate(network) as emulation:
            tokens = draw_tokens(case.size, case.batch, case.context, device)

            def build() -> Wrapped:
                return wrap(way, make_model(case.size, str(device), case.context), case.ranks)

            if device.type == "cuda":
                left = torch.cuda.memory_allocated()
                trial = build()
                memory = _follow_on_cuda(trial, tokens, left)
            else:
                memory, trial = follow_on_cpu(build, tokens), build()
            taken = Taken()
            time_step(trial.step_on(*tokens), emulation, device, case.steps, taken)
            _go(trial, tokens)
            held, timer = count_roles(trial), timer_on(device.type)
            update = _update_of(trial.optimizer)
            updates = [timer(update).step_ms for _ in range(case.steps)]
        found = sum_up(taken) | {"update_ms": statistics.median(updates)}
        return found | {"memory_bytes": memory, "held_bytes": held}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def _follow_on_cuda(trial: Wrapped, tokens: tuple[Tensor, Tensor], left: int) -> dict[str, int]:
    def held(reset: bool = False) -> int:
        torch.cuda.synchronize()
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() - left

    found = {"init": held()}
    _go(trial, tokens)
    trial.optimizer.step()
    held(reset=True)
    _go(trial, tokens)
    torch.cuda.synchronize()
    backward = torch.cuda.max_memory_allocated() - left
    found["before"] = held(reset=True)
    trial.optimizer.step()
    torch.cuda.synchronize()
    found["peak"] = torch.cuda.max_memory_allocated() - left
    return found | {"step_peak": max(backward, found["peak"]), "after": held()}


# What is made of the rows


def draw(rows: list[Row]) -> str:
    """What a rank holds, by role, and its peak."""
    groups = {
        row["way"]: {role: row["held_bytes"][role] / 1e6 for role in ROLES}
        | {"peak of a step": row["memory_bytes"]["step_peak"] / 1e6}
        for row in rows
        if "failure" not in row
    }
    return draw_bars("optimizer state, whole and sharded: what a rank holds", groups, "MB")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    good = [row for row in rows if "failure" not in row]
    lines = []
    for row in good:
        said = row["document"]
        theirs = [f"{said['step_s'] * 1e3:.0f}", f"{said['peak_gb']:.0f}"] if said else ["", ""]
        figures = [short_ms(row[name]) for name in ("step_ms", "step_spread_ms", "update_ms")]
        lines.append([row["way"], *figures, *theirs])
    lines += [[row["way"], "failed"] for row in rows if "failure" in row]
    first, title = ("optimizer",), f"one step, ms ({facts['network']})"
    heads = [*first, "step", "+-", "update", "document", "its peak GB"]
    print_table(title, heads, lines, {}, first, width=80)
    lines = [
        [row["way"], *(_mb(row["memory_bytes"][moment]) for moment in (*MOMENTS, "step_peak"))]
        for row in good
    ]
    heads = [*first, "init", "before", "peak in it", "after", "peak of step"]
    print_table("memory around the update, MB", heads, lines, {}, first, width=80)
    lines = []
    for row in good:
        held = row["held_bytes"]
        rest = row["memory_bytes"]["before"] - sum(held.values())
        cells = [row["way"], *(_mb(held[role]) for role in ROLES), _mb(rest)]
        lines.append([*cells, _mb(row["formula_bytes"]["fp32"])])
    heads = [*first, *ROLES, "rest", "formula"]
    print_table("before the update, by role, MB", heads, lines, facts["environment"], first, 80)
    print(
        "rest: what else is held then; zero1's parameters are its rows, and the gathered\n"
        "ones are in the rest.\n"
        "formula: in fp32 8 P + 8 P / n bytes (whole: n = 1). The paper's 4 P + K P / n,\n"
        "which the document quotes, is of 16-bit training with K = 12 bytes.\n"
        "The document's XL has 2.0 B parameters: half of its fp32 moments are 8 GB, and\n"
        "its two peaks are 13 GB apart, so they differ by more than the state."
    )
    for row in rows:
        if "failure" in row:
            print(f"{row['way']}: {row['failure']}")
    if facts["network"] != "gloo":
        print("ZeroRedundancyOptimizer broadcasts; the emulated network does not carry that.")


def _mb(nbytes: float) -> str:
    return f"{nbytes / 1e6:,.1f}" if nbytes < 1e9 else f"{nbytes / 1e6:,.0f}"
