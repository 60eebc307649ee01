"""The benchmark of runs that are killed and resumed."""

from __future__ import annotations

from shardwise.lab.benchmark import PLOT, ROWS, Benchmark
from shardwise.lab.options import Option, count, number

RESUME = Benchmark(
    "resume",
    "runs killed at random and resumed, against uninterrupted ones",
    "Kills training runs at random moments, resumes them, and compares every bit.",
    "resuming.pairs",
    (
        *(option for option in ROWS if option is not PLOT),
        count("--pairs", 100, "of seed and kill step; default: %(default)s"),
        number("--seed", 0, "at least 0", lambda value: value >= 0, "the first; default: 0"),
        Option("--device", {"choices": ["cpu", "cuda"], "default": "cpu",
                            "help": "cuda: one rank, deterministic kernels (default: cpu)"}),
    ),
    """\
A seed draws a run (ranks, plan, dtype, micro-batches, recomputation, how often and how it saves; a
model with dropout) and a moment: some time within a step, or one of the operations by which a save
changes the disk. The run goes through once; once more a rank is killed there by SIGKILL, the others
are ended, and the run goes on by run.resume=auto. Compared are the last checkpoints (model,
optimizer, random state: every byte), the rows of metrics.jsonl and the batches of every rank, and
what the resumed ranks took over with what was saved. A fifth of the runs go on with another number
of ranks: there sums are added in another order, so only what was taken over is compared.

examples:
  shardwise bench resume --pairs 100 --json resume.json
  shardwise bench resume --device cuda --pairs 10
""",
)  # fmt: skip
BENCHMARKS = (RESUME,)
