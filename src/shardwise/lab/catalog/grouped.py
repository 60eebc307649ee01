"""The benchmark of the grouped step: a replicated model, updated in slices."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, Benchmark
from shardwise.lab.options import count, list_counts, list_names, number

GROUPED_STEP = Benchmark(
    "grouped-step",
    "update a replicated model: averaged gradients against slices",
    "Times what follows backward on a replicated model, with gradients that are there already.",
    "grouped.run",
    (
        *ROWS,
        list_names("--frameworks", "framework", ("torch", "mlx")),
        list_names("--sizes", "size", ("0.3b", "2.7b", "5.4b")),
        list_counts("--groups", "16,32", 1, "MiB of a message on a GPU; default: %(default)s"),
        list_names("--precision", "precision", ("fp32", "bf16")),
        count("--steps", 5, "timed steps of each candidate; default: %(default)s"),
        number("--ranks", None, "at least 2", lambda value: value >= 2,
               "default: 8 emulated ones on a GPU, 2 real ones without"),
        number("--bandwidth", 450.0, "GB/s above 0", lambda value: value > 0,
               "of the emulated network, per rank; default: %(default)s", float, "GB/S"),
        number("--latency", 20.0, "microseconds, at least 0", lambda value: value >= 0,
               "of the emulated network; default: %(default)s", float, "US"),
    ),
    """\
candidates, in turn:
  ddp    gradients averaged in groups by all-reduce, then AdamW on every parameter
  rows   sharded_step: reduce-scatter, AdamW on this rank's rows of every parameter, all-gather
  flat   sharded_step, layout="flat": the same, each message cut horizontally

The candidates' parameters must agree after two steps on real ranks, else nothing is timed. On a
GPU, one process is a rank of an emulated group of 8: values are fabricated, times are not. Without
one, real gloo ranks, models of a six-hundredth of the size, messages of a sixteenth (so that there
are many). mlx: the same on real ranks of MLX's ring, with nn.average_gradients as ddp; skipped
where MLX is not installed.

columns: `sent` is the bytes of `rows` over those of an all-reduce, as the engine counts them (gloo
and MLX's ring sum whole messages, so there it is 1.5 on the wire); `its ddp` and what follows are
the document's; `expected` is the memory of the moments that the other ranks keep.

examples:
  shardwise bench grouped-step --json grouped-step.json --plot grouped-step.svg
  shardwise bench grouped-step --frameworks torch --sizes 2.7b --precision bf16
  shardwise bench grouped-step --quick            every path in seconds; not to be quoted
""",
    document="grouped",
)  # fmt: skip
BENCHMARKS = (GROUPED_STEP,)
