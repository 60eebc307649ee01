"""`shardwise calibrate`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwise.cli.help import HelpFormatter

_HELP = """\
Measures matrix products by shape and dtype, attention by length, convolutions, memory bandwidth and
what norms, sums, casts and other movers of memory make of it, the collectives of gloo ranks that it
starts itself, and what the host takes to issue work. Under torchrun its ranks are used; on several
hosts collectives are measured inside a host, between hosts, and over all ranks.
The file has the median of each figure with its interquartile range (`spread`) and its source, and
is a cluster that `shardwise plan --cluster FILE.toml` reads. Run it while nothing else runs.

examples:
  shardwise calibrate --out mine.toml
  shardwise calibrate --ranks 4 --out four.toml
  torchrun --nnodes 2 --nproc-per-node 2 ... -m shardwise.cli calibrate --device cpu --out two.toml
  shardwise calibrate --device cuda --links h100x8 --out node.toml
  shardwise calibrate --busy --out mine.toml        other work goes on beside it
  shardwise calibrate --quick --out trial.toml      every path in seconds; its figures mean little
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "calibrate",
        help="measure this machine and write a cluster file",
        description="Measures this machine and writes a cluster file for planning.",
        epilog=_HELP,
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.toml")
    parser.add_argument("--name", help="of the cluster; default: the file's name")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto",
        help="auto: cuda where there is one (default)",
    )  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="CPU ranks to start (default: 2)")
    parser.add_argument(
        "--links", default="h200x8", metavar="CLUSTER",
        help="with cuda: the cluster whose links to take (default: h200x8)",
    )  # fmt: skip
    parser.add_argument(
        "--busy", action="store_true",
        help="the quickest of many short samples instead of medians, for a machine that is busy",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a trial run")
    parser.set_defaults(command=calibrate)


def calibrate(arguments: argparse.Namespace) -> None:
    """Check the choices, measure, write the file, read it back, print what it says."""
    from shardwise.description.cluster import Cluster
    from shardwise.errors import UserError
    from shardwise.profiling.results import check_file
    from shardwise.trainer.launch import joined

    out: Path = arguments.out
    if out.suffix != ".toml":
        raise UserError(f"--out {out}: a cluster file ends in .toml")
    check_file("--out", out)
    started = joined()
    if started and arguments.ranks is not None:
        raise UserError("--ranks: torchrun has started the ranks already; leave it out")
    ranks = 2 if arguments.ranks is None else arguments.ranks
    if ranks < 1:
        raise UserError(f"--ranks is {arguments.ranks}, expected at least 1")
    Cluster.load(arguments.links)  # an unknown name is told before anything is measured

    # Only now: this imports torch.
    import torch

    from shardwise.calibration.calibrate import calibrate as measure
    from shardwise.description.cluster_toml import write_cluster

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: this machine has no CUDA device; use --device cpu")
    if device == "cuda" and started:
        raise UserError(
            "on a GPU one device is measured, without torchrun; for torchrun's gloo ranks give "
            "--device cpu"
        )
    first = not started or os.environ["RANK"] == "0"
    if first and not arguments.busy:
        _warn_if_busy()
    with _progress() as tell:
        calibrated = measure(
            arguments.name or out.stem,
            device=device,
            ranks=ranks,
            links=arguments.links,
            quick=arguments.quick,
            busy=arguments.busy,
            tell=tell,
        )
    if not first:
        return
    out.write_text(write_cluster(calibrated.cluster, calibrated.spreads), encoding="utf-8")
    print(summarize(Cluster.load(out), calibrated.spreads))
    print(f"wrote {out}")


def _warn_if_busy() -> None:
    """Other work on the machine makes every figure too slow."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 4:
        print(
            f"shardwise: the machine is busy (load {load:.1f} on {cores} cores), so the figures "
            "will be too slow; measure again when it is quiet, or with --busy",
            file=sys.stderr,
        )


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that says what is measured now, and for how long; plain lines without a terminal."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda text: console.print(f"measuring {text}")
        return
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as live:
        task = live.add_task("starting")
        yield lambda text: live.update(task, description=f"measuring {text}")


def summarize(cluster: Any, spreads: dict[str, float]) -> str:
    """The measured cluster in a few lines."""

    def show(key: str, value: float, unit: str, scale: float) -> str:
        bar = f" +- {spreads[key] / scale:,.2f}" if key in spreads else ""
        return f"{value / scale:,.2f}{bar} {unit}"

    device, host = cluster.device, cluster.host
    copy = show("device.bandwidth_bytes_per_s", device.bandwidth_bytes_per_s, "GB/s", 1e9)
    lines = [f"{cluster.name}: {device.name}"]
    for rate in device.matmul:
        key = f"device.matmul.{rate.dtype}.peak"
        lines.append(f"  best {rate.dtype} product      {show(key, rate.peak, 'GFLOP/s', 1e9)}")
        key = f"device.matmul.{rate.dtype}.convolution_fraction"
        share = show(key, rate.convolution_fraction, "of a product's rate", 1.0)
        lines.append(f"  {rate.dtype} convolutions      {share}")
    lines.append(f"  memory, read and written  {copy}")
    for level in cluster.levels:
        rate = level.bandwidth_bytes_per_s / 1e9
        lines.append(f"  {level.name}: {rate:,.2f} GB/s, {len(level.points)} measured points")
    for name, key, seconds in (
        ("operator", "host.op_s", host.op_s),
        ("unit", "host.unit_s", host.unit_s),
        ("cast", "host.cast_s", host.seconds_to_cast),
    ):
        lines.append(f"  host, one {name:<16}{show(key, seconds, 'us', 1e-6)}")
    return "\n".join(lines)
