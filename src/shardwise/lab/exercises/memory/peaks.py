"""`shardwise bench memory`: the peak of a forward pass and of a step, and what holds it; and
single tensors (`tensors.py`).

Peaks on a GPU are the allocator's own; on a CPU, and for curves and names everywhere, the
profiler's record of allocations. The modes: `lab/catalog/assignment.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from shardwise.description.language_model import LM, compute_loss
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.memory import tensors
from shardwise.lab.exercises.memory.trace import (
    MODULE,
    PHASE,
    HeldMemory,
    MemoryTrace,
    group_by_name,
    read_trace,
    thin_out,
)
from shardwise.lab.exercises.models import ModelCase, choose_sizes, make_optimizer, one_thread
from shardwise.lab.pictures import draw_memory
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, only_draw, say
from shardwise.profiling.footprint import open_profiler, read_events
from shardwise.profiling.results import Row, print_table
from shardwise.reporting.formats import show_bytes

MODES = ("inference", "forward", "step")
POINTS = 120  # of a stored curve
LARGEST = 6  # groups of allocations that a row names
PASSES = {"inference": ["inference"], "forward": ["forward"], "step": ["first step", "second step"]}


class MeasuredModel:
    """One model in memory, and the passes over it."""

    def __init__(self, case: ModelCase) -> None:
        """For sequences of up to the case's context."""
        self.on_gpu = case.device == "cuda"
        self.model: LM = case.make_model()
        self.names = {id(m): name for name, m in self.model.named_modules() if name}
        # The libraries' workspaces come with the first products; they are not the model's.
        self.run(dataclasses.replace(case, context=min(8, case.context)), "step")
        self.release()

    def run(self, case: ModelCase, mode: str) -> tuple[list[int], list[dict[int, str]]]:
        """The peak of each pass (on a GPU), and the owners of addresses at its end."""
        tokens, targets = case.make_tokens()
        peaks: list[int] = []
        owners: list[dict[int, str]] = []
        optimizer = make_optimizer(self.model) if mode == "step" else None
        for _ in PASSES[mode]:
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
            if optimizer is not None:
                optimizer.zero_grad()
            with record_function(f"{PHASE}forward"), case.autocast():
                if mode == "inference":
                    with torch.no_grad():
                        result = self.model(tokens)
                else:
                    result = compute_loss(self.model, tokens, targets)
            if optimizer is not None:
                with record_function(f"{PHASE}backward"):
                    result.backward()
                with record_function(f"{PHASE}optimizer"):
                    optimizer.step()
            if self.on_gpu:
                torch.cuda.synchronize()
                peaks.append(torch.cuda.max_memory_allocated())
            owners.append(self.find_owners(optimizer))
        return peaks, owners

    def find_owners(self, optimizer: torch.optim.Optimizer | None) -> dict[int, str]:
        owners: dict[int, str] = {}
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                owners[_address(parameter.grad)] = f"gradient of {name}"
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for key, moment in (("exp_avg", "first moment"), ("exp_avg_sq", "second moment")):
                if key in state:
                    owners[_address(state[key])] = f"{moment} of {name}"
        return owners

    def profile(self, case: ModelCase, mode: str) -> MemoryTrace:
        """The same pass under the profiler."""
        before = torch.cuda.memory_allocated() if self.on_gpu else self.count_parameters()
        with _marked(self.model, self.names), open_profiler() as profiled:
            _, owners = self.run(case, mode)
        return read_trace(read_events(profiled), self.on_gpu, before, owners)

    def count_parameters(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    def release(self) -> None:
        """Back to the parameters alone."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()

    def measure(self, case: ModelCase, mode: str, with_curve: bool) -> Row:
        """Peaks and, on a CPU always, curve and names."""
        try:
            self.release()
            peaks: list[int] = []
            if self.on_gpu:
                peaks = self.run(case, mode)[0]
                self.release()
            found: Row = {"parameter_bytes": self.count_parameters()}
            if with_curve or not self.on_gpu:
                trace = self.profile(case, mode)
                described = [self.describe_peak(trace, mode, i) for i in range(len(PASSES[mode]))]
                found |= {"curve": compress(trace)}
            else:
                described = [{"pass": name} for name in PASSES[mode]]
            for told, peak in zip(described, peaks, strict=False):
                told["bytes"] = peak
            return found | {"peaks": described}
        except (RuntimeError, ValueError) as error:
            failure = explain_failure(error)
        self.release()
        return {"failure": failure}

    def describe_peak(self, trace: MemoryTrace, mode: str, number: int) -> dict[str, Any]:
        """What is held at the peak of the pass with this number, by name."""
        time, total = trace.peak(*_passes(trace)[number])
        held = [*self.parameters(), *trace.held_at(time)]
        by_total = group_by_name(held)
        by_size = sorted(by_total, key=lambda group: (-group["each"], -group["count"]))
        return {
            "pass": PASSES[mode][number], "profiled_bytes": total, "bytes": total,
            "roles": sum_by_role(held), "held": by_total[:LARGEST], "largest": by_size[:LARGEST],
        }  # fmt: skip

    def parameters(self) -> list[HeldMemory]:
        return [
            HeldMemory(p.numel() * p.element_size(), 0.0, what=f"parameter {name}")
            for name, p in self.model.named_parameters()
        ]


def sum_by_role(held: list[HeldMemory]) -> dict[str, int]:
    """Bytes of parameters, gradients and moments; the rest is activations and temporaries."""
    roles = dict.fromkeys(("parameters", "gradients", "moments", "activations"), 0)
    named = {"parameter": "parameters", "gradient": "gradients"}
    named |= {"first moment": "moments", "second moment": "moments"}
    for allocation in held:
        owned = (role for word, role in named.items() if allocation.what.startswith(f"{word} "))
        roles[next(owned, "activations")] += allocation.bytes
    return roles


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _passes(trace: MemoryTrace) -> list[tuple[float, float]]:
    """Start and end of each pass: a pass begins with forward."""
    starts = [phase.start for phase in trace.phases if phase.name == "forward"]
    ends = [*starts[1:], trace.phases[-1].end]
    return list(zip(starts, ends, strict=True))


@contextmanager
def _marked(model: nn.Module, names: dict[int, str]) -> Iterator[None]:
    """Name every module's forward in the profiler's record."""
    open_marks: list[Any] = []

    def enter(module: nn.Module, inputs: Any) -> None:
        mark = record_function(MODULE + names[id(module)])
        mark.__enter__()
        open_marks.append(mark)

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        open_marks.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for module in model.modules():
            if id(module) in names and type(module).forward is not nn.Module.forward:
                hooks.enter_context(module.register_forward_pre_hook(enter))
                hooks.enter_context(module.register_forward_hook(leave))
        yield


def compress(trace: MemoryTrace) -> dict[str, Any]:
    """A curve to keep: ms from the start and MiB, and where the phases are."""
    start = trace.times[0]
    points = thin_out(trace.times, trace.totals, POINTS)
    return {
        "ms": [round((time - start) / 1e3, 2) for time, _ in points],
        "mib": [round(total / 2**20, 1) for _, total in points],
        "phases": [
            [phase.name, round((phase.start - start) / 1e3, 2), round((phase.end - start) / 1e3, 2)]
            for phase in trace.phases
        ],
    }


def run(arguments: argparse.Namespace) -> None:
    """Measure row by row, write the JSON after each, draw the curves, print the table."""
    if only_draw(arguments, draw_memory):
        return
    file = RowFile.of(arguments)
    with one_thread(arguments.quick):
        if "residual" in arguments.parts:
            tensors.run_residual(file, arguments.sizes or seed004.MODELS)
        if "attention" in arguments.parts:
            tensors.run_attention(file, arguments.quick)
        if "peaks" in arguments.parts:
            run_peaks(arguments, file)
    file.tell(arguments.plot, draw_memory, show)


def run_peaks(arguments: argparse.Namespace, file: RowFile) -> None:
    """Every model, precision, context and mode."""
    quick, contexts = arguments.quick, arguments.contexts
    if quick:
        contexts = sorted({max(4, context // 32) for context in (contexts[0], contexts[-1])})
    chosen = choose_sizes(arguments.sizes, quick)
    for size, precision in itertools.product(chosen, arguments.precision):
        cases = [ModelCase(size, precision, arguments.attention, c, quick=quick) for c in contexts]
        todo = itertools.product(cases, MODES)
        subject: MeasuredModel | None = None
        failure = ""
        for case, mode in file.missing(todo, lambda pair: _key(*pair)):
            if subject is None and not failure:
                try:
                    subject = MeasuredModel(cases[-1])
                except (RuntimeError, ValueError) as error:
                    failure = explain_failure(error)
            # Curves of the largest model at every context, of the others at the longest.
            with_curve = mode != "inference" and (size == chosen[-1] or case == cases[-1])
            row: Row = {"key": _key(case, mode), **case.describe(), "mode": mode}
            row["seed"] = seed004.memory(size, precision, case.context, mode)
            row |= (
                {"failure": failure} if subject is None else subject.measure(case, mode, with_curve)
            )
            file.add(row)
            say(_describe(row))
        del subject
        gc.collect()
        if file.time_left() == 0.0:
            break


def _key(case: ModelCase, mode: str) -> str:
    return f"{case.key}/{mode}"


def _describe(row: Row) -> str:
    name = f"{row['size']} {row['precision']} {row['context']} {row['mode']}: "
    if "failure" in row:
        return name + row["failure"]
    return name + ", ".join(show_bytes(peak["bytes"]) for peak in row["peaks"])


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """What single tensors hold, then the peaks."""
    tensors.print_tables(rows, facts["environment"])
    print_peaks([row for row in rows if "mode" in row], facts["environment"])


def print_peaks(rows: list[Row], environment: dict[str, Any]) -> None:
    """A line per pass; then the largest tensors of each pass at the longest context."""
    peaks = [peak["bytes"] for row in rows for peak in row.get("peaks", ())]
    unit, factor = ("GB", 1e9) if max(peaks, default=0) >= 1e8 else ("MB", 1e6)
    longest = max((row["context"] for row in rows), default=0)
    lines, named = [], []
    for row in rows:
        cells = [row["size"], row["precision"], str(row["context"])]
        if "failure" in row:
            lines.append([*cells, row["mode"], row["failure"]])
            continue
        for i, peak in enumerate(row["peaks"]):
            seed = f"{row['seed']['gb'] * 1e9 / factor:.3f}" if row["seed"] and i == 0 else ""
            lines.append([*cells, peak["pass"], f"{peak['bytes'] / factor:.3f}", seed])
            for group in peak.get("largest", [])[: row["context"] == longest]:
                size = f"{group['count']} x {show_bytes(group['each'])}"
                named.append([" ".join([*cells[:2], peak["pass"]]), size, group["what"]])
    if lines:
        left = ("size", "precision", "context", "pass")
        title = f"peak memory, {unit} ({factor:.0e} bytes)".replace("e+0", "e")
        print_table(title, (*left, "peak", "document's"), lines, environment, left, width=80)
    if named:
        heads = ("pass", "tensors", "what they are")
        title = f"the largest tensors at the peak, {longest} tokens"
        print_table(title, heads, named, environment, heads, width=80)
