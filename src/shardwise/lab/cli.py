"""`shardwise bench`: its subcommands are the rows of the table of benchmarks."""

from __future__ import annotations

import argparse
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.lab.benchmarks import BENCHMARKS, Benchmark


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
