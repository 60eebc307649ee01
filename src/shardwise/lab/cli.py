"""`shardwise bench`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardwise.lab.accuracy import cli as accuracy_cli
from shardwise.lab.exercises import cli as exercise_cli
from shardwise.profiling.results import check_file

_CASES = ("fake8", "gloo2", "h200")
_STRATEGIES = ("zero3", "zero2", "ddp")
_SWEEPS = ("heads", "table7", "tables45")

_HELP = """\
cases:
  fake8   CPU, one rank of 8, nothing is sent: many small parameters, so what counts is the
          engines' own Python. zero3 and zero2 against fully_shard
  gloo2   CPU, two real ranks: zero3 against fully_shard, ddp against DistributedDataParallel.
          Both must agree to 1e-5 after three steps, else nothing is timed
  h200    GPU, 0.95 B parameters in bf16, one rank of an emulated 8-rank group, three networks.
          Skipped without a CUDA device; its figures are labelled `emulated`

Both engines train the same model on the same inputs with the same fused AdamW, in turn, in one run;
figures are medians, with the interquartile range after +-. Ratios are shardwise over torch: below 1
is better. `cpu` is the time until the step's call returns, `memory` the peak of a step.

examples:
  shardwise bench step --against torch
  shardwise bench step --cases fake8 --strategies zero3 --steps 100
  shardwise bench step --cases h200 --json step-h200.json
  shardwise bench step --through fully_shard
  shardwise bench step --quick            every path in seconds; its figures mean nothing
"""

_ATTENTION_HELP = """\
sweeps:
  heads     16 heads, bf16, causal, 8,192 to 65,536 tokens: Triton, torch's flash, cuDNN
  table7    one head, causal, 128 to 131,072 tokens, bf16 and fp32, plain torch too
  tables45  batch 8, fp32, not causal, 256 to 16,384 tokens: plain torch, eager and compiled

The tables are those of the document that this project started from; its figures stand beside.

examples:
  shardwise bench attention --json attention.json --plot attention.svg
  shardwise bench attention --sweeps heads --budget 60 --json attention.json --resume
"""


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
    step = kinds.add_parser(
        "step",
        help="time, host time and memory of one training step",
        description="Times whole training steps: zero_grad, forward, backward, optimizer.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    step.add_argument(
        "--against", choices=["torch"], default="torch", help="the peer (default: torch)"
    )
    step.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    step.add_argument(
        "--cases", default=",".join(_CASES), metavar="A,B", help="default: %(default)s"
    )
    step.add_argument(
        "--strategies", metavar="A,B", help="of zero3, zero2, ddp; default: all that a case has"
    )
    step.add_argument(
        "--through",
        choices=["plan", "fully_shard"],
        default="plan",
        help="how shardwise is used: by a Plan, or by torch's own program with only the import of "
        "fully_shard changed (default: plan)",
    )
    step.add_argument("--steps", type=int, metavar="N", help="timed steps of each candidate")
    step.add_argument("--quick", action="store_true", help="two blocks, four steps: a trial run")
    step.add_argument(
        "--commit", metavar="ID", help="what to record where the code is not in its repository"
    )
    step.set_defaults(command=bench_step)
    gather = kinds.add_parser(
        "gather",
        help="gathers on 2 gloo ranks: packed against one call per tensor",
        description="Times forward and backward under zero3 on two real CPU ranks, by gather mode "
        "and tensor size. Its result is what gather='auto' follows on gloo.",
    )
    gather.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    gather.add_argument("--rounds", type=int, default=15, metavar="N", help="default: %(default)s")
    gather.set_defaults(command=bench_gather)
    attention = kinds.add_parser(
        "attention",
        help="attention, backend against backend, on a CUDA device",
        description="Times forward, backward and both per backend, dtype, width and length. A "
        "backend is first compared with float64; one that differs is not timed.",
        epilog=_ATTENTION_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    attention.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    attention.add_argument("--plot", type=Path, metavar="FILE", help="write a picture here (SVG)")
    attention.add_argument(
        "--sweeps", default=",".join(_SWEEPS), metavar="A,B", help="default: %(default)s"
    )
    attention.add_argument("--budget", type=float, metavar="S", help="start no row after S seconds")
    attention.add_argument(
        "--resume",
        action="store_true",
        help="keep the rows that FILE has; with --plot and no GPU, only draw them",
    )
    attention.add_argument("--quick", action="store_true", help="tiny shapes: a trial run")
    attention.add_argument(
        "--commit", metavar="ID", help="what to record where the code is not in its repository"
    )
    attention.set_defaults(command=bench_attention)
    profile = kinds.add_parser(
        "profile",
        help="what profiling costs: steps with it on and off",
        description="Times steps of zero3 with the profiler on and off, in turn, on two real CPU "
        "ranks and, where there is one, on a CUDA device as a rank of an emulated group.",
        epilog="`on` is a step that a profile times. `ratio` is that of the medians, `paired` the "
        "median of the rounds' ratios; `traced` is what a traced step takes of one without. The "
        "last column is what the marks cost when no profile listens.",
    )
    profile.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    profile.add_argument(
        "--cases", default="gloo2,h200", metavar="A,B", help="default: %(default)s"
    )
    profile.add_argument("--rounds", type=int, metavar="N", help="of three steps each way")
    profile.add_argument(
        "--commit", metavar="ID", help="what to record where the code is not in its repository"
    )
    profile.set_defaults(command=bench_profile)
    accuracy_cli.add_parser(kinds)
    exercise_cli.add_parsers(kinds)


def bench_step(arguments: argparse.Namespace) -> None:
    """Check the choices, run the cases, write the JSON, print the table."""
    from shardwise.errors import UserError

    cases = _split(arguments.cases, "case", _CASES)
    strategies = None
    if arguments.strategies is not None:
        strategies = _split(arguments.strategies, "strategy", _STRATEGIES)
    if arguments.steps is not None and arguments.steps < 1:
        raise UserError(f"--steps is {arguments.steps}, expected at least 1")
    check_file("--json", arguments.json)

    # Only now: this imports torch.
    from shardwise.lab.step import BenchmarkError, Options, run_family, select
    from shardwise.profiling.results import print_table, write_json
    from shardwise.profiling.timing import describe_environment

    families = select(
        cases, Options(strategies, arguments.steps, arguments.quick, arguments.through)
    )
    environment = describe_environment(arguments.commit)
    rows: list[dict[str, Any]] = []
    try:
        for family in families.values():
            rows += run_family(family, arguments.quick)
    except BenchmarkError as error:
        sys.exit(f"shardwise: {error}")
    if arguments.json is not None:
        write_json(arguments.json, environment, _command(arguments.json), rows)
    if rows:
        print_table(environment, rows)
    else:
        print("nothing was measured: no case of these is left on this machine")


def bench_gather(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print the table."""
    check_file("--json", arguments.json)

    from shardwise.lab.gather import measure
    from shardwise.profiling.results import write_json
    from shardwise.profiling.timing import describe_environment

    environment = describe_environment(None)
    rows = measure(arguments.rounds)
    if arguments.json is not None:
        write_json(arguments.json, environment, _command(arguments.json), rows)
    print("tensor bytes   packed ms     each ms   each/packed")
    for row in rows:
        medians = row["median_ms"]
        print(
            f"{row['tensor_bytes']:12,} {medians['packed']:11.3f} {medians['each']:11.3f} "
            f"{row['each_over_packed']:13.2f}"
        )


def bench_profile(arguments: argparse.Namespace) -> None:
    """Measure, write the JSON, print a line for each case."""
    cases = _split(arguments.cases, "case", ("gloo2", "h200"))
    check_file("--json", arguments.json)

    from shardwise.lab.profiling import measure
    from shardwise.profiling.results import write_json
    from shardwise.profiling.timing import describe_environment

    environment = describe_environment(arguments.commit)
    rows = measure(cases, arguments.rounds)
    if arguments.json is not None:
        write_json(arguments.json, environment, _command(arguments.json), rows)
    print(
        "case                     off ms      on ms  ratio paired traced   off: share of the step"
    )
    for row in rows:
        print(
            f"{row['case']:20} {row['off']['step_ms']:10.1f} {row['on']['step_ms']:10.1f} "
            f"{row['step_ratio']:6.3f} {row['paired_ratio']:6.3f} {row['traced_ratio']:6.3f}   "
            f"{row['share_of_step_off']:.1e}"
        )


def bench_attention(arguments: argparse.Namespace) -> None:
    """Check the choices, measure row by row, write the JSON after each, draw the plot."""
    sweeps = _split(arguments.sweeps, "sweep", _SWEEPS)
    check_file("--json", arguments.json)
    check_file("--plot", arguments.plot)

    from shardwise.lab.attention.sweeps import run

    run(arguments, sweeps, _command(arguments.json, arguments.plot))


def _command(*paths: Path | None) -> str:
    """The command as typed. A result is read on other machines, where its folder says nothing."""
    names = {str(path): path.name for path in paths if path is not None}
    return " ".join(["shardwise", *(names.get(word, word) for word in sys.argv[1:])])


def _split(text: str, what: str, valid: tuple[str, ...]) -> tuple[str, ...]:
    from shardwise.errors import UserError, nearest

    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in valid:
            raise UserError(f"unknown {what} {name!r}{nearest(name, valid)}")
    return names
