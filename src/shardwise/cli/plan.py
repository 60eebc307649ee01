"""`shardwise plan`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

from shardwise.checked import Bound, check_bounds
from shardwise.description.workload import MICRO_BATCHES_HELP, Workload, parse_micro_batches
from shardwise.errors import UserError, nearest
from shardwise.profiling.results import check_file, open_console, print_table

if TYPE_CHECKING:
    from shardwise.predict.ranking import Candidate, Ranking

_HELP = """\
A plan says how a model is trained in parallel: the mesh (replicas x shards), which parameters
travel together, and what is kept, gathered ahead and reduced when. This command tries the
strategies, meshes, micro-batch sizes and settings, drops what does not fit in memory, simulates one
step of the rest on all ranks, and ranks them by step time.

reading the table:
  step      predicted milliseconds of one optimizer step; the fastest plan is first
  peak      the most memory of a rank, in 1e9 bytes, and what is to spare
  exposed   communication during which compute stands still: sharding more adds to it
  contention  what communication kernels cost the compute they run beside
  host      the device waits for the host: too many small units

--what-if KEY=VALUE asks the same question of a changed world, and shows both answers; the plan that
is written is the first one's. Keys:
  sequence=8192  world=64  tokens=4194304     the work and the ranks
  model=llama8b  cluster=h200x8               another model, other machines
  compute_dtype=float32  reduce_dtype=...     the precision
  budget_gb=40                                the memory a rank may use
  nvlink=x0.5  infiniband=100e9               a link's bytes/s, or a multiple of it
  contention=0  memory_gb=141                 what communication takes of compute; the device

--micro-batches fixes how a rank's sequences are split: 2, or sequences of each as 1,2; of replicas
that have large ones in turn, 1,2/2,1. Those wait for each other, unless sync lets them meet once.

--exercise NAME shows a worked example of planning on paper.

examples:
  shardwise plan --model xl --cluster h100x8 --tokens 131072
  shardwise plan --model llama8b --world 64 --tokens 1048576 --what-if infiniband=x2
  shardwise plan --model llama8b --cluster h200x8 --tokens 65536 --budget-gb 60 --out plan.json
  shardwise plan --model tiny --cluster cpu-gloo --world 2 --tokens 2048 --sequence 128
  shardwise plan --model llama8b --world 16 --sequence 4096 --micro-batches 1,4/4,1
The output ends with the command that trains under the plan.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "plan",
        help="find the fastest plan that fits, before anything runs",
        description="Predicts step time and memory of many plans and writes the best one.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        help="tiny, small, medium, large, xl, 2.7b, llama1b, llama8b, llama70b, llama405b, xxl, "
        "ffn8",
    )
    parser.add_argument(
        "--cluster",
        default="h100x8",
        metavar="NAME|FILE",
        help="v100x8, a100x8, h100x8, h200x8, h200x8-measured, b200x8, tpu-v5p, cpu-gloo, or a "
        "file that `shardwise calibrate` wrote; default: %(default)s",
    )
    parser.add_argument("--world", type=int, metavar="N", help="ranks; default: one node")
    parser.add_argument("--tokens", type=int, metavar="N", help="of one step, all ranks together")
    parser.add_argument("--sequence", type=int, default=2048, metavar="N", help="default: 2048")
    parser.add_argument(
        "--micro-batches",
        metavar="N|A,B[/C,D]",
        help=f"{MICRO_BATCHES_HELP}, and then no --tokens; default: the best",
    )
    parser.add_argument(
        "--compute-dtype",
        metavar="D",
        help="default: bfloat16, or float32 where that is quicker (a CPU)",
    )
    parser.add_argument("--reduce-dtype", metavar="D", help="of gradients; default: float32")
    parser.add_argument("--budget-gb", type=float, metavar="X", help="memory of a rank, 1e9 bytes")
    parser.add_argument("--strategies", metavar="A,B", help="only these; default: all")
    parser.add_argument("--top", type=int, default=8, metavar="N", help="rows; default: 8")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("plan.json"),
        metavar="FILE",
        help="write the best plan here; default: %(default)s",
    )
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write its step for Perfetto")
    parser.add_argument(
        "--what-if",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="ask again of a changed world, see below; may be repeated",
    )
    parser.add_argument("--exercise", metavar="NAME", help="a worked example; `list` names them")
    parser.set_defaults(command=plan)


Count = Annotated[int, Bound("a whole number of at least 1", lambda n: n >= 1)]
Gigabytes = Annotated[float, Bound("a number above 0, in 1e9 bytes", lambda n: 0 < n < math.inf)]
_CONTENTION = "the share of compute that communication takes: at least 0 and below 1"


@dataclasses.dataclass(frozen=True)
class Question:
    """What is planned."""

    model: str
    cluster: str
    world: Count | None
    tokens: Count | None
    sequence: Count
    compute_dtype: str | None
    reduce_dtype: str | None
    budget_gb: Gigabytes | None
    memory_gb: Gigabytes | None = None
    contention: Annotated[float | None, Bound(_CONTENTION, lambda n: 0 <= n < 1)] = None
    links: tuple[tuple[str, str], ...] = ()
    strategies: tuple[str, ...] = ("ddp", "zero1", "zero2", "zero3", "hsdp")
    micro_batches: str | None = None

    def __post_init__(self) -> None:
        from shardwise.planning.plan import DTYPES

        check_bounds(self, error=UserError)
        for name in ("compute_dtype", "reduce_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                raise UserError(f"--{name.replace('_', '-')} {value!r}{nearest(value, DTYPES)}")

    def changed(self, assignments: list[str]) -> Question:
        """The question with every KEY=VALUE applied; unknown keys are links' names."""
        values: dict[str, Any] = {}
        links = list(self.links)
        kinds = _types_by_key()
        for text in assignments:
            key, equals, value = text.partition("=")
            key = "sequence" if key == "seq" else key
            if not (key and equals and value):
                raise UserError(f"--what-if {text}: expected KEY=VALUE, such as sequence=8192")
            if key not in kinds:
                links.append((key, value))
                continue
            try:
                values[key] = kinds[key](value)
            except ValueError as error:
                kind = "a whole number" if kinds[key] is int else "a number"
                raise UserError(
                    f"--what-if {text}: expected {kind}; several changes are given as "
                    f"--what-if {key}=... --what-if ..."
                ) from error
        try:
            return dataclasses.replace(self, links=tuple(links), **values)
        except UserError as error:
            raise UserError(f"--what-if {', '.join(assignments)}: {error}") from error

    def load_cluster(self) -> Any:
        from shardwise.description.cluster import Cluster

        cluster = Cluster.load(self.cluster)
        for name, value in self.links:
            names = [level.name for level in cluster.levels]
            if name not in names:
                valid = (*names, *_types_by_key())
                raise UserError(f"--what-if: unknown key {name!r}{nearest(name, valid)}")
            levels = tuple(
                _with_bandwidth(level, value) if level.name == name else level
                for level in cluster.levels
            )
            cluster = dataclasses.replace(cluster, levels=levels)
        if self.memory_gb is not None:
            device = dataclasses.replace(cluster.device, memory_bytes=self.memory_gb * 1e9)
            cluster = dataclasses.replace(cluster, device=device)
        if self.contention is not None:
            cluster = dataclasses.replace(cluster, communication_share_of_compute=self.contention)
        return cluster

    def check(self) -> tuple[Any, int, Workload]:
        """The cluster, the ranks and the work of one: wrong input is told before a search."""
        from shardwise.description.preset import load_preset

        load_preset(self.model)
        cluster = self.load_cluster()
        world = self.world or cluster.ranks_per_node or 1
        return cluster, world, self._work_on(world)

    def _work_on(self, world: int) -> Workload:
        """Of a rank; its split into micro-batches is free unless they are given."""
        text = self.micro_batches
        if text is not None and not text.strip().isdigit():
            sizes = parse_micro_batches(text)
            if world % len(sizes):
                raise UserError(
                    f"--micro-batches {text} is for {len(sizes)} kinds of replicas, which do not "
                    f"divide {world} ranks"
                )
            sequences = sum(map(sum, sizes)) * world // len(sizes)
            if self.tokens not in (None, sequences * self.sequence):
                raise UserError(
                    f"--micro-batches {text} are {sequences * self.sequence} tokens a step on "
                    f"{world} ranks, and --tokens is {self.tokens}: leave --tokens out"
                )
            return Workload.uneven(self.sequence, sizes)
        if self.tokens is None:
            raise UserError("--tokens is needed, as in: --model xl --tokens 131072")
        per_rank = self._sequences_of_a_rank(self.tokens, world)
        if text is None:
            return Workload(self.sequence, per_rank)
        batch, rest = divmod(per_rank, int(text))
        if rest or not batch:
            raise UserError(
                f"--micro-batches {text} do not divide the {per_rank} sequences of a rank"
            )
        return Workload.uneven(self.sequence, parse_micro_batches(text, batch))

    def _sequences_of_a_rank(self, tokens: int, world: int) -> int:
        least = world * self.sequence
        per_rank, rest = divmod(tokens, least)
        if rest or per_rank < 1:
            raise UserError(
                f"{tokens} tokens a step do not divide into sequences of {self.sequence} on "
                f"{world} ranks: give --tokens as a multiple of {least}, such as "
                f"{max(1, round(tokens / least)) * least}"
            )
        return per_rank

    def answer(self) -> Ranking:
        from shardwise.predict.search import search

        cluster, world, workload = self.check()
        try:
            return search(
                self.model,
                cluster,
                workload,
                self.budget_gb,
                world=world,
                compute_dtype=self.compute_dtype,
                reduce_dtype=self.reduce_dtype,
                strategies=self.strategies,
            )
        except ValueError as error:
            raise UserError(f"{self.model} on {self.cluster}: {error}") from error


def _types_by_key() -> dict[str, Any]:
    """What --what-if can change beside the links: int, float or str, each by its key."""
    hints = get_type_hints(Question)
    del hints["links"], hints["strategies"]
    return {name: (*get_args(hint), hint)[0] for name, hint in hints.items()}


def _with_bandwidth(level: Any, value: str) -> Any:
    """A link with another bandwidth, and without the points that were measured at the old one."""
    try:
        bandwidth = (
            level.bandwidth_bytes_per_s * float(value[1:]) if value[0] == "x" else float(value)
        )
        return dataclasses.replace(level, bandwidth_bytes_per_s=bandwidth, points=())
    except ValueError as error:
        raise UserError(
            f"--what-if {level.name}={value}: expected bytes/s, such as 100e9, or a factor, such "
            f"as x2 ({error})"
        ) from error


def plan(arguments: argparse.Namespace) -> None:
    """Answer, print, write."""
    if arguments.exercise is not None:
        _show_exercise(arguments.exercise)
        return
    if arguments.model is None:
        raise UserError("--model is needed, as in: --model xl --tokens 131072")
    if arguments.top < 1:
        raise UserError(f"--top {arguments.top}: expected at least 1 row")
    check_file("--out", arguments.out)
    check_file("--trace", arguments.trace)
    question = _question(arguments)
    changed = question.changed(arguments.what_if)
    question.check()
    changed.check()
    ranking = question.answer()
    if not len(ranking) and not arguments.what_if:
        raise UserError(ranking.explain())
    _print(question, ranking, arguments.top, "as asked")
    if arguments.what_if:
        other = changed.answer()
        _print(changed, other, arguments.top, "what if " + ", ".join(arguments.what_if))
        if len(ranking) and len(other):
            before, after = ranking[0].step_ms, other[0].step_ms
            print(f"\nThe best step goes from {before:.1f} to {after:.1f} ms.")
    if not len(ranking):
        raise UserError(f"no plan as asked, so {arguments.out} is not written")
    _write(arguments.out, question, ranking[0])
    if arguments.trace is not None:
        _write_trace(arguments.trace, question, ranking[0])


def _question(arguments: argparse.Namespace) -> Question:
    from shardwise.planning.strategies import NAMES

    strategies = Question.strategies
    if arguments.strategies is not None:
        strategies = tuple(name.strip() for name in arguments.strategies.split(","))
        for name in strategies:
            if name not in NAMES:
                raise UserError(f"unknown strategy {name!r}{nearest(name, NAMES)}")
    asked = ("model", "cluster", "world", "tokens", "sequence", "compute_dtype", "reduce_dtype")
    given = {name: getattr(arguments, name) for name in (*asked, "budget_gb", "micro_batches")}
    return Question(**given, strategies=strategies)


_WIDTH = 150  # of the table in a pipe
_COLUMNS: dict[str, Callable[[Candidate], str]] = {
    "plan": lambda c: c.plan.title,
    "mesh": lambda c: "x".join(map(str, c.plan.mesh)),
    "micro-batches": lambda c: c.workload.split,
    "recompute": lambda c: "no" if c.workload.checkpoint == "none" else "yes",
    "settings": lambda c: c.show_settings(),
    "step ms": lambda c: f"{c.step_ms:.1f}",
    "tokens/s": lambda c: f"{c.tokens_per_s:,.0f}",
    "peak GB": lambda c: f"{c.peak_bytes / 1e9:.1f}",
    "spare": lambda c: f"{c.spare_gb:.1f}",
    "exposed": lambda c: f"{c.exposed_ms:.1f}",
    "contention": lambda c: f"{c.breakdown.contention / 1e6:.1f}",
    "host": lambda c: f"{c.breakdown.host_idle / 1e6:.1f}",
}


def _print(question: Question, ranking: Ranking, top: int, title: str) -> None:
    console, heads = open_console(_WIDTH), list(_COLUMNS)
    if len(ranking):
        lines = [
            [show(candidate) for show in _COLUMNS.values()]
            for candidate in ranking.distinct()[:top]
        ]
        title = f"{question.model} on {question.cluster}, {title}"
        print_table(title, heads, lines, {}, heads[:5], _WIDTH)
    console.print(ranking.explain(), highlight=False)
    if len(ranking):
        console.print(str(ranking[0].breakdown), highlight=False)


def _write(path: Path, question: Question, best: Candidate) -> None:
    """A Plan that `shardwise train --plan` runs: its units are found again in the model."""
    from shardwise.description.preset import load_preset

    portable = dataclasses.replace(best.plan, units=None)
    _save(path, portable.to_json() + "\n")
    settings = [
        f"model.size={question.model}",
        f"model.checkpoint={best.workload.checkpoint}",
        f"data.seq={best.workload.sequence}",
    ]
    if "x" not in best.workload.split:
        settings.append(f"data.sizes={best.workload.split}")
    else:
        settings.append(f"data.batch={best.workload.micro_batch}")
        settings.append(f"run.micro_batches={best.workload.micro_batches}")
    flags = " ".join(f"--set {setting}" for setting in settings)
    if load_preset(question.model).kind != "lm":
        print(
            f"\n{path} written. `shardwise train` has language models only: run it on your own "
            "model with sw.shard(model, sw.Plan.from_json(text))."
        )
        return
    print(f"\n{path} written. It runs with:")
    world, node = best.plan.world, question.load_cluster().ranks_per_node or best.plan.world
    if world <= node:
        print(f"  shardwise train --plan {path} --nproc {world} {flags}")
        return
    each = math.gcd(world, node)
    launch = f"torchrun --nnodes {world // each} --nproc-per-node {each} --rdzv-endpoint HOST:PORT"
    print(f"  {launch} -m shardwise.cli train --plan {path} {flags}")


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def _write_trace(path: Path, question: Question, best: Candidate) -> None:
    import json

    from shardwise.predict.simulate import simulate
    from shardwise.predict.sources import as_source

    portable = dataclasses.replace(best.plan, units=None)
    resolved, description = as_source(question.model, best.workload).at(portable, best.workload)
    timeline = simulate(resolved, description, question.load_cluster(), best.workload)
    _save(path, json.dumps(timeline.to_chrome()))
    print(f"{path} written: open it in https://ui.perfetto.dev")


def _show_exercise(name: str) -> None:
    exercises = importlib.import_module("shardwise.lab.paper.exercises")
    if name == "list":
        print("\n".join(exercises.NAMES))
        return
    if name not in exercises.NAMES:
        raise UserError(f"unknown exercise {name!r}{nearest(name, exercises.NAMES)}")
    print(exercises.show(name))
