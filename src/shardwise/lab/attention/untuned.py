"""`shardwise bench attention --shapes untuned`: is the default the fastest on shapes that no table
was made for?

Shapes are drawn by a seeded generator over batch, heads, key/value heads, width, tokens and mask;
with them go the four of an earlier complaint, and a small grid for the kernels against cuDNN. All
backends that can serve a shape and the default take turns, forward alone (no gradient wanted) and
forward + backward, after two checks: each against float64 on a short sequence, and all against each
other on the shape itself. Times are medians of calls with a cold L2 cache.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import active_children, get_context
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import UserError
from shardwise.kernels.attention import backends
from shardwise.kernels.attention.backends import Request
from shardwise.kernels.attention.interface import attention
from shardwise.kernels.attention.measured import Trials
from shardwise.kernels.attention.reference import plain_attention
from shardwise.lab.exercises.models import one_thread
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import no_garbage_collection, version_of

PASSES = ("forward", "both")
DRAWN = 44
SEED = 17
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
HEADS = (8, 12, 16, 20, 24, 32, 40, 48, 64)
GROUPS = (1, 1, 2, 4, 8)  # query heads of a key/value head
WIDTHS = (32, 48, 64, 80, 96, 112, 128, 160, 192, 256)
MOST_FLOPS = 9e12  # of a forward: both passes in about 0.1 s
MOST_ELEMENTS = 2**29  # of q: 1 GiB
MOST_SCORES = 2**28  # for torch's plain attention to take part
GRID_WIDTHS, GRID_TOKENS = (64, 96, 128, 256), (2048, 8192, 32768)
WITHIN = 1.03
PARITY, AGREEMENT = 1e-2, 3e-2  # bf16: against float64, and of two backends
PARITY_TOKENS = 701
BUDGET_MS = 150.0  # of one shape's rounds of one pass; three are always made
FAR = 3.0
HANG_S = 150.0  # for compiling all kernels


@dataclass(frozen=True)
class Shape:
    group: str  # drawn, named or grid
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    causal: bool
    window: int | None = None
    documents: int = 0  # segments of about equal length

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    @property
    def mask(self) -> str:
        words = ["causal" if self.causal else "full"]
        words += [f"w{self.window}"] if self.window else []
        words += [f"{self.documents} seg."] if self.documents else []
        return " ".join(words)

    @property
    def sizes(self) -> str:
        """Batch, heads (and those of keys and values if fewer), tokens, width."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        return f"{self.batch}x{heads}x{self.seq}x{self.dim}"

    def short(self) -> Shape:
        """The same with two key/value heads and few tokens: what float64 has the memory for."""
        tokens = min(self.seq, PARITY_TOKENS)
        return replace(
            self, group="short", batch=1, heads=2 * self.heads // self.kv_heads, kv_heads=2,
            seq=tokens, window=None if self.window is None else min(self.window, tokens // 3),
        )  # fmt: skip

    def pairs(self) -> int:
        """Queries and keys that see each other, in one head."""
        parts = self.documents or 1
        bounds = [-(-self.seq * i // parts) for i in range(parts + 1)]
        return sum(self._pairs_in(end - begin) for begin, end in pairwise(bounds))

    def _pairs_in(self, length: int) -> int:
        window = min(self.window or length, length)
        below = (length * (length + 1) - (length - window) * (length - window + 1)) // 2
        return below if self.causal else 2 * below - length

    def flops(self, name: str) -> float:
        products = {"forward": 2, "both": 7}[name]
        return products * 2.0 * self.batch * self.heads * self.pairs() * self.dim


# Batch, heads, key/value heads, tokens, width: where the default was found slow.
NAMED = ((8, 16, 16, 2048, 64), (16, 12, 12, 1024, 64), (1, 8, 8, 16384, 96), (2, 16, 4, 8192, 256))


def make_shapes(quick: bool) -> list[Shape]:
    if quick:
        return [
            Shape("named", 1, 2, 2, 64, 16, True), Shape("drawn", 2, 4, 2, 50, 16, False),
            Shape("drawn", 1, 2, 1, 64, 16, True, window=9),
            Shape("drawn", 1, 2, 2, 64, 16, False, documents=3),
        ]  # fmt: skip
    named = [Shape("named", *sizes, causal=True) for sizes in NAMED]
    grid = [
        Shape("grid", max(1, 16384 // tokens), 16, 16, tokens, width, causal=True)
        for width in GRID_WIDTHS
        for tokens in GRID_TOKENS
    ]
    return [*named, *draw(DRAWN), *grid]


def draw(count: int) -> list[Shape]:
    """The same shapes every time: lengths spread evenly over 512 to 65,536 tokens by octaves, the
    rest as it comes, drawn again while it is too much work or memory.
    """
    chance = random.Random(SEED)

    def one_of(values: Sequence[int]) -> int:
        return values[int(chance.random() * len(values))]

    shapes: list[Shape] = []
    while len(shapes) < count:
        seq = int(2 ** (9 + 7 * (len(shapes) + chance.random()) / count))
        if chance.random() < 0.75:
            seq = max(512, seq // 128 * 128)
        heads, group, kind = one_of(HEADS), one_of(GROUPS), chance.random()
        shape = Shape(
            "drawn", one_of(BATCHES), heads, heads // group if heads % group == 0 else heads, seq,
            one_of(WIDTHS), chance.random() < 0.65,
            window=int(seq * (0.02 + 0.4 * chance.random())) if kind < 0.15 else None,
            documents=2 + int(6 * chance.random()) if kind > 0.85 else 0,
        )  # fmt: skip
        elements = shape.batch * heads * seq * shape.dim
        if shape.flops("forward") <= MOST_FLOPS and elements <= MOST_ELEMENTS:
            shapes.append(shape)
    return shapes


class Bench:
    """One run: its device, and the parities already found."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.parities: dict[tuple[str, Shape], float | str] = {}

    def measure(self, shape: Shape) -> Row:
        row: Row = {"key": shape.key, "shape": asdict(shape), "failure": None}
        try:
            with no_garbage_collection():
                row |= self._measure(shape)
        except Exception as error:  # the next shape may do
            row["failure"] = explain_failure(error)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return row

    def _measure(self, shape: Shape) -> Row:
        problem = Problem(shape, self.device)
        failed: dict[str, str] = {}
        able = []
        for name in self.rivals(problem):
            parity = self.parity(shape, name)
            if isinstance(parity, str):
                failed[name] = parity
            elif not parity <= PARITY:  # NaN is not
                failed[name] = f"differs from float64 by {parity:.1e}"
            else:
                able.append(name)
        apart = problem.largest_distance(able, failed)
        if not apart <= AGREEMENT:
            raise RuntimeError(f"the backends {able} differ by {apart:.1e} on this shape")
        sides = {name: self.side(problem, name, able) for name in PASSES}
        return {"failed": failed, "apart": apart, **sides}

    def rivals(self, problem: Problem) -> list[str]:
        names = backends.rank(problem.request("both"))
        if self.device.type != "cuda":
            return [*names, "reference"]
        shape = problem.shape
        scores = shape.batch * shape.heads * shape.seq**2
        small = scores <= MOST_SCORES and (shape.window is not None or shape.documents)
        return [*names, "math"] if small and "math" not in names else names

    def parity(self, shape: Shape, name: str) -> float | str:
        """The largest relative error of o, dq, dk, dv against float64, on a short sequence; or why
        there is none.
        """
        short = shape.short()
        key = (name, short)
        if key not in self.parities:
            try:
                self.parities[key] = Problem(short, self.device).error(name)
            except Exception as error:  # what a backend says of a width it does not take
                self.parities[key] = explain_failure(error)
        return self.parities[key]

    def side(self, problem: Problem, name: str, able: Sequence[str]) -> Row:
        """One pass: the default and all that can, in turn."""
        began = time.perf_counter()
        problem.call(name, None)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        first_ms = 1e3 * (time.perf_counter() - began)
        chosen = backends.choose(problem.request(name), plain=True)
        calls = {each or "default": partial(problem.call, name, each) for each in (None, *able)}
        trials = Trials()
        budget = 1.0 if self.quick else BUDGET_MS
        trials.run(calls, self.device, budget, far=FAR, rounds=(3, 80))
        if "default" not in trials.ms or len(trials.ms) == 1:
            raise RuntimeError(f"nothing to compare: {trials.failed}")
        ms = trials.medians()
        fastest = min((each for each in ms if each != "default"), key=lambda each: ms[each])
        return {
            "ms": ms,
            "spread_ms": {each: spread(times) for each, times in trials.ms.items()},
            "tflops": {each: problem.shape.flops(name) / ms[each] / 1e9 for each in ms},
            "failed": trials.failed,
            "chosen": chosen,
            "fastest": fastest,
            "ratio": ms["default"] / ms[fastest],
            "first_ms": first_ms,
        }


class Problem:
    """The tensors of a shape, and calls on them."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        made = torch.Generator(device).manual_seed(SEED)
        sizes = [shape.heads, shape.kv_heads, shape.kv_heads, shape.heads]
        q, k, v, self.do = (
            torch.empty(
                shape.batch, n, shape.seq, shape.dim, device=device, dtype=torch.bfloat16
            ).normal_(generator=made)
            for n in sizes
        )
        self.inputs = [x.requires_grad_() for x in (q, k, v)]
        self.options: dict[str, Any] = {"causal": shape.causal, "window": shape.window}
        if shape.documents:
            ids = torch.arange(shape.seq, device=device) * shape.documents // shape.seq
            ids = ids.int().expand(shape.batch, -1).contiguous()
            self.options["segment_ids"] = (ids, ids)

    def request(self, name: str) -> Request:
        q, k, v = self.inputs
        mask = (self.shape.causal, self.shape.window, bool(self.shape.documents))
        with torch.set_grad_enabled(name == "both"):
            return Request.of(q, k, v, *mask)

    def call(self, name: str, backend: str | None) -> None:
        with torch.set_grad_enabled(name == "both"):
            o = attention(*self.inputs, **self.options, backend=backend)
            if name == "both":
                torch.autograd.grad(o, self.inputs, self.do)

    def results(self, backend: str) -> list[Tensor]:
        o = attention(*self.inputs, **self.options, backend=backend)
        return [o.detach(), *torch.autograd.grad(o, self.inputs, self.do)]

    def error(self, backend: str) -> float:
        """Against float64: the largest relative error of o, dq, dk, dv."""
        wide = [x.detach().double().requires_grad_() for x in self.inputs]
        o = plain_attention(*wide, **self.options)
        wanted = [o.detach(), *torch.autograd.grad(o, wide, self.do.double())]
        return distance(self.results(backend), wanted)

    def largest_distance(self, names: list[str], failed: dict[str, str]) -> float:
        """Of the first backend's results and each other's; one that cannot run goes to `failed`."""
        first, largest = None, 0.0
        for name in list(names):
            try:
                found = self.results(name)
            except Exception as error:
                names.remove(name)
                failed[name] = explain_failure(error)
                continue
            if first is None:
                first = found
            else:
                largest = max(largest, distance(found, first))
        return largest


def distance(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> float:
    gaps = [
        ((a.to(b.dtype) - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)
    ]
    return math.nan if any(map(math.isnan, gaps)) else max(gaps)


def spread(times: Sequence[float]) -> float:
    """Between the quartiles; of few, between the ends."""
    if len(times) < 4:
        return max(times) - min(times)
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def compile_ahead(shapes: Sequence[Shape]) -> None:
    """Run these kernels once in many processes: what they compile stays in Triton's cache, and
    compiling one after the other would take longer than all that is measured.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", __name__])
    workers = max(1, min(12, (os.cpu_count() or 1) - 2))
    pool = ProcessPoolExecutor(workers, context)
    jobs = {pool.submit(compile_one, shape): shape for shape in shapes}
    try:
        for done, job in enumerate(as_completed(jobs, timeout=HANG_S), 1):
            problem = job.exception() or job.result()
            if problem or done % 10 == 0:
                of = f" ({jobs[job].key}: {problem})" if problem else ""
                say(f"kernels of {done} of {len(jobs)} shapes are compiled{of}")
    except TimeoutError:
        say(f"not all kernels are compiled after {HANG_S:.0f} s: the rest as it comes")
        for process in active_children():  # a compiler that hangs cannot be interrupted
            process.kill()
    pool.shutdown(cancel_futures=True)


def compile_one(shape: Shape) -> str | None:
    """Why these kernels do not compile or run; it is said again where they are measured."""
    try:
        for each in (shape, shape.short()):
            Problem(each, torch.device("cuda")).call("both", "triton")
        torch.cuda.synchronize()
    except Exception as error:
        return explain_failure(error)
    finally:
        torch.cuda.empty_cache()  # other processes share the GPU
    return None


def describe(row: Row) -> str:
    shape = Shape(**row["shape"])
    name = f"{shape.sizes}, {shape.mask}: "
    if row["failure"] is not None:
        return name + row["failure"]
    words = []
    for side in (row[each] for each in PASSES):
        times = ", ".join(f"{each} {ms:.3f}" for each, ms in side["ms"].items())
        words.append(f"{times} ms, took {side['chosen']}: {side['ratio']:.3f}")
    failed = "".join(f"; {each}: {why}" for each, why in row["failed"].items())
    return name + "; both ".join(words) + failed


def sum_up(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """By pass, how far the default is from the fastest: at worst, and how often within 3 %."""
    found = {}
    for name in PASSES:
        ratios = [row[name]["ratio"] for row in rows if row["failure"] is None]
        if ratios:
            near = sum(ratio <= WITHIN for ratio in ratios)
            found[name] = {"shapes": len(ratios), "worst": max(ratios), "within": near}
    return found


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Every shape: what the default took, its rate, and its time to the fastest's."""
    left = ("shape", "mask", "forward", "both")
    lines = []
    for row in rows:
        shape = Shape(**row["shape"])
        cells = [shape.sizes, shape.mask]
        if row["failure"] is not None:
            lines.append([*cells, row["failure"]])
            continue
        for side in (row[name] for name in PASSES):
            cells += [f"{side['chosen']} {side['ratio']:.2f}", f"{side['tflops']['default']:.3g}"]
        lines.append(cells)
    heads = ("shape", "mask", "forward", "rate", "both", "rate")
    title = "attention by default: the backend, its time / the fastest one's, TFLOP/s"
    print_table(title, heads, lines, facts["environment"], left, width=80)
    print("shape: batch x heads (/ key/value heads) x tokens x width; w: a window; seg.: segments")
    for name, each in sum_up(rows).items():
        print(
            f"{name}: {each['within']} of {each['shapes']} shapes within 3 % of the fastest, "
            f"at worst {each['worst']:.2f}"
        )


def run(arguments: argparse.Namespace) -> None:
    """Measure shape by shape, write the JSON after each, print the table."""
    if arguments.plot is not None:
        raise UserError("--shapes untuned draws no picture: leave --plot out")
    if not torch.cuda.is_available() and not arguments.quick:
        raise UserError("this needs a CUDA device (--quick runs every path without one)")
    with one_thread(arguments.quick):
        bench = Bench(arguments.quick)
        file = RowFile.of(arguments)
        file.facts["environment"]["triton"] = version_of("triton")
        file.facts["environment"]["cudnn"] = torch.backends.cudnn.version()
        shapes = make_shapes(arguments.quick)
        missing = [shape for shape in shapes if shape.key not in file]
        if missing and bench.device.type == "cuda" and backends.HAS_TRITON:
            compile_ahead(missing)
        for shape in file.missing(missing, lambda shape: shape.key):
            row = bench.measure(shape)
            say(describe(row))
            file.add(row)
    show(file.rows, file.facts)
