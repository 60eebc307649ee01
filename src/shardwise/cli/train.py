"""`shardwise train`."""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from shardwise.description.workload import MICRO_BATCHES_HELP
from shardwise.errors import UserError
from shardwise.run_files import FILES

# Flags that are shorter names of configuration keys.
_SHORTCUTS = {
    "plan": ("plan.strategy", "NAME|FILE", "ddp, zero1, zero2, zero3, hsdp, or a plan.json"),
    "data": ("data.path", "FILE", "text, or .bin/.npy token ids; default: the built-in grammar"),
    "nproc": ("run.nproc", "N", "ranks to start on this machine"),
    "steps": ("run.steps", "N", "optimizer steps"),
    "micro-batches": ("run.micro_batches", "N|A,B[/C,D]", f"{MICRO_BATCHES_HELP}: data.sizes"),
    "out": ("run.out", "DIR", "where the run's files go"),
    "profile": ("run.profile", "N", "profile N steps, for the report's timelines"),
}

_EXAMPLES = """\
examples:
  shardwise train                                        a tiny model on this machine, one rank
  shardwise train --plan zero3 --nproc 2 --out run       two ranks, everything sharded
  shardwise train --plan hsdp --nproc 4 --set plan.mesh=2x2
  shardwise train --plan hsdp --nproc 4 --set plan.mesh=2x2 --micro-batches 1,2/2,1 \\
      --set plan.sync=scatter_each_reduce_last       uneven replicas, which meet once in a step
  shardwise train config.toml --set optim.lr=1e-3 --set plan.compute_dtype=bfloat16
  shardwise train run/config.toml --out again            the same run once more
  torchrun --nproc-per-node 8 -m shardwise.cli train --plan zero3 --set model.size=medium

keys of config.toml and of --set, with their defaults:
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    from shardwise.trainer.config import describe_keys

    parser = subparsers.add_parser(
        "train",
        help="train a language model under a plan",
        description="Trains a transformer language model and writes metrics.jsonl, config.toml,\n"
        "plan.json and run.json to DIR, and with --profile timeline.json, predicted.json,\n"
        "memory.json, messages.json, kernels.json and trace.json. Starts the ranks itself, or\n"
        "joins torchrun's.",
        epilog=_EXAMPLES + describe_keys(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", metavar="config.toml", help="configuration to start from"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="A.B=C",
        dest="assignments",
        help="set one key of the configuration; may be repeated",
    )
    for flag, (key, metavar, help) in _SHORTCUTS.items():
        parser.add_argument(f"--{flag}", metavar=metavar, help=f"{help} ({key})")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace the run that DIR holds already"
    )
    parser.set_defaults(command=train)


def train(arguments: argparse.Namespace) -> None:
    """Resolve the configuration, claim the directory, run the ranks."""
    from shardwise.trainer.config import load_config
    from shardwise.trainer.launch import joined, run_ranks

    assignments = [tuple(text.partition("=")[::2]) for text in arguments.assignments]
    for flag, (key, _, _) in _SHORTCUTS.items():
        value = getattr(arguments, flag.replace("-", "_"))
        if value is not None:
            listed = flag == "micro-batches" and not value.strip().isdigit()
            assignments.append(("data.sizes" if listed else key, value))
    config = load_config(arguments.config, assignments)
    if config.run.profile:
        # torch warns of memory that is older than the profile, and announces every start of it.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if config.plan.is_file and not joined():
        from shardwise.trainer.loop import load_plan

        load_plan(config.plan, config.run.nproc)  # wrong: told before an older run is replaced
        plan, out = Path(config.plan.strategy).resolve(), Path(config.run.out).resolve()
        if arguments.overwrite and plan.parent == out:
            raise UserError(
                f"the plan {config.plan.strategy} is a file of the run that --overwrite replaces: "
                "copy it elsewhere first, or choose another --out"
            )
    if not joined() or os.environ["RANK"] == "0":
        _claim_directory(config.run.out, overwrite=arguments.overwrite)
    try:
        run_ranks("shardwise.trainer.loop:train", (config.to_toml(),), config.run.nproc)
    finally:
        if sys.stdout.isatty():
            # A rank that was ended while it drew the progress bar left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)


def _claim_directory(path: str, *, overwrite: bool) -> None:
    """Make the directory; one that holds a run is refused, or with `overwrite` cleared of it."""
    directory = Path(path)
    held = [name for name in FILES if (directory / name).exists()]
    if held and not overwrite:
        raise UserError(
            f"{path} already holds a run ({', '.join(held)}): choose another --out, or give "
            f"--overwrite to replace it"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {error.strerror}") from error
    for name in held:
        (directory / name).unlink()
