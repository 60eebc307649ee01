"""`shardwise report`."""

import argparse
from pathlib import Path
from typing import Any

from shardwise.cli.help import HelpFormatter


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "report",
        help="write the HTML report of a run, or of two side by side",
        description="Reads what `shardwise train` or `shardwise profile` left in DIR, writes\n"
        "DIR/report.html (one file, opens without a network) and prints a summary.\n"
        "With two directories, writes one page that compares them.\n"
        "A run that is still going, or was cut short, can be reported too.",
        epilog="examples:\n  shardwise report run\n  shardwise report run-a run-b --out both.html",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("directory", metavar="DIR", type=Path, help="the run's directory")
    parser.add_argument(
        "other", metavar="DIR2", type=Path, nargs="?", help="a second run, to compare"
    )
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write the page (default: DIR/report.html; of two runs comparison.html)",
    )
    parser.set_defaults(command=report)


def report(arguments: argparse.Namespace) -> None:
    """Write the report; print its path, the summary and the first finding."""
    from shardwise.reporting.report import report_comparison, report_run
    from shardwise.reporting.run import read_run
    from shardwise.run_files import REPORT

    run = read_run(arguments.directory)
    if arguments.other is None:
        page = report_run(run)
        file = page.write(arguments.out or arguments.directory / REPORT)
    else:
        page = report_comparison(run, read_run(arguments.other))
        file = page.write(arguments.out or Path("comparison.html"))
    print(f"report      {file}")
    for line in page.data["summary"]:
        print(line)
    if arguments.other is not None:
        for finding in page.data["findings"]:
            print(f"finding     {finding['text']}")
