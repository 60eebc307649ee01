"""Attention on a GPU, against float64: every kernel, fresh random inputs, poisoned results.

Needs no pytest where there is none: `python -m tests.gpu.test_attention` runs the same cases, many
processes at a time because most of the work is compiling.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.kernels.attention import backends, measured
from shardwise.kernels.attention.backends import Request, choose
from shardwise.kernels.attention.configs import Backward, Stash, Tiles
from shardwise.kernels.attention.in_trace import choose_in_trace
from shardwise.kernels.attention.interface import FlashAttention, attention
from tests.attention_in_float64 import error, expect, gradient_of

try:
    import pytest
except ImportError:  # a GPU machine without test tools
    pytest = None  # type: ignore[assignment]

LIMIT = 150  # seconds for all jobs together
BOUNDS = {"bf16": 1e-2, "fp16": 2e-3, "fp32": 1e-5, "tf32": 1e-3}
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "tf32": torch.float32,
}

STASH = Stash(Tiles(128, 128, 8, 3), chunk=512, bytes=64 << 20, min_heads=1)
WITH_STASH = Backward(Tiles(64, 128, 8, 2), Tiles(128, 64, 8, 2), STASH)
HOPPER = Backward(Tiles(64, 128, 4, 2, hopper=True), Tiles(128, 64, 8, 2))
HOPPER_STASH = Backward(Tiles(64, 128, 4, 2, hopper=True), Tiles(128, 64, 8, 2), STASH)


@dataclass(frozen=True)
class Shape:
    kind: str = "bf16"
    B: int = 1
    H: int = 4
    G: int = 2
    M: int = 1000
    N: int = 1000
    D: int = 128
    causal: bool = True
    window: int | None = None
    segments: bool = False
    transposed: bool = False  # (batch, seq, heads, dim) in memory
    flat: bool = False  # (batch, seq, dim)
    forward: Tiles | None = None  # None: what the tables say
    backward: Backward | None = None


CASES = {
    "bf16": Shape(M=1024, N=1024),
    "bf16-ragged": Shape(),
    "bf16-full": Shape(causal=False),
    "bf16-full-even": Shape(M=1024, N=512, causal=False),
    "bf16-lengths": Shape(M=500, N=1300),
    "bf16-more-queries": Shape(M=1300, N=500),
    "bf16-one-query": Shape(M=1, N=777, causal=False),
    "bf16-16": Shape(D=16),
    "bf16-32": Shape(D=32),
    "bf16-64": Shape(D=64),
    "bf16-80": Shape(D=80),
    "bf16-100": Shape(D=100, M=300, N=300),
    "bf16-256": Shape(D=256),
    "bf16-window": Shape(window=200),
    "bf16-window-full": Shape(window=200, causal=False),
    "bf16-window-empty": Shape(M=1300, N=300, window=200),
    "bf16-segments": Shape(B=2, segments=True),
    "bf16-segments-window": Shape(B=2, segments=True, window=100, causal=False),
    "bf16-transposed": Shape(B=2, transposed=True),
    "bf16-pointers": Shape(forward=Tiles(128, 64, 8, 2, tma=False),
                           backward=Backward(Tiles(64, 64, 4, 2, tma=False),
                                             Tiles(64, 64, 4, 2, tma=False))),
    "bf16-stash": Shape(M=1800, N=1800, backward=WITH_STASH),
    "bf16-stash-full": Shape(M=1300, N=700, causal=False, backward=WITH_STASH),
    "bf16-stash-lengths": Shape(M=700, N=1300, backward=WITH_STASH),
    "fp16": Shape("fp16"),
    "fp16-64": Shape("fp16", D=64, causal=False),
    "fp32": Shape("fp32"),
    "fp32-16": Shape("fp32", D=16),
    "fp32-long": Shape("fp32", H=8, G=4, M=2300, N=2300),
    "fp32-64-long": Shape("fp32", H=8, G=4, M=2300, N=2300, D=64, causal=False),
    "fp32-100": Shape("fp32", H=8, M=1100, N=1100, D=100),
    "fp32-few": Shape("fp32", H=2, G=1),
    "fp32-few-64": Shape("fp32", H=2, G=1, D=64, causal=False),
    "fp32-few-16": Shape("fp32", H=1, G=1, M=1024, N=1024, D=16),
    "fp32-few-window": Shape("fp32", H=2, G=1, D=64, window=100),
    "fp32-16-long": Shape("fp32", H=8, G=4, M=2300, N=2300, D=16),
    "tf32-long": Shape("tf32", H=8, G=4, M=2300, N=2300),
    "tf32-64-long": Shape("tf32", H=8, G=4, M=2300, N=2300, D=64),
    "tf32-16": Shape("tf32", D=16),
    "tf32-segments": Shape("tf32", B=2, segments=True),
    "fp32-flat": Shape("fp32", B=8, H=1, G=1, M=1101, N=1101, D=16, causal=False, flat=True),
    "bf16-flat": Shape(B=24, H=1, G=1, M=1101, N=1101, flat=True),
    "bf16-joined": Shape(backward=Backward(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), joined=2)),
    "bf16-joined-3": Shape(B=2, D=64, segments=True, transposed=True,
                           backward=Backward(Tiles(64, 64, 4, 2, tma=False),
                                             Tiles(64, 64, 4, 2, tma=False), joined=3)),
    "bf16-tables": Shape(H=32, G=8, M=1100, N=1100),
    "bf16-64-tables": Shape(H=32, G=8, M=1100, N=1100, D=64, causal=False),
    "bf16-window-tables": Shape(H=32, G=8, M=1100, N=1100, window=300),
    "bf16-16-tables": Shape(H=32, G=8, M=1100, N=1100, D=16),
    "fp32-64": Shape("fp32", D=64, M=512, N=512),
    "fp32-256": Shape("fp32", D=256, H=1, G=1, M=300, N=300),
    "fp32-window": Shape("fp32", D=64, window=100),
    "fp32-segments": Shape("fp32", D=64, B=2, segments=True),
    "tf32": Shape("tf32"),
    "tf32-64": Shape("tf32", D=64, causal=False),
    "tf32-256": Shape("tf32", D=256, M=300, N=300),
    "hopper": Shape(M=1024, N=1024, forward=Tiles(128, 128, 4, 2, hopper=True), backward=HOPPER),
    "hopper-ragged": Shape(forward=Tiles(128, 128, 4, 2, hopper=True),
                          backward=HOPPER_STASH),
    "hopper-full": Shape(M=700, N=1300, causal=False, transposed=True,
                         forward=Tiles(128, 128, 4, 2, hopper=True),
                         backward=HOPPER_STASH),
    "hopper-lengths": Shape(M=1300, N=700, forward=Tiles(128, 128, 4, 2, hopper=True),
                            backward=HOPPER_STASH),
    "hopper-64": Shape("fp16", B=3, D=64, forward=Tiles(128, 128, 4, 3, hopper=True),
                       backward=HOPPER_STASH),
    "hopper-long": Shape(H=16, G=16, M=4096, N=4096,
                         forward=Tiles(128, 128, 4, 2, hopper=True),
                         backward=HOPPER_STASH),
}  # fmt: skip


def make_inputs(shape: Shape, seed: int) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
    """q, k, v and do, and segment ids."""
    random = torch.Generator("cuda").manual_seed(seed)
    sizes = [(shape.H, shape.M), (shape.G, shape.N), (shape.G, shape.N), (shape.H, shape.M)]
    tensors = []
    for heads, length in sizes:
        size = (shape.B, heads, length, shape.D)
        x = torch.randn(size, generator=random, device="cuda").to(DTYPES[shape.kind])
        if shape.transposed:
            x = x.transpose(1, 2).contiguous().transpose(1, 2)
        tensors.append(x)
    if not shape.segments:
        return tensors, None
    ids = [
        torch.randint(0, 9, (shape.B, n), generator=random, device="cuda", dtype=torch.int32)
        for n in (shape.M, shape.N)
    ]
    q_ids, k_ids = (x.sort(-1).values for x in ids)
    return tensors, (q_ids, k_ids)


def run_kernels(shape: Shape, tensors: list[Tensor], ids: Any, uses_lse: bool) -> list[Tensor]:
    """o, lse, dq, dk, dv into tensors that held NaN."""
    from shardwise.kernels.attention import launch

    q, k, v, do = (x.squeeze(1) for x in tensors) if shape.flat else tensors
    mask = launch.Mask(shape.causal, 1 / math.sqrt(shape.D), shape.window, *(ids or (None, None)))
    precision = "tf32" if shape.kind == "tf32" else "fp32"
    # Under this mode torch fills each new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            o, lse = launch.forward(q, k, v, mask, precision, shape.forward)
            dlse = gradient_of(lse) if uses_lse else None
            grads = launch.backward(q, k, v, o, lse, do, dlse, mask, precision, shape.backward)
    finally:
        torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    return [x.unsqueeze(1) if shape.flat else x for x in (o, lse, *grads)]


def expected(shape: Shape, tensors: list[Tensor], ids: Any, uses_lse: bool = False) -> list[Tensor]:
    """o, lse, dq, dk, dv in float64; `uses_lse`: the loss does."""
    mask = {"causal": shape.causal, "window": shape.window, "segment_ids": ids}
    return expect(tensors, uses_lse, **mask)


def complaint_about(kind: str, got: list[Tensor], wanted: list[Tensor]) -> str | None:
    """What is too far off of o, lse, dq, dk, dv; None if nothing is."""
    errors = [error(a, b) for a, b in zip(got, wanted, strict=True)]
    of_lse = errors.pop(1)
    good = all(e <= BOUNDS[kind] for e in errors)  # NaN is not
    # lse is fp32 and natural also where o has 16 bits.
    if good and of_lse <= BOUNDS["tf32" if kind == "tf32" else "fp32"]:
        return None
    return f"errors of o, dq, dk, dv: {errors}, of lse: {of_lse}"


def run_case(name: str) -> str | None:
    """Compare one case with float64, and with itself; the complaint, or None."""
    shape = CASES[name]
    seed = int.from_bytes(os.urandom(4), "little")
    tensors, ids = make_inputs(shape, seed)
    got, again = (run_kernels(shape, tensors, ids, False) for _ in range(2))
    complaint = complaint_about(shape.kind, got, expected(shape, tensors, ids))
    if complaint is not None:
        return f"{complaint}, seed {seed}"
    if not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
        return f"a second run gave other bits, seed {seed}"
    got = run_kernels(shape, tensors, ids, True)
    complaint = complaint_about(shape.kind, got, expected(shape, tensors, ids, True))
    return None if complaint is None else f"with a gradient of lse, {complaint}, seed {seed}"


def run_long(dtype: torch.dtype, length: int) -> str | None:
    """One long head: runs, in memory linear in the sequence, and the last rows are right."""
    q, k, v = (
        torch.randn(1, 1, length, 128, device="cuda", dtype=dtype, requires_grad=True)
        for _ in range(3)
    )
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    o = attention(q, k, v, causal=True, backend="triton", precision="tf32")
    o.backward(torch.ones_like(o))
    used = torch.cuda.max_memory_allocated() - before
    # o, do, three gradients, and copies of a few: far below the smallest square matrix.
    if used > 16 * q.numel() * q.itemsize:
        return f"{used / 2**20:.0f} MiB for {length} queries of {q.itemsize} bytes x 128"
    place = torch.arange(length, device="cuda")
    s = q[..., -128:, :].detach().double() @ k.detach().double().transpose(-1, -2) * 128**-0.5
    s = s.masked_fill(place > place[-128:, None], -math.inf)
    wanted = torch.softmax(s, -1) @ v.detach().double()
    gap = error(o[..., -128:, :].detach(), wanted)
    return None if gap <= BOUNDS["bf16"] else f"error {gap} in the last rows"


def run_public() -> str | None:
    """Backends agree, torch.compile and checkpointing change nothing, the choice can be forced."""
    shape = Shape(B=2, H=8, G=2, M=512, N=512)
    (q, k, v, do), _ = make_inputs(shape, int.from_bytes(os.urandom(4), "little"))
    for x in (q, k, v):
        x.requires_grad_()
    (wanted_o, wanted_lse, *wanted_grads), with_lse = (
        expected(shape, [x.detach() for x in (q, k, v, do)], None, uses) for uses in (False, True)
    )

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="triton")

    variants: dict[str, Any] = {
        "compiled": torch.compile(call, fullgraph=True),
        "compiled-default": torch.compile(
            lambda q, k, v: attention(q, k, v, causal=True), fullgraph=True
        ),
        "checkpointed": lambda *x: checkpoint(call, *x, use_reentrant=False),
    }
    for backend in ("triton", "flash", "cudnn", "efficient", "math", "sdpa", None):
        variants[str(backend)] = lambda *x, b=backend: attention(*x, causal=True, backend=b)
    wanted = [wanted_o, *wanted_grads]
    for name, variant in variants.items():
        o = variant(q, k, v)
        got = [o, *torch.autograd.grad(o, (q, k, v), do)]
        errors = [error(a.detach(), b) for a, b in zip(got, wanted, strict=True)]
        if not all(e <= BOUNDS["bf16"] for e in errors):
            return f"{name}: errors of o, dq, dk, dv: {errors}"
    output = FlashAttention.apply(q, k, v, True)  # with it goes what it saved
    saved = output.grad_fn.saved_tensors[4]
    if not error(saved, wanted_lse) <= BOUNDS["fp32"]:
        return f"FlashAttention saved an lse that is off by {error(saved, wanted_lse)}"

    def both(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> tuple[Tensor, Tensor]:
        return attention(q, k, v, causal=True, backend=backend, return_lse=True)

    variants = {
        "compiled": torch.compile(both, fullgraph=True),
        "checkpointed": lambda *x: checkpoint(both, *x, use_reentrant=False),
    }
    for backend in ("triton", "reference", None):
        variants[str(backend)] = lambda *x, b=backend: both(*x, backend=b)
    for name, variant in variants.items():
        o, lse = variant(q, k, v)
        grads = torch.autograd.grad((o, lse), (q, k, v), (do, gradient_of(lse)))
        complaint = complaint_about("bf16", [o.detach(), lse.detach(), *grads], with_lse)
        if complaint is not None:
            return f"{name} with return_lse, {complaint}"
    return None


def run_dispatch() -> str | None:
    """A window goes to a backend that has windows."""
    q = torch.empty(1, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    chosen = choose(Request.of(q, q, q, causal=True, window=100))
    return None if chosen == "triton" else f"{chosen} was chosen for a window"


def run_choice() -> str | None:
    """The default times its backends once, takes one of the fastest, and is right with it; a second
    process only reads; a captured graph, a recomputed forward and a compiled one take the same.
    """
    cases = (
        (Shape(B=2, H=8, G=2, M=1024, N=1024, D=64), (False, True)),
        (Shape(H=8, G=4, M=1280, N=1280, D=256, causal=False, transposed=True), (False, True)),
        (Shape("fp32", H=4, G=4, M=640, N=640, D=64), (False,)),
    )
    with tempfile.TemporaryDirectory() as folder, own_cache(folder):
        for shape, grads in cases:
            for grad in grads:
                complaint = choose_one(shape, grad)
                if complaint is not None:
                    return f"{shape}, with gradients {grad}: {complaint}"
    return None


@contextmanager
def own_cache(folder: str) -> Iterator[None]:
    """A cache folder of its own, and no choice of this process so far."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = folder
    forget()
    try:
        yield
    finally:
        forget()
        if before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = before


def forget() -> None:
    for kept in (measured._decided, measured._timed, backends._chosen):
        kept.clear()


def choose_one(shape: Shape, grad: bool) -> str | None:
    (q, k, v, do), _ = make_inputs(shape, 3)
    for x in (q, k, v):
        x.requires_grad_(grad)
    state = torch.cuda.get_rng_state()

    def call(*inputs: Tensor) -> Tensor:
        return attention(*inputs, causal=shape.causal)

    began = time.monotonic()
    o = call(q, k, v)
    torch.cuda.synchronize()
    took = time.monotonic() - began
    request = Request.of(q, k, v, shape.causal)
    chosen, names = choose(request, plain=True), backends.rank(request)
    times = measured._timed.get(measured._sign(request))
    if times is None or chosen not in times:
        return f"{chosen} was taken without a trial: {times}"
    if times[chosen] > measured.CLOSE * min(times.values()):
        return f"{chosen} was taken, of {times}"
    if set(names) != set(times):
        return f"of {names} only these could be timed: {times}"
    if not torch.equal(state, torch.cuda.get_rng_state()):
        return "the trial drew random numbers of the program's"
    wanted = expected(shape, [x.detach() for x in (q, k, v, do)], None)
    got = [o.detach(), *(torch.autograd.grad(o, (q, k, v), do) if grad else ())]
    errors = [error(a, b) for a, b in zip(got, [wanted[0], *wanted[2:]], strict=False)]
    if not all(e <= BOUNDS[shape.kind] for e in errors):
        return f"{chosen}: errors of o, dq, dk, dv: {errors}"
    forget()  # as in a new process, which must find what this one kept
    if choose(request, plain=True) != chosen or measured._timed:
        return f"a second process would not take {chosen} at once"
    if not grad:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call(q, k, v)
        graph.replay()
        torch.cuda.synchronize()
        return None if torch.equal(captured, o) else "a captured call gave other bits"
    again = checkpoint(call, q, k, v, use_reentrant=False)
    torch.autograd.grad(again, (q, k, v), do)
    if not torch.equal(again, o):
        return f"a checkpointed call gave other bits than {chosen}"
    if choose_in_trace(request) != chosen:
        return f"a trace would take {choose_in_trace(request)}, not {chosen}"
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")(q, k, v)
    if not error(compiled.detach(), wanted[0]) <= BOUNDS[shape.kind]:
        return f"compiled, {chosen} is off by {error(compiled.detach(), wanted[0])}"
    print(f"    {shape.H} x {shape.M} x {shape.D}: {chosen} of {times} ms, first call {took:.1f} s")
    return None


JOBS: dict[str, tuple[Any, ...]] = {
    "choice": (run_choice,),
    **{name: (run_case, name) for name in CASES},
    "long-bf16": (run_long, torch.bfloat16, 65536),
    "long-bf16-131072": (run_long, torch.bfloat16, 131072),
    "long-fp32": (run_long, torch.float32, 65536),
    "public": (run_public,),
    "dispatch": (run_dispatch,),
}


def run_job(name: str) -> tuple[str | None, float]:
    function, *arguments = JOBS[name]
    began = time.monotonic()
    try:
        complaint = function(*arguments)
    except Exception as failure:
        complaint = f"{type(failure).__name__}: {str(failure)[-300:]}"
    return complaint, time.monotonic() - began


if pytest is not None:

    @pytest.mark.parametrize("job", JOBS)
    def test_attention_on_a_gpu(job: str) -> None:
        function, *arguments = JOBS[job]
        complaint = function(*arguments)
        assert complaint is None, complaint


def main() -> int:
    """All jobs without pytest, or those named; the exit code counts the failures."""
    # fp32 kernels take longest to compile.
    names = sys.argv[1:] or sorted(JOBS, key=lambda name: "fp32" not in name)
    failures = 0
    context = get_context("forkserver")
    context.set_forkserver_preload(["torch", "triton", "shardwise.kernels.attention.interface"])
    pool = ProcessPoolExecutor(13, context)
    jobs = {pool.submit(run_job, name): name for name in names}
    waiting = set(names)
    try:
        for job in as_completed(jobs, timeout=LIMIT):
            complaint, seconds = job.result()
            waiting.discard(jobs[job])
            failures += complaint is not None
            print(f"{jobs[job]:22} {complaint or 'ok'} {seconds:.1f} s", flush=True)
    except TimeoutError:  # a kernel that never ends cannot be interrupted, only left behind
        print(f"after {LIMIT} s still running: {sorted(waiting)}", flush=True)
        for process in active_children():
            process.kill()
        os._exit(len(waiting))
    pool.shutdown()
    print(f"{len(names) - failures} passed, {failures} failed")
    return failures


if __name__ == "__main__":
    sys.exit(main())
