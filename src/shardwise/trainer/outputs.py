"""Writing a run's directory, which `reporting.run` reads."""

import json
import math
import platform
import subprocess
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardwise.errors import UserError
from shardwise.run_files import FILES, METRICS


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


def claim_directory(path: str, *, overwrite: bool) -> None:
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


class MetricsFile:
    """Appends rows to metrics.jsonl; each is on disk as soon as it is written."""

    def __init__(self, directory: Path) -> None:
        self._file = (directory / METRICS).open("a", encoding="utf-8")

    def write(self, row: StepMetrics) -> None:
        # JSON has no NaN: what is not finite is written as null.
        finite = {k: v for k, v in asdict(row).items() if v is not None and math.isfinite(v)}
        self._file.write(json.dumps({name: finite.get(name) for name in asdict(row)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def write_json(file: Path, value: dict[str, Any]) -> None:
    """Write an indented JSON object."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def describe_software() -> dict[str, Any]:
    """Give the versions a run depends on, and the commit of the working directory if it has one."""
    return {
        "shardwise": _version("shardwise"),
        "torch": _version("torch"),
        "python": platform.python_version(),
        "commit": _commit(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None  # run from a source tree that is not installed


def _commit() -> str | None:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
