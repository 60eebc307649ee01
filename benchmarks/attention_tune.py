"""Find the fastest tiles for the attention kernels on this GPU, and check each before timing it.

    python benchmarks/attention_tune.py --json results.json --budget 240

1. Every candidate runs on a small problem with fresh random inputs and NaN-filled results, and is
   compared with float64, each in a process of its own, many at a time because most of it is
   compiling; what they compile stays in Triton's cache for step 2. A candidate that fails to
   compile, is wrong or hangs is named and left out.
2. One process times the rest, best guesses first, with torch's flash and cuDNN beside: 16 heads,
   causal, bf16. The median of repeated calls, timed with device events.

The file is written after every result, and results it already has are not made again, so a run that
ended early continues. Last come a table, and the rows to put into attention_configs.py.

    python benchmarks/attention_tune.py --once backward hopper-stash 128 8192

runs one candidate a few times and nothing else: the program to give to a profiler.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwise.kernels.attention_configs import Backward, Stash, Tiles
from shardwise.kernels.attention_reference import plain_attention

HEADS = 16
WIDTHS = (128, 64)
LENGTHS = (32768, 8192)
BOUND = 1e-2
CHECK_LENGTH = 1024
WORKERS = 12
HANG = 90.0  # seconds for one candidate, compiling included

DQ = {128: Tiles(128, 64, 8, 2), 64: Tiles(128, 128, 8, 2)}
HOPPER_DKDV = Tiles(64, 128, 4, 2, hopper=True)
PLAIN_DKDV = Tiles(64, 128, 8, 2)


def stash(product: Tiles, gigabytes: float = 1, chunk: int = 4096) -> Stash:
    return Stash(product, bytes=int(gigabytes * 2**30), chunk=chunk)


FORWARD: dict[int, dict[str, Tiles]] = {
    128: {
        "hopper-turns": Tiles(128, 128, 4, 2, hopper=True, pingpong=True),
        "hopper": Tiles(128, 128, 4, 2, hopper=True),
        "128x128-w8-s2": Tiles(128, 128, 8, 2),
        "128x64-w8-s3": Tiles(128, 64, 8, 3),
        "128x64-w4-s3": Tiles(128, 64, 4, 3),
        "64x64-w4-s2": Tiles(64, 64, 4, 2),
        "128x128-w8-s2-persistent": Tiles(128, 128, 8, 2, persistent=True),
        "64x128-w4-s2": Tiles(64, 128, 4, 2),
        "128x64-w4-s2": Tiles(128, 64, 4, 2),
        "128x64-w8-s4": Tiles(128, 64, 8, 4),
        "128x128-w8-s2-pointers": Tiles(128, 128, 8, 2, tma=False),
        "128x64-w8-s3-pointers": Tiles(128, 64, 8, 3, tma=False),
    },
    64: {
        "hopper-turns-s3": Tiles(128, 128, 4, 3, hopper=True, pingpong=True),
        "hopper-s3": Tiles(128, 128, 4, 3, hopper=True),
        "hopper-turns-s2": Tiles(128, 128, 4, 2, hopper=True, pingpong=True),
        "128x128-w8-s3": Tiles(128, 128, 8, 3),
        "128x64-w4-s3": Tiles(128, 64, 4, 3),
        "128x128-w8-s2": Tiles(128, 128, 8, 2),
        "64x128-w4-s2": Tiles(64, 128, 4, 2),
        "128x64-w8-s3": Tiles(128, 64, 8, 3),
        "128x128-w8-s3-persistent": Tiles(128, 128, 8, 3, persistent=True),
        "128x64-w4-s3-pointers": Tiles(128, 64, 4, 3, tma=False),
    },
}
BACKWARD: dict[int, dict[str, Backward]] = {
    128: {
        "hopper-stash": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(128, 128, 8, 3))),
        "hopper": Backward(HOPPER_DKDV, DQ[128]),
        "stash": Backward(PLAIN_DKDV, DQ[128], stash(Tiles(128, 128, 8, 3))),
        "recompute": Backward(PLAIN_DKDV, DQ[128]),
        "hopper-stash-2g": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(128, 128, 8, 3), 2)),
        "hopper-stash-4g-8192": Backward(
            HOPPER_DKDV, DQ[128], stash(Tiles(128, 128, 8, 3), 4, 8192)
        ),
        "hopper-stash-2048": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(128, 128, 8, 3), 1, 2048)),
        "hopper-stash-64x128": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(64, 128, 4, 4))),
        "hopper-stash-128x64": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(128, 64, 4, 4))),
        "hopper-stash-64x64": Backward(HOPPER_DKDV, DQ[128], stash(Tiles(64, 64, 4, 4))),
        "hopper-s3-stash": Backward(
            Tiles(64, 128, 4, 3, hopper=True), DQ[128], stash(Tiles(128, 128, 8, 3))
        ),
        "dkdv-64x64-w4": Backward(Tiles(64, 64, 4, 2), DQ[128]),
        "dkdv-64x128-s3": Backward(Tiles(64, 128, 8, 3), DQ[128]),
        "dq-64x128-w4": Backward(PLAIN_DKDV, Tiles(64, 128, 4, 2)),
        "dq-64x64-w4": Backward(PLAIN_DKDV, Tiles(64, 64, 4, 2)),
        "dq-128x128-s1": Backward(PLAIN_DKDV, Tiles(128, 128, 8, 1)),
        "dkdv-pointers": Backward(Tiles(64, 128, 8, 2, tma=False), DQ[128]),
    },
    64: {
        "hopper-stash": Backward(
            Tiles(64, 128, 4, 3, hopper=True), DQ[64], stash(Tiles(128, 128, 8, 3))
        ),
        "hopper": Backward(Tiles(64, 128, 4, 3, hopper=True), DQ[64]),
        "recompute": Backward(PLAIN_DKDV, DQ[64]),
        "stash": Backward(PLAIN_DKDV, DQ[64], stash(Tiles(128, 128, 8, 3))),
        "dkdv-128x128": Backward(Tiles(128, 128, 8, 2), DQ[64]),
        "dkdv-64x64-w4": Backward(Tiles(64, 64, 4, 2), DQ[64]),
        "dq-128x64-s3": Backward(PLAIN_DKDV, Tiles(128, 64, 8, 3)),
        "dq-64x64-w4": Backward(PLAIN_DKDV, Tiles(64, 64, 4, 3)),
    },
}
TABLES: dict[str, dict[int, dict[str, Any]]] = {"forward": FORWARD, "backward": BACKWARD}
BASELINES = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def make_inputs(width: int, length: int) -> list[Tensor]:
    """q, k, v, do: fresh every time."""
    torch.manual_seed(int.from_bytes(os.urandom(4), "little"))
    size = (1, HEADS, length, width)
    return [torch.randn(size, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def caller(kind: str, name: str, width: int, tensors: list[Tensor]) -> Callable[[], Any]:
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
    from shardwise.kernels import attention_launch as launch

    mask = launch.Mask(True, 1 / math.sqrt(width))
    tiles = TABLES[kind][width][name]
    if kind == "forward":
        return lambda: launch.forward(q, k, v, mask, "fp32", tiles)
    o, lse = launch.forward(q, k, v, mask, "fp32", Tiles(128, 64, 8, 2))
    return lambda: launch.backward(q, k, v, o, lse, do, mask, "fp32", tiles)


def _sdpa(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(BASELINES[name]):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def check(kind: str, name: str, width: int) -> dict[str, Any]:
    """Errors against float64, and whether a second run gives the same bits."""
    import warnings

    warnings.simplefilter("ignore")
    tensors = make_inputs(width, CHECK_LENGTH)
    wanted_inputs = [x.double().requires_grad_() for x in tensors[:3]]
    o = plain_attention(*wanted_inputs, causal=True)
    if kind == "forward":
        wanted: tuple[Tensor, ...] = (o.detach(),)
    else:
        wanted = torch.autograd.grad(o, wanted_inputs, tensors[3].double())
    # Under this mode torch fills each new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    call = caller(kind, name, width, tensors)
    runs = [call() for _ in range(2)]
    torch.cuda.synchronize()
    got, again = ((r[0],) if kind == "forward" else r for r in runs)
    errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(got, wanted, strict=True)]
    good = all(e <= BOUND for e in errors)  # NaN is not
    same = all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    return {"ok": good and same, "errors": errors, "same_bits": same}


_inputs: dict[tuple[int, int], list[Tensor]] = {}


def measure(kind: str, name: str, width: int, length: int) -> dict[str, Any]:
    """Median milliseconds and TFLOP/s, and the time of each kernel in it."""
    if (width, length) not in _inputs:
        _inputs.clear()
        _inputs[width, length] = make_inputs(width, length)
    call = caller(kind, name, width, [x.detach() for x in _inputs[width, length]])
    times = time_calls(call)
    products = 2 if kind == "forward" else 5
    operations = products * 2 * HEADS * length * length / 2 * width
    milliseconds = statistics.median(times)
    return {
        "ms": milliseconds,
        "spread_ms": max(times) - min(times),
        "tflops": operations / milliseconds / 1e9,
        "kernels_ms": kernel_times(call) if kind == "backward" else {},
    }


def time_calls(call: Callable[[], Any], least_ms: float = 150) -> list[float]:
    """Milliseconds of single calls, by device events, after two to warm up."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < least_ms and len(times) < 50):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return times


def kernel_times(call: Callable[[], Any]) -> dict[str, float]:
    """Milliseconds per kernel of one call; empty where the profiler does not work."""
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as run:
            call()
            torch.cuda.synchronize()
        rows = run.key_averages()
        return {
            r.key[:40]: r.self_device_time_total / 1e3 for r in rows if r.self_device_time_total
        }
    except Exception:
        return {}


class Results:
    """The file: one entry per finished piece of work."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}

    def add(self, key: str, row: dict[str, Any]) -> None:
        self.rows[key] = row
        self.path.write_text(json.dumps(self.rows, indent=1) + "\n")


def check_all(results: Results, widths: list[int], deadline: float) -> None:
    work = {
        f"check/{kind}/{width}/{name}": (kind, name, width)
        for width in widths
        for kind, table in TABLES.items()
        for name in table[width]
    }
    work = {key: arguments for key, arguments in work.items() if key not in results.rows}
    for key, row in run_apart(work, deadline):
        results.add(key, row)
        print(f"{key:48} {'ok' if row['ok'] else 'NO'} {detail(row)}", flush=True)


def run_apart(
    work: dict[str, tuple[str, str, int]], deadline: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Check each candidate in a process of its own: a crash or a hang stays its own."""
    context = get_context("spawn")
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


def check_into(pipe: Connection, kind: str, name: str, width: int) -> None:
    try:
        row = check(kind, name, width)
    except Exception as failure:
        row = {"ok": False, "failure": f"{type(failure).__name__}: {str(failure)[-400:]}"}
    pipe.send(row)


def detail(row: dict[str, Any]) -> str:
    if "failure" in row:
        return str(row["failure"]).replace("\n", " ")[-160:]
    return " ".join(f"{e:.1e}" for e in row["errors"]) + ("" if row["same_bits"] else " UNSTEADY")


def time_all(results: Results, widths: list[int], lengths: list[int], deadline: float) -> None:
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    for width in widths:
        for length in lengths:
            for kind, table in TABLES.items():
                for name in (*BASELINES, *table[width]):
                    key = f"time/{kind}/{width}/{length}/{name}"
                    checked = results.rows.get(f"check/{kind}/{width}/{name}", {})
                    if key in results.rows or (name not in BASELINES and not checked.get("ok")):
                        continue
                    if time.monotonic() > deadline:
                        print("the time is up; run again to continue", flush=True)
                        pool.shutdown()
                        return
                    try:
                        row = pool.submit(measure, kind, name, width, length).result(HANG)
                    except Exception as failure:  # out of memory, a hang: the others go on
                        row = {"failure": f"{type(failure).__name__}: {str(failure)[-300:]}"}
                        for process in active_children():
                            process.kill()
                        pool = ProcessPoolExecutor(1, get_context("spawn"))
                    results.add(key, row)
    pool.shutdown()


def print_table(results: Results) -> None:
    best: dict[tuple[str, int], tuple[float, str]] = {}
    names = f"{'name':28}{'ms':>9}{'TFLOP/s':>9}{'/flash':>8}{'/cudnn':>8}"
    print(f"\n{'what':10}{'dim':>5}{'seq':>7}  {names}")
    groups: dict[tuple[str, int, int], list[tuple[str, dict[str, Any]]]] = {}
    for key, row in results.rows.items():
        if key.startswith("time/") and "ms" in row:
            _, what, dim, seq, name = key.split("/")
            groups.setdefault((what, int(dim), int(seq)), []).append((name, row))
    for (kind, width, length), rows in sorted(groups.items(), reverse=True):
        base = {name: row["tflops"] for name, row in rows if name in BASELINES}
        for name, row in sorted(rows, key=lambda r: r[1]["ms"]):
            ratios = (row["tflops"] / base[b] if b in base else math.nan for b in BASELINES)
            print(
                f"{kind:10}{width:5}{length:7}  {name:28}{row['ms']:9.3f}{row['tflops']:9.1f}"
                + "".join(f"{r:8.2f}" for r in ratios)
            )
            if name not in BASELINES and row["tflops"] > best.get((kind, width), (0.0, ""))[0]:
                best[kind, width] = (row["tflops"], name)
    for (kind, width), (_, name) in sorted(best.items()):
        print(f"best {kind} {width}: {name}: {TABLES[kind][width][name]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("attention-tune.json"))
    parser.add_argument("--budget", type=float, default=240, help="seconds (default: 240)")
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), choices=WIDTHS)
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--once", nargs=4, metavar=("KIND", "NAME", "DIM", "SEQ"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("attention_tune: needs a CUDA device")
    if options.once:
        kind, name, width, length = options.once
        call = caller(kind, name, int(width), make_inputs(int(width), int(length)))
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        return
    deadline = time.monotonic() + options.budget
    results = Results(options.json)
    check_all(results, options.widths, deadline)
    time_all(results, options.widths, options.lengths, deadline)
    print_table(results)


if __name__ == "__main__":
    main()
