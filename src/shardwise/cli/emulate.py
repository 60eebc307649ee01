"""`shardwise emulate`."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.checked import read_text
from shardwise.cli.help import HelpFormatter
from shardwise.cli.question import check_dtypes
from shardwise.description.workload import MICRO_BATCHES_HELP, parse_micro_batches
from shardwise.errors import UserError, nearest
from shardwise.profiling.results import check_file, print_table

if TYPE_CHECKING:
    import torch

    from shardwise.emulation.engines import Subject
    from shardwise.emulation.networks import NetworkModel
    from shardwise.emulation.run import Job
    from shardwise.planning.plan import Plan

_HELP = """\
This process becomes one rank of the mesh. Its kernels, copies and host are real; its collectives
copy what would arrive and take the time that the cluster's description gives them. So one GPU (or
a CPU, for small models) shows what a step of a large cluster costs, under shardwise and torch.
Values are fabricated: read no loss from it.

reading the table:
  step      milliseconds of one training step, median and spread
  device    the same by the device's clock with the host a step ahead (on a CPU: the host's)
  cpu       until the host has issued it
  free      the same step if communication cost nothing
  exposed   what the compute stream waits for more than over a free network, by its own waits
  counterfactual  the step less the same step over a free network: the same by the clock
  contended  of that, with --occupancy: what the collectives' kernels cost the compute beside them
            On a GPU these are taken with the host a step ahead: a slow host is not in them
  peak      the most memory of the rank, in 1e9 bytes; reserved: what torch's allocator holds (GPU)

--micro-batches: a step of several, as 2 (each of --batch sequences) or 1,2 (sequences of each). In
1,2/2,1 replicas take turns with a large one: collectives across them then wait for the one that
would come last. --sync says when gradients are reduced over them; under scatter_each_reduce_last
replicas meet once in a step, and a late one costs nothing.

--network: modelled (by the cluster's description), free, or bytes/s that every rank sends at.
--check times the emulated collectives themselves against the model (GPU).

examples:
  shardwise emulate --world 128 --mesh 16x8 --cluster h100x8 --model llama8b --plan zero3
  shardwise emulate --mesh 8 --model bench --plan zero3 --engine both --network 100e9
  shardwise emulate --mesh 2x4 --model tiny --plan zero3 --batch 2 --seq 64 --network 1e9
  shardwise emulate --mesh 2x2 --model tiny --plan zero3 --micro-batches 1,4/4,1 \\
      --sync scatter_each_reduce_last
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "emulate",
        help="run one rank of a large cluster on this device, with modelled communication",
        description="Measures a training step of one rank; only the network is emulated.",
        epilog=_HELP,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--model", default="tiny", metavar="NAME",
        help="a preset (tiny, xl, llama8b, ...), or bench: the benchmarks' 0.95 B; default: tiny",
    )  # fmt: skip
    parser.add_argument(
        "--plan", default="zero3", metavar="NAME|FILE",
        help="a strategy, or a Plan that `shardwise plan` wrote; default: %(default)s",
    )  # fmt: skip
    parser.add_argument("--mesh", metavar="RxS", help="replicas x shards, or one number")
    parser.add_argument("--world", type=int, metavar="N", help="ranks; default: the mesh's")
    parser.add_argument(
        "--cluster", default="h100x8", metavar="NAME|FILE", help="default: %(default)s"
    )
    parser.add_argument("--rank", type=int, default=0, metavar="R", help="which one; default: 0")
    parser.add_argument(
        "--engine", choices=("shardwise", "torch", "both"), default="shardwise",
        help="default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--batch", default="1", metavar="N[,N]", help="sequences of this rank; default: 1"
    )
    parser.add_argument("--micro-batches", metavar="N|A,B[/C,D]", help=MICRO_BATCHES_HELP)
    parser.add_argument(
        "--sync", metavar="WHEN", help="each, scatter_each_reduce_last, last; default: each"
    )
    parser.add_argument("--seq", type=int, metavar="N", help="tokens; default: 2048, on a CPU 128")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="timed; default: 10")
    parser.add_argument(
        "--network", default="modelled", metavar="KIND[,KIND]",
        help="modelled, free, or bytes/s; default: %(default)s",
    )  # fmt: skip
    parser.add_argument(
        "--latency", type=float, default=20e-6, metavar="S",
        help="seconds per collective of a --network given as bytes/s; default: 20e-6",
    )  # fmt: skip
    parser.add_argument(
        "--occupancy", type=int, default=0, metavar="N",
        help="GPU: blocks that a collective takes while it moves its data; default: 0",
    )  # fmt: skip
    parser.add_argument("--compute-dtype", metavar="D", help="default: bfloat16, on a CPU its own")
    parser.add_argument("--reduce-dtype", metavar="D", help="default: float32")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every figure here")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="write a profiled step of each engine under it"
    )
    parser.add_argument("--check", action="store_true", help="time the collectives themselves")
    parser.add_argument("--commit", metavar="ID", help="of this code, where git is not there")
    parser.set_defaults(command=emulate)


def emulate(arguments: argparse.Namespace) -> None:
    """Check, run, print, write."""
    import torch

    device = _device(arguments.device)
    plan = _plan(arguments, device)
    _check(arguments, device, plan.world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    _run(arguments, device, plan)


def _check(arguments: argparse.Namespace, device: torch.device, world: int) -> None:
    """Error if an option's value means nothing."""
    if not 0 <= arguments.rank < world:
        raise UserError(f"--rank {arguments.rank}: expected 0 to {world - 1} of {world} ranks")
    check_file("--json", arguments.json)
    out = arguments.out
    if out is not None:
        if not out.parent.is_dir():
            raise UserError(f"--out {out}: there is no folder {out.parent}")
        try:
            out.mkdir(exist_ok=True)
        except OSError as error:
            raise UserError(f"--out {out}: {error.strerror}") from error
    for name in ("steps", "seq"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} must be at least 1, got {value}")
    if arguments.occupancy < 0 or (arguments.occupancy and device.type != "cuda"):
        raise UserError(
            f"--occupancy {arguments.occupancy} on {device.type}: expected a number of blocks of a "
            "GPU, at least 0"
        )


def _run(arguments: argparse.Namespace, device: torch.device, plan: Plan) -> None:
    from shardwise.emulation import run as runner
    from shardwise.emulation.check import check
    from shardwise.emulation.engines import ENGINES, check_torch
    from shardwise.profiling.results import write_json
    from shardwise.profiling.timing import describe_environment

    engines = ENGINES if arguments.engine == "both" else (arguments.engine,)
    if "torch" in engines:
        check_torch(plan)
    length = arguments.seq or (2048 if device.type == "cuda" else 128)
    subjects = _subjects(arguments, length)
    networks = [(name, _network(name, arguments)) for name in arguments.network.split(",")]
    runner.check_memory(plan, subjects[0], device)
    environment = describe_environment(arguments.commit)
    rows: list[dict[str, Any]] = []
    with runner.joined(arguments.rank, plan.world):
        if arguments.check:
            rows += check(device, networks)
            shown = [[column.show(row) for column in _CHECKED] for row in rows]
            _print_shown("emulated collectives against the clock", _CHECKED, shown, width=110)
        for subject, (name, network) in itertools.product(subjects, networks):
            job = runner.Job(
                subject, plan, arguments.rank, device, network, name, arguments.steps,
                arguments.occupancy,
            )  # fmt: skip
            figures = runner.run(job, engines, _say)
            _print_figures(job, figures)
            rows += [_facts(job, arguments) | row for row in figures]
            if arguments.out is not None:
                _profile(job, engines, arguments.out, arguments.cluster)
    if arguments.json is not None:
        command = "shardwise " + shlex.join(sys.argv[1:])
        write_json(arguments.json, environment, command, rows)
        print(f"{arguments.json} written")


def _device(wanted: str) -> torch.device:
    import torch

    there = torch.cuda.is_available()
    if wanted == "cuda" and not there:
        raise UserError("--device cuda: there is no CUDA device here; use --device cpu")
    return torch.device("cuda", 0) if there and wanted != "cpu" else torch.device("cpu")


def _plan(arguments: argparse.Namespace, device: torch.device) -> Plan:
    """The Plan asked for. A zero strategy on a mesh with replicas is hsdp over it."""
    from shardwise.planning.plan import Plan
    from shardwise.planning.strategies import NAMES

    check_dtypes(arguments)
    compute = arguments.compute_dtype or ("bfloat16" if device.type == "cuda" else None)
    reduce = arguments.reduce_dtype or "float32"
    mesh = arguments.mesh or arguments.world
    try:
        if arguments.plan not in NAMES:
            path = Path(arguments.plan)
            if not path.is_file():
                raise UserError(
                    f"--plan {path} is no file, and no strategy{nearest(str(path), NAMES)}"
                )
            plan = Plan.from_json(read_text(path, "plan"))
            if arguments.sync is not None:
                plan = dataclasses.replace(plan, sync=arguments.sync)
        elif mesh is None:
            raise UserError("--mesh or --world is needed, as in: --world 128 --mesh 16x8")
        else:
            settings: dict[str, Any] = {"compute_dtype": compute, "reduce_dtype": reduce}
            settings["sync"] = arguments.sync or "each"
            name = arguments.plan
            parts = str(mesh).lower().split("x")
            if name.startswith("zero") and len(parts) == 2 and parts[0].strip() != "1":
                name, settings["inner"] = "hsdp", name
            plan = Plan.of(name, mesh, **settings)
    except (ValueError, TypeError) as error:
        raise UserError(f"--plan {arguments.plan}: {error}") from error
    if arguments.world is not None and plan.world != arguments.world:
        raise UserError(
            f"mesh {plan.replicate}x{plan.shard} has {plan.world} ranks, but --world is "
            f"{arguments.world}: give a --mesh whose product is {arguments.world}"
        )
    return plan


def _subjects(arguments: argparse.Namespace, length: int) -> list[Subject]:
    from shardwise.emulation.engines import Subject

    batches, text = _batches(arguments.batch), arguments.micro_batches
    if text is None:
        return [Subject(arguments.model, batch, length) for batch in batches]
    found = [
        Subject(arguments.model, batch, length, parse_micro_batches(text, batch))
        for batch in batches
    ]
    if not text.strip().isdigit() and arguments.batch != "1":
        raise UserError(
            f"--batch {arguments.batch} and --micro-batches {text} both give sequences: leave "
            "--batch out, or give how many micro-batches there are"
        )
    return found


def _batches(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UserError(f"--batch {text}: expected a number of sequences, or several as 4,1")
    return [int(part) for part in parts]


def _network(name: str, arguments: argparse.Namespace) -> NetworkModel:
    from shardwise.description.cluster import Cluster
    from shardwise.emulation.networks import ClusterNetwork, Network

    if name == "free":
        return Network()
    if name == "modelled":
        return ClusterNetwork(Cluster.load(arguments.cluster))
    try:
        return Network(float(name), arguments.latency, shared=True)
    except ValueError as error:
        raise UserError(
            f"--network {name}: expected modelled, free, or bytes/s such as 300e9 ({error})"
        ) from error


def _facts(job: Job, arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "model": job.subject.name,
        "batch": job.subject.batch,
        "micro_batches": job.subject.rows,
        "sync": job.plan.sync,
        "sequence": job.subject.length,
        "plan": job.plan.title,
        "mesh": list(job.plan.mesh),
        "rank": job.rank,
        "compute_dtype": job.plan.compute_dtype or "float32",
        "reduce_dtype": job.plan.reduce_dtype or "float32",
        "network": f"emulated: {job.network_name}",
        "cluster": arguments.cluster if job.network_name == "modelled" else None,
        "latency_s": arguments.latency if job.network_name not in ("modelled", "free") else None,
        "occupancy": job.occupancy,
        "device": str(job.device),
        "steps": job.steps,
    }


class _Column(NamedTuple):
    """A column of a table: what it shows of a row, in which form (words have none) and unit."""

    title: str
    key: str
    form: str = ""
    unit: float = 1
    spread: str = ""  # the key of its spread

    def show(self, row: dict[str, Any]) -> str:
        value = row[self.key]
        if value is None:
            return "-"
        if not self.form:
            return str(value)
        spread = f" +-{row[self.spread] / self.unit:{self.form}}" if self.spread else ""
        return f"{value / self.unit:{self.form}}{spread}"

    def compare(self, ours: dict[str, Any], theirs: dict[str, Any]) -> str:
        if self.key == "collectives":
            return ""
        first, second = ours[self.key] or 0, theirs[self.key] or 0
        return f"{first / second:.2f}" if second > 0 else "-"


_FIGURES = (
    _Column("engine", "engine"),
    _Column("step ms", "step_ms", ".1f", spread="step_spread_ms"),
    _Column("device ms", "device_ms", ".1f"),
    _Column("cpu ms", "cpu_ms", ".1f"),
    _Column("free ms", "free_step_ms", ".1f"),
    _Column("exposed", "exposed_ms", ".2f", spread="exposed_spread_ms"),
    _Column("counterfactual", "counterfactual_ms", ".2f", spread="counterfactual_spread_ms"),
    _Column("contended", "contention_ms", ".2f"),
    _Column("peak GB", "peak_bytes", ".2f", unit=1e9),
    _Column("reserved", "reserved_bytes", ".2f", unit=1e9),
    _Column("calls", "collectives", ".0f"),
)
_CHECKED = (
    _Column("network", "network"),
    _Column("collective", "check"),
    _Column("device", "device"),
    _Column("MiB", "bytes", ".0f", unit=2**20),
    _Column("modelled us", "modelled_us", ".1f"),
    _Column("taken us", "taken_us", ".1f"),
    _Column("error", "error", "+.1%"),
    _Column("worst", "worst_error", "+.1%"),
)


def _print_figures(job: Job, rows: list[dict[str, Any]]) -> None:
    columns = [column for column in _FIGURES if job.occupancy or column.title != "contended"]
    shown = [[column.show(row) for column in columns] for row in rows]
    if len(rows) == 2:
        shown.append(["ratio", *(column.compare(*rows) for column in columns[1:])])
    plan, subject = job.plan, job.subject
    title = (
        f"{subject.name}, {subject.tokens}, {plan.title}, rank "
        f"{job.rank} of {plan.replicate}x{plan.shard}; network emulated: {job.network_name}"
    )
    _print_shown(title, columns, shown, width=130)


def _print_shown(title: str, columns: Sequence[_Column], rows: list[list[str]], width: int) -> None:
    words = [column.title for column in columns if not column.form]
    print_table(title, [column.title for column in columns], rows, {}, words, width)


def _profile(job: Job, engines: tuple[str, ...], out: Path, cluster: str) -> None:
    """One directory per engine that `shardwise report` reads."""
    from shardwise.emulation.run import profile

    name = cluster if job.network_name == "modelled" else ""
    subject = f"{job.subject.name}-{job.subject.batch}x{job.subject.length}-{job.network_name}"
    for engine in engines:
        directory = out / f"{engine}-{subject}"
        profile(job, engine, directory, name)
        print(f"{directory} written")


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
