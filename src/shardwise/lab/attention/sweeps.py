# mypy: disable-error-code="import-not-found,import-untyped"
"""`shardwise bench attention`: forward, backward and both, per backend, dtype, width and length.

No row without parity: a backend is first compared with float64 on the same or a shorter sequence.
Times are medians by `triton.testing.do_bench`, which empties the cache between calls; Triton is
called as the document calls it, `FlashAttention.apply(q, k, v, is_causal)`. TFLOP/s count the
products that the mathematics needs (2 forward, 5 backward), half of them under a causal mask; the
fraction is of a large matrix product timed in the same run.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardwise.description.language_model import attend_plainly
from shardwise.errors import UserError
from shardwise.kernels.attention.interface import FlashAttention, attention
from shardwise.kernels.attention.reference import plain_attention
from shardwise.lab.attention import untuned
from shardwise.lab.attention.seed import TABLE_7, numbers, tables_4_and_5
from shardwise.lab.exercises.models import one_thread
from shardwise.lab.pictures import draw_attention
from shardwise.lab.processes import explain_failure
from shardwise.lab.rows import RowFile, only_draw, read_rows, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import no_garbage_collection, timer_on, version_of

DOCUMENT = ("table7", "tables45")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
PARITY = {"bf16": 1e-2, "tf32": 1e-3, "fp32": 1e-5}
# Not a multiple of any block; long enough that the kernels for long sequences are the ones checked.
PARITY_LENGTHS = {"one head": 8301, "more": 1101}
PASSES = ("forward", "backward", "both")
TABLE7 = [("bf16", b) for b in ("triton", "flash", "cudnn", "plain")]
TABLE7 += [("fp32", b) for b in ("triton", "efficient", "plain")]
TABLE7 += [("tf32", b) for b in ("triton", "plain")]


@dataclass(frozen=True)
class AttentionCase:
    """One row to be: a backend on a shape."""

    sweep: str
    backend: str  # plain, compiled, triton, flash, cudnn, efficient
    kind: str  # bf16, fp32, or tf32: fp32 with products of 10 bits
    batch: int
    heads: int
    seq: int
    dim: int
    causal: bool

    @property
    def key(self) -> str:
        return "/".join(str(value) for value in asdict(self).values())

    def flops(self, name: str) -> float:
        products = {"forward": 2, "backward": 5, "both": 7}[name]
        pairs = self.seq * self.seq * (0.5 if self.causal else 1.0)
        return products * 2 * self.batch * self.heads * pairs * self.dim


@dataclass
class AttentionRow:
    """What was measured. Times in ms; bytes are beyond the inputs; `seed` is the document's."""

    case: AttentionCase
    parity: float | None = None
    ms: dict[str, float] = field(default_factory=dict)
    tflops: dict[str, float] = field(default_factory=dict)
    of_ceiling: dict[str, float] = field(default_factory=dict)
    saved_bytes: int | None = None  # held between forward and backward
    peak_bytes: int | None = None
    seed: dict[str, float] = field(default_factory=dict)
    failure: str | None = None


def seed_figures(case: AttentionCase) -> dict[str, float]:
    """The document's figures for this row, in ms and GB; empty if it has none."""
    if case.sweep == "tables45" and case.backend in ("plain", "compiled"):
        found = tables_4_and_5(case.dim, case.seq)
        if found and case.backend == "plain":
            # The times are of the run that has compiled ones too; the memory is the other's.
            return found["plain"] | {"memory_gb": found["alone"]["memory_gb"]}
        return found.get(case.backend, {})
    if case.sweep == "table7" and case.backend in ("plain", "triton"):
        for seq, dim, mixed, *times in numbers(TABLE_7):
            if (seq, dim, bool(mixed)) == (case.seq, case.dim, case.kind == "bf16"):
                own = times[case.backend == "triton" :: 2]
                return dict(zip(PASSES, own, strict=True))
    return {}


def make_cases(sweeps: tuple[str, ...], quick: bool) -> list[AttentionCase]:
    """In the order of measuring: last what no promise is made about, long sequences of other widths
    than 128."""
    cases: list[AttentionCase] = []
    lengths: tuple[int, ...]
    if "heads" in sweeps:
        lengths = (128,) if quick else (8192, 16384, 32768, 65536)
        for dim in (128, 64):
            for seq in lengths:
                for backend in ("triton", "flash", "cudnn"):
                    cases.append(AttentionCase("heads", backend, "bf16", 1, 16, seq, dim, True))
    if "table7" in sweeps:
        lengths = (128,) if quick else (128, 1024, 8192, 32768, 65536, 131072)
        for seq in lengths:
            for dim in (16,) if quick else (128, 64, 16):
                for kind, backend in TABLE7:
                    # What is not asked for and takes long: quadratic memory, and tf32.
                    slow = backend == "plain" or kind == "tf32"
                    if not slow or seq <= 32768 or (seq, dim, kind) == (65536, 128, "bf16"):
                        cases.append(AttentionCase("table7", backend, kind, 1, 1, seq, dim, True))
    if "tables45" in sweeps:
        for dim in (16,) if quick else (16, 32, 64, 128):
            for seq in (128,) if quick else (256, 1024, 4096, 8192, 16384):
                for backend in ("plain", "compiled", "triton"):
                    cases.append(AttentionCase("tables45", backend, "fp32", 8, 1, seq, dim, False))
    return sorted(cases, key=lambda c: c.seq > 32768 and c.heads == 1 and c.dim != 128)


class Bench:
    """One run: its device, its compiled function, its ceilings, and parities already found."""

    def __init__(self, quick: bool, ceilings: bool = True) -> None:
        """Without ceilings, rows say nothing of what fraction of them they reach."""
        self.quick = quick
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # Once for all shapes. A trial takes the same way through the tracer, without a compiler.
        backend = "aot_eager" if quick else "inductor"
        self.compiled = torch.compile(attend_plainly, dynamic=True, backend=backend)
        self.parities: dict[tuple[str, str, str, int, int], float] = {}
        self.ceilings = {kind: self.ceiling(kind) for kind in DTYPES} if ceilings else {}

    def ceiling(self, kind: str) -> float:
        """TFLOP/s of a large square matrix product."""
        size = 256 if self.quick else 8192
        a, b = (torch.randn(size, size, device=self.device, dtype=DTYPES[kind]) for _ in range(2))
        with _tf32(kind == "tf32"):
            return 2 * size**3 / self.median_ms(lambda: a @ b) / 1e9

    def median_ms(self, call: Callable[[], Any]) -> float:
        if self.device == "cuda":
            from triton.testing import do_bench

            return float(do_bench(call, warmup=15, rep=60, return_mode="median"))
        return statistics.median(timer_on("cpu")(call).step_ms for _ in range(3))

    def function(self, case: AttentionCase) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if case.backend == "plain":
            return lambda q, k, v: attend_plainly(q, k, v, case.causal)
        if case.backend == "compiled":
            return lambda q, k, v: self.compiled(q, k, v, case.causal)
        if case.backend == "triton":
            return lambda q, k, v: FlashAttention.apply(q, k, v, case.causal)
        backend = case.backend if self.device == "cuda" else "reference"
        return lambda q, k, v: attention(q, k, v, causal=case.causal, backend=backend)

    def inputs(self, case: AttentionCase, seq: int) -> list[Tensor]:
        heads = () if case.sweep in DOCUMENT else (case.heads,)
        size = (case.batch, *heads, seq, case.dim)
        made = [torch.randn(size, device=self.device, dtype=DTYPES[case.kind]) for _ in range(4)]
        return [x.requires_grad_(i < 3) for i, x in enumerate(made)]

    def parity(self, case: AttentionCase) -> float:
        """The largest relative error of o, dq, dk, dv against float64, on a shorter sequence."""
        longest = PARITY_LENGTHS["one head" if case.batch * case.heads == 1 else "more"]
        length = 32 if self.quick else min(case.seq, longest)
        key = (case.sweep, case.backend, case.kind, case.dim, length)
        if key not in self.parities:
            *qkv, do = self.inputs(case, length)
            o = self.function(case)(*qkv)
            got = (o, *torch.autograd.grad(o, qkv, do))
            wide = [x.detach().double().requires_grad_() for x in qkv]
            heads = (x.view(case.batch, case.heads, length, case.dim) for x in wide)
            o = plain_attention(*heads, causal=case.causal).view_as(do)
            wanted = (o, *torch.autograd.grad(o, wide, do.double()))
            gaps = [
                ((a.double() - b).norm() / b.norm()).item()
                for a, b in zip(got, wanted, strict=True)
            ]
            self.parities[key] = math.nan if any(map(math.isnan, gaps)) else max(gaps)
        return self.parities[key]

    def measure(self, case: AttentionCase) -> AttentionRow:
        row = AttentionRow(case, seed=seed_figures(case))
        try:
            with no_garbage_collection(), _tf32(case.kind == "tf32"):
                row.parity = self.parity(case)
                if row.parity <= PARITY[case.kind]:
                    self.fill(row)
                else:
                    row.failure = f"differs from float64 by {row.parity:.1e}: not timed"
        except (RuntimeError, ValueError) as error:
            row.failure = explain_failure(error)
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return row

    def fill(self, row: AttentionRow) -> None:
        case, call = row.case, self.function(row.case)
        *qkv, do = self.inputs(case, case.seq)
        if self.device == "cuda":
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            o = call(*qkv)
            row.saved_bytes = torch.cuda.memory_allocated() - before
            torch.autograd.grad(o, qkv, do)
            row.peak_bytes = torch.cuda.max_memory_allocated() - before
            del o
        row.ms["forward"] = self.median_ms(lambda: call(*qkv))
        row.ms["both"] = self.median_ms(lambda: torch.autograd.grad(call(*qkv), qkv, do))
        if case.backend == "compiled":  # its backward frees what it read: it runs once per forward
            row.ms["backward"] = row.ms["both"] - row.ms["forward"]
        else:
            o = call(*qkv)
            row.ms["backward"] = self.median_ms(
                lambda: torch.autograd.grad(o, qkv, do, retain_graph=True)
            )
        row.tflops = {name: case.flops(name) / ms / 1e9 for name, ms in row.ms.items()}
        if self.ceilings:
            ceiling = self.ceilings[case.kind]
            row.of_ceiling = {name: value / ceiling for name, value in row.tflops.items()}


@contextmanager
def _tf32(allow: bool) -> Iterator[None]:
    """Let torch's own fp32 products use tf32, or not."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allow
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def describe(row: AttentionRow) -> str:
    case = row.case
    name = f"{case.sweep} {case.kind} {case.seq} x {case.dim} {case.backend}: "
    return name + (row.failure or ", ".join(f"{p} {row.ms[p]:.3f}" for p in PASSES) + " ms")


SWEEPS = {
    "heads": "16 heads", "table7": "one head, table 7", "tables45": "batch 8, tables 4 and 5",
}  # fmt: skip


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """Times and rates of each sweep and dtype; or those of the untuned shapes."""
    if rows and "shape" in rows[0]:
        untuned.show(rows, facts)
        return
    environment = facts["environment"]
    left = ("tokens", "width", "backend")
    for sweep, kind in dict.fromkeys((r["case"]["sweep"], r["case"]["kind"]) for r in rows):
        times, rates = [], []
        for row in rows:
            case = row["case"]
            if (case["sweep"], case["kind"]) != (sweep, kind):
                continue
            name = [f"{case['seq']:,}", str(case["dim"]), case["backend"]]
            if row["failure"] is not None:
                times.append([*name, row["failure"]])
                continue
            seed = row["seed"]
            both = seed.get("both", seed.get("forward", 0.0) + seed.get("backward", 0.0))
            cells = (f"{row['ms'][p]:.3f}" for p in PASSES)
            times.append([*name, *cells, f"{both:.3f}" if both else ""])
            memory = (row["saved_bytes"], row["peak_bytes"])
            mib = ("" if n is None else f"{n / 2**20:,.0f}" for n in memory)
            rate, part = row["tflops"]["both"], row["of_ceiling"].get("both")
            rates.append([*name, f"{rate:.3g}", "" if part is None else f"{part:.0%}", *mib])
        title = f"attention, {SWEEPS[sweep]}, {kind}"
        heads = (*left, *PASSES, "document's both")
        print_table(f"{title}: ms", heads, times, {}, left, width=80)
        heads = (*left, "TFLOP/s", "of a product", "MiB held", "MiB peak")
        print_table(f"{title}: both passes", heads, rates, environment, left, width=80)


def check_kind(arguments: argparse.Namespace) -> None:
    """A file that goes on has rows of these shapes, and not of the others."""
    known = read_rows(arguments.json) if arguments.resume else []
    other = "case" if arguments.shapes == "untuned" else "shape"
    if any(other in row for row in known):
        raise UserError(
            f"--resume {arguments.json}: its rows are not of --shapes {arguments.shapes}: name "
            "another file"
        )


def run(arguments: argparse.Namespace) -> None:
    """Measure row by row, write the JSON after each, draw the plot, print the tables."""
    check_kind(arguments)
    if arguments.shapes == "untuned":
        untuned.run(arguments)
        return
    if only_draw(arguments, draw_attention):
        return
    if not torch.cuda.is_available() and not arguments.quick:
        raise UserError("this needs a CUDA device (--quick runs every path without one)")
    with one_thread(arguments.quick):
        bench = Bench(arguments.quick)
        file = RowFile.of(
            arguments,
            key_of=lambda row: AttentionCase(**row["case"]).key,
            ceilings_tflops=bench.ceilings,
        )
        file.facts["environment"]["triton"] = version_of("triton")
        cases = make_cases(arguments.sweeps, arguments.quick)
        for case in file.missing(cases, lambda case: case.key):
            row = bench.measure(case)
            say(describe(row))
            file.add(asdict(row))
    file.tell(arguments.plot, draw_attention, show)
