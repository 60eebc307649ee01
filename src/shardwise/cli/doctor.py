"""`shardwise doctor`."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from shardwise.children import ChildFailed
from shardwise.cli.help import HelpFormatter


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="check a machine, or a job's ranks, before a run",
        description="Checks versions, devices and backend, the processor, shared memory, disk, "
        "limits and memory; starts ranks and checks that they reach each other, how fast, and "
        "their clocks. Ends with code 1 if something fails.",
        epilog="examples:\n"
        "  shardwise doctor --nproc 2\n"
        "  shardwise doctor --nproc 8 --config run/config.toml --out run\n"
        "  torchrun --nnodes 2 --nproc-per-node 8 ... -m shardwise.cli doctor",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--nproc", type=int, default=2, metavar="N", help="ranks to start (default: 2)"
    )
    parser.add_argument("--out", default=".", metavar="DIR", help="where the run's files will go")
    parser.add_argument("--config", metavar="FILE", help="a config.toml: is there room for it?")
    parser.add_argument("--port", type=int, metavar="N", help="a port that the job will use")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the checks as JSON")
    parser.set_defaults(command=doctor)


def doctor(arguments: argparse.Namespace) -> None:
    """Run the checks, print the table; fail if one of them did."""
    from shardwise.errors import UserError
    from shardwise.profiling.results import check_file
    from shardwise.trainer.config import load_config
    from shardwise.trainer.doctor import examine

    if arguments.nproc < 1:
        raise UserError(f"--nproc is {arguments.nproc}, expected at least 1")
    if arguments.port is not None and not 0 < arguments.port < 65536:
        raise UserError(f"--port is {arguments.port}, expected 1 to 65535")
    config = load_config(arguments.config, []) if arguments.config else None
    tells = os.environ.get("RANK", "0") == "0"
    if tells:
        check_file("--json", arguments.json)

    def progress(what: str) -> None:
        if tells:
            print(f"shardwise: checking {what} ...", file=sys.stderr, flush=True)

    found = examine(arguments.nproc, Path(arguments.out), config, arguments.port, progress)
    checks = list(found)
    if tells:
        _show(checks)
        if arguments.json:
            text = json.dumps([asdict(check) for check in checks], indent=1)
            arguments.json.write_text(text + "\n", encoding="utf-8")
    failed = [check.name for check in checks if check.verdict == "fail"]
    if failed:
        raise ChildFailed(f"not ready for a run: {', '.join(failed)}")


def _show(checks: list[Any]) -> None:
    from shardwise.profiling.results import print_table

    heads = ("check", "found", "verdict", "what to do")
    lines = [(check.name, check.found, check.verdict, check.do) for check in checks]
    print_table("shardwise doctor", heads, lines, {}, left=heads)
