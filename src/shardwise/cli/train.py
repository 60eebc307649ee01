"""`shardwise train`."""

import argparse
import dataclasses
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.cli.help import HelpFormatter
from shardwise.description.workload import MICRO_BATCHES_HELP
from shardwise.errors import UserError
from shardwise.run_files import CHECKPOINTS, FILES

if TYPE_CHECKING:
    from shardwise.trainer.config import TrainConfig

# Flags that are shorter names of configuration keys.
_SHORTCUTS = {
    "plan": ("plan.strategy", "NAME|FILE", "ddp, zero1, zero2, zero3, hsdp, a plan.json, or auto"),
    "data": ("data.path", "FILE", "text, or .bin/.npy token ids; default: the built-in grammar"),
    "nproc": ("run.nproc", "N", "ranks to start on this machine"),
    "steps": ("run.steps", "N", "optimizer steps"),
    "micro-batches": ("run.micro_batches", "N|A,B[/C,D]", f"{MICRO_BATCHES_HELP}: data.sizes"),
    "out": ("run.out", "DIR", "where the run's files go"),
    "save-every": ("run.save_every", "N", "steps between two checkpoints, in DIR/checkpoints"),
    "profile": ("run.profile", "N", "profile N steps, for the report's timelines"),
}

_EXAMPLES = """\
examples:
  shardwise train                                        a tiny model on this machine, one rank
  shardwise train --plan zero3 --nproc 2 --out run       two ranks, everything sharded
  shardwise train --plan auto --nproc 2 --out run        the plan that is fastest here, by trials
  shardwise train --plan hsdp --nproc 4 --set plan.mesh=2x2
  shardwise train --plan hsdp --nproc 4 --set plan.mesh=2x2 --micro-batches 1,2/2,1 \\
      --set plan.sync=scatter_each_reduce_last       uneven replicas, which meet once in a step
  shardwise train config.toml --set optim.lr=1e-3 --set plan.compute_dtype=bfloat16
  shardwise train run/config.toml --out again            the same run once more
  torchrun --nproc-per-node 8 -m shardwise.cli train --plan zero3 --set model.size=medium
  shardwise train --steps 500 --save-every 50 --out run
  shardwise train --steps 500 --save-every 50 --out run --resume       after it was cut short
  torchrun --nproc-per-node 8 --max-restarts 3 -m shardwise.cli train --save-every 50 --resume

SIGTERM: the ranks end their step, save, and the command ends with 75; --resume goes on there. A
second SIGTERM ends it at once.

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
        formatter_class=HelpFormatter,
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
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in DIR from its newest checkpoint that is whole, or begin "
        "it; plan, ranks, steps and batch may be others. What torchrun starts again does so anyway",
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
    if arguments.resume and arguments.overwrite:
        raise UserError("--resume goes on with a run and --overwrite removes it: give one of them")
    config = load_config(arguments.config, assignments)
    # Workers that torchrun has started again go on, with the command that began.
    restarted = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    wanted = config.run.resume == "auto" and not arguments.overwrite
    resumes = arguments.resume or restarted or wanted
    if resumes:
        config = _resume(config)
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
        if arguments.overwrite and not resumes:
            _check_apart(config.run.resume, config.run.out)
        _claim_directory(config.run.out, overwrite=arguments.overwrite, resumes=resumes)
    try:
        # What chooses a plan stands above the trainer: it is asked only where one is to be chosen.
        room = "calibration.training" if config.plan.is_auto else "trainer.loop"
        run_ranks(f"shardwise.{room}:train", (config.to_toml(),), config.run.nproc)
    finally:
        if sys.stdout.isatty():
            # A rank that was ended while it drew the progress bar left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)
    if not joined() or os.environ["RANK"] == "0":
        _say_what_is_next(config.run.out)


def _say_what_is_next(out: str) -> None:
    """Where the run's files are, and the commands that read them."""
    print(f"\n{out} holds the run ({', '.join(n for n in FILES if Path(out, n).exists())}). Next:")
    print(f"  shardwise report {out}")
    if any(Path(out, CHECKPOINTS).glob("step-*")):
        print(f"  shardwise inspect {out}/{CHECKPOINTS}")


def _resume(config: "TrainConfig") -> "TrainConfig":
    """From the run's own checkpoints; before it has any, from where the configuration says."""
    own = any(Path(config.run.out, CHECKPOINTS).glob("step-*/manifest.json"))
    if config.run.resume != "none" and not own:
        return config
    return dataclasses.replace(config, run=dataclasses.replace(config.run, resume="auto"))


def _check_apart(resume: str, out: str) -> None:
    """What a run is to begin from is not in the directory that is cleared for it."""
    if resume in ("none", "auto"):
        return
    if Path(resume).resolve().is_relative_to(Path(out).resolve()):
        raise UserError(
            f"run.resume is {resume}, and --overwrite would remove that checkpoint: leave one of "
            "them out, or choose another --out"
        )


def _claim_directory(path: str, *, overwrite: bool, resumes: bool) -> None:
    """Make the directory. One that holds a run is refused, cleared of it with `overwrite`, or left
    as it is for a run that goes on.
    """
    directory = Path(path)
    held = [name for name in (*FILES, CHECKPOINTS) if (directory / name).exists()]
    if held and not (overwrite or resumes):
        going_on = "--resume to go on with it, or " if CHECKPOINTS in held else ""
        raise UserError(
            f"{path} already holds a run ({', '.join(held)}): choose another --out, or give "
            f"{going_on}--overwrite to replace it"
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the directory {path}: {error.strerror}") from error
    for name in held if not resumes else ():
        if name == CHECKPOINTS:
            shutil.rmtree(directory / name)
        else:
            (directory / name).unlink()
