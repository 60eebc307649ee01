"""`shardwise inspect` and `shardwise convert`."""

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from shardwise.checked import write_text
from shardwise.cli.help import HelpFormatter

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def add_parser(subparsers: Any) -> None:
    """Register both commands."""
    parser = subparsers.add_parser(
        "inspect",
        help="show what is in a checkpoint, and whether it is whole",
        description="PATH is a checkpoint, a folder of them, a Hugging Face folder or file\n"
        "(safetensors, .bin), or a folder of torch.distributed.checkpoint. Nothing in it is run.\n"
        "A checkpoint of shardwise is read to its last byte and compared with its checksums.\n"
        "Exit code: 0 whole, 1 damaged, 2 no checkpoint.",
        epilog="examples:\n  shardwise inspect run/checkpoints\n"
        "  shardwise inspect run/checkpoints/step-00000020 --tensors\n"
        "  shardwise inspect llama/model.safetensors.index.json --json contents.json",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("path", metavar="PATH", help="the checkpoint, or the folder of several")
    parser.add_argument(
        "--verify",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="read everything and compare checksums (the default)",
    )
    parser.add_argument("--tensors", action="store_true", help="list every tensor")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write what was found to FILE")
    parser.set_defaults(command=inspect)

    parser = subparsers.add_parser(
        "convert",
        help="convert a checkpoint to or from Hugging Face and torch DCP",
        description="SOURCE is anything that `shardwise inspect` reads. Tensors are converted one\n"
        "after the other. TARGET appears when it is whole. Hugging Face's format holds the model\n"
        "only; DCP's the model, the optimizer and the step.",
        epilog="examples:\n  shardwise convert run/checkpoints llama-trained --to hf --dtype bf16\n"
        "  shardwise convert run/checkpoints for-torch --to dcp\n"
        "  shardwise convert for-torch checkpoints --to shardwise",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="the checkpoint to read")
    parser.add_argument("target", metavar="TARGET", help="the folder to write")
    parser.add_argument("--to", required=True, choices=("shardwise", "dcp", "hf"))
    parser.add_argument(
        "--key-prefix",
        metavar="PREFIX",
        help="what stands before the model's names in the other program's files: taken off when\n"
        "reading them, put before when writing (DCP: 'model.', found by itself when reading)",
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=parse_size,
        default=5 * 10**9,
        help="of one Hugging Face file, like 500MB (default: 5GB)",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, help="write the model's floating tensors in this dtype"
    )
    parser.set_defaults(command=convert)


def parse_size(text: str) -> int:
    """Bytes of `5GB`, `500MB`, `1e6`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * _UNITS[found[2].upper()]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 5GB or 500MB")
    return size


def inspect(arguments: argparse.Namespace) -> None:
    """Show one checkpoint, or the list of a folder's."""
    from shardwise.children import ChildFailed
    from shardwise.interchange.contents import Listed, checkpoints_of, look_into

    found = checkpoints_of(arguments.path)
    if found is None:
        contents = look_into(arguments.path, arguments.verify, _Progress("verified"))
        problems = contents.problems or []
        told: Any = contents.to_json()
        print("\n".join(contents.lines(arguments.tensors)))
    else:
        print(f"{len(found)} checkpoint{'s' * (len(found) > 1)} in {arguments.path}")
        listed = []
        for number, path in enumerate(found):
            listed.append(Listed.of(path, arguments.verify, _Progress("verified")))
            print(listed[-1].line(newest=number == 0), flush=True)
        problems = [problem for each in listed for problem in each.problems or []]
        for problem in problems:
            print(f"  {problem}")
        told = {
            "root": arguments.path,
            "newest": found[0],
            "checkpoints": [
                {"path": e.path, "step": e.step, "bytes": e.nbytes, "finite": e.finite,
                 "verdict": e.verdict, "problems": e.problems}
                for e in listed
            ],
        }  # fmt: skip
    if arguments.json is not None:
        write_text(arguments.json, json.dumps(told, indent=2) + "\n")
    if problems:
        raise ChildFailed(f"{arguments.path} is damaged")


class _Progress:
    """Says on stderr, every two seconds, how far something is."""

    def __init__(self, doing: str) -> None:
        self._doing, self._shown = doing, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        from shardwise.interchange.contents import show_bytes

        if time.monotonic() - self._shown > 2:
            self._shown = time.monotonic()
            text = f"shardwise: {self._doing} {show_bytes(done)} of {show_bytes(total)}"
            print(text, file=sys.stderr, flush=True)


def convert(arguments: argparse.Namespace) -> None:
    """Convert, and say what was written and what was left out."""
    from shardwise.interchange.contents import show_bytes
    from shardwise.interchange.convert import convert as convert_checkpoint

    done = convert_checkpoint(
        arguments.source,
        arguments.target,
        arguments.to,
        key_prefix=arguments.key_prefix,
        max_shard_bytes=arguments.max_shard_size,
        dtype=_DTYPES.get(arguments.dtype),
        progress=_Progress("converted"),
    )
    print(f"{done.path}: {done.tensors} tensors, {show_bytes(done.nbytes)}")
    if done.left_out:
        print(f"left out, since the format has no place for it: {', '.join(done.left_out)}")
