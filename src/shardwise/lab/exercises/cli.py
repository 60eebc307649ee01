"""`shardwise bench forward-backward`, `memory`, `compile` and `overlap`: seed 004's exercises; and
`ffn`, what the prediction of seed 000 starts from.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from shardwise.errors import UserError, nearest
from shardwise.lab.exercises.seed004 import MODELS
from shardwise.profiling.results import check_file

_PRECISIONS = ("fp32", "bf16")
_PARTS = ("model", "attention")
_SCOPES = ("whole", "blocks")
_REDUCES = ("naive", "overlap", "bucketed")

_FORWARD_BACKWARD = """\
Each model and precision runs in a process of its own, so that its first step is a first step. w
steps of warm-up means that the first w are left out of the mean and standard deviation.

precisions:
  fp32   everything in fp32, without tf32
  bf16   fp32 weights under autocast, as in mixed precision

The tables are those of the document that this project started from; its figures stand beside, with
the hardware that it names.

examples:
  shardwise bench forward-backward --json times.json
  shardwise bench forward-backward --sizes small,2.7b --precision bf16 --warmup 0,5
  shardwise bench forward-backward --quick        every path in seconds; its figures mean nothing
"""
_MEMORY = """\
modes, each measured at every context:
  inference   forward without autograd
  forward     forward with the activations kept for backward, as the document measured it
  step        two whole steps from a fresh optimizer: the first makes the moments after the
              activations are gone; the second has both, and is what training needs

Names and curves come from torch's profiler: modules and operators for activations, parameters for
gradients and moments. They are kept of the largest model at every context, of the others at the
longest.

examples:
  shardwise bench memory --json memory.json --plot memory.svg
  shardwise bench memory --sizes 2.7b --contexts 128 --precision fp32
  shardwise bench memory --attention fused        one kernel instead of scores and softmax
"""
_COMPILE = """\
parts:
  model       the language models: forward, backward, optimizer, eager and compiled
  attention   attention alone at the document's shapes (its tables 4 and 5)

scopes of a model:
  whole    torch.compile of the model, as in the document's table 6
  blocks   torch.compile of each block: one compilation serves all of them

What the first forward and backward take, compilation included, is reported apart. With --jobs,
models compile at the same time (each compile time is then that of a busy machine); steps are timed
one model after another in any case. Compiled and eager losses must agree, else nothing is timed.

examples:
  shardwise bench compile --json compile.json
  shardwise bench compile --sizes small --scopes blocks
  shardwise bench compile --parts model --jobs 5 --json compile.json --resume
"""
_OVERLAP = """\
One process is a rank of an emulated group: collectives take the modelled time beside compute. The
pictures show compute and communication of one step by `Plan.of("ddp", reduce=...)`:
  naive      one all-reduce per tensor after backward, one at a time
  overlap    each tensor's all-reduce starts in backward as soon as its gradient is there
  bucketed   the same with neighbouring tensors in one message

Default: the XL model on 2 ranks joined by 117 GB/s, which is what the document's 0.0681 s for its
8 GB of gradients mean. The values are fabricated, the times are measured.

examples:
  shardwise bench overlap --json overlap.json --plot overlap.svg
  shardwise bench overlap --size small --bandwidth 5 --reduce naive,bucketed
"""
_FFN = """\
8 gated feed-forward layers of 4096 x 14336 in fp32, 4,096 tokens a sequence: forward and backward
of a micro-batch of 1 and of 2 sequences, in turn. `shardwise bench accuracy` predicts the steps of
the document's four GPUs from these two times. About half a minute on an H200, 30 GB.

examples:
  shardwise bench ffn --json ffn.json
  shardwise bench ffn --quick             every path in seconds; its figures mean nothing
"""


def add_parsers(kinds: Any) -> None:
    """Register the benchmarks."""
    parser = _add(
        kinds, "forward-backward", "forward, backward and optimizer times by model size",
        "Times the parts of training steps: sizes small to 2.7b, fp32 and mixed precision, by "
        "warm-up.", _FORWARD_BACKWARD, forward_backward,
    )  # fmt: skip
    _add_models(parser, "fp32,bf16")
    parser.add_argument(
        "--warmup", default="0,1,2,5", metavar="A,B", help="steps left out; default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="default: %(default)s")

    parser = _add(
        kinds, "memory", "peak memory of a pass and of a step, and what holds it",
        "Measures peak memory and names the largest allocations.", _MEMORY, memory,
    )  # fmt: skip
    _add_models(parser, "fp32,bf16")
    parser.add_argument(
        "--contexts", default="128,256,512", metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the curves here (SVG)")

    parser = _add(
        kinds, "compile", "torch.compile against eager: models and attention",
        "Compares compiled with eager execution.", _COMPILE, compile_,
    )  # fmt: skip
    _add_models(parser, "fp32")
    parser.add_argument(
        "--parts", default=",".join(_PARTS), metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument(
        "--scopes", default=",".join(_SCOPES), metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="models that compile at once; default: 1"
    )

    parser = _add(
        kinds, "overlap", "pictures of naive against overlapped data parallel",
        "Measures one step of data parallel and draws its streams.", _OVERLAP, overlap,
    )  # fmt: skip
    parser.add_argument("--size", metavar="NAME", help="default: xl; without a CUDA device: small")
    parser.add_argument(
        "--reduce", default=",".join(_REDUCES), metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--bandwidth", type=float, default=117.0, metavar="GB/S", help="default: %(default)s"
    )
    parser.add_argument(
        "--latency", type=float, default=30.0, metavar="US", help="default: %(default)s"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the streams here (SVG)")

    parser = _add(
        kinds, "ffn", "a micro-batch of seed 000's feed-forward stack on one device",
        "Times forward and backward of the feed-forward stack.", _FFN, ffn,
    )  # fmt: skip
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="default: %(default)s")


def _add(
    kinds: Any, name: str, summary: str, description: str, epilog: str, command: Any
) -> argparse.ArgumentParser:
    parser = kinds.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures here")
    parser.add_argument("--budget", type=float, metavar="S", help="start no row after S seconds")
    parser.add_argument("--resume", action="store_true", help="keep the rows that FILE has")
    parser.add_argument("--quick", action="store_true", help="tiny models: a trial run")
    parser.add_argument(
        "--commit", metavar="ID", help="what to record where the code is not in its repository"
    )
    parser.set_defaults(command=command)
    return parser


def _add_models(parser: argparse.ArgumentParser, precisions: str) -> None:
    parser.add_argument(
        "--sizes",
        metavar="A,B",
        help=f"of {', '.join(MODELS)}; default: all; without a CUDA device: small",
    )
    parser.add_argument(
        "--precision", default=precisions, metavar="A,B", help="default: %(default)s"
    )
    parser.add_argument(
        "--attention",
        choices=["plain", "fused"],
        default="plain",
        help="scores and softmax as tensors, as in the document, or torch's fused kernel",
    )


def forward_backward(arguments: argparse.Namespace) -> None:
    """Check the choices, then measure."""
    sizes, precisions = _check_models(arguments)
    warmups = _numbers(arguments.warmup, "--warmup", least=0)
    _check_least("--steps", arguments.steps)

    from shardwise.lab.exercises.forward_backward import run

    run(arguments, sizes, precisions, warmups, _command(arguments))


def memory(arguments: argparse.Namespace) -> None:
    """Check the choices, then measure."""
    sizes, precisions = _check_models(arguments)
    contexts = _numbers(arguments.contexts, "--contexts", least=1)
    check_file("--plot", arguments.plot)

    from shardwise.lab.exercises.memory import run

    run(arguments, sizes, precisions, contexts, _command(arguments))


def compile_(arguments: argparse.Namespace) -> None:
    """Check the choices, then measure."""
    sizes, precisions = _check_models(arguments)
    parts = _names(arguments.parts, "part", _PARTS)
    scopes = _names(arguments.scopes, "scope", _SCOPES)
    _check_least("--steps", arguments.steps)
    _check_least("--jobs", arguments.jobs)

    from shardwise.lab.exercises.compiling import run

    run(arguments, sizes, precisions, parts, scopes, _command(arguments))


def overlap(arguments: argparse.Namespace) -> None:
    """Check the choices, then measure."""
    if arguments.size is not None:
        _names(arguments.size, "size", tuple(MODELS))
    reduces = _names(arguments.reduce, "reduce", _REDUCES)
    if arguments.ranks < 2:
        raise UserError(f"--ranks is {arguments.ranks}, expected at least 2")
    if not arguments.bandwidth > 0:
        raise UserError(f"--bandwidth is {arguments.bandwidth}, expected GB/s above 0")
    if not arguments.latency >= 0:
        raise UserError(f"--latency is {arguments.latency}, expected microseconds, at least 0")
    check_file("--json", arguments.json)
    check_file("--plot", arguments.plot)

    from shardwise.lab.exercises.overlap import run

    run(arguments, reduces, _command(arguments))


def ffn(arguments: argparse.Namespace) -> None:
    """Check the choices, then measure."""
    _check_least("--steps", arguments.steps)
    check_file("--json", arguments.json)

    from shardwise.lab.exercises.ffn import run

    run(arguments, _command(arguments))


def _check_models(
    arguments: argparse.Namespace,
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    check_file("--json", arguments.json)
    sizes = None
    if arguments.sizes is not None:
        sizes = _names(arguments.sizes, "size", tuple(MODELS))
    return sizes, _names(arguments.precision, "precision", _PRECISIONS)


def _names(text: str, what: str, valid: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in valid:
            raise UserError(f"unknown {what} {name!r}{nearest(name, valid)}")
    return names


def _numbers(text: str, option: str, least: int) -> tuple[int, ...]:
    try:
        numbers = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise UserError(f"{option} is {text!r}, expected whole numbers such as 1,2,5") from None
    _check_least(option, numbers[0], least)
    return numbers


def _check_least(option: str, value: int, least: int = 1) -> None:
    if value < least:
        raise UserError(f"{option} is {value}, expected at least {least}")


def _command(arguments: argparse.Namespace) -> str:
    """The command as typed. A result is read on other machines, where its folder says nothing."""
    paths = (arguments.json, getattr(arguments, "plot", None))
    names = {str(path): path.name for path in paths if path is not None}
    return " ".join(["shardwise", *(names.get(word, word) for word in sys.argv[1:])])
