"""What a benchmark is: its row in the catalog, and the options that many of them share."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.lab.exercises.seed004 import MODELS
from shardwise.lab.options import Option, count, file, flag, list_names

# The documents that this project started from, by the titles that users see.
DOCUMENTS = {
    "hsdp": "HSDP for inhomogeneity (a gist)",
    "grouped": "grouped FSDP in MLX (a change request)",
    "buckets": "capped FSDP buckets (a change request)",
    "lecture": "a lecture on FSDP",
    "assignment": "an assignment on systems",
    "own": "the project's own",
}


@dataclass(frozen=True)
class Benchmark:
    """One row of the catalog. Its module has `run(arguments)`."""

    name: str
    summary: str
    description: str
    module: str  # in `shardwise.lab`
    options: tuple[Option, ...]
    epilog: str = ""
    document: str = "own"  # of DOCUMENTS: where its table comes from


JSON = file("--json", "write all figures here")
PLOT = file("--plot", "draw the figures here (SVG)")
QUICK = flag("--quick", "every path in seconds: small, few, and not to be quoted")
COMMIT = Option(
    "--commit",
    {"metavar": "ID", "help": "what to record where the code is not in its repository"},
)
ROWS = (  # of every benchmark that is measured row by row
    JSON,
    PLOT,
    Option("--budget", {"type": float, "metavar": "S", "help": "start no row after S seconds"}),
    flag("--resume", "keep the rows that FILE has; with --plot and no GPU, only draw a GPU's"),
    QUICK,
    COMMIT,
)
STEPS = count("--steps", 10)


def models(precisions: str) -> tuple[Option, ...]:
    """Of the benchmarks of whole language models."""
    help = f"of {', '.join(MODELS)}; default: all; without a CUDA device: small"
    attention = "scores and softmax as tensors, as in the document, or torch's fused kernel"
    return (
        list_names("--sizes", "size", MODELS, None, help),
        list_names("--precision", "precision", ("fp32", "bf16"), precisions),
        Option(
            "--attention", {"choices": ["plain", "fused"], "default": "plain", "help": attention}
        ),
    )
