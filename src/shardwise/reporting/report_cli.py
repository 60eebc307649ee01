"""`shardwise report`."""

import argparse
from pathlib import Path
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "report",
        help="write the HTML report of a run, and print its summary",
        description="Reads the files that `shardwise train` left in DIR, writes DIR/report.html\n"
        "(one file, opens without a network) and prints a three-line summary.\n"
        "A run that is still going, or was cut short, can be reported too.",
        epilog="examples:\n  shardwise report run\n  shardwise report demo-run",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the run's directory")
    parser.set_defaults(command=report)


def report(arguments: argparse.Namespace) -> None:
    """Write the report; print its path and the summary."""
    from shardwise.reporting.html import write_html
    from shardwise.reporting.run import read_run
    from shardwise.reporting.text import summarize

    run = read_run(arguments.directory)
    print(f"report      {write_html(run)}")
    print(summarize(run))
