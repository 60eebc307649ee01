"""`shardwise bench kernels`: the profiling questions a to e, each answered by name from a trace.

Forward passes without autograd are timed by Python's clock, then traced; then a whole training step
is traced. On a CUDA device a trace has its kernels; on a CPU, operators by their own time. Hooks
note when the host is inside attention, and inside its projections.
"""

from __future__ import annotations

import argparse
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.description.language_model import LM, Attention, compute_loss
from shardwise.lab.charts import draw_bars
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.models import (
    QUICK_CONTEXT,
    ModelCase,
    choose_cases,
    make_optimizer,
    one_thread,
)
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import no_garbage_collection, spread, timer_on
from shardwise.profiling.trace import TorchTrace, Tracer
from shardwise.timeline.busy import union
from shardwise.timeline.kernel_groups import (
    NOTABLE,
    PHASES,
    Ran,
    computing,
    group_of,
    merge_phases,
    sum_by_group,
    tabulate,
)

WARMUP = 2
TRACED = 3  # passes, and steps; the median one counts
KEPT = 12  # kernels of a pass that a row names
SOFTMAX_FLOPS = 5  # an element: its row's maximum, subtract, exponential, sum, divide
Window = tuple[int, int]


class Subject:
    """A model, and what is traced of it."""

    def __init__(self, case: ModelCase) -> None:
        self.case = case
        self.model: LM = case.make_model()
        self.tokens = case.make_tokens()
        self.optimizer = make_optimizer(self.model)

    @torch.no_grad()
    def infer(self) -> None:
        with self.case.autocast():
            self.model(self.tokens[0])

    def step(self) -> list[int]:
        """A training step; gives when its phases began, and its end."""
        moments = [perf_counter_ns()]
        self.optimizer.zero_grad()
        with self.case.autocast():
            loss = compute_loss(self.model, *self.tokens)
        moments.append(perf_counter_ns())
        loss.backward()
        moments.append(perf_counter_ns())
        self.optimizer.step()
        return [*moments, perf_counter_ns()]

    def trace(self, run: Callable[[], Any]) -> tuple[TorchTrace, Any]:
        """What the profiler sees of a run, and what the run gives."""
        tracer = Tracer(self.case.device == "cuda", memory=False)
        self.case.synchronize()
        tracer.start()
        given = run()
        tracer.stop()
        return tracer.read(), given


def measure(case: ModelCase, steps: int) -> Row:
    """All that the questions need."""
    try:
        subject = Subject(case)
        for _ in range(WARMUP):
            subject.infer()
            subject.step()
        with no_garbage_collection():
            timer = timer_on(case.device)
            clock, forwards, traced = [], [], []
            for i in range(max(steps, TRACED)):  # in turn: what disturbs one disturbs the others
                clock.append(timer(subject.infer).step_ms)
                if i < TRACED:
                    forwards.append(_trace_forward(subject))
                    traced.append(_trace_step(subject))
        forward = sorted(forwards, key=lambda found: found["ms"])[TRACED // 2]
        step = sorted(traced, key=_ms)[TRACED // 2]
        found: Row = {"of": "kernels" if case.device == "cuda" else "operators"}
        return found | answer(clock, forward, step) | {"attention_flops": count_flops(case)}
    except (RuntimeError, ValueError) as error:
        return {"failure": explain_failure(error)}


def _trace_forward(subject: Subject) -> Row:
    """One forward pass: its time by the profiler, its kernels, and those inside attention."""
    with watch(subject.model) as (attention, projections):
        trace, (start, end) = subject.trace(lambda: _between(subject.infer))
    ran = trace.list_ran(start, end)
    events = trace.kernels or trace.operations
    spans = [(e.start, e.end) for e in events if start <= getattr(e, "launched", e.start) < end]
    inside = [each for each in ran if _within(each, attention)]
    parts = {
        "softmax": [each for each in inside if group_of(each.name) == "softmax"],
        "scores": [e for e in inside if _is_product(e) and not _within(e, projections)],
        "projections": [e for e in inside if _is_product(e) and _within(e, projections)],
    }
    return {
        "ms": (max(stop for _, stop in spans) - min(begin for begin, _ in spans)) / 1e6,
        "busy_ms": sum(stop - begin for begin, stop in union(spans)) / 1e6,
        "rows": tabulate(("forward", each) for each in ran),
        "attention_ms": {name: sum(each.ns for each in held) / 1e6 for name, held in parts.items()},
    }


def _trace_step(subject: Subject) -> list[dict[str, Any]]:
    """The kernels of one step by phase and name."""
    trace, moments = subject.trace(subject.step)
    return tabulate(
        (phase, ran)
        for phase, start, end in zip(PHASES, moments, moments[1:], strict=False)
        for ran in trace.list_ran(start, end)
    )


def _between(run: Callable[[], object]) -> Window:
    began = perf_counter_ns()
    run()
    return began, perf_counter_ns()


def _is_product(ran: Ran) -> bool:
    return group_of(ran.name) in ("products", "attention")


def _within(ran: Ran, windows: Sequence[Window]) -> bool:
    return any(start <= ran.begun < end for start, end in windows)


@contextmanager
def watch(model: LM) -> Iterator[tuple[list[Window], list[Window]]]:
    """When the host is inside attention, and inside the projections of it."""
    attention: list[Window] = []
    projections: list[Window] = []
    begun: list[int] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        begun.append(perf_counter_ns())

    def leave_into(windows: list[Window]) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda module, inputs, output: windows.append((begun.pop(), perf_counter_ns()))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, Attention):
                linear = [(m, projections) for m in module.children() if isinstance(m, nn.Linear)]
                for each, windows in [(module, attention), *linear]:
                    hooks.enter_context(each.register_forward_pre_hook(enter))
                    hooks.enter_context(each.register_forward_hook(leave_into(windows)))
        yield attention, projections


def count_flops(case: ModelCase) -> dict[str, int]:
    """Of all attention layers in one forward pass."""
    size, tokens = case.model_size, case.batch * case.context
    scores = size.layers * size.heads * tokens * case.context
    widths = 2 * size.d_model + 2 * size.kv_heads * size.head_width
    return {
        "softmax": SOFTMAX_FLOPS * scores,
        "scores": 2 * 2 * size.head_width * scores,
        "projections": 2 * size.layers * tokens * size.d_model * widths,
    }


def answer(clock: list[float], forward: Row, step: list[dict[str, Any]]) -> Row:
    """The figures of questions a to e."""
    inference = computing(merge_phases(forward["rows"], ("forward",)))
    both = computing(merge_phases(step, PHASES[:2]))
    whole = computing(merge_phases(step, PHASES))
    return {
        "clock_ms": statistics.median(clock),
        "clock_spread_ms": spread(clock),
        "profiler_ms": forward["ms"],
        "busy_ms": forward["busy_ms"],
        "kernels": {
            "forward": _largest(inference),
            "forward and backward": _largest(both),
            "whole step": _largest(whole),
        },
        "shares": {"forward": _shares(inference), "whole step": _shares(whole)},
        "compute_ms": {"forward": _ms(inference), "whole step": _ms(whole)},
        "attention_ms": forward["attention_ms"],
    }


def _largest(rows: list[dict[str, Any]]) -> list[Row]:
    total = sum(row["ns"] for row in rows) or 1
    return [
        {"name": row["name"], "group": row["group"], "calls": row["count"],
         "ms": row["ns"] / 1e6, "share": row["ns"] / total}
        for row in rows[:KEPT]
    ]  # fmt: skip


def _ms(rows: list[dict[str, Any]]) -> float:
    return sum(row["ns"] for row in rows) / 1e6


def _shares(rows: list[dict[str, Any]]) -> dict[str, float]:
    total = sum(row["ns"] for row in rows) or 1
    return {group: ns / total for group, ns in sum_by_group(rows).items()}


def tell(row: Row) -> list[str]:
    """The answers in words."""
    forward, both = row["kernels"]["forward"], row["kernels"]["forward and backward"]
    first, again = forward[0], both[0]
    same = "the same" if first["name"] == again["name"] else again["name"]
    others = [k for k in forward if k["group"] != "products" and k["share"] >= NOTABLE]
    named = ", ".join(f"{k['name']} {k['share']:.0%}" for k in others) or "none"
    products = [row["shares"][name].get("products", 0.0) for name in ("forward", "whole step")]
    most = sorted(row["shares"]["whole step"].items(), key=lambda item: -item[1])
    rest = ", ".join(f"{group} {share:.0%}" for group, share in most if group != "products")
    return [
        f"a) Forward takes {row['profiler_ms']:.2f} ms by the profiler, of which {row['of']} run "
        f"for {row['busy_ms']:.2f}, and {row['clock_ms']:.2f} +-{row['clock_spread_ms']:.2f} ms by "
        f"Python's clock without it.",
        f"b) {first['name']} takes most of forward: {first['share']:.0%} in {first['calls']} "
        f"calls. With backward: {same}, {again['share']:.0%} in {again['calls']} calls.",
        f"c) Other {row['of']} from {NOTABLE:.0%} of forward on: {named}.",
        f"d) Products are {products[0]:.0%} of inference and {products[1]:.0%} of a training "
        f"step; of the step the others are {rest}.",
        f"e) {_tell_attention(row)}",
    ]


def _tell_attention(row: Row) -> str:
    took, flops = row["attention_ms"], row["attention_flops"]
    if not took["softmax"]:
        return "Softmax is no kernel of its own here: attention is one, products and all."
    slow = took["softmax"] / took["scores"] if took["scores"] else float("nan")
    return (
        f"Softmax takes {slow:.2f} of the time of the two products around it, for "
        f"{flops['softmax'] / flops['scores']:.3f} of their FLOPs."
    )


def run(arguments: argparse.Namespace) -> None:
    """Measure model by model, write the JSON after each, draw the shares, print the answers."""
    quick, steps = arguments.quick, 3 if arguments.quick else arguments.steps
    context = QUICK_CONTEXT if quick else arguments.context
    file = RowFile.of(arguments, steps=steps, warmup=WARMUP, optimizer="AdamW, fused")
    with one_thread(quick):
        for case in file.missing(choose_cases(arguments, context), lambda case: case.key):
            say(f"{case.size} {case.precision}: {steps} passes by the clock, {2 * TRACED} traced")
            row: Row = {"key": case.key, **case.describe(), **measure(case, steps)}
            # The document could not run its profiler; of its own it has forward by the clock.
            row["document"] = seed004.forward_backward(case.size, case.precision)
            file.add(row)
    file.tell(arguments.plot, draw, show)


def draw(rows: list[Row]) -> str:
    """What the groups take of a pass and of a step."""
    groups = {
        f"{row['size']} {row['precision']}, {name}": {
            group: 100 * share for group, share in row["shares"][name].items()
        }
        for row in rows
        if "failure" not in row
        for name in row["shares"]
    }
    return draw_bars("What takes the time", groups, "%")


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Sentences for each model, then the tables of all."""
    environment = facts["environment"]
    times, kernels, shares, inside = [], [], [], []
    for row in rows:
        name = f"{row['size']} {row['precision']}"
        if "failure" in row:
            times.append([name, row["failure"]])
            continue
        print(f"{name}, {row['batch']} x {row['context']} tokens:")
        for sentence in tell(row):
            print(textwrap.fill(sentence, 80, subsequent_indent="   "))
        clock = f"{row['clock_ms']:.2f} +-{row['clock_spread_ms']:.2f}"
        documents = ", ".join(f"{d['forward']:.0f} ({d['hardware']})" for d in row["document"])
        times.append([name, f"{row['profiler_ms']:.2f}", f"{row['busy_ms']:.2f}", clock, documents])
        for done in ("forward", "whole step"):
            for k in row["kernels"][done][:5]:
                cells = [f"{k['calls']:,}", f"{k['ms']:.2f}", f"{k['share']:.0%}"]
                kernels.append([f"{name} {done}", k["name"], *cells])
        for group in dict.fromkeys((*row["shares"]["forward"], *row["shares"]["whole step"])):
            cells = [f"{row['shares'][d].get(group, 0.0):.1%}" for d in ("forward", "whole step")]
            shares.append([name, group, *cells])
        for part, ms in row["attention_ms"].items():
            gflop = row["attention_flops"][part] / 1e9
            rate = f"{gflop / ms * 1e3:,.1f}" if ms else ""
            inside.append([name, part, f"{ms:.3f}", f"{gflop:,.3g}", rate])
    left = ("model", "pass", "name", "group", "in attention")
    tables: list[tuple[str, tuple[str, ...], list[list[str]]]] = [
        ("a) forward, ms", ("model", "profiler", "busy", "clock", "document's clock"), times),
        ("b, c) what takes most", ("pass", "name", "calls", "ms", "share"), kernels),
        ("d) share of the time", ("model", "group", "inference", "training step"), shares),
        ("e) softmax and products", ("model", "in attention", "ms", "GFLOP", "GFLOP/s"), inside),
    ]
    for title, heads, lines in tables:
        if lines:
            print_table(title, heads, lines, environment, left, width=80)
    print("The document has no answers: its author's rented GPUs let no profiler run.")
