"""`shardwise plan`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import math
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checked import write_text
from shardwise.cli.help import HelpFormatter
from shardwise.cli.question import Question
from shardwise.description.foreign import is_foreign
from shardwise.description.workload import MICRO_BATCHES_HELP
from shardwise.errors import UserError, nearest
from shardwise.profiling.results import check_file

if TYPE_CHECKING:
    from shardwise.predict.ranking import Candidate, Ranking

_HELP = """\
A plan says how a model is trained in parallel: the mesh (replicas x shards), which parameters
travel together, and what is kept, gathered ahead and reduced when. This command tries the
strategies, meshes, micro-batch sizes and settings, drops what does not fit in memory, simulates one
step of the rest on all ranks, and ranks them by step time.

--model is a name from the list, or a model of your own, which needs no weights and no GPU:
  my_file.py:build        a function (or a class) that gives an nn.Module, or a module itself; it
                          is called on the meta device, and on the host if it cannot be there
  package.module:build    the same, imported
  hf:config.json          a config of Transformers, or a model type with its defaults: hf:gpt2
--inputs are its example inputs: a function that returns them (of the number of samples, if it takes
an argument), or tensors as text, whose names are forward's: "tokens:int64[4,1024]",
"image:float32[8,3,224,224],label:int64[8]". Dim 0 is the samples. Models over token ids, and those
of Transformers, need none: --tokens and --sequence say it.
--loss is a function of the output, or of the output and the inputs. Without one it is the output's
`loss`, the output if that is one number, else the mean of its float tensors.
A model that reads values (.item(), a branch on a tensor, nonzero as in a mixture of experts, numpy)
is traced while one micro-batch of it runs, on a GPU if there is one, if it fits: --trace-on.

reading the table:
  step      predicted milliseconds of one optimizer step; the fastest plan is first
  peak      the most bytes of a rank's tensors, in 1e9; spare is what the device has left when
            the allocator's fragments, the driver's context and NCCL's buffers have theirs too
  exposed   communication during which compute stands still: sharding more adds to it
  contention  what communication kernels cost the compute they run beside
  host      the device waits for the host: too many small units

--what-if KEY=VALUE asks the same question of a changed world, and shows both answers; the plan that
is written is the first one's. Keys:
  sequence=8192  world=64  tokens=4194304     the work and the ranks (or samples=512)
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
  shardwise plan --model unet.py:build --inputs "x:float32[16,3,256,256]" --samples 128
  shardwise plan --model hf:mixtral --tokens 131072 --sequence 4096 --world 64
The output ends with the command that trains under the plan.
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "plan",
        help="find the fastest plan that fits, before anything runs",
        description="Predicts step time and memory of many plans and writes the best one.",
        epilog=_HELP,
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--model",
        metavar="NAME|FILE.py:FUNCTION|hf:CONFIG",
        help="tiny, small, medium, large, xl, 2.7b, llama1b, llama8b, llama70b, llama405b, xxl, "
        "ffn8; or your own, see below",
    )
    parser.add_argument(
        "--inputs", metavar="TENSORS|FUNCTION", help="example inputs of your own model"
    )
    parser.add_argument("--loss", metavar="FUNCTION", help="of its output, or output and inputs")
    parser.add_argument(
        "--cluster",
        default="h100x8",
        metavar="NAME|FILE",
        help="v100x8, a100x8, h100x8, h200x8, h200x8-measured, b200x8, tpu-v5p, cpu-gloo, or a "
        "file that `shardwise calibrate` wrote; default: %(default)s",
    )
    parser.add_argument("--world", type=int, metavar="N", help="ranks; default: one node")
    parser.add_argument("--tokens", type=int, metavar="N", help="of one step, all ranks together")
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="instead of tokens; default with --inputs: that many on every rank",
    )
    parser.add_argument("--sequence", type=int, metavar="N", help="default: 2048")
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
    parser.add_argument(
        "--trace-on",
        choices=("auto", "meta", "cpu", "cuda"),
        default="auto",
        help="where the model is traced; auto: on the meta device, for real if it reads values",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="try the best plans here, some steps each, and rank by what they take",
    )
    parser.add_argument("--exercise", metavar="NAME", help="a worked example; `list` names them")
    parser.set_defaults(command=plan)


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
    asked = (
        "model", "cluster", "world", "tokens", "sequence", "compute_dtype", "reduce_dtype",
        "budget_gb", "micro_batches", "samples", "inputs", "loss", "trace_on",
        "measure",
    )  # fmt: skip
    given = {name: getattr(arguments, name) for name in asked}
    return Question(**given, strategies=strategies)


# A line for each plan; those of `_DETAILS` are in a second one, under it.
_COLUMNS: dict[str, Callable[[Candidate], str]] = {
    "plan": lambda c: c.plan.title,
    "mesh": lambda c: "x".join(map(str, c.plan.mesh)),
    "batches": lambda c: c.workload.split,
    "step ms": lambda c: f"{c.step_ms:.1f}",
    "tokens/s": lambda c: f"{c.tokens_per_s:,.0f}",
    "peak GB": lambda c: c.peak_gb,
    "spare": lambda c: f"{c.spare_gb:.1f}",
}
_LEFT = ("plan", "mesh", "batches")


def _details(candidate: Candidate) -> str:
    again = candidate.workload.again.removeprefix(", ")
    again += ", " if again else ""
    parts = candidate.breakdown
    lost = f"exposed {candidate.exposed_ms:.1f}, contention {parts.contention / 1e6:.1f}, "
    host = f"host {parts.host_idle / 1e6:.1f} ms"
    return f"{again}{candidate.show_settings()}; {lost}{host}; {candidate.show_basis()}"


def lay_table(ranking: Ranking, top: int, width: int) -> list[str]:
    """The first plans, with all of their settings, in lines of `width`."""
    shown = ranking.distinct()[:top]
    heads = list(_COLUMNS)
    heads[heads.index("tokens/s")] = shown[0].rate_unit
    rows = [heads, *[[show(candidate) for show in _COLUMNS.values()] for candidate in shown]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = []
    for number, row in enumerate(rows):
        cells = [
            f"{cell:<{w}}" if name in _LEFT else f"{cell:>{w}}"
            for cell, w, name in zip(row, widths, _COLUMNS, strict=True)
        ]
        lines.append(f"{number or '':>2} " + "  ".join(cells).rstrip())
        if number:
            lines += wrap(_details(shown[number - 1]), width, "     ")
    return lines


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """In lines of `width`, all but the first of them two columns further in."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _print(question: Question, ranking: Ranking, top: int, title: str) -> None:
    width = max(60, min(120, shutil.get_terminal_size((80, 24)).columns))
    if len(ranking):
        print("\n".join(wrap(f"{question.model} on {question.cluster}, {title}", width)) + "\n")
        print("\n".join(lay_table(ranking, top, width)) + "\n")
    for line in ranking.explain().splitlines():
        print("\n".join(wrap(line, width)))
    if len(ranking):
        print("\n".join(wrap(str(ranking[0].breakdown), width)))


def _write(path: Path, question: Question, best: Candidate) -> None:
    """A Plan that `shardwise train --plan` runs: its units are found again in the model."""
    from shardwise.description.preset import load_preset

    portable = dataclasses.replace(best.plan, units=None)
    write_text(path, portable.to_json() + "\n")
    if is_foreign(question.model) or load_preset(question.model).kind != "lm":
        work = best.workload
        print(f"\n{path} written, for {work.split} {work.of} on a rank{work.again}. It runs with:")
        if work.checkpoint != "none":
            print(f"  model = sw.recompute(model, {work.checkpoint!r})")
        print(f"  model = sw.shard(model, sw.Plan.from_json(Path({str(path)!r}).read_text()))")
        if best.captured is not None:
            print(
                f"  step = sw.capture(step)  # {best.captured.step_ms:.1f} ms, not "
                f"{best.step_ms:.1f}: the device does not wait for its host"
            )
        print("(`shardwise train` has language models only, of its own.)")
        return
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
    if best.captured is not None:
        settings.append("run.capture=true")
    print(f"\n{path} written. It runs with:")
    world, node = best.plan.world, question.load_cluster().ranks_per_node or best.plan.world
    each = math.gcd(world, node)
    command = [f"shardwise train --plan {path} --nproc {world}"]
    if world > node:
        nodes = f"--nnodes {world // each} --nproc-per-node {each}"
        command = [f"torchrun {nodes} --rdzv-endpoint HOST:PORT"]
        command.append(f"-m shardwise.cli train --plan {path}")
    flags = [f"--set {setting}" for setting in settings]
    command += [" ".join(flags[:3]), " ".join(flags[3:])]
    print("  " + " \\\n      ".join(command))


def _write_trace(path: Path, question: Question, best: Candidate) -> None:
    import json

    from shardwise.predict.simulate import simulate
    from shardwise.predict.sources import as_source

    portable, cluster = dataclasses.replace(best.plan, units=None), question.load_cluster()
    source = as_source(
        question.model,
        best.workload,
        inputs=question.example(),
        loss=question.load_loss(),
        trace_on=question.trace_on,
        device="cpu" if cluster.host.communicates else "cuda",
    )
    resolved, description = source.at(portable, best.workload)
    timeline = simulate(resolved, description, cluster, best.workload)
    write_text(path, json.dumps(timeline.to_chrome()))
    print(f"{path} written: open it in https://ui.perfetto.dev")


def _show_exercise(name: str) -> None:
    exercises = importlib.import_module("shardwise.lab.paper.exercises")
    if name == "list":
        for known in exercises.NAMES:
            title = f"{known:<20}{exercises.show(known).splitlines()[0]}"
            print("\n".join(textwrap.wrap(title, 80, subsequent_indent=" " * 20)))
        return
    print(exercises.show(name))
