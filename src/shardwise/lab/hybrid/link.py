"""Two hosts of two ranks with a slow link between them: steps measured there, and predicted from
what was calibrated there.

Replicas are across hosts, shards inside one. A machine's speed drifts over minutes, so steps and
calibration are measured in rounds, each under a torchrun of its own; a row has all steps of all
rounds, and the median of the rounds' predictions.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shardwise.calibration.calibrate import assemble, measure_as_rank
from shardwise.calibration.measure import (
    CPU,
    HOST_WORLD,
    QUICK,
    Effort,
    Findings,
    Tell,
    measure_links,
    measure_unit,
)
from shardwise.description.cluster import COLLECTIVES, Cluster, Level
from shardwise.description.cluster_toml import parse_cluster, write_cluster
from shardwise.description.preset import Preset
from shardwise.emulation.engines import fully_shard_blocks
from shardwise.errors import UserError
from shardwise.hosts import two_hosts
from shardwise.lab.hybrid.case import MESH, RANKS, HybridCase, document_speedup, plan_of, summarize
from shardwise.lab.hybrid.ffn import time_micro_batches
from shardwise.lab.hybrid.predicted import predict_step
from shardwise.lab.hybrid.ranks import time_steps
from shardwise.lab.on_hosts import ask_hosts
from shardwise.lab.processes import time_on_ranks
from shardwise.lab.rows import say
from shardwise.predict.cost import Costs
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import time_calls

RATE, ROUNDS = "200mbit", 3
Points = tuple[tuple[float, float], ...]
# What a link is: messages from a kilobyte to four megabytes. Products are of no use here, for
# micro-batches are timed whole.
LINK = dataclasses.replace(
    CPU, samples=5, seconds=0.05, shapes=((64, 128, 128),), dtypes=("float32",), copy_bytes=2**24,
    sizes=tuple(2**power for power in range(10, 23, 2)), attention=((1, 2, 64, 32),),
)  # fmt: skip


def measure(
    case: HybridCase,
    candidates: list[tuple[str, str]],
    warmup: int,
    steps: int,
    rate: str,
    quick: bool,
) -> dict[str, dict[str, Any]]:
    """Figures by engine and mode."""
    rounds = []
    with two_hosts(rate) as hosts:
        for i in range(1 if quick else ROUNDS):
            say(f"2 hosts, {rate}, round {i + 1}: torchrun on each")
            effort = QUICK if quick else LINK
            task = (case, candidates, warmup, steps, effort)
            found = ask_hosts(hosts, MESH[1], measure_rank, *task)
            if "error" in found:
                raise UserError(found["error"])
            rounds.append(found)
    return {
        f"{engine}/{mode}": _sum_up(case, engine, mode, rate, rounds) for engine, mode in candidates
    }


# On each rank

# What torch's engines find of links: between ranks of one host they send by gloo, ours do not.
BY_TORCH = ("collectives", "between_hosts", "issue", "share")


def measure_rank(
    case: HybridCase, candidates: list[tuple[str, str]], warmup: int, steps: int, effort: Effort
) -> dict[str, Any]:
    """Steps, once all gradients agree; then micro-batches alone, calls, links and the host. All
    ranks at once, for they share the machine's cores.
    """
    found = time_steps(case, candidates, warmup, steps)
    if "error" in found:
        return found
    say("micro-batches alone, on all ranks at once")
    sizes = sorted({size for replica in range(MESH[0]) for size in case.sizes(replica)})
    times = max(steps, 5)
    alone = time_micro_batches(case.stack, case.sequence, times, sizes, "cpu", time_on_ranks)
    say("calls and links")
    inner = init_device_mesh("cpu", MESH).get_group(1)
    calls = {
        engine: {
            kind: [
                (size, statistics.median(time_calls(kind, size, effort.samples, inner, plain)))
                for size in effort.sizes
            ]
            for kind in COLLECTIVES
        }
        for engine, plain in (("shardwise", False), ("torch", True))
    }
    first = dist.get_rank() == 0  # the group is left on the way
    tell: Tell = lambda text: say(f"  {text}") if first else None  # noqa: E731
    by_torch = Findings()
    measure_links(by_torch, effort, tell, MESH[0], plain=True)
    measured, host = measure_as_rank(effort, tell)
    links = {name: getattr(by_torch, name) for name in BY_TORCH}
    findings = {"shardwise": measured, "torch": dataclasses.replace(measured, **links)}
    clusters = {
        engine: assemble("two-hosts", each, host, "cpu", RANKS, None, hosts=MESH[0])
        for engine, each in findings.items()
    }
    return found | {
        "torch_unit_s": _measure_torch_unit(case.stack, effort),
        "micro_batch_s": {size: side.step_ms / 1e3 for size, side in alone.items()},
        "calls": calls,
        "clusters": {name: write_cluster(c.cluster, c.spreads) for name, c in clusters.items()},
    }


def _measure_torch_unit(stack: Preset, effort: Effort) -> float:
    """What torch's host takes for a unit; `calibrate` has that of shardwise's."""
    tiny = dataclasses.replace(stack, d_model=8, d_ff=8).build(1).to_empty(device="cpu")

    def wrap(model: nn.Module) -> nn.Module:
        fully_shard_blocks(model, plan_of("fsdp"), init_device_mesh("cpu", (HOST_WORLD,)))
        return model

    return measure_unit(tiny, torch.randn(1, 1, 8), stack.layers, wrap, effort).value


# From what they found


def _sum_up(
    case: HybridCase, engine: str, mode: str, rate: str, rounds: list[dict[str, Any]]
) -> dict[str, Any]:
    steps_ms = [ms for found in rounds for ms in found["steps_ms"][f"{engine}/{mode}"]]
    clusters = [parse_cluster(found["clusters"][engine], "two-hosts") for found in rounds]
    predicted = [
        _predict(case, engine, mode, cluster, found)
        for cluster, found in zip(clusters, rounds, strict=True)
    ]
    row = summarize(steps_ms, case.tokens)
    expected = statistics.median(predicted)
    return row | {
        "hosts": MESH[0], "rate": rate, "rounds": len(rounds),
        "parity": max(found["parity"] for found in rounds),
        "predicted_ms": expected, "off": expected / row["step_ms"] - 1,
        "rounds_ms": [
            (before, statistics.median(found["steps_ms"][f"{engine}/{mode}"]))
            for before, found in zip(predicted, rounds, strict=True)
        ],
        "links": {
            level.name: _describe(level, [c.levels[i] for c in clusters])
            for i, level in enumerate(clusters[0].levels)
        },
    }  # fmt: skip


def _describe(level: Level, rounds: list[Level]) -> dict[str, float]:
    """Of a link: seconds of the smallest all-gather, and bytes/s of the largest."""
    return {
        "latency_ms": statistics.median(each.latency_s for each in rounds) * 1e3,
        "mb_per_s": statistics.median(each.bandwidth_bytes_per_s for each in rounds) / 1e6,
    }


def _predict(
    case: HybridCase, engine: str, mode: str, cluster: Cluster, found: dict[str, Any]
) -> float:
    """Milliseconds."""
    if engine == "torch":
        host = dataclasses.replace(cluster.host, unit_s=found["torch_unit_s"])
        cluster = dataclasses.replace(cluster, host=host)
    calls: dict[str, Points] = {
        kind: tuple((size, seconds) for size, seconds in points)
        for kind, points in found["calls"][engine].items()
    }
    costs = dataclasses.replace(Costs.of(cluster), call_points=calls)
    alone = {int(size): seconds for size, seconds in found["micro_batch_s"].items()}
    name = "fsdp2" if engine == "torch" else engine
    return predict_step(
        case.stack, plan_of(mode), case.workload, costs, alone.__getitem__, name
    ).step_ms


def show(rows: list[Row], environment: dict[str, Any]) -> None:
    """The rows of one rate, measured beside predicted."""
    lines = [
        [
            row["engine"], row["mode"], "{mean_ms:.1f} ±{std_ms:.1f}".format(**row),
            f"{row['tokens_per_s']:,.0f}",
            "-" if row["speedup"] is None else f"{row['speedup']:.2f}",
            f"{row['predicted_ms']:.1f}", f"{row['off']:+.1%}",
        ]
        for row in rows
    ]  # fmt: skip
    left = ("engine", "mode")
    heads = (*left, "step ms", "tokens/s", "x hsdp", "predicted", "off")
    title = f"2 hosts of 2 ranks, a link of {rows[0]['rate']}: a step of micro-batches"
    print_table(title, heads, lines, environment, left, 80)
    print("step: mean and standard deviation; tokens/s: of a rank; x hsdp, off: by medians.")
    offs = [row["off"] for row in rows]
    average, worst = statistics.mean(map(abs, offs)), max(offs, key=abs)
    print(f"predicted: off by {average:.1%} on average, {worst:+.1%} at worst.")
    _show_ratios(rows)
    for name, found in rows[0]["links"].items():
        told = "{latency_ms:.2f} ms, {mb_per_s:.1f} MB/s a rank and direction".format(**found)
        print(f"{name}, calibrated: {told}.")
    print("{layers} layers of {hidden} x {intermediate}, {sequence} tokens.".format(**rows[0]))
    print(f"The document, 4 H100: delayed {document_speedup('delayed'):.2f} x hsdp.")


def _show_ratios(rows: list[Row]) -> None:
    """A step of shardwise over one of torch, where both were measured."""
    medians = {(row["engine"], row["mode"]): row["step_ms"] for row in rows}
    ratios = [
        f"{mode} {medians['shardwise', mode] / medians['torch', mode]:.2f}"
        for mode in dict.fromkeys(row["mode"] for row in rows)
        if {("shardwise", mode), ("torch", mode)} <= set(medians)
    ]
    if ratios:
        print(f"shardwise over torch, medians: {', '.join(ratios)}.")
