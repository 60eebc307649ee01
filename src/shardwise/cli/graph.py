"""`shardwise graph`."""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardwise.checked import write_text
from shardwise.cli.help import HelpFormatter
from shardwise.errors import UserError

if TYPE_CHECKING:
    from torch.fx import Graph

    from shardwise.graph.passes.run import PassOptions, PassResult
    from shardwise.graph.presets import TracedStep
    from shardwise.predict.cost import Costs
    from shardwise.timeline import Timeline

MIB = 2**20

_HELP = """\
A sharded model as two whole graphs, forward and backward: compute, and collectives as nodes that
run beside it until something waits for them. Nothing runs here: the graphs are traced by rank 0 of
a world that is imagined, and costed with a cluster's figures.

Each parameter is gathered where it is used, each gradient reduced where it is made. Passes change
that, one after the other:
  bucket    small messages become fewer larger ones (--bucket-mib; --adjacent: neighbours only)
  prefetch  a gather is issued up to --window compute nodes before it is needed
  sort      compute that waits for nothing goes first; with recomputation many blocks' forwards
            come in front of the first reduce-scatter, and their activations fill the memory
  cap       at most --cap compute nodes between reduce-scatters, where the model had no more
            (--cap 0: no cap); --restore: the model's own order instead
--passes names those to run (default: all), or `none`.

reading the table, row for row from the graph as traced to the last pass:
  step      predicted milliseconds of forward and backward, without the optimizer's update
  exposed   of these, communication during which compute stands still
  peak      the most memory of a rank, in 1e9 bytes
  gathers, scatters   messages of parameters and of gradients on the sharding group, with their sum
  run       the most compute nodes between two reduce-scatters of backward

--budget-gb tries bucket sizes, windows and caps, prints those that no other beats in both time and
memory, and takes the fastest that fits.

examples:
  shardwise graph --model llama8b --plan zero3 --mesh 16 --tp 8 --recompute
  shardwise graph --model llama8b --plan zero3 --mesh 16 --tp 8 --passes bucket --bucket-mib 16
  shardwise graph --model llama1b --plan hsdp --mesh 2x8 --length 4096 --trace step.json
  shardwise graph --model small --plan zero3 --mesh 8 --recompute --budget-gb 6 --dump graph.txt
"""


def add_parser(subparsers: Any) -> None:
    """Register the command."""
    parser = subparsers.add_parser(
        "graph",
        help="what compiler passes do to a sharded model's graph: time and memory",
        description="Traces a model's step as graphs with collectives, runs passes over them, and\n"
        "predicts what each pass does to step time and memory.",
        epilog=_HELP,
        formatter_class=HelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help="tiny, small, ..., llama8b, llama70b")
    add("--plan", default="zero3", metavar="NAME", help="zero3, hsdp, ...; default: %(default)s")
    add("--mesh", default="8", metavar="N|RxN", help="ranks that shard; replicas x those")
    add("--tp", type=int, default=1, metavar="N", help="tensor-parallel ranks in each one's place")
    add("--batch", type=int, default=2, metavar="N", help="sequences of a rank; default: 2")
    add("--length", type=int, default=8192, metavar="N", help="tokens of one; default: 8192")
    add("--layers", type=int, metavar="N", help="only so many of the model's blocks")
    add("--cluster", default="h100x8", metavar="NAME|FILE", help="default: %(default)s")
    add("--recompute", action="store_true", help="blocks' activations are made again in backward")
    add("--passes", metavar="A,B", help="of: bucket, prefetch, sort, cap; or none; default: all")
    add("--bucket-mib", type=int, default=48, metavar="N", help="default: %(default)s")
    add("--adjacent", action="store_true", help="bucket only what no other collective parts")
    add("--window", type=int, default=50, metavar="N", help="compute nodes; default: %(default)s")
    add("--cap", type=int, default=8, metavar="N", help="compute nodes, 0: none; default: 8")
    add("--restore", action="store_true", help="the model's own order of compute, in cap's place")
    add("--budget-gb", type=float, metavar="X", help="choose settings for this memory, see below")
    add("--dump", type=Path, metavar="FILE", help="write the last graphs, a line for each node")
    add("--trace", type=Path, metavar="FILE", help="write the last step for Perfetto")
    add("--timeline", type=Path, metavar="FILE", help="write it as `shardwise report` reads it")
    add("--json", type=Path, metavar="FILE", help="write the table")
    parser.set_defaults(command=graph)


def graph(arguments: argparse.Namespace) -> None:
    """The command. Large graphs are many objects, and none of them is garbage before the end:
    looking for it takes a tenth of the time.
    """
    gc.disable()
    try:
        _graph(arguments)
    finally:
        gc.enable()


def _graph(arguments: argparse.Namespace) -> None:
    """Trace, run the passes, cost each, print, write."""
    files = [getattr(arguments, name) for name in ("dump", "trace", "timeline", "json")]
    for path in files:
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: there is no folder {path.parent}")
    from shardwise.description.cluster import Cluster
    from shardwise.graph.passes.run import each_pass
    from shardwise.predict.cost import Costs

    names, options = _passes(arguments), _options(arguments)
    costs = Costs.of(Cluster.load(arguments.cluster))
    step = _trace(arguments)
    if arguments.budget_gb is not None:
        options = _choose(step, costs, arguments.budget_gb)
    rows, last, timeline = [], None, None
    for last in each_pass(step.forward, step.backward, options, passes=names):
        timeline = _simulate(last, step, costs, arguments)
        rows.append(row_of(last, timeline))
    assert last is not None and timeline is not None
    _print(arguments, options, rows, timeline)
    if arguments.dump is not None:
        write_text(arguments.dump, dump(last.forward, "forward") + dump(last.backward, "backward"))
    if arguments.trace is not None:
        write_text(arguments.trace, json.dumps(timeline.to_chrome()))
        print(f"{arguments.trace} written: open it in https://ui.perfetto.dev")
    if arguments.timeline is not None:
        write_text(arguments.timeline, timeline.to_json() + "\n")
    if arguments.json is not None:
        write_text(arguments.json, json.dumps({"rows": rows}, indent=1) + "\n")


def _passes(arguments: argparse.Namespace) -> tuple[str, ...]:
    from shardwise.graph.passes.run import PASSES

    if arguments.passes is None:
        return PASSES
    return tuple(n.strip() for n in arguments.passes.split(",") if n.strip() not in ("", "none"))


def _options(arguments: argparse.Namespace) -> PassOptions:
    from shardwise.graph.passes.run import PassOptions

    return PassOptions(
        bucket_bytes=arguments.bucket_mib * MIB,
        adjacent_only=arguments.adjacent,
        window=arguments.window,
        max_consecutive=arguments.cap or None,
        restore=arguments.restore,
    )


def _trace(arguments: argparse.Namespace) -> TracedStep:
    import dataclasses

    from shardwise.description.preset import load_preset
    from shardwise.description.workload import Workload
    from shardwise.graph.presets import plan_by_modules, trace_preset

    preset = load_preset(arguments.model)
    for name in ("tp", "batch", "length", "layers"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: expected at least 1")
    if arguments.layers is not None:
        preset = dataclasses.replace(preset, layers=arguments.layers)
    try:
        mesh = int(arguments.mesh) if arguments.mesh.isdigit() else arguments.mesh
        plan = plan_by_modules(arguments.plan, mesh)
    except ValueError as error:
        raise UserError(f"--plan {arguments.plan} --mesh {arguments.mesh}: {error}") from error
    workload = Workload(arguments.length, arguments.batch)
    return trace_preset(preset, plan, workload, tensor=arguments.tp, recompute=arguments.recompute)


def _simulate(
    result: PassResult, step: TracedStep, costs: Costs, arguments: argparse.Namespace
) -> Timeline:
    import dataclasses

    from shardwise.graph.cost import simulate_graphs

    timeline = simulate_graphs(result.forward, result.backward, costs, step.axes)
    mesh = f"{arguments.mesh} x {arguments.tp}" if arguments.tp > 1 else arguments.mesh
    labels = {
        "plan": f"{arguments.plan}, compiled", "mesh": mesh, "cluster": arguments.cluster,
        "after": result.after,
    }  # fmt: skip
    return dataclasses.replace(timeline, labels=labels)


def _choose(step: TracedStep, costs: Costs, budget_gb: float) -> PassOptions:
    from shardwise.graph.passes.schedule import choose, frontier, schedule

    trials = schedule(step.forward, step.backward, costs=costs, axes=step.axes)
    print("the frontier of time against memory:")
    for trial in frontier(trials):
        print(f"  {trial}")
    best = choose(trials, budget_gb * 1e9)
    print(f"the fastest in {budget_gb:g} GB:\n  {best}\n")
    return best.options


def row_of(result: PassResult, timeline: Timeline) -> dict[str, Any]:
    """What a pass left, in figures."""
    backward = result.summaries[1]
    return {
        "after": result.after,
        "step_ms": timeline.step_ms,
        "exposed_ms": timeline.breakdown().exposed_transfer / 1e6,
        "peak_bytes": timeline.peak().total,
        "gathers": sum(s.gathers for s in result.summaries),
        "gather_bytes": sum(s.gather_bytes for s in result.summaries),
        "scatters": sum(s.scatters for s in result.summaries),
        "scatter_bytes": sum(s.scatter_bytes for s in result.summaries),
        "longest_run": backward.longest_run,
        "before_first_scatter": backward.before_first,
    }


def _print(
    arguments: argparse.Namespace, options: PassOptions, rows: list[dict[str, Any]], last: Timeline
) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    console = console if console.is_terminal else Console(width=80)
    work = f"{arguments.batch} x {arguments.length} tokens a rank"
    table = Table(title=f"{arguments.model}, {last.labels['mesh']} ranks, {work}")
    table.add_column("after")
    for name in ("step ms", "exposed", "peak GB", "gathers", "scatters", "run"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["after"],
            f"{row['step_ms']:.1f}",
            f"{row['exposed_ms']:.1f}",
            f"{row['peak_bytes'] / 1e9:.2f}",
            f"{row['gathers']}, {_size(row['gather_bytes'])}",
            f"{row['scatters']}, {_size(row['scatter_bytes'])}",
            str(row["longest_run"]),
        )
    console.print(table)
    console.print(str(last.breakdown()), highlight=False)
    peak = {r: b for r, b in sorted(last.peak().by_role.items(), key=lambda p: -p[1]) if b}
    told = ", ".join(f"{role} {_size(nbytes)}" for role, nbytes in peak.items())
    console.print(f"peak {_size(last.peak().total)} = {told}", highlight=False)


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.2f} MB"


def dump(graph: Graph, title: str) -> str:
    """A graph for people: `*` compute, `>` a collective goes, `<` it is waited for."""
    from shardwise.graph.nodes import group_of, is_compute, is_wait, kind_of, message_bytes

    lines = [f"# {title}"]
    for node in graph.nodes:
        mark, more = " ", ""
        if kind_of(node):
            mark, more = ">", f"  group {group_of(node)}, {message_bytes(node) / MIB:.2f} MiB"
        elif is_wait(node):
            mark = "<"
        elif is_compute(node):
            mark = "*"
        given = ", ".join(n.name for n in node.all_input_nodes)
        called = node.op if node.op in ("placeholder", "output") else str(node.target)
        lines.append(f"{mark} {node.name} = {called}({given}){_shape_of(node)}{more}")
    return "\n".join(lines) + "\n\n"


def _shape_of(node: Any) -> str:
    from shardwise.graph.nodes import tensors_of

    shapes = [
        f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
        for t in tensors_of(node if node.op != "output" else ())
    ]
    return f"  : {', '.join(shapes)}" if shapes else ""
