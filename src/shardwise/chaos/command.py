"""`shardwise chaos`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardwise.chaos.faults import KINDS
from shardwise.cli.help import HelpFormatter
from shardwise.errors import UserError, nearest
from shardwise.profiling.results import check_file

QUICK, FULL = 110, 1100  # faults

_EXAMPLES = """\
Every job has 2 to 4 gloo ranks that train a small model, evaluate, save, load into a fresh model
and train again; one fault strikes one of them. It is as expected if the job ends as the class says,
its one message names the rank and the cause, no process is left, and what is on the disk loads to
exactly the last committed state. Exit code 1 if one is not.

examples:
  shardwise chaos                                    each class a few times
  shardwise chaos --full --json chaos.json           more than a thousand faults
  shardwise chaos --full --json chaos.json --resume  go on with a run that was ended
  shardwise chaos --classes kill,"power cut" --faults 40 --seed 7

classes:
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    width = max(len(kind.name) for kind in KINDS)
    lines = [f"  {kind.name:{width}}  {kind.what}: {kind.expected}" for kind in KINDS]
    parser = subparsers.add_parser(
        "chaos",
        help="inject faults into real jobs, and judge what becomes of them",
        description="Injects faults into small real jobs on this machine, and judges what becomes "
        "of them.",
        epilog=_EXAMPLES + "\n".join(lines),
        formatter_class=HelpFormatter,
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{QUICK} faults (the default)")
    size.add_argument("--full", action="store_true", help=f"{FULL} faults: half an hour")
    size.add_argument("--faults", type=int, metavar="N", help="so many")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="which ones (default: 0)")
    parser.add_argument("--classes", metavar="A,B", help="only these; default: all")
    parser.add_argument(
        "--slots", type=int, default=3, metavar="N", help="jobs at a time (default: 3)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write a summary of each class, and each failure"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what FILE.rows has of a run that was ended"
    )
    parser.set_defaults(command=chaos)


def chaos(arguments: argparse.Namespace) -> None:
    """Check what was typed; then import torch, and run."""
    count = FULL if arguments.full else QUICK
    if arguments.faults is not None:
        count = arguments.faults
    for flag, value in (("--faults", count), ("--slots", arguments.slots)):
        if value < 1:
            raise UserError(f"{flag} is {value}, expected at least 1")
    if sys.platform != "linux":
        raise UserError("shardwise chaos needs Linux: it forks ranks and looks at them in /proc")
    names = [kind.name for kind in KINDS]
    chosen = arguments.classes.split(",") if arguments.classes else names
    chosen = [name.strip() for name in chosen]
    for name in chosen:
        if name not in names:
            raise UserError(f"unknown class {name!r}{nearest(name, names)}")
    if arguments.resume and arguments.json is None:
        raise UserError("--resume goes on with a file: give --json FILE")
    check_file("--json", arguments.json)
    from shardwise.chaos.report import run

    run(arguments, count, chosen)
