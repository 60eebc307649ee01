"""Benchmarks of the systems assignment that need several ranks."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, Benchmark
from shardwise.lab.options import list_counts, list_names

ALL_REDUCE = Benchmark(
    "all-reduce",
    "collectives by size and ranks: time, bandwidth, prediction",
    "Times all-reduce, all-gather and reduce-scatter on real ranks of this machine.",
    "parallel.all_reduce",
    (
        *ROWS,
        list_counts("--sizes", "1,10,100,1000", 1, "MB (1e6 bytes) of fp32; default: %(default)s"),
        list_counts("--ranks", "2,4,6", 2),
        list_names("--operations", "operation", ("all_reduce", "all_gather", "reduce_scatter")),
    ),
    """\
The document's table 8. gloo everywhere; NCCL too where there are as many GPUs as ranks. The first
call of a message, which may set things up, is a column of its own; the document's NCCL times are
such first calls, and the last table takes them apart. `predicted` is the planner's, from what
`calibrate` measures of links in the same ranks (up to 16 MiB): beyond that it is extrapolated. A
message that does not fit into memory is left out, with the reason. About 2 minutes on 2 cores.

examples:
  shardwise bench all-reduce --json all-reduce.json --plot all-reduce.svg
  shardwise bench all-reduce --sizes 1,10 --ranks 2 --operations all_reduce
""",
    document="assignment",
)
