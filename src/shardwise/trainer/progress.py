"""What rank 0 shows while it trains: a bar on a terminal, plain lines elsewhere."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shardwise.reporting.formats import show_bytes
from shardwise.trainer.outputs import StepMetrics

_PLAIN_LINES = 20  # of a whole run, where the output is a file or a pipe

Show = Callable[[StepMetrics], None]


@contextmanager
def progress(steps: int, rank: int) -> Iterator[Show]:
    """Give the function that shows a step; on ranks other than 0 it shows nothing."""
    console = Console()
    if rank != 0:
        yield lambda row: None
    elif not console.is_terminal:
        yield _line_printer(steps)
    else:
        bar = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=console,
        )
        with bar:
            task = bar.add_task("starting", total=steps)
            yield lambda row: bar.update(task, completed=row.step, description=format_row(row))


def format_row(row: StepMetrics) -> str:
    """Give the numbers of one step on one line."""
    exposed = "" if row.exposed_share is None else f"  exposed {row.exposed_share:.0%}"
    return (
        f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tok/s  "
        f"{show_bytes(row.memory_bytes)}{exposed}"
    )


def _line_printer(steps: int) -> Show:
    due = 1

    def show(row: StepMetrics) -> None:
        nonlocal due
        if row.step >= due or row.step == steps:
            due = row.step + max(1, steps // _PLAIN_LINES)
            print(f"step {row.step}/{steps}  {format_row(row)}", flush=True)

    return show
