"""Find the fastest tiles for the attention kernels on this GPU, and check each before timing it.

    python benchmarks/attention_tune.py --json results.json --budget 240

1. Every candidate runs on a small problem with fresh random inputs and NaN-filled results, and is
   compared with float64, each in a process of its own, many at a time because most of it is
   compiling; what they compile stays in Triton's cache for step 2. A candidate that fails to
   compile, is wrong or hangs is named and left out.
2. One process times the rest with torch's flash and cuDNN beside, causal: medians by device events.
   Ours are replayed from a graph, because tiles should not depend on how fast the host is.

The file is written after every result, and results it already has are not made again, so a run that
ended early continues. Last comes a table; the winners are for attention_configs.py.

    python benchmarks/attention_tune.py --once backward hopper-stash-128x64 16x128-bf16 8192

runs one candidate a few times and nothing else: the program to give to a profiler.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.kernels.attention.configs import Backward, Stash, Tiles
from shardwise.kernels.attention.reference import plain_attention

BOUNDS = {"bf16": 1e-2, "fp32": 1e-5, "tf32": 1e-3}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
CHECK_LENGTH = 1024
WORKERS = 12
HANG = 60.0  # seconds for one candidate, compiling included


class Problem(NamedTuple):
    heads: int
    width: int
    kind: str  # bf16, fp32 or tf32

    def __str__(self) -> str:
        return f"{self.heads}x{self.width}-{self.kind}"


PROBLEMS = {
    str(p): p
    for p in (
        Problem(16, 128, "bf16"), Problem(16, 64, "bf16"), Problem(1, 128, "bf16"),
        Problem(1, 64, "bf16"), Problem(1, 16, "bf16"), Problem(1, 128, "fp32"),
        Problem(1, 64, "fp32"), Problem(1, 16, "fp32"), Problem(1, 128, "tf32"),
        Problem(1, 64, "tf32"), Problem(1, 16, "tf32"),
    )
}  # fmt: skip
LENGTHS = (32768, 8192, 1024)


def pointers(*sizes: int) -> Tiles:
    return Tiles(*sizes, tma=False)


def parts(*sizes: int, tma: bool = True) -> Tiles:
    return Tiles(*sizes, tma=tma, split=True)


def joined(dkdv: Tiles, dq: Tiles, roles: int = 2) -> Backward:
    return Backward(dkdv, dq, joined=roles)


def hopper(*sizes: int) -> Tiles:
    return Tiles(*sizes, hopper=True)


def stash(product: Tiles, gigabytes: float = 2, chunk: int = 8192) -> Stash:
    return Stash(product, bytes=int(gigabytes * 2**30), chunk=chunk)


PLAIN_FORWARD = {
    "128x128-w8-s2": Tiles(128, 128, 8, 2),
    "128x64-w8-s3": Tiles(128, 64, 8, 3),
    "128x64-w4-s2": Tiles(128, 64, 4, 2),
    "64x128-w4-s2": Tiles(64, 128, 4, 2),
    "128x64-w8-s3-pointers": pointers(128, 64, 8, 3),
    "128x64-w4-s4-pointers": pointers(128, 64, 4, 4),
}
PLAIN_BACKWARD = {
    "64x64, 64x64": Backward(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    "64x64, 128x64": Backward(Tiles(64, 64, 4, 2), Tiles(128, 64, 8, 3)),
    "64x128, 128x64": Backward(Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3)),
}
SMALL_FORWARD = {
    "64x64-s2": pointers(64, 64, 4, 2),
    "64x64-s3": pointers(64, 64, 4, 3),
    "64x32-s3": pointers(64, 32, 4, 3),
    "32x64-s2": pointers(32, 64, 4, 2),
    "128x64-w8-s3": pointers(128, 64, 8, 3),
}
SMALL_BACKWARD = {
    "64x64, 64x64": Backward(pointers(64, 64, 4, 2), pointers(64, 64, 4, 2)),
    "32x64, 64x32": Backward(pointers(32, 64, 4, 2), pointers(64, 32, 4, 3)),
    "64x64-tma, 128x64": Backward(Tiles(64, 64, 4, 2), pointers(128, 64, 8, 3)),
    "joined-64x64": joined(pointers(64, 64, 4, 2), pointers(64, 64, 4, 2)),
    "joined-32x64, 64x32": joined(pointers(32, 64, 4, 2), pointers(64, 32, 4, 2)),
}
FP32_FORWARD = {
    "parts-128x32-w8": parts(128, 32, 8, 2, tma=False),
    "parts-64x64-s2": parts(64, 64, 4, 2, tma=False),
    "parts-64x64-s3": parts(64, 64, 4, 3, tma=False),
    "parts-64x32": parts(64, 32, 4, 2, tma=False),
    "parts-32x64": parts(32, 64, 4, 2, tma=False),
    "parts-16x64": parts(16, 64, 4, 2, tma=False),
    "32x32": pointers(32, 32, 4, 2),
    "16x32": pointers(16, 32, 4, 2),
    "16x64": pointers(16, 64, 4, 2),
}
FP32_BACKWARD = {
    "parts-32x64-w8, 64x32": Backward(parts(32, 64, 8, 2), parts(64, 32, 4, 2)),
    "parts-32x64, 64x32": Backward(parts(32, 64, 4, 2), parts(64, 32, 4, 2)),
    "parts-64x64, 64x64": Backward(parts(64, 64, 4, 2), parts(64, 64, 4, 2)),
    "32x32": Backward(pointers(32, 32, 4, 1), pointers(32, 32, 4, 1)),
    "joined-parts-32x64, 64x32": joined(parts(32, 64, 4, 2), parts(64, 32, 4, 2)),
    "joined3-parts-32x64, 64x32": joined(parts(32, 64, 4, 2), parts(64, 32, 4, 2), 3),
    "joined3-parts-32x32-pointers": joined(
        parts(32, 32, 4, 2, tma=False), parts(32, 32, 4, 2, tma=False), 3
    ),
    "joined-parts-64x64": joined(parts(64, 64, 4, 2), parts(64, 64, 4, 2)),
    "joined-parts-32x64-pointers": joined(
        parts(32, 64, 4, 2, tma=False), parts(64, 32, 4, 2, tma=False)
    ),
    "joined-parts-32x32-pointers": joined(
        parts(32, 32, 4, 2, tma=False), parts(32, 32, 4, 2, tma=False)
    ),
    "joined-32x32": joined(pointers(32, 32, 4, 1), pointers(32, 32, 4, 1)),
}
TF32_FORWARD = {
    "128x64-w8": pointers(128, 64, 8, 2),
    "64x32": pointers(64, 32, 4, 2),
    "parts-128x64-w8": parts(128, 64, 8, 2, tma=False),
    "parts-128x32-w8": parts(128, 32, 8, 2, tma=False),
    "parts-64x64": parts(64, 64, 4, 2, tma=False),
    "parts-32x64": parts(32, 64, 4, 2, tma=False),
}
TF32_BACKWARD = {
    "32x64, 64x32": Backward(pointers(32, 64, 4, 2), pointers(64, 32, 4, 2)),
    "32x64-w8, 64x32-w8": Backward(pointers(32, 64, 8, 2), pointers(64, 32, 8, 2)),
    "parts-32x128-w8, 128x32-w8": Backward(parts(32, 128, 8, 2), parts(128, 32, 8, 2)),
    "joined-parts-32x128-w8, 128x32": joined(parts(32, 128, 8, 2), parts(128, 32, 8, 2)),
    "joined3-parts-32x128-w8, 128x32": joined(parts(32, 128, 8, 2), parts(128, 32, 8, 2), 3),
    "joined-parts-64x64": joined(parts(64, 64, 4, 2), parts(64, 64, 4, 2)),
    "joined3-parts-64x64": joined(parts(64, 64, 4, 2), parts(64, 64, 4, 2), 3),
    "joined-parts-32x64, 64x32": joined(parts(32, 64, 4, 2), parts(64, 32, 4, 2)),
    "joined3-parts-32x32-pointers": joined(
        parts(32, 32, 4, 2, tma=False), parts(32, 32, 4, 2, tma=False), 3
    ),
}
DQ = {128: Tiles(64, 64, 4, 2), 64: Tiles(128, 64, 8, 3)}


def candidates(kind: str, problem: Problem) -> dict[str, Any]:
    """By name, what competes for a row of the tables."""
    forward = kind == "forward"
    if problem.kind == "fp32":
        return dict(FP32_FORWARD if forward else FP32_BACKWARD)
    if problem.kind == "tf32":
        return dict(TF32_FORWARD if forward else TF32_BACKWARD)
    if problem.width not in DQ:
        return dict(SMALL_FORWARD if forward else SMALL_BACKWARD)
    plain = PLAIN_FORWARD if forward else PLAIN_BACKWARD
    small = SMALL_FORWARD if forward else SMALL_BACKWARD
    rest = plain if problem.heads > 1 else small
    if forward:
        return {"hopper-s2": hopper(128, 128, 4, 2), "hopper-s3": hopper(128, 128, 4, 3)} | rest
    dkdv, dq = hopper(64, 128, 4, 2 if problem.width == 128 else 3), DQ[problem.width]
    return {
        "hopper": Backward(dkdv, dq),
        "hopper-stash-128x64": Backward(dkdv, dq, stash(Tiles(128, 64, 4, 4))),
        "hopper-stash-128x128": Backward(dkdv, dq, stash(Tiles(128, 128, 8, 3))),
        "hopper-stash-1g": Backward(dkdv, dq, stash(Tiles(128, 64, 4, 4), 1, 4096)),
        "hopper-stash-8g": Backward(dkdv, dq, stash(Tiles(128, 64, 4, 4), 8, 16384)),
    } | rest


KINDS = ("forward", "backward")
BASELINES = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def make_inputs(problem: Problem, length: int) -> list[Tensor]:
    """q, k, v, do: fresh every time."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    size = (1, problem.heads, length, problem.width)
    return [torch.randn(size, device="cuda", dtype=DTYPES[problem.kind]) for _ in range(4)]


def caller(kind: str, name: str, problem: Problem, tensors: list[Tensor]) -> Callable[[], Any]:
    """What to time: one forward, or one backward from saved o and lse."""
    q, k, v, do = tensors
    if name in BASELINES:
        for x in (q, k, v):
            x.requires_grad_(kind == "backward")
        with sdpa_kernel(BASELINES[name]):
            if kind == "forward":
                return lambda: _sdpa(name, q, k, v)
            o = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True)
    from shardwise.kernels.attention import launch

    mask = launch.Mask(True, 1 / math.sqrt(problem.width))
    tiles = candidates(kind, problem)[name]
    precision = "tf32" if problem.kind == "tf32" else "fp32"
    if kind == "forward":
        return lambda: launch.forward(q, k, v, mask, precision, tiles)
    o, lse = launch.forward(q, k, v, mask, precision)
    return lambda: launch.backward(q, k, v, o, lse, do, None, mask, precision, tiles)


def _sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(BASELINES[name]):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def check(kind: str, name: str, problem: Problem) -> dict[str, Any]:
    """Errors against float64, and whether a second run gives the same bits."""
    import warnings

    warnings.simplefilter("ignore")
    tensors = make_inputs(problem, CHECK_LENGTH)
    wanted_inputs = [x.double().requires_grad_() for x in tensors[:3]]
    o = plain_attention(*wanted_inputs, causal=True)
    if kind == "forward":
        wanted: tuple[Tensor, ...] = (o.detach(),)
    else:
        wanted = torch.autograd.grad(o, wanted_inputs, tensors[3].double())
    # Under this mode torch fills each new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    call = caller(kind, name, problem, tensors)
    runs = [call() for _ in range(2)]
    torch.cuda.synchronize()
    got, again = ((r[0],) if kind == "forward" else r for r in runs)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]
    good = all(e <= BOUNDS[problem.kind] for e in errors)  # NaN is not
    same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return {"ok": good and same, "errors": errors, "same_bits": same}


_inputs: dict[tuple[Problem, int], list[Tensor]] = {}


def measure(kind: str, name: str, problem: Problem, length: int) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s."""
    if (problem, length) not in _inputs:
        _inputs.clear()
        _inputs[problem, length] = make_inputs(problem, length)
    call = caller(kind, name, problem, [x.detach() for x in _inputs[problem, length]])
    milliseconds = time_calls(call) if name in BASELINES else time_replays(call)
    products = 2 if kind == "forward" else 5
    operations = products * problem.heads * length * length * problem.width
    return {"ms": milliseconds, "tflops": operations / milliseconds / 1e9}


def time_calls(call: Callable[[], Any], calls: int = 1) -> float:
    """The median of repeated calls by device events, divided by `calls`."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < 150 and len(times) < 50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times) / calls


def time_replays(call: Callable[[], Any]) -> float:
    """One call without the host's part: a graph of several, replayed."""
    calls = max(2, min(20, int(15 / time_calls(call))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return time_calls(graph.replay, calls)


class Results:
    """The file: one entry per finished piece of work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")


def select(work: list[str], names: str) -> list[tuple[str, Problem, list[str]]]:
    """Passes and problems, each with the candidates whose names match."""
    pairs = [(kind, PROBLEMS[problem]) for kind, problem in (w.split("/") for w in work)]
    return [(k, p, [n for n in candidates(k, p) if re.search(names, n)]) for k, p in pairs]


def check_all(
    results: Results, selected: list[tuple[str, Problem, list[str]]], deadline: float
) -> None:
    work = {
        f"check/{kind}/{problem}/{name}": (kind, name, problem)
        for kind, problem, names in selected
        for name in names
    }
    work = {key: arguments for key, arguments in work.items() if key not in results.rows}
    for key, row in run_apart(work, deadline):
        results.add(key, row)
        print(f"{key:48} {'ok' if row['ok'] else 'NO'} {detail(row)}", flush=True)


def run_apart(
    work: dict[str, tuple[str, str, Problem]], deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check each candidate in a process of its own: a crash or a hang stays its own."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "shardwise.kernels.attention.interface"])
    queue = list(work.items())
    running: dict[str, tuple[BaseProcess, Connection, float]] = {}
    while queue or running:
        while queue and len(running) < WORKERS and time.monotonic() < deadline:
            key, arguments = queue.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            started = context.Process(target=check_into, args=(theirs, *arguments))
            started.start()
            running[key] = (started, ours, time.monotonic())
        if not running:
            return  # the time is up
        time.sleep(0.05)
        for key, (process, pipe, began) in list(running.items()):
            row: dict[str, Any] | None = None
            if pipe.poll():
                row = pipe.recv()
            elif not process.is_alive():
                row = {"ok": False, "failure": f"died with exit code {process.exitcode}"}
            elif time.monotonic() - began > HANG:
                row = {"ok": False, "failure": f"no result after {HANG:.0f} s"}
            if row is not None:
                process.kill()
                del running[key]
                yield key, row


def check_into(pipe: Connection, kind: str, name: str, problem: Problem) -> None:
    try:
        row = check(kind, name, problem)
    except Exception as failure:
        row = {"ok": False, "failure": f"{type(failure).__name__}: {str(failure)[-400:]}"}
    pipe.send(row)


def detail(row: dict[str, Any]) -> str:
    if "failure" in row:
        return str(row["failure"]).replace("\n", " ")[-160:]
    return " ".join(f"{e:.1e}" for e in row["errors"]) + ("" if row["same_bits"] else " UNSTEADY")


def time_all(
    results: Results,
    selected: list[tuple[str, Problem, list[str]]],
    lengths: list[int],
    deadline: float,
) -> None:
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    work = [
        (kind, name, problem, length)
        for kind, problem, names in selected
        for length in lengths
        for name in (*(BASELINES if problem.kind == "bf16" else ()), *names)
    ]
    for kind, name, problem, length in work:
        key = f"time/{kind}/{problem}/{length}/{name}"
        checked = results.rows.get(f"check/{kind}/{problem}/{name}", {})
        if key in results.rows or (name not in BASELINES and not checked.get("ok")):
            continue
        if time.monotonic() > deadline:
            print("the time is up; run again to continue", flush=True)
            break
        try:
            row = pool.submit(measure, kind, name, problem, length).result(HANG)
        except Exception as failure:  # out of memory, a hang: the others go on
            row = {"failure": f"{type(failure).__name__}: {str(failure)[-300:]}"}
            for process in active_children():
                process.kill()
            pool = ProcessPoolExecutor(1, get_context("spawn"))
        results.add(key, row)
    pool.shutdown()


def print_table(results: Results) -> None:
    groups: dict[tuple[str, str, int], list[tuple[str, dict[str, Any]]]] = {}
    for key, row in results.rows.items():
        if key.startswith("time/") and "ms" in row:
            _, kind, problem, length, name = key.split("/")
            groups.setdefault((kind, problem, int(length)), []).append((name, row))
    columns = f"{'name':28}{'ms':>9}{'TFLOP/s':>9}{'/flash':>8}{'/cudnn':>8}"
    print(f"\n{'what':10}{'problem':>13}{'seq':>7}  {columns}")
    for (kind, problem, length), rows in sorted(groups.items()):
        base = {name: row["tflops"] for name, row in rows if name in BASELINES}
        for name, row in sorted(rows, key=lambda r: r[1]["ms"]):
            ratios = (row["tflops"] / base[b] if b in base else math.nan for b in BASELINES)
            print(
                f"{kind:10}{problem:>13}{length:7}  {name:28}{row['ms']:9.3f}{row['tflops']:9.1f}"
                + "".join(f"{r:8.2f}" for r in ratios)
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("attention-tune.json"))
    parser.add_argument("--budget", type=float, default=240, help="seconds (default: 240)")
    every = [f"{kind}/{problem}" for problem in PROBLEMS for kind in KINDS]
    parser.add_argument("--work", nargs="+", default=every, choices=every, metavar="PASS/PROBLEM")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--names", default="", help="a pattern for the candidates (default: all)")
    parser.add_argument("--once", nargs=4, metavar=("KIND", "NAME", "PROBLEM", "SEQ"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_tune: needs a CUDA device")
    if options.once:
        kind, name, problem, length = options.once
        inputs = make_inputs(PROBLEMS[problem], int(length))
        call = caller(kind, name, PROBLEMS[problem], inputs)
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return
    deadline = time.monotonic() + options.budget
    results = Results(options.json)
    selected = select(options.work, options.names)
    check_all(results, selected, deadline)
    time_all(results, selected, options.lengths, deadline)
    print_table(results)


if __name__ == "__main__":
    main()
