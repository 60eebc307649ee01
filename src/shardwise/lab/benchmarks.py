"""The table of benchmarks: what each is called and measures, what it takes, and who runs it.

`shardwise bench` is built from it, a subcommand for each row, without torch. A benchmark's module
has `run(arguments)`.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.lab.exercises.seed004 import MODELS
from shardwise.lab.options import (
    Option,
    choose,
    count,
    file,
    flag,
    list_counts,
    list_names,
    number,
)


@dataclass(frozen=True)
class Benchmark:
    """One row of the table."""

    name: str
    summary: str
    description: str
    module: str  # in `shardwise.lab`
    options: tuple[Option, ...]
    epilog: str = ""


_JSON = file("--json", "write all figures here")
_QUICK = flag("--quick", "every path in seconds; its figures mean nothing")
_COMMIT = Option(
    "--commit",
    {"metavar": "ID", "help": "what to record where the code is not in its repository"},
)
_ROWS = (  # of every benchmark that is measured row by row
    _JSON,
    Option("--budget", {"type": float, "metavar": "S", "help": "start no row after S seconds"}),
    flag("--resume", "keep the rows that FILE has; with --plot and no GPU, only draw a GPU's"),
    _QUICK,
    _COMMIT,
)
_STEPS = count("--steps", 10)


def _models(precisions: str) -> tuple[Option, ...]:
    """Of the benchmarks of whole language models."""
    help = f"of {', '.join(MODELS)}; default: all; without a CUDA device: small"
    attention = "scores and softmax as tensors, as in the document, or torch's fused kernel"
    return (
        list_names("--sizes", "size", MODELS, None, help),
        list_names("--precision", "precision", ("fp32", "bf16"), precisions),
        Option(
            "--attention", {"choices": ["plain", "fused"], "default": "plain", "help": attention}
        ),
    )


STEP = Benchmark(
    "step",
    "time, host time and memory of one training step",
    "Times whole training steps: zero_grad, forward, backward, optimizer.",
    "steps.compare",
    (
        Option("--against", {"choices": ["torch"], "default": "torch",
                             "help": "the peer (default: torch)"}),
        _JSON,
        list_names("--cases", "case", ("fake8", "gloo2", "h200", "graph")),
        list_names("--strategies", "strategy", ("zero3", "zero2", "ddp"), None,
               "of zero3, zero2, ddp; default: all that a case has"),
        Option("--through", {"choices": ["plan", "fully_shard"], "default": "plan",
                             "help": "how shardwise is used: by a Plan, or by torch's own program "
                             "with only the import of fully_shard changed (default: plan)"}),
        count("--steps", None, "timed steps of each candidate"),
        _QUICK,
        _COMMIT,
    ),
    """\
cases:
  fake8   CPU, one rank of 8, nothing is sent: many small parameters, so what counts is the
          engines' own Python. zero3 and zero2 against fully_shard
  gloo2   CPU, two real ranks: zero3 against fully_shard, ddp against DistributedDataParallel.
          Both must agree to 1e-5 after three steps, else nothing is timed
  h200    GPU, 0.95 B parameters in bf16, one rank of an emulated 8-rank group, three networks.
          Skipped without a CUDA device; its figures are labelled `emulated`
  graph   GPU, the same model as compiled graphs (sw.compile) against fully_shard over compiled
          blocks; skipped without a CUDA device

Both engines train the same model on the same inputs with the same fused AdamW, in turn, in one run;
figures are medians, with the interquartile range after +-. Ratios are shardwise over torch: below 1
is better. `cpu` is the time until the step's call returns, `memory` the peak of a step.

examples:
  shardwise bench step --against torch
  shardwise bench step --cases fake8 --strategies zero3 --steps 100
  shardwise bench step --cases h200 --json step-h200.json
  shardwise bench step --through fully_shard
  shardwise bench step --quick            every path in seconds; its figures mean nothing
""",
)  # fmt: skip
GATHER = Benchmark(
    "gather",
    "gathers on 2 gloo ranks: packed against one call per tensor",
    "Times forward and backward under zero3 on two real CPU ranks, by gather mode and tensor size. "
    "Its result is what gather='auto' follows on gloo.",
    "steps.gather",
    (_JSON, count("--rounds", 15)),
)
ATTENTION = Benchmark(
    "attention",
    "attention, backend against backend, on a CUDA device",
    "Times forward, backward and both per backend, dtype, width and length. A backend is first "
    "compared with float64; one that differs is not timed.",
    "attention.sweeps",
    (
        *_ROWS,
        file("--plot", "write a picture here (SVG)"),
        list_names("--sweeps", "sweep", ("heads", "table7", "tables45")),
    ),
    """\
sweeps:
  heads     16 heads, bf16, causal, 8,192 to 65,536 tokens: Triton, torch's flash, cuDNN
  table7    one head, causal, 128 to 131,072 tokens, bf16 and fp32, plain torch too
  tables45  batch 8, fp32, not causal, 256 to 16,384 tokens: plain torch, eager and compiled

The tables are those of the document that this project started from; its figures stand beside.

examples:
  shardwise bench attention --json attention.json --plot attention.svg
  shardwise bench attention --sweeps heads --budget 60 --json attention.json --resume
""",
)
PROFILE = Benchmark(
    "profile",
    "what profiling costs: steps with it on and off",
    "Times steps of zero3 with the profiler on and off, in turn, on two real CPU ranks and, where "
    "there is one, on a CUDA device as a rank of an emulated group.",
    "steps.profiling",
    (
        _JSON,
        list_names("--cases", "case", ("gloo2", "h200")),
        count("--rounds", None, "of three steps each way"),
        _COMMIT,
    ),
    """\
`on` is a step that a profile times. `ratio` is that of the medians, `paired` the median of the
rounds' ratios; `traced` is what a traced step takes of one without. The last column is what the
marks cost when no profile listens.
""",
)
ACCURACY = Benchmark(
    "accuracy",
    "how well the planner predicts step time and memory",
    "Compares predictions with reported and with measured figures.",
    "accuracy.run",
    (
        _JSON,
        list_names("--cases", "case", ("seeds", "shipped", "gloo", "h200")),
        flag("--simulated", "only what needs no accelerator and no other rank"),
        file("--docs", "write the page of results here"),
        Option("--beside", {"type": Path, "nargs": "*", "default": [], "metavar": "FILE",
                            "help": "results of other machines: the page shows them too, and "
                            "`shipped` predicts them"}),
        Option("--cluster", {"default": "h200x8-measured", "metavar": "NAME",
                             "help": "of shipped; default: %(default)s"}),
        _QUICK,
        flag("--busy", "gloo: other programs run here; take quickest samples"),
        Option("--device", {"default": "", "metavar": "NAME", "help": "of h200; default: cuda"}),
        _COMMIT,
    ),
    """\
parts:
  seeds   no hardware: figures that others measured (an HSDP step on 4 GPUs, optimizer sharding on
          8, a graph-level schedule on 128), predicted from cluster constants with their sources
  shipped no hardware: the GPU's configurations that a file of --beside has measurements of, as
          `shardwise plan` predicts them: from a packaged cluster file (--cluster) and nothing of
          the run they are compared with
  gloo    two real CPU ranks: calibrates this machine, predicts a step of ddp, zero1, zero2 and
          zero3, then measures it
  h200    one GPU: times its copies and host alone, replays a model's kernels without the engine,
          then predicts and measures training steps of one rank of an emulated 8-rank group.
          `build` rows corrected the model, `held-out` rows are the claim. Skipped without a CUDA
          device

Rows are written as they come; run the same command again to go on after an interruption. With
--docs, docs/accuracy.md and its plot are written from the file.

examples:
  shardwise bench accuracy --simulated --json accuracy.json
  shardwise bench accuracy --cases shipped --beside benchmarks/results/accuracy-h200.json
  shardwise bench accuracy --cases h200 --json accuracy.json
  shardwise bench accuracy --json accuracy.json --docs docs/accuracy.md
""",
)  # fmt: skip
FORWARD_BACKWARD = Benchmark(
    "forward-backward",
    "forward, backward and optimizer times by model size",
    "Times the parts of training steps: sizes small to 2.7b, fp32 and mixed precision, by warm-up.",
    "exercises.forward_backward",
    (
        *_ROWS,
        *_models("fp32,bf16"),
        list_counts("--warmup", "0,1,2,5", 0, "steps left out; default: %(default)s"),
        _STEPS,
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
)
MEMORY = Benchmark(
    "memory",
    "peak memory of a pass and of a step, and what holds it",
    "Measures peak memory and names the largest allocations.",
    "exercises.memory.peaks",
    (
        *_ROWS,
        *_models("fp32,bf16"),
        list_counts("--contexts", "128,256,512", 1),
        file("--plot", "draw the curves here (SVG)"),
    ),
    """\
modes, each measured at every context:
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
)
COMPILE = Benchmark(
    "compile",
    "torch.compile against eager: models and attention",
    "Compares compiled with eager execution.",
    "exercises.compiling",
    (
        *_ROWS,
        *_models("fp32"),
        list_names("--parts", "part", ("model", "attention")),
        list_names("--scopes", "scope", ("whole", "blocks")),
        _STEPS,
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
)
OVERLAP = Benchmark(
    "overlap",
    "pictures of naive against overlapped data parallel",
    "Measures one step of data parallel and draws its streams.",
    "exercises.overlap",
    (
        *_ROWS,
        Option("--size", {"metavar": "NAME", "help": "default: xl; without a CUDA device: small"},
               lambda _, name: None if name is None else choose(name, "size", MODELS)[0]),
        list_names("--reduce", "reduce", ("naive", "overlap", "bucketed")),
        number("--ranks", 2, "at least 2", lambda value: value >= 2),
        number("--bandwidth", 117.0, "GB/s above 0", lambda value: value > 0,
                kind=float, metavar="GB/S"),
        number("--latency", 30.0, "microseconds, at least 0", lambda value: value >= 0,
                kind=float, metavar="US"),
        file("--plot", "draw the streams here (SVG)"),
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
)  # fmt: skip
FFN = Benchmark(
    "ffn",
    "a micro-batch of seed 000's feed-forward stack on one device",
    "Times forward and backward of the feed-forward stack.",
    "exercises.ffn",
    (*_ROWS, _STEPS),
    """\
8 gated feed-forward layers of 4096 x 14336 in fp32, 4,096 tokens a sequence: forward and backward
of a micro-batch of 1 and of 2 sequences, in turn. `shardwise bench accuracy` predicts the steps of
the document's four GPUs from these two times. About half a minute on an H200, 30 GB.

examples:
  shardwise bench ffn --json ffn.json
  shardwise bench ffn --quick             every path in seconds; its figures mean nothing
""",
)
BENCHMARKS = (
    STEP, GATHER, ATTENTION, PROFILE, ACCURACY, FORWARD_BACKWARD, MEMORY, COMPILE, OVERLAP, FFN,
)  # fmt: skip


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure shardwise against torch's own engines",
        description="Measures shardwise against torch's own engines.",
        epilog="examples:\n  shardwise bench step --against torch\n  shardwise bench step --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    for benchmark in BENCHMARKS:
        command = kinds.add_parser(
            benchmark.name,
            help=benchmark.summary,
            description=benchmark.description,
            epilog=benchmark.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for option in benchmark.options:
            command.add_argument(option.flag, **option.settings)
        command.set_defaults(command=partial(run, benchmark))


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Check what was typed; then import the benchmark, and torch with it, and run it."""
    arguments.typed = _describe_command(arguments)
    for option in benchmark.options:
        name = option.flag.lstrip("-").replace("-", "_")
        if option.check is not None:
            setattr(arguments, name, option.check(option.flag, getattr(arguments, name)))
    importlib.import_module(f"shardwise.lab.{benchmark.module}").run(arguments)


def _describe_command(arguments: argparse.Namespace) -> str:
    """The command as typed. A result is read on other machines, where its folder says nothing."""
    written = {str(vars(arguments).get(name)) for name in ("json", "plot")}
    typed = (
        Path(word).name if word in written or Path(word).is_absolute() else word
        for word in sys.argv[1:]
    )
    return " ".join(["shardwise", *typed])
