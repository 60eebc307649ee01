"""`shardwise bench accuracy`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

_PARTS = ("seeds", "shipped", "gloo", "h200")
_SIMULATED = ("seeds", "shipped")

_HELP = """\
parts:
  seeds   no hardware: figures that others measured (an HSDP step on 4 GPUs, optimizer sharding on
          8, a graph-level schedule on 128), predicted from cluster constants with their sources
  shipped no hardware: the GPU's configurations that a file of --beside has measurements of, as
          `shardwise plan` predicts them: from a packaged cluster file (--cluster) and nothing of
          the run they are compared with
  gloo    two real CPU ranks: calibrates this machine, predicts a step of ddp, zero1, zero2 and
          zero3, then measures it
  h200    one GPU: times its copies and host alone, replays a model's kernels without the engine,
          then predicts and measures training steps of one rank of an emulated 8-rank group.
          `build` rows corrected the model, `held-out` rows are the claim. Skipped without a CUDA
          device

Rows are written as they come; run the same command again to go on after an interruption. With
--docs, docs/accuracy.md and its plot are written from the file.

examples:
  shardwise bench accuracy --simulated --json accuracy.json
  shardwise bench accuracy --cases shipped --beside benchmarks/results/accuracy-h200.json
  shardwise bench accuracy --cases h200 --json accuracy.json
  shardwise bench accuracy --json accuracy.json --docs docs/accuracy.md
"""


def add_parser(kinds: Any) -> None:
    """Register the benchmark."""
    parser = kinds.add_parser(
        "accuracy",
        help="how well the planner predicts step time and memory",
        description="Compares predictions with reported and with measured figures.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep all figures here")
    parser.add_argument(
        "--cases", default=",".join(_PARTS), metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument(
        "--simulated", action="store_true", help="only what needs no accelerator and no other rank"
    )
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the page of results here")
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="*",
        default=[],
        metavar="FILE",
        help="results of other machines: the page shows them too, and `shipped` predicts them",
    )
    parser.add_argument(
        "--cluster",
        default="h200x8-measured",
        metavar="NAME",
        help="of shipped; default: %(default)s",
    )
    parser.add_argument(
        "--quick", action="store_true", help="every path in seconds; its figures mean nothing"
    )
    parser.add_argument(
        "--busy", action="store_true", help="gloo: other programs run here; take quickest samples"
    )
    parser.add_argument("--device", default="", metavar="NAME", help="of h200; default: cuda")
    parser.add_argument(
        "--commit", metavar="HASH", help="what to record where the code is not in its repository"
    )
    parser.set_defaults(command=bench_accuracy)


def bench_accuracy(arguments: argparse.Namespace) -> None:
    """Check the choices, run the parts, print the table, write the page."""
    from shardwise.errors import UserError, nearest
    from shardwise.profiling.results import read_json

    names = tuple(dict.fromkeys(name.strip() for name in arguments.cases.split(",")))
    for name in names:
        if name not in _PARTS:
            raise UserError(f"unknown case {name!r}{nearest(name, _PARTS)}")
    if arguments.simulated:
        names = _SIMULATED
    beside = [read_json(path, "--beside", needs="mode") for path in arguments.beside]
    for path in (arguments.json, arguments.docs):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")

    # Only now: this imports torch.
    from shardwise.lab.accuracy import rows as accuracy
    from shardwise.lab.accuracy.docs import write_docs
    from shardwise.profiling.timing import describe_environment

    command = "shardwise " + " ".join(
        Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:]
    )
    environment = describe_environment(arguments.commit)
    results = accuracy.Results.open(arguments.json, environment, command)
    accuracy.run(
        names,
        results,
        arguments.quick,
        arguments.device,
        arguments.busy,
        [row for each in beside for row in each["rows"]],
        arguments.cluster,
    )
    _print_table(results.rows)
    for line in (*accuracy.summarize(results.rows), *results.delayed):
        print(line)
    if arguments.docs is not None:
        write_docs(
            arguments.docs,
            {
                "environment": results.environment,
                "rows": results.rows,
                "sweep": results.sweep,
                "delayed": results.delayed,
            },
            *beside,
        )


def _print_table(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from shardwise.lab.accuracy.rows import error_of

    table = Table(title="predicted against measured or reported")
    for name in ("case", "mode"):
        table.add_column(name)
    for name in ("predicted ms", "actual ms", "error", "predicted GB", "actual GB", "error"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row.get("case") or f"seed {row['seed']}", row["mode"]]
        if "error" in row:
            table.add_row(*cells, f"failed: {row['error'][:60]}")
            continue
        for what, scale in (("ms", 1.0), ("bytes", 1e9)):
            error, predicted = error_of(row, what), row.get(f"predicted_{what}")
            ordered = row.get("compared") == "order"
            if predicted is None or (error is None and not ordered):
                cells += ["", "", ""]
                continue
            actual = row.get(f"measured_{what}") or row.get(f"reported_{what}")
            told = "-" if actual is None else f"{actual / scale:.2f}"
            shown = "order" if ordered else f"{error:+.1%}"
            cells += [f"{predicted / scale:.2f}", told, shown]
        table.add_row(*cells)
    console = Console()
    console = console if console.is_terminal else Console(width=150)
    console.print(table)
