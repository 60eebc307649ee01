"""Benchmarks of hybrid sharding with a delayed all-reduce."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, STEPS, Benchmark
from shardwise.lab.options import count, flag, link_rate, list_names, number

HSDP = Benchmark(
    "hsdp",
    "hybrid sharding, its all-reduce delayed, and uneven micro-batches",
    "Compares steps of uneven micro-batches: hsdp, hsdp with a delayed all-reduce, and fsdp.",
    "hybrid.compare",
    (
        *ROWS,
        list_names("--sources", "source", ("gloo", "emulated", "predicted"), None,
                   "default: all; on a GPU: emulated,predicted"),
        number("--hosts", 1, "1 or 2", lambda value: value in (1, 2),
               "2: real ranks, two on each of two hosts (as root)"),
        link_rate("200mbit"),
        list_names("--engines", "engine", ("shardwise", "torch")),
        list_names("--modes", "mode", ("hsdp", "delayed", "fsdp")),
        flag("--delay-all-reduce", "only hsdp with the all-reduce at the last micro-batch"),
        flag("--fsdp-only", "only one shard group of all ranks, without replicas"),
        count("--accum-steps", 2, "micro-batches of a step; default: %(default)s"),
        count("--batch-size-ratio", 2, "sequences of a large one, a small has 1; default: 2"),
        flag("--sync-batch-sizes", "all replicas have their large ones at once"),
        count("--seqlen", None, "tokens of a sequence; default: 4096, on a CPU few"),
        count("--num-layers", None, "default: 8"),
        count("--hidden-dim", None, "default: 4096, on a CPU less"),
        count("--intermediate-dim", None, "default: 14336, on a CPU less"),
        count("--warmup-steps", 5),
        count("--measured-steps", 10),
    ),
    """\
The switches are the document's. Without --delay-all-reduce and --fsdp-only all modes are measured
side by side:
  hsdp      2 x 2 ranks; gradients are all-reduced over replicas with every micro-batch
  delayed   the same, with the last micro-batch alone: a replica may be late in one and early in the
            next for free
  fsdp      one shard group of all 4 ranks: everybody waits for everybody all the time

sources:
  gloo       4 real ranks on this machine (CPU); gradients of all candidates must agree first
  emulated   one rank of the mesh on this device, with a modelled network and the other replica as
             late as it would be; by CUDA events on a GPU
  predicted  the simulator, for the document's sizes and GPUs

With --hosts 2 there is one source: torchrun on each of two hosts, which are network namespaces of
this machine with a cable of RATE between them (root and iproute2). Replicas are across hosts,
shards inside one. Beside each step stands its prediction: the links are calibrated by mesh axis,
and micro-batches are timed alone, on all four ranks at once.

shardwise runs by Plan.of("hsdp", (2, 2), sync=...), torch by fully_shard and its setters. A step
is forward and backward of all micro-batches in fp32, without an optimizer, as in the document.
On an H200 about 7 minutes, or 5 with --measured-steps 5.

examples:
  shardwise bench hsdp --json hsdp.json --plot hsdp.svg
  shardwise bench hsdp --accum-steps 4 --batch-size-ratio 3 --sources predicted
  shardwise bench hsdp --delay-all-reduce --engines torch
  shardwise bench hsdp --hosts 2 --rate 200mbit --json hsdp-hosts.json
  shardwise bench hsdp --quick            every path in seconds; its figures mean nothing
""",
    document="hsdp",
)  # fmt: skip
FFN = Benchmark(
    "ffn",
    "a micro-batch of the gist's feed-forward stack, one device",
    "Times forward and backward of the feed-forward stack.",
    "hybrid.ffn",
    (*ROWS, STEPS),
    """\
8 gated feed-forward layers of 4096 x 14336 in fp32, 4,096 tokens a sequence: forward and backward
of a micro-batch of 1 and of 2 sequences, in turn. `shardwise bench accuracy` predicts the steps of
the document's four GPUs from these two times. About half a minute on an H200, 30 GB.

examples:
  shardwise bench ffn --json ffn.json
  shardwise bench ffn --quick             every path in seconds; its figures mean nothing
""",
    document="hsdp",
)
BENCHMARKS = (FFN, HSDP)
