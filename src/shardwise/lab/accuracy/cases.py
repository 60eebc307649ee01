"""The configurations whose prediction is compared with a measurement on one GPU.

`build` is the set the model was corrected with; `held-out` was fixed beforehand and is what the
claim is made on.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

import shardwise as sw
from shardwise.description.language_model import compute_loss, make_model
from shardwise.description.model import ModelDescription
from shardwise.description.preset import BENCH as LARGE
from shardwise.description.preset import Size, bench_size
from shardwise.description.workload import Workload
from shardwise.emulation.collectives import Network
from shardwise.lab.steps.cases import MIXED, NETWORKS, OWN
from shardwise.lab.steps.engines import Precision

WORLD = 8
FREE, NVLINK, SLOW = (NETWORKS[name] for name in ("free", "300GBs", "100GBs"))

WIDE = bench_size(layers=8, d_model=4096, d_ff=11008, heads=32, vocab=32000, fused_qkv=True)
DEEP = bench_size(layers=24, d_model=1536, d_ff=4096, heads=12, vocab=50304)
LEAN = bench_size(layers=8, d_model=1024, d_ff=4096, heads=8, vocab=16000)
HALF = Precision("bfloat16", "bfloat16")


@dataclass(frozen=True)
class AccuracyCase:
    """One configuration: a model, a Plan and a step."""

    name: str
    group: str  # build, held-out
    size: Size
    strategy: str
    batch: int  # sequences of a micro-batch
    length: int
    precision: Precision = MIXED
    network: Network = NVLINK
    checkpoint: str = "none"
    micro_batches: int = 1
    mesh: tuple[int, int] | None = None  # None: one axis of WORLD ranks
    settings: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.group not in ("build", "held-out"):
            raise ValueError(f"case {self.name}: group is {self.group!r}, expected build, held-out")

    def plan(self) -> sw.Plan:
        return self.precision.plan(self.strategy, self.mesh or WORLD, **dict(self.settings))

    @property
    def workload(self) -> Workload:
        return Workload(self.length, self.batch, self.micro_batches, checkpoint=self.checkpoint)

    def describe(self) -> str:
        mesh = "x".join(map(str, self.plan().mesh))
        dtype = self.precision.compute or "float32"
        reduce = self.precision.reduce or "float32"
        again = ", recomputing" if self.checkpoint != "none" else ""
        settings = "".join(f", {k}={v}" for k, v in self.settings)
        return (
            f"{self.strategy} {mesh}, d{self.size.d_model} x {self.size.layers}, "
            f"{self.micro_batches} x {self.batch} x {self.length}, {dtype}/{reduce}"
            f"{again}{settings}"
        )

    def quick(self) -> AccuracyCase:
        """The same path in seconds on any device; its figures mean nothing."""
        small = bench_size(2, 64, 128, 4, 128, self.size.fused_qkv)
        return dataclasses.replace(self, size=small, batch=1, length=32)


CASES: tuple[AccuracyCase, ...] = (
    AccuracyCase("b1", "build", LARGE, "zero3", 4, 2048),
    AccuracyCase("b2", "build", LARGE, "zero3", 8, 2048, checkpoint="nonreentrant", network=FREE),
    AccuracyCase("b3", "build", LARGE, "ddp", 4, 2048),
    AccuracyCase("b4", "build", DEEP, "zero2", 8, 1024, network=SLOW),
    AccuracyCase("b5", "build", LARGE, "hsdp", 4, 2048, mesh=(2, 4)),
    AccuracyCase("b6", "build", LEAN, "zero3", 4, 1024, precision=OWN),
    AccuracyCase("h1", "held-out", WIDE, "zero3", 4, 2048),
    AccuracyCase("h2", "held-out", WIDE, "zero3", 8, 2048, checkpoint="nonreentrant", network=SLOW),
    AccuracyCase("h3", "held-out", WIDE, "zero2", 2, 4096),
    AccuracyCase("h4", "held-out", LARGE, "zero1", 16, 1024),
    AccuracyCase("h5", "held-out", DEEP, "ddp", 16, 1024, network=SLOW),
    AccuracyCase(
        "h6", "held-out", WIDE, "hsdp", 4, 1024, mesh=(2, 4), micro_batches=2,
        settings=(("sync", "scatter_each_reduce_last"), ("reduce_depth", 2)),
    ),
    AccuracyCase("h7", "held-out", DEEP, "zero3", 16, 1024, precision=HALF, network=FREE),
    AccuracyCase("h8", "held-out", LARGE, "zero3", 6, 2048, network=SLOW),
    AccuracyCase("h9", "held-out", LEAN, "zero2", 8, 1024, precision=OWN),
    AccuracyCase("h10", "held-out", DEEP, "zero2", 16, 2048, checkpoint="nonreentrant"),
    AccuracyCase(
        "h11", "held-out", LARGE, "zero3", 4, 2048, network=SLOW,
        settings=(("keep_after_forward", True), ("backward_prefetch", 2), ("forward_prefetch", 2)),
    ),
)  # fmt: skip


Traced = tuple[sw.Plan, ModelDescription]


def describe_model(
    size: Size,
    batch: int,
    length: int,
    plan: sw.Plan,
    device: str,
    checkpoint: str = "none",
) -> Traced:
    """Trace a model on the meta device: the Plan with its units, and what each of them costs."""
    model = make_model(size, "meta", length)
    plan = plan.resolve(model)
    tokens = torch.empty((batch, length), dtype=torch.int64, device="meta")
    described = sw.describe(
        model,
        (tokens, tokens.clone()),
        plan,
        loss=compute_loss,
        device=torch.device(device).type,
        checkpoint=checkpoint,
    )
    return plan, described
