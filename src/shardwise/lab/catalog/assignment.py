"""Benchmarks of the systems assignment: one device, and pictures of data parallel."""

from __future__ import annotations

from shardwise.lab.benchmark import ROWS, STEPS, Benchmark, models
from shardwise.lab.exercises.seed004 import CONTEXT, MODELS
from shardwise.lab.options import Option, choose, count, list_counts, list_names, number

FORWARD_BACKWARD = Benchmark(
    "forward-backward",
    "forward, backward and optimizer times by model size",
    "Times the parts of training steps: sizes small to 2.7b, fp32 and mixed precision, by warm-up.",
    "exercises.forward_backward",
    (
        *ROWS,
        *models("fp32,bf16"),
        list_counts("--warmup", "0,1,2,5", 0, "steps left out; default: %(default)s"),
        STEPS,
    ),
    """\
Each model and precision runs in a process of its own, so that its first step is a first step. w
steps of warm-up means that the first w are left out of the mean and standard deviation.

precisions:
  fp32   everything in fp32, without tf32
  bf16   fp32 weights under autocast, as in mixed precision

The tables are those of the document that this project started from; its figures stand beside, with
the hardware that it names.

examples:
  shardwise bench forward-backward --json times.json
  shardwise bench forward-backward --sizes small,2.7b --precision bf16 --warmup 0,5
  shardwise bench forward-backward --quick        every path in seconds; its figures mean nothing
""",
    document="assignment",
)
MEMORY = Benchmark(
    "memory",
    "peak memory of a pass and of a step, and what holds it",
    "Measures peak memory and names the largest allocations; accounts for single tensors.",
    "exercises.memory.peaks",
    (
        *ROWS,
        *models("fp32,bf16"),
        list_counts("--contexts", "128,256,512", 1),
        list_names("--parts", "part", ("residual", "attention", "peaks")),
    ),
    """\
parts:
  residual    one tensor between two blocks, by formula and counted
  attention   what plain attention keeps for backward: table 4's last column
  peaks       of whole models

modes of peaks, each measured at every context:
  inference   forward without autograd
  forward     forward with the activations kept for backward, as the document measured it
  step        two whole steps from a fresh optimizer: the first makes the moments after the
              activations are gone; the second has both, and is what training needs

Names and curves come from torch's profiler: modules and operators for activations, parameters for
gradients and moments. They are kept of the largest model at every context, of the others at the
longest.

examples:
  shardwise bench memory --json memory.json --plot memory.svg
  shardwise bench memory --sizes 2.7b --contexts 128 --precision fp32
  shardwise bench memory --attention fused        one kernel instead of scores and softmax
""",
    document="assignment",
)
COMPILE = Benchmark(
    "compile",
    "torch.compile against eager: models and attention",
    "Compares compiled with eager execution.",
    "exercises.compiling",
    (
        *ROWS,
        *models("fp32"),
        list_names("--parts", "part", ("model", "attention")),
        list_names("--scopes", "scope", ("whole", "blocks")),
        STEPS,
        count("--jobs", 1, "models that compile at once; default: 1"),
    ),
    """\
parts:
  model       the language models: forward, backward, optimizer, eager and compiled
  attention   attention alone at the document's shapes (its tables 4 and 5)

scopes of a model:
  whole    torch.compile of the model, as in the document's table 6
  blocks   torch.compile of each block: one compilation serves all of them

What the first forward and backward take, compilation included, is reported apart. With --jobs,
models compile at the same time (each compile time is then that of a busy machine); steps are timed
one model after another in any case. Compiled and eager losses must agree, else nothing is timed.

examples:
  shardwise bench compile --json compile.json
  shardwise bench compile --sizes small --scopes blocks
  shardwise bench compile --parts model --jobs 5 --json compile.json --resume
""",
    document="assignment",
)
KERNELS = Benchmark(
    "kernels",
    "which kernels take the time: products, softmax, the rest",
    "Answers the profiling questions a to e by name, from traces.",
    "exercises.kernels",
    (
        *ROWS,
        *models("fp32"),
        count("--context", CONTEXT),
        STEPS,
    ),
    """\
questions:
  a   how long forward takes by the profiler, and by Python's clock
  b   which kernel takes most, how often it is called; the same with backward?
  c   which kernels other than products take a notable share of forward
  d   the share of products in inference and in a whole training step
  e   softmax against products inside attention, in time and in FLOPs

A CUDA device's trace has its kernels. A CPU's has operators, each by its own time; tracing makes
them longer, so the clock's pass without it stands beside. `shardwise report` has a section of the
same.

examples:
  shardwise bench kernels --json kernels.json --plot kernels.svg
  shardwise bench kernels --sizes xl --precision fp32,bf16
  shardwise bench kernels --attention fused       softmax is no kernel of its own then
""",
    document="assignment",
)
MIXED_PRECISION = Benchmark(
    "mixed-precision",
    "sums, dtypes under autocast and layer norms in 16 bits",
    "Runs the exercises on mixed precision, and says why each comes out as it does.",
    "exercises.mixed_precision",
    (*ROWS, list_names("--parts", "part", ("sums", "dtypes", "layer-norm"))),
    """\
parts:
  sums         0.01 added a thousand times, by dtype of the sum and of what is added
  dtypes       of a toy model's parts under autocast: as this CPU casts, and by CUDA's lists, which
               need no CUDA device to be followed
  layer-norm   the parts of a layer norm in 16 bits, one at a time, against float64

The figures are exact: any machine gives the same sums. --quick changes nothing, it takes seconds.

examples:
  shardwise bench mixed-precision
  shardwise bench mixed-precision --parts sums --plot sums.svg
""",
    document="assignment",
)
OVERLAP = Benchmark(
    "overlap",
    "pictures of naive against overlapped data parallel",
    "Measures one step of data parallel and draws its streams.",
    "exercises.overlap",
    (
        *ROWS,
        Option("--size", {"metavar": "NAME", "help": "default: xl; without a CUDA device: small"},
               lambda _, name: None if name is None else choose(name, "size", MODELS)[0]),
        list_names("--reduce", "reduce", ("naive", "overlap", "bucketed")),
        number("--ranks", 2, "at least 2", lambda value: value >= 2),
        number("--bandwidth", 117.0, "GB/s above 0", lambda value: value > 0,
                kind=float, metavar="GB/S"),
        number("--latency", 30.0, "microseconds, at least 0", lambda value: value >= 0,
                kind=float, metavar="US"),
    ),
    """\
One process is a rank of an emulated group: collectives take the modelled time beside compute. The
pictures show compute and communication of one step by `Plan.of("ddp", reduce=...)`:
  naive      one all-reduce per tensor after backward, one at a time
  overlap    each tensor's all-reduce starts in backward as soon as its gradient is there
  bucketed   the same with neighbouring tensors in one message

Default: the XL model on 2 ranks joined by 117 GB/s, which is what the document's 0.0681 s for its
8 GB of gradients mean. The values are fabricated, the times are measured.

examples:
  shardwise bench overlap --json overlap.json --plot overlap.svg
  shardwise bench overlap --size small --bandwidth 5 --reduce naive,bucketed
""",
    document="assignment",
)  # fmt: skip
BENCHMARKS = (FORWARD_BACKWARD, KERNELS, MIXED_PRECISION, MEMORY, COMPILE, OVERLAP)
