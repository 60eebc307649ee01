"""Benchmarks of hybrid sharding with a delayed all-reduce."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, STEPS, Benchmark

FFN = Benchmark(
    "ffn",
    "a micro-batch of the gist's feed-forward stack, one device",
    "Times forward and backward of the feed-forward stack.",
    "exercises.ffn",
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
BENCHMARKS = (FFN,)
