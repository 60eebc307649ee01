"""Published throughputs on H100s beside what `shardwise plan` says of the same steps.

The rates of products and of attention in `h100x8.toml` are derated by the runs that `derates` says:
by the one factor at which their median is right. The others are only compared with the stated
range, and nothing was set by them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from shardwise.description.cluster import Cluster
from shardwise.description.preset import Preset, load_preset
from shardwise.description.workload import Workload
from shardwise.lab.accuracy.user_models import Writer
from shardwise.predict.ranking import Candidate
from shardwise.predict.search import search
from shardwise.profiling.results import Row

CLUSTER = "h100x8"

# Where the figures are, and when they were made; all read 2026-11-16.
SOURCES = {
    "llm-foundry": "github.com/mosaicml/llm-foundry, scripts/train/benchmarking/README.md at "
    "commit 061f2c7, table H100 80GB BF16: FSDP1, MPT models, no compiler",
    "torchtitan": "github.com/pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, "
    "December 2024, tables 1 and 3: FSDP2, Llama 3.1 8B; H100s of 96 GB, 2.4 TB/s and 500 W",
    "lingua": "github.com/facebookresearch/lingua/issues/56, 2024-11-14: full shard, "
    "Llama 7B (taken to be Llama 2's sizes), compiled; 2 x 4,096 tokens follow from its 9,080 "
    "tokens/s and 0.9013 s a step",
}


@dataclass(frozen=True)
class PublishedRun:
    """A full-shard run: what a rank did in a step, and its tokens in a second."""

    source: str
    model: str
    sequence: int
    world: int
    micro_batch: int
    micro_batches: int
    checkpoint: str
    tokens_per_s: int
    reduce_dtype: str = "float32"
    note: str = ""

    @property
    def derates(self) -> bool:
        return self.source == "llm-foundry" and self.model in ("mpt-1b", "mpt-7b")

    @property
    def name(self) -> str:
        return f"{self.source} {self.model} {self.sequence}" + f" {self.note}" * bool(self.note)

    @property
    def mode(self) -> str:
        again = "" if self.checkpoint == "none" else f", {self.checkpoint}"
        return (
            f"{self.world} GPUs, {self.micro_batches} x {self.micro_batch} x {self.sequence}{again}"
        )

    @property
    def workload(self) -> Workload:
        sizes = ((self.micro_batch,) * self.micro_batches,)
        return Workload.uneven(self.sequence, sizes, checkpoint=self.checkpoint)

    @property
    def step_ms(self) -> float:
        tokens = self.micro_batch * self.micro_batches * self.sequence
        return tokens / self.tokens_per_s * 1e3


# d_model, blocks, heads; vocabulary 50,368, tied, feed-forward of four times the width.
_MPT = {
    "760m": (1536, 24, 12), "1b": (2048, 24, 16), "3b": (2560, 32, 20), "7b": (4096, 32, 32),
    "13b": (5120, 40, 40), "30b": (7168, 48, 56), "70b": (8192, 80, 64),
}  # fmt: skip
# Sequence, GPUs, micro-batch, micro-batches, tokens/s of a GPU; *: every block is recomputed.
_FOUNDRY = {
    "70b": "2048 64 8 4 1039*, 2048 32 2 16 882*",
    "30b": "8192 8 1 21 1384*, 4096 8 1 21 1802*, 2048 32 14 3 2308*, 2048 16 10 3 2263*, "
    "2048 8 3 21 2002*, 1024 8 6 21 2084*",
    "13b": "32768 8 1 3 1976*, 16384 8 3 3 2985*, 4096 8 10 3 4717*, 2048 64 2 1 4800, "
    "2048 32 2 1 4811, 2048 16 2 1 4767, 2048 8 2 1 4792, 1024 8 40 3 5502*",
    "7b": "65536 8 1 2 1956*, 32768 8 2 2 3318*, 8192 8 8 2 6935*, 4096 8 16 2 8611*, "
    "2048 8 6 1 10643, 1024 8 64 2 10203*",
    "3b": "65536 8 1 2 3262*, 32768 8 3 6 5873*, 16384 8 1 6 11152, 8192 8 3 6 16578, "
    "4096 8 5 6 20964, 2048 64 6 3 22525, 2048 32 6 3 23021, 2048 16 10 3 24142, "
    "1024 8 20 6 27046, 512 8 40 6 27965",
    "1b": "65536 8 1 2 5506*, 32768 8 1 4 12025, 16384 8 2 4 19649, 8192 8 3 4 29157, "
    "4096 8 7 4 38535, 2048 64 20 1 44402, 2048 32 20 1 45130, 2048 16 20 1 46037, "
    "2048 8 14 1 45455, 1024 8 18 4 48910, 512 8 56 4 52275",
    "760m": "32768 8 1 2 16291, 16384 8 3 2 27815, 8192 8 6 2 41825, 4096 8 12 2 55459, "
    "2048 32 24 1 67971, 2048 16 24 1 68551, 2048 8 24 2 63147, 1024 8 48 2 78581, "
    "512 8 96 2 83749",
}


def _foundry() -> Iterator[PublishedRun]:
    for model, runs in _FOUNDRY.items():
        for text in runs.split(", "):
            how = "nonreentrant" if text.endswith("*") else "none"
            sequence, world, size, count, rate = map(int, text.rstrip("*").split())
            yield PublishedRun(
                "llm-foundry", f"mpt-{model}", sequence, world, size, count, how, rate, "bfloat16",
                f"on {world}" if world > 8 else "",
            )  # fmt: skip


RUNS: tuple[PublishedRun, ...] = (
    PublishedRun("torchtitan", "llama8b", 8192, 8, 2, 1, "op", 5762),
    PublishedRun("torchtitan", "llama8b", 8192, 8, 2, 1, "op", 6667, note="compiled"),
    PublishedRun("torchtitan", "llama8b", 8192, 128, 2, 1, "op", 5605, note="on 128"),
    PublishedRun("torchtitan", "llama8b", 8192, 128, 2, 1, "op", 6514, note="on 128, compiled"),
    PublishedRun("lingua", "llama7b", 4096, 8, 2, 1, "none", 9080, note="compiled"),
    *_foundry(),
)
LLAMA_7B = Preset(
    "llama7b", "lm", d_model=4096, d_ff=11008, layers=32, heads=32, kv_heads=32, vocab=32000
)


@lru_cache(maxsize=1)
def _build(model: str, context: int) -> nn.Module:
    if model.startswith("mpt-"):
        width, layers, heads = _MPT[model.removeprefix("mpt-")]
        with torch.device("meta"):
            return Writer(width, layers, heads, 50_368, context)
    return (LLAMA_7B if model == "llama7b" else load_preset(model)).build(context)


def predict(run: PublishedRun, cluster: Cluster) -> Candidate:
    """What `plan --strategies zero3 --micro-batches ...` puts first, on devices that all of them
    fit in: torchtitan's have 96 GB.
    """
    found: Candidate = search(
        _build(run.model, run.sequence),
        cluster,
        run.workload,
        budget_gb=103.0,
        world=run.world,
        reduce_dtype=run.reduce_dtype,
        checkpoints=(run.checkpoint,),
        strategies=("zero3",),
    )[0]
    return found


def row_of(run: PublishedRun, cluster: Cluster) -> Row:
    """The published step beside the predicted one and its range."""
    said = predict(run, cluster)
    assert said.range_ms is not None
    return {
        "case": run.name,
        "mode": run.mode,
        "set": "derating" if run.derates else "published",
        "cluster_file": CLUSTER,
        "predicted_ms": said.step_ms,
        "range_ms": list(said.range_ms),
        "reported_ms": run.step_ms,
        "reported_tokens_per_s": run.tokens_per_s,
        "inside": said.range_ms[0] <= run.step_ms <= said.range_ms[1],
        "note": f"{run.source}: {SOURCES[run.source]}.",
    }


def quick_runs() -> tuple[PublishedRun, ...]:
    """Some that derate nothing, and are soon predicted."""
    known = ("torchtitan llama8b 8192 compiled", "llm-foundry mpt-760m 512")
    return tuple(run for run in RUNS if run.name in known)
