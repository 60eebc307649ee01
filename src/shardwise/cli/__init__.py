"""The command line: `shardwise COMMAND`.

Each command registers itself from a small module of its own, which imports what is heavy only when
the command runs, so that `--help` answers at once.
"""

import argparse
import importlib
import os
import select
import signal
import sys
from collections.abc import Sequence

from shardwise import __version__, processor
from shardwise.children import STOPPED, UNREAD, ChildFailed, Stopped, drop_output, supervise
from shardwise.cli.help import HelpFormatter
from shardwise.errors import UserError

INTERRUPTED = 130  # by Ctrl-C

# Modules with `add_parser(subparsers)`, in the order of `--help`. The parser's default `command` is
# called with the parsed arguments.
COMMANDS = (
    "shardwise.cli.plan",
    "shardwise.cli.graph",
    "shardwise.cli.train",
    "shardwise.cli.report",
    "shardwise.cli.checkpoints",
    "shardwise.cli.profile",
    "shardwise.lab.benchmarks",
    "shardwise.cli.calibrate",
    "shardwise.cli.emulate",
    "shardwise.cli.doctor",
    "shardwise.chaos.command",
)


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="shardwise",
        description="Sharded data-parallel training for PyTorch.",
        epilog="examples:\n"
        "  shardwise plan --model xl --cluster h100x8 --tokens 131072\n"
        "  shardwise train --plan zero3 --nproc 2 --steps 60 --out run\n"
        "  shardwise report run\n"
        "  shardwise COMMAND --help",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"shardwise {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(name).add_parser(subparsers)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 for success, 1 for failure, 2 for wrong input, 75 for a run that SIGTERM
    ended and that can go on, 130 for Ctrl-C.
    """
    arguments = build_parser().parse_args(argv)
    processor.settle()
    try:
        arguments.command(arguments)
    except UserError as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 2
    except ChildFailed as error:
        print(f"shardwise: {error}", file=sys.stderr)
        return 1
    except Stopped as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"shardwise: {stop}", file=sys.stderr)
        return STOPPED
    except KeyboardInterrupt:
        print("shardwise: interrupted", file=sys.stderr)
        return INTERRUPTED
    return 0


def start() -> int:
    """The program: a command in a process of its own, so that none dies without a word."""
    return supervise(_read_or_not)


def _read_or_not() -> int:
    """A command; that its output is not read to the end (`| head`) is no error of its own, and a
    second Ctrl-C tells nothing of an exit that is on its way.
    """
    try:
        try:
            code = main()
            if code == INTERRUPTED:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            return code
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe's
        drop_output()
        return UNREAD


def _reader_left() -> bool:
    output = select.poll()
    output.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in output.poll(0))
