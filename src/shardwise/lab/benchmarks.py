"""`shardwise bench`: a subcommand for each benchmark of the catalog, and `all` of them in turn.

The commands are built without torch; a benchmark's module is imported when it runs.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from shardwise.cli.help import HelpFormatter
from shardwise.errors import UserError
from shardwise.lab.benchmark import DOCUMENTS, QUICK, Benchmark
from shardwise.lab.catalog import assignment, engine, grouped, hybrid, parallel, resume

BENCHMARKS = (
    *engine.BENCHMARKS,
    *assignment.BENCHMARKS,
    *parallel.BENCHMARKS,
    *grouped.BENCHMARKS,
    *hybrid.BENCHMARKS,
    *resume.BENCHMARKS,
)


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "bench",
        help="measure shardwise against torch's own engines, and the documents' tables",
        description="Measures shardwise against torch's own engines, and the tables of the\n"
        "documents that it started from, with their figures beside.",
        epilog=_list_by_document() + "\n\nexamples:\n  shardwise bench step --against torch\n"
        "  shardwise bench step --help\n  shardwise bench all --quick",
        formatter_class=HelpFormatter,
    )
    kinds = parser.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    parsers = {}
    for benchmark in BENCHMARKS:
        command = kinds.add_parser(
            benchmark.name,
            help=benchmark.summary,
            description=f"{benchmark.description}\nFrom: {DOCUMENTS[benchmark.document]}.",
            epilog=benchmark.epilog,
            formatter_class=HelpFormatter,
        )
        for option in benchmark.options:
            command.add_argument(option.flag, **option.settings)
        command.set_defaults(command=partial(run, benchmark))
        parsers[benchmark.name] = command
    every = kinds.add_parser(
        "all",
        help="every benchmark in turn, with its defaults",
        description="Runs every benchmark in turn, each with its defaults. One that fails does not "
        "stop the others; the command then ends with 1.",
    )
    every.add_argument(QUICK.flag, **QUICK.settings)
    every.add_argument(
        "--folder", type=Path, metavar="FOLDER", help="write NAME.json and NAME.svg there"
    )
    every.set_defaults(command=partial(_run_all, parsers))


def _list_by_document() -> str:
    """Which benchmark repeats a table of which document."""
    lines = ["where the tables come from:"]
    for key, title in DOCUMENTS.items():
        names = ", ".join(b.name for b in BENCHMARKS if b.document == key)
        if names:
            lines.append(f"  {title}: {names}")
    return "\n".join(lines)


def run(benchmark: Benchmark, arguments: argparse.Namespace) -> None:
    """Check what was typed; then import the benchmark, and torch with it, and run it."""
    arguments.typed = _describe_command(arguments)
    for option in benchmark.options:
        name = option.flag.lstrip("-").replace("-", "_")
        if option.check is not None:
            setattr(arguments, name, option.check(option.flag, getattr(arguments, name)))
    importlib.import_module(f"shardwise.lab.{benchmark.module}").run(arguments)


def _run_all(parsers: dict[str, argparse.ArgumentParser], arguments: argparse.Namespace) -> None:
    """One after another in this process; what each took is said at the end."""
    folder: Path | None = arguments.folder
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    took: dict[str, str] = {}
    for benchmark in BENCHMARKS:
        flags = {option.flag for option in benchmark.options}
        typed = ["--quick"] * (arguments.quick and "--quick" in flags)
        if folder is not None:
            typed += ["--json", str(folder / f"{benchmark.name}.json")]
            if "--plot" in flags:
                typed += ["--plot", str(folder / f"{benchmark.name}.svg")]
        print(f"== {benchmark.name}: {benchmark.summary}", file=sys.stderr, flush=True)
        began = time.monotonic()
        try:
            run(benchmark, parsers[benchmark.name].parse_args(typed))
            outcome = ""
        except (Exception, SystemExit) as error:
            outcome = f"FAILED: {error}"
            print(f"shardwise: {benchmark.name}: {error}", file=sys.stderr)
        took[benchmark.name] = f"{time.monotonic() - began:6.1f} s  {outcome}"
    width = max(map(len, took))
    print("\n".join(f"{name:{width}} {line}" for name, line in took.items()))
    if any("FAILED" in line for line in took.values()):
        raise UserError("some benchmarks failed; see above")


def _describe_command(arguments: argparse.Namespace) -> str:
    """The command as typed. A result is read on other machines, where its folder says nothing."""
    written = {str(vars(arguments).get(name)) for name in ("json", "plot")}
    typed = (
        Path(word).name if word in written or Path(word).is_absolute() else word
        for word in sys.argv[1:]
    )
    return " ".join(["shardwise", *typed])
