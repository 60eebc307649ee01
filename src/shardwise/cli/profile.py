"""`shardwise profile`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.children import describe_end
from shardwise.cli.help import HelpFormatter
from shardwise.errors import UserError
from shardwise.profiling import DIRECTORY, SKIP, STEPS
from shardwise.run_files import TIMELINE

_RUNNER = ["-m", "shardwise.profiling.run"]
_EXAMPLES = """\
examples:
  shardwise profile -- python train.py
  shardwise profile --out profile --steps 5 --skip 10 -- torchrun --nproc-per-node 8 train.py
  shardwise profile -- python infer.py
  shardwise profile -- shardwise train --nproc 2 --steps 20
  shardwise report profile

The program needs no change: it trains with shardwise, or with torch's fully_shard or
DistributedDataParallel, and steps with a torch optimizer. Without an optimizer (forward and
backward alone, or inference) a step goes from one forward of the model to the next; where the
program calls the model's zero_grad(), from the first forward after it to that of the next time, so
that the micro-batches between belong to one. The last one is over when another begins.

Steps are profiled after the first ones, which warm up. Tracing lengthens a step, so some are traced
and the others timed: on a CPU the last is traced, on CUDA the first two. Ask for five or more where
the step's time matters; one alone is a traced step, which is not to be compared with a timed one.
timeline.json, memory.json, messages.json, kernels.json and trace.json (for ui.perfetto.dev) are
written to DIR, and on CUDA a memory snapshot for pytorch.org/memory_viz.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "profile",
        help="run a program that trains or infers, and profile some of its steps",
        description="Runs a program of torch's and profiles some of its steps, on all its ranks.",
        epilog=_EXAMPLES,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--out", default="profile", metavar="DIR", help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="to profile (default: %(default)s)"
    )
    parser.add_argument(
        "--skip", type=int, default=3, metavar="N", help="to run before (default: %(default)s)"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- CMD ...", help="the program to run"
    )
    parser.set_defaults(command=profile_program)


def profile_program(arguments: argparse.Namespace) -> None:
    """Run the program with the profiler asked for in its environment; fail where it did not."""
    command = arguments.program[1:] if arguments.program[:1] == ["--"] else arguments.program
    if not command:
        raise UserError(
            "give the program to run after --, as: shardwise profile -- python train.py"
        )
    for name in ("steps", "skip"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name} is {getattr(arguments, name)}, expected at least 1")
    out = Path(arguments.out).resolve()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {out}: {error.strerror}") from error
    written = out / TIMELINE
    written.unlink(missing_ok=True)
    environment = {
        **os.environ,
        DIRECTORY: str(out),
        STEPS: str(arguments.steps),
        SKIP: str(arguments.skip),
    }
    # torch warns of memory that is older than the profile, and announces every start of it.
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    environment.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        code = subprocess.run(insert_runner(command), env=environment, check=False).returncode
    except OSError as error:
        raise UserError(f"cannot run {command[0]}: {error.strerror}") from error
    if not written.exists():
        needed = arguments.skip + arguments.steps
        raise UserError(
            f"the program {describe_end(code)} and nothing was profiled: at least {needed} "
            "steps of a torch optimizer are needed (--skip and --steps), or one more forward than "
            "that of a model without one, in a python program that this command starts itself "
            "(python, torchrun) or that imports shardwise"
        )
    print(f"wrote {out}; see it with: shardwise report {arguments.out}")
    if code < 0:
        print(f"shardwise: the program {describe_end(code)}", file=sys.stderr)
    if code:
        sys.exit(code if code > 0 else 128 - code)


def insert_runner(command: list[str]) -> list[str]:
    """The command with our runner in front of the script of python or torchrun, so that programs
    that do not import shardwise are watched too. Other commands stay as they are.
    """
    program = Path(command[0]).name
    if program != "torchrun" and not program.startswith("python"):
        return command
    launchers = ["torch.distributed.run", "torch.distributed.launch"]
    launched = program != "torchrun" and command[1:2] == ["-m"] and command[2] in launchers
    return _insert(command, 3 if launched else 1)


# Options of python and torchrun that take no value of their own.
_FLAGS = {
    "--standalone", "--no-python", "--no_python", "--run-path", "--run_path", "-u", "-O", "-OO",
    "-B", "-E", "-I", "-s", "-S", "-v", "-q",
}  # fmt: skip


def _insert(command: list[str], at: int) -> list[str]:
    """Find the script (or -m MODULE) after the options from `at` on."""
    while at < len(command):
        word = command[at]
        if word in ("-m", "--module"):
            return [*command[:at], *_RUNNER, "-m", *command[at + 1 :]]
        if not word.startswith("-"):
            return [*command[:at], *_RUNNER, *command[at:]]
        at += 1 if "=" in word or word in _FLAGS else 2
    return command
