"""Benchmarks that need several ranks: those of the systems assignment, and of checkpoints."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, Benchmark
from shardwise.lab.exercises.seed004 import MODELS
from shardwise.lab.options import Option, choose, count, list_counts, list_names, number

# A model of the document, on ranks that a network joins: emulated on a GPU, gloo's on a CPU.
SIZE = Option(
    "--size",
    {"metavar": "NAME", "help": "default: xl; without a CUDA device one that is scaled down"},
    lambda _, name: None if name is None else choose(name, "size", MODELS)[0],
)
RANKS = number("--ranks", 2, "at least 2", lambda value: value >= 2)
NETWORK = (
    number("--bandwidth", 117.0, "GB/s above 0", lambda value: value > 0,
           "of the emulated network; default: %(default)s", kind=float, metavar="GB/S"),
    number("--latency", 30.0, "microseconds, at least 0", lambda value: value >= 0,
           "of an emulated call; default: %(default)s", kind=float, metavar="US"),
)  # fmt: skip

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
DDP = Benchmark(
    "ddp",
    "naive, flat, overlapped, bucketed data parallel, and torch's",
    "Times a step of data parallel by the way in which gradients are sent.",
    "parallel.ddp",
    (
        *ROWS,
        SIZE,
        list_names("--ways", "way", ("naive", "flat", "overlap", "bucketed", "torch")),
        list_counts("--buckets", "1,10,100,1000", 1, "MB (1e6 bytes); default: %(default)s"),
        RANKS,
        *NETWORK,
        count("--steps", 7, "timed, of each way; default: %(default)s"),
    ),
    """\
ways:
  naive      one all-reduce per tensor after backward, one at a time
  flat       one all-reduce of all gradients after backward
  overlap    each tensor's all-reduce starts in backward as soon as its gradient is there
  bucketed   the same with neighbouring tensors in one message of about so many MB
  torch      DistributedDataParallel with its defaults (25 MiB)

Without a CUDA device: real gloo ranks and a model of 7 M parameters (29 MB of gradients), 16 x 32
tokens on each; every way must agree with torch's to 1e-5, else nothing is timed. On a GPU: one rank
of an emulated group trains the document's XL, in fp32; the network is the 117 GB/s that its 0.0681
s for 8 GB of gradients mean. The best bucket is given as measured, as the planner predicts it and
by the document's formula. About two minutes on 2 cores, 5 on a GPU.

examples:
  shardwise bench ddp --json ddp.json --plot ddp.svg
  shardwise bench ddp --ways naive,bucketed --buckets 5,25,50
""",
    document="assignment",
)
OPTIMIZER_SHARDING = Benchmark(
    "optimizer-sharding",
    "optimizer state whole and sharded: time, memory by role",
    "Times data parallel with and without a sharded optimizer state, and follows its memory.",
    "parallel.optimizer_sharding",
    (
        *ROWS,
        SIZE,
        list_names("--ways", "way", ("whole", "sharded", "zero1", "torch")),
        RANKS,
        *NETWORK,
        count("--steps", 7, "timed, of each way; default: %(default)s"),
    ),
    """\
ways:
  whole     DistributedDataParallel and AdamW
  sharded   the same with sw.ShardedOptimizer: each group of parameters is gathered under the next
            one's update
  zero1     Plan.of("zero1"): gradients and state by units
  torch     the same with torch's ZeroRedundancyOptimizer

Without a CUDA device: real gloo ranks and a model of 7 M parameters; every way must agree with the
whole one to 1e-5, else nothing is timed. On a GPU: one rank of an emulated group trains the
document's XL, in fp32. Memory is the second step's, when all state is there: what is held after
initialisation, before the update, at the update's peak, after it; and at the step's peak. About a
minute on 2 cores, 3 on a GPU.

examples:
  shardwise bench optimizer-sharding --json optimizer-sharding.json
  shardwise bench optimizer-sharding --ways whole,sharded --ranks 4
""",
    document="assignment",
)
CHECKPOINT = Benchmark(
    "checkpoint",
    "save and load against torch.distributed.checkpoint",
    "Times saving, loading and asynchronous saving of the same model, by shardwise and by torch.",
    "checkpoints",
    (
        *ROWS,
        count("--megabytes", 400, "of parameters and AdamW's state; default: %(default)s"),
        RANKS,
        Option("--folder", {"metavar": "PATH", "help": "on the disk to measure; default: /tmp's"}),
        count("--steps", 7, "rounds; default: %(default)s"),
    ),
    """\
Real gloo ranks, a model sharded by torch's own fully_shard. Each way first loads what it saved into
other values; if a bit differs nothing is timed. Then, in turn: a save (to the disk: both call
fsync), a load (from the page cache), an asynchronous save. About a minute on 2 cores.

examples:
  shardwise bench checkpoint --json checkpoint.json --plot checkpoint.svg
  shardwise bench checkpoint --megabytes 2000 --folder /mnt/scratch
""",
)
BENCHMARKS = (ALL_REDUCE, DDP, OPTIMIZER_SHARDING, CHECKPOINT)
