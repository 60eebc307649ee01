"""`shardwise bench hsdp`: hybrid sharding with and without a delayed all-reduce, and sharding over
all ranks, under shardwise and torch: on real ranks, emulated, predicted, and in the document.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from shardwise.description.preset import load_preset
from shardwise.errors import UserError
from shardwise.hosts import refusal
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises.models import tell_device
from shardwise.lab.hybrid import emulated, link, ranks
from shardwise.lab.hybrid.case import DOCUMENT, RANKS, HybridCase, document_speedup
from shardwise.lab.hybrid.ffn import SEQUENCE
from shardwise.lab.hybrid.predicted import predict
from shardwise.lab.processes import ask_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table


class Shape(NamedTuple):
    hidden: int
    intermediate: int
    layers: int
    sequence: int


REAL = Shape(4096, 14336, 8, SEQUENCE)
QUICK = Shape(64, 224, 2, 16)
# Where nobody has a GPU. Ranks share the cores, so a rank that waits costs nothing there; what a
# delayed all-reduce saves is messages, so micro-batches are small beside the parameters. Emulated,
# the rank has a core to itself and waits for the other replica; there compute has to count.
ON_CPU = {
    "gloo": Shape(128, 448, 8, 8), "hosts": Shape(128, 448, 8, 8),
    "emulated": Shape(256, 896, 4, 128),
}  # fmt: skip
COMPARED = {
    "gloo": "real ranks that share this machine's cores, scaled down: what is gained is messages; "
    "of the document only the ratios can be compared",
    "hosts": "2 hosts of 2 ranks on this machine's cores, with a real link between them: replicas "
    "across it, shards inside a host; of the document only the ratios can be compared",
    "emulated": "one rank of 2 x 2 with h100x8's modelled network, the other replica as late as it "
    "would be; the document's GPUs were H100",
    "predicted": "the document's sizes on h100x8; measured are one H200's micro-batches alone",
}


def run(arguments: argparse.Namespace) -> None:
    """Measure source by source, write the JSON after each row, draw, print."""
    modes, sources = _modes(arguments), _sources(arguments)
    tell_device()
    file = RowFile.of(arguments, steps=arguments.measured_steps, warmup=arguments.warmup_steps)
    for source in sources:
        case = _case(arguments, source)
        wanted = [
            (engine, mode)
            for engine in arguments.engines
            for mode in modes
            if _key(source, arguments, case, engine, mode) not in file
        ]
        if not wanted:
            continue
        if file.time_is_up():
            break
        say(f"{source}: {_tell(case)}")
        for engine, mode, found in _measure(source, case, wanted, arguments):
            key = _key(source, arguments, case, engine, mode)
            row: Row = {"key": key, "source": source}
            row |= {"engine": engine, "mode": mode, **case.describe(), **found}
            row["document"] = DOCUMENT[mode] | {"speedup": document_speedup(mode)}
            row["compared"] = COMPARED[source]
            file.add(row)
    for row in file.rows:
        row["speedup"] = _speedup(row, file.rows)
    file.write()
    file.tell(arguments.plot, draw, show)


def _modes(arguments: argparse.Namespace) -> list[str]:
    """All, or the one that the document's switches name."""
    if arguments.delay_all_reduce and arguments.fsdp_only:
        raise UserError(
            "--delay-all-reduce and --fsdp-only: without replicas there is no all-reduce to delay; "
            "give one of them, or none to compare all modes"
        )
    if arguments.delay_all_reduce:
        return ["delayed"]
    return ["fsdp"] if arguments.fsdp_only else list(arguments.modes)


def _sources(arguments: argparse.Namespace) -> tuple[str, ...]:
    """As asked for, or all that this machine has."""
    if arguments.hosts > 1:
        if arguments.sources is not None:
            raise UserError("--hosts 2 has real ranks on two hosts: leave out --sources")
        if why := refusal():
            raise UserError(f"--hosts 2 makes two hosts of network namespaces: {why}")
        arguments.rate = arguments.rate or link.RATE
        return ("hosts",)
    if arguments.rate is not None:
        raise UserError("--rate is of the link between two hosts: give --hosts 2 with it")
    if arguments.sources is not None:
        return tuple(arguments.sources)
    gpu = torch.cuda.is_available()
    return ("emulated", "predicted") if gpu else ("gloo", "emulated", "predicted")


def _case(arguments: argparse.Namespace, source: str) -> HybridCase:
    shape = REAL
    if source != "predicted":
        on_gpu = torch.cuda.is_available() and source == "emulated"
        default = REAL if on_gpu else ON_CPU[source]
        default = QUICK if arguments.quick else default
        shape = Shape(
            arguments.hidden_dim or default.hidden,
            arguments.intermediate_dim or default.intermediate,
            arguments.num_layers or default.layers,
            arguments.seqlen or default.sequence,
        )
    stack = dataclasses.replace(
        load_preset("ffn8"), d_model=shape.hidden, d_ff=shape.intermediate, layers=shape.layers
    )
    return HybridCase(
        stack, shape.sequence, arguments.accum_steps, arguments.batch_size_ratio,
        arguments.sync_batch_sizes,
    )  # fmt: skip


def _key(
    source: str, arguments: argparse.Namespace, case: HybridCase, engine: str, mode: str
) -> str:
    where = f"{source}/{arguments.rate}" if source == "hosts" else source
    return f"{where}/{case.key}/{engine}/{mode}"


def _measure(
    source: str, case: HybridCase, wanted: list[tuple[str, str]], arguments: argparse.Namespace
) -> Iterator[tuple[str, str, dict[str, Any]]]:
    warmup, steps = (
        (1, 2) if arguments.quick else (arguments.warmup_steps, arguments.measured_steps)
    )
    if source == "predicted":
        for engine, mode in wanted:
            name = "fsdp2" if engine == "torch" else engine
            step = predict(mode, case.accumulate, case.ratio, name, case.synced).step_ms
            told = {"step_ms": step, "mean_ms": step, "std_ms": None, "steps": 0}
            yield engine, mode, told | {"tokens_per_s": case.tokens / RANKS / step * 1e3}
        return
    # All in one run and in turn.
    if source == "gloo":
        found = ask_ranks(ranks.measure, case, wanted, warmup, steps, world=RANKS)
        if "error" in found:
            raise UserError(found["error"])
    elif source == "hosts":
        found = link.measure(case, wanted, warmup, steps, arguments.rate, arguments.quick)
    else:
        # The first steps of the other roles have warmed it up.
        found = emulated.measure(case, wanted, min(warmup, 1), steps)
    for engine, mode in wanted:
        yield engine, mode, found[f"{engine}/{mode}"]


def _speedup(row: Row, rows: list[Row]) -> float | None:
    """Over hsdp of the same source, engine and case; by medians."""
    base = row["key"].removesuffix(row["mode"]) + "hsdp"
    for other in rows:
        if other["key"] == base:
            return float(other["step_ms"] / row["step_ms"])
    return None


def _tell(case: HybridCase) -> str:
    stack = case.stack
    turn = "together" if case.synced else "in turn"
    return (
        f"{stack.layers} layers of {stack.d_model} x {stack.d_ff}, {case.sequence} tokens; "
        f"{case.accumulate} micro-batches of 1 and {case.ratio}, {turn}"
    )


def draw(rows: list[Row]) -> str:
    """How much quicker than hsdp each mode is."""
    groups: dict[str, dict[str, float | None]] = {}
    for row in rows:
        group = groups.setdefault(f"{row['source']}, {row['engine']}", {})
        group[row["mode"]] = row["speedup"]
    groups["document, torch"] = {mode: document_speedup(mode) for mode in DOCUMENT}
    return draw_bars("a step of hsdp over a step of each mode", groups, "x")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """One table for all sources; the document's own rows last. Rows of a link have their own."""
    environment = facts["environment"]
    for rate in dict.fromkeys(row["rate"] for row in rows if row["source"] == "hosts"):
        link.show([row for row in rows if row.get("rate") == rate], environment)
    rows = [row for row in rows if row["source"] != "hosts"]
    if not rows:
        return
    lines = []
    for row in rows:
        cells = [row["source"], row["engine"], row["mode"]]
        lines.append([*cells, *_figures(row, row["speedup"])])
    for mode, figures in DOCUMENT.items():
        lines.append(["document", "torch", mode, *_figures(figures, document_speedup(mode))])
    left = ("source", "engine", "mode")
    heads = (*left, "step ms", "tokens/s/rank", "x hsdp")
    print_table("hybrid sharding, a step of micro-batches", heads, lines, environment, left, 80)
    print("step: mean and standard deviation; x hsdp: by medians, same source and engine.")
    shown = dict.fromkeys(row["source"] for row in rows)
    for source in shown:
        first = next(row for row in rows if row["source"] == source)
        sizes = "{layers} layers of {hidden} x {intermediate}, {sequence} tokens".format(**first)
        print(f"{source}: {sizes}; {COMPARED[source]}.")


def _figures(row: Row, speedup: float | None) -> list[str]:
    spread = "" if row.get("std_ms") is None else f" ±{row['std_ms']:.1f}"
    ratio = "-" if speedup is None else f"{speedup:.2f}"
    return [f"{row['mean_ms']:.1f}{spread}", f"{row['tokens_per_s']:,.0f}", ratio]
