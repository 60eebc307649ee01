"""Run directories made by the simulator: a predicted step, and as the measured one a simulation of
the same plan in a worse world, shaken a little.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path

from shardwise.description.cluster import Cluster, Device, Host, Level, MatmulRate, Protocol
from shardwise.description.model import (
    KernelFact,
    ModelDescription,
    PassFacts,
    UnitDescription,
    UnitSegment,
)
from shardwise.description.parameters import ParameterSpec
from shardwise.description.workload import Workload
from shardwise.planning.plan import Plan
from shardwise.predict.simulate import simulate
from shardwise.predict.sources import cut_described
from shardwise.run_files import (
    CONFIG,
    FACTS,
    KERNELS,
    MEMORY,
    MESSAGES,
    METRICS,
    PLAN,
    PREDICTED,
    TIMELINE,
)  # fmt: skip
from shardwise.timeline import Span, Timeline
from shardwise.timeline.kernel_groups import Ran, tabulate

DEVICE = Device("d", 1.2e9, 1e15, 1.0, 1e-6, (MatmulRate("float32", 1e12, 1.0),))


def cluster(bytes_per_s: float = 12e9) -> Cluster:
    link = Level("link", None, bytes_per_s, (Protocol("p", 20e-6, 5e-6),))
    return Cluster("made-up", DEVICE, (link,), Host(20e-6, 5e-6, 0.0))


def model(blocks: int = 8) -> ModelDescription:
    def part(seconds: float, peak: int, net: int) -> PassFacts:
        return PassFacts(
            (KernelFact("matmul", seconds * 1e12, 0.0, "float32", (8, 8, 8)),), peak, net
        )

    return ModelDescription(
        "m",
        tuple(
            UnitDescription(
                f"layers.{i}",
                (f"layers.{i}",),
                (ParameterSpec(f"layers.{i}.w", (2000, 3000), "float32"),),
                (
                    UnitSegment(
                        i,
                        part(3e-3, 24_000_000, 16_000_000),
                        part(6e-3, 8_000_000, -16_000_000),
                        16_000_000,
                        4_000_000,
                    ),
                ),
            )
            for i in range(blocks)
        ),
    )


def resolved(blocks: int = 8, mesh: int = 4, **settings: object) -> tuple[Plan, ModelDescription]:
    plan, description = Plan.of("zero3", mesh, **settings), model(blocks)
    return dataclasses.replace(plan, units=cut_described(plan, description)), description


def shake(timeline: Timeline, amount: float, seed: int, **labels: str) -> Timeline:
    """The same step with each span a little shorter at random: gaps appear, order stays."""
    dice = random.Random(seed)

    def change(span: Span) -> Span:
        if span.role != "compute":
            return span
        end = span.end - int(span.duration * amount * dice.random())
        return dataclasses.replace(span, end=end, alone=None)

    spans = tuple(change(span) for span in timeline.spans)
    return dataclasses.replace(timeline, spans=spans, labels={**timeline.labels, **labels})


def make_run(folder: Path, *, title: str = "", steps: int = 40, **world: object) -> Path:
    """Write a whole run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, description = resolved()
    net, workload = cluster(), Workload(8)
    slow = world.get("slow", {2: 1.12})
    actual = dataclasses.replace(plan, forward_prefetch=int(world.get("prefetch", 0)))
    predicted = simulate(plan, description, net, workload)
    measured = shake(
        simulate(actual, description, cluster(float(world.get("rate", 9e9))), workload, slow=slow),
        0.04, 1, title=title, source="measured", engine="shardwise", device="made up", steps="3",
    )  # fmt: skip
    (folder / TIMELINE).write_text(measured.to_json())
    (folder / PREDICTED).write_text(predicted.to_json())
    (folder / PLAN).write_text(actual.to_json())
    (folder / CONFIG).write_text('[run]\nout = "</pre><script>alert(1)</script>"\n')
    facts = {
        "world": 4, "device": "made up", "torch": "2.13.0", "parameters": 48_000_000,
        "unigram_entropy": 2.75, "plan_explanation": actual.explain(), "peak_flops": 1e12,
    }  # fmt: skip
    (folder / FACTS).write_text(json.dumps(facts))
    rows = [
        {
            "step": step, "loss": 2.6 + 3 * math.exp(-step / 12), "tokens": 8192 * step,
            "tokens_per_s": 78_000 - (30_000 if step == 1 else 900 * math.sin(step)),
            "step_s": measured.step / 1e9, "memory_bytes": measured.peak().total,
            "exposed_share": 0.2,
        }
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / MEMORY).write_text(json.dumps(_memory(measured)))
    (folder / MESSAGES).write_text(json.dumps(_messages(measured)))
    (folder / KERNELS).write_text(json.dumps(_kernels(measured)))
    return folder


def _memory(timeline: Timeline) -> dict[str, object]:
    ranks = []
    for curve in timeline.memory:
        peak = curve.peak()
        reserved = [int(max(curve.totals[: i + 1]) * 1.12) for i in range(len(curve.times))]
        ranks.append(
            {"rank": curve.rank, "limit_bytes": int(peak.total * 1.3), "peak_allocated": peak.total,
             "times": list(curve.times), "allocated": list(curve.totals), "reserved": reserved,
             "active": None,
             "largest": [{"bytes": v, "role": r, "what": f"{r} of layers.0"}
                         for r, v in peak.by_role.items() if v]}
        )  # fmt: skip
    return {"ranks": ranks}


def _messages(timeline: Timeline) -> dict[str, object]:
    size = 24_000_000
    messages = [
        {"collective": o.span.name, "unit": o.span.unit, "phase": o.span.phase, "ranks": 4,
         "bytes": size, "seconds": o.span.duration / 1e9, "exposed_s": o.exposed / 1e9}
        for o in timeline.overlaps()
        if o.span.unit.startswith("layers")
    ]  # fmt: skip
    curve = [
        {"collective": name, "ranks": 4, "bytes": 2**k, "seconds": 40e-6 + 2**k * 0.75 / 12e9}
        for name in ("all_gather", "reduce_scatter")
        for k in range(14, 30)
    ]
    return {"cluster": "made-up", "messages": messages, "curve": curve}


def _kernels(timeline: Timeline) -> dict[str, object]:
    names = (("sgemm_128x64", 40), ("softmax_warp_forward", 8), ("Memcpy DtoD", 3), ("nccl", 9))
    ran = [
        (phase, Ran(name, 0, 100_000 * share + 7_000 * rank))
        for rank in timeline.ranks
        for phase in ("forward", "backward", "optimizer")
        for name, share in names
        for _ in range(8)
    ]
    each = len(ran) // len(timeline.ranks)
    return {"ranks": [{"rank": rank, "rows": tabulate(ran[i * each : (i + 1) * each])}
                      for i, rank in enumerate(timeline.ranks)]}  # fmt: skip


def crowd(spans: int, ranks: int = 2) -> Timeline:
    """A step with very many short spans."""
    each = spans // ranks
    found = [
        Span(
            "forward" if i % 40 else "gather", f"layers.{i % 32}", "forward",
            "compute" if i % 40 else "transfer", rank, "compute" if i % 40 else "shard",
            i * 10_000, i * 10_000 + 9_000 + i % 7 * 300,
        )
        for rank in range(ranks)
        for i in range(each)
    ]  # fmt: skip
    return Timeline(tuple(found), labels={"title": "crowd", "source": "measured"})
