"""What rank 0 writes into the run's directory and shows: facts at the start, then a row for each
logged step.
"""

import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import shardwise as sw
from shardwise.children import say
from shardwise.description.preset import parameter_count
from shardwise.profiling.timing import ask_git, version_of
from shardwise.reporting.formats import show_bytes
from shardwise.run_files import CONFIG, FACTS, METRICS, PLAN
from shardwise.trainer.config import TrainConfig
from shardwise.trainer.data import Corpus
from shardwise.trainer.group import Member

_PLAIN_LINES = 20  # of a whole run, where the output is a file or a pipe


def write_facts(
    config: TrainConfig, plan: sw.Plan, corpus: Corpus, member: Member, done: int = 0
) -> None:
    """Write the configuration, the plan, and what the run depends on. A run that goes on after
    step `done` adds that to where it has resumed before.
    """
    out = Path(config.run.out)
    resumed = [*(step for step in _resumed_before(out) if step < done), *([done] if done else [])]
    (out / CONFIG).write_text(config.to_toml(), encoding="utf-8")
    (out / PLAN).write_text(plan.to_json() + "\n", encoding="utf-8")
    facts = {
        "shardwise": version_of("shardwise"),
        "torch": version_of("torch"),
        "python": platform.python_version(),
        "commit": ask_git(Path(), "rev-parse", "HEAD") or None,  # of the working directory
        "world": member.world,
        "device": member.device_name,
        "backend": member.backend,
        "threads": torch.get_num_threads(),
        "parameters": parameter_count(config.model.resolve()),
        "data": corpus.name,
        "data_tokens": len(corpus.tokens),
        "unigram_entropy": corpus.unigram_entropy(),
        "resumed_after": resumed,
        "plan_explanation": plan.explain(config.run.micro_batches),
    }
    if not resumed:
        del facts["resumed_after"]
    (out / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def _resumed_before(out: Path) -> list[int]:
    try:
        found = json.loads((out / FACTS).read_text(encoding="utf-8"))["resumed_after"]
        return [step for step in found if type(step) is int]
    except (OSError, ValueError, KeyError, TypeError):
        return []


@dataclass(frozen=True)
class StepMetrics:
    """One logged step, as rank 0 saw it. Times are means over the steps since the last row."""

    step: int
    loss: float  # mean over all tokens of all ranks, nats
    grad_norm: float  # before clipping
    skipped: int  # steps left out so far because the norm was not finite
    lr: float
    tokens: int  # of all ranks, since the start
    tokens_per_s: float  # of all ranks
    step_s: float
    memory_bytes: int  # cuda: peak allocated since the last row; cpu: resident
    exposed_share: float | None  # of the time this rank waited for communication; None: unknown

    def to_json(self) -> str:
        """One line; JSON has no NaN, so what is not finite is written as null."""
        row = asdict(self)
        known = {k: v for k, v in row.items() if v is not None and math.isfinite(v)}
        return json.dumps({name: known.get(name) for name in row})

    def __str__(self) -> str:
        exposed = "" if self.exposed_share is None else f"  exposed {self.exposed_share:.0%}"
        return (
            f"loss {self.loss:.4f}  {self.tokens_per_s:,.0f} tok/s  "
            f"{show_bytes(self.memory_bytes)}{exposed}"
        )


Log = Callable[[StepMetrics], None]


@contextmanager
def open_log(directory: Path, steps: int, rank: int, done: int = 0) -> Iterator[Log]:
    """Give the function that logs a step. Rank 0 appends it to the file, where it is on disk at
    once, and shows it; the others do nothing. Rows after step `done` are cut: those steps come
    again.
    """
    if rank != 0:
        yield lambda row: None
        return
    _cut_rows(directory / METRICS, done)
    with (directory / METRICS).open("a", encoding="utf-8") as file, _display(steps) as show:

        def log(row: StepMetrics) -> None:
            print(row.to_json(), file=file, flush=True)
            show(row)

        yield log


def _cut_rows(file: Path, done: int) -> None:
    """Keep the rows of the first `done` steps; the file is whole at any time."""
    if not file.exists():
        return
    kept = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            row = json.loads(line)
            if line.endswith("\n") and row["step"] <= done:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue  # half a row, of a run that was killed
    shorter = file.with_name(f"{file.name}.part")
    shorter.write_text("".join(kept), encoding="utf-8")
    shorter.replace(file)


@contextmanager
def _display(steps: int) -> Iterator[Log]:
    """A bar on a terminal, plain lines elsewhere."""
    console = Console()
    if not console.is_terminal:
        yield _line_printer(steps)
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TextColumn("{task.description}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=steps)
        yield lambda row: bar.update(task, completed=row.step, description=str(row))


def _line_printer(steps: int) -> Log:
    due = 1

    def show(row: StepMetrics) -> None:
        nonlocal due
        if row.step >= due or row.step == steps:
            due = row.step + max(1, steps // _PLAIN_LINES)
            say(f"step {row.step}/{steps}  {row}")

    return show
