"""Attention on the CPU: the kernels through Triton's interpreter, and all that needs no kernel.

Kernels are interpreted in a process of its own, because Triton decides at import whether they are.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from shardwise.cli import main
from shardwise.kernels.attention import backends
from shardwise.kernels.attention.backends import Request, choose, forced
from shardwise.kernels.attention.interface import FlashAttention, attention
from shardwise.kernels.attention.mask import Mask
from shardwise.kernels.attention.ops import attention_op
from shardwise.kernels.attention.reference import plain_attention, tiled_backward, tiled_forward
from tests.attention_in_float64 import error, expect, gradient_of

# bf16 is cut off, not rounded, by the interpreter.
BOUNDS = {torch.float32: 3e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
TF32_BOUND = 1e-4  # of two bf16 parts, 16 bits


@dataclass(frozen=True)
class Shape:
    """One case; block sizes are (queries, keys), far smaller than a GPU's, to get many tiles."""

    B: int = 1
    H: int = 2
    G: int = 1
    M: int = 35  # three blocks, the last ragged
    N: int = 35
    D: int = 16
    causal: bool = True
    window: int | None = None
    segments: str | None = None  # "packed", "shuffled" or "apart": queries and keys share none
    dtype: torch.dtype = torch.float32
    blocks: tuple[int, int] = (16, 16)
    tma: bool = True
    stash: int = 0  # queries per chunk
    split: bool = False  # fp32 as bf16 parts
    joined: int = 0  # dk, dv and dq in one launch of so many roles
    precision: str = "fp32"
    layout: str = "plain"  # or "transposed": (B, seq, heads, D) in memory; "strided": every second;
    # "flat": (B, seq, D)
    scale: float | None = None
    dlse: bool = False  # the loss uses lse too


CASES = {
    "even": Shape(M=64, N=64),
    "ragged": Shape(),
    "pointers": Shape(tma=False),
    "full": Shape(causal=False),
    "full-even": Shape(M=32, N=48, causal=False, tma=False),
    "more-queries": Shape(M=61, N=37),
    "more-keys": Shape(M=37, N=61),
    "more-keys-full": Shape(M=37, N=61, causal=False),
    "one-query": Shape(M=1, N=40, causal=False),
    "one-key": Shape(M=40, N=1),
    "wide-keys": Shape(blocks=(16, 32), M=50, N=50),
    "wide-queries": Shape(blocks=(32, 16)),
    "width-1": Shape(D=1, tma=False),
    "width-20": Shape(D=20),
    "width-33": Shape(D=33, M=33, N=33, tma=False),
    "width-64": Shape(D=64, M=40, N=40),
    "width-256": Shape(D=256, M=20, N=20, H=1),
    "heads": Shape(B=2, H=6, G=2, M=20, N=20),
    "no-groups": Shape(B=2, H=2, G=2, M=20, N=20),
    "split": Shape(split=True),
    "split-pointers": Shape(split=True, tma=False, D=20, H=4, G=2, B=2),
    "split-unaligned": Shape(split=True, D=12, M=20, N=37, causal=False),
    "split-segments": Shape(split=True, segments="packed", window=20),
    "two-parts": Shape(split=True, precision="tf32"),
    "two-parts-joined": Shape(split=True, precision="tf32", joined=2, tma=False, B=2, H=4, G=2),
    "joined": Shape(joined=2, B=2, H=4, G=2),
    "joined-pointers": Shape(joined=3, tma=False, M=37, N=61, D=20),
    "joined-full": Shape(joined=3, M=61, N=37, causal=False),
    "joined-window": Shape(joined=2, M=60, N=20, window=5),
    "joined-packed": Shape(joined=3, B=2, segments="packed"),
    "joined-split": Shape(joined=3, split=True, blocks=(16, 32), M=50, N=50, H=4, G=2),
    "joined-fp16": Shape(joined=2, dtype=torch.float16, blocks=(32, 16)),
    "window": Shape(window=9),
    "window-1": Shape(window=1),
    "window-wide": Shape(window=100),
    "window-full": Shape(window=9, causal=False),
    "window-pointers": Shape(window=20, causal=False, tma=False, M=33, N=60),
    "window-empty": Shape(M=60, N=20, window=5),
    "packed": Shape(B=2, segments="packed"),
    "packed-full": Shape(B=1, segments="packed", causal=False, tma=False),
    "packed-lengths": Shape(B=2, segments="packed", M=33, N=60, causal=False),
    "packed-window": Shape(B=2, segments="packed", window=7, causal=False),
    "shuffled": Shape(B=2, segments="shuffled"),
    "apart": Shape(segments="apart"),
    "fp16": Shape(dtype=torch.float16),
    "bf16": Shape(dtype=torch.bfloat16, H=4, G=2),
    "bf16-pointers": Shape(dtype=torch.bfloat16, tma=False, window=20),
    "transposed": Shape(H=4, G=2, layout="transposed"),
    "strided": Shape(layout="strided"),
    "flat": Shape(B=3, H=1, layout="flat"),
    "flat-joined-full": Shape(B=3, H=1, M=20, layout="flat", joined=2, split=True, causal=False),
    "scale": Shape(scale=0.5),
    "stash": Shape(M=80, N=80, dtype=torch.float16, stash=32),
    "stash-groups": Shape(B=2, H=4, G=2, M=40, N=40, dtype=torch.bfloat16, stash=32),
    "stash-full": Shape(M=70, N=50, causal=False, dtype=torch.float16, stash=32),
    "stash-more-keys": Shape(M=50, N=90, dtype=torch.float16, stash=32),
    "stash-more-queries": Shape(M=90, N=50, dtype=torch.float16, stash=48),
    "stash-one-chunk": Shape(M=50, N=50, dtype=torch.float16, stash=128, blocks=(16, 32)),
    "lse": Shape(B=2, H=4, G=2, dlse=True),
    "lse-split": Shape(dlse=True, split=True, D=20, causal=False),
    "lse-flat": Shape(dlse=True, B=3, H=1, layout="flat", joined=3, tma=False),
    "lse-window-empty": Shape(dlse=True, M=60, N=20, window=5),
    "lse-packed": Shape(dlse=True, B=2, segments="packed", joined=2),
    "lse-stash": Shape(dlse=True, M=70, N=50, dtype=torch.float16, stash=32),
}


def make_inputs(shape: Shape, seed: int) -> tuple[list[Tensor], tuple[Tensor, Tensor] | None]:
    """q, k, v and do, and segment ids."""
    random = torch.Generator().manual_seed(seed)
    sizes = [(shape.H, shape.M), (shape.G, shape.N), (shape.G, shape.N), (shape.H, shape.M)]
    tensors = []
    for heads, length in sizes:
        x = torch.randn(shape.B, heads, length, 2 * shape.D, generator=random).to(shape.dtype)
        if shape.layout == "transposed":
            x = x[..., : shape.D].transpose(1, 2).contiguous().transpose(1, 2)
        elif shape.layout == "strided":
            x = x[..., ::2]
        else:
            x = x[..., : shape.D].contiguous()
        tensors.append(x)
    if shape.segments is None:
        return tensors, None
    q_ids = torch.randint(0, 5, (shape.B, shape.M), generator=random, dtype=torch.int32)
    k_ids = torch.randint(1, 6, (shape.B, shape.N), generator=random, dtype=torch.int32)
    if shape.segments == "apart":
        k_ids += 5
    if shape.segments == "packed":
        q_ids, k_ids = q_ids.sort(-1).values, k_ids.sort(-1).values
    return tensors, (q_ids, k_ids)


def expected(shape: Shape, tensors: list[Tensor], ids: Any) -> list[Tensor]:
    """o, lse, dq, dk, dv in float64."""
    mask = {"causal": shape.causal, "scale": shape.scale, "window": shape.window}
    return expect(tensors, shape.dlse, **mask, segment_ids=ids)


def interpret(shape: Shape, seed: int) -> list[float]:
    """Errors of o, lse, dq, dk, dv from the kernels."""
    from shardwise.kernels.attention import launch
    from shardwise.kernels.attention.configs import Backward, Stash, Tiles

    torch.set_num_threads(1)
    # Poison: under this mode torch fills each new tensor with NaN.
    torch.use_deterministic_algorithms(True, warn_only=True)
    (q, k, v, do), ids = make_inputs(shape, seed)
    scale = shape.scale if shape.scale is not None else 1 / math.sqrt(shape.D)
    mask = launch.Mask(shape.causal, scale, shape.window, *(ids or (None, None)))
    tiles = Tiles(*shape.blocks, tma=shape.tma, split=shape.split)
    stash = None
    if shape.stash:
        room = 2 * shape.N * shape.stash * shape.H  # all heads of one batch element at a time
        stash = Stash(Tiles(16, 16), bytes=room, chunk=shape.stash, min_heads=1)
    wanted = expected(shape, [q, k, v, do], ids)
    if shape.layout == "flat":
        q, k, v, do = (x.squeeze(1) for x in (q, k, v, do))
    backward = Backward(tiles, tiles, stash, shape.joined)
    o, lse = launch.forward(q, k, v, mask, shape.precision, tiles)
    dlse = gradient_of(lse) if shape.dlse else None
    grads = launch.backward(q, k, v, o, lse, do, dlse, mask, shape.precision, backward)
    return [error(a.view_as(b), b) for a, b in zip([o, lse, *grads], wanted, strict=True)]


def interpret_public(compiled: bool) -> list[float]:
    """`attention` with the Triton backend, its own tiles: with lse, or under torch.compile."""
    shape = Shape(M=33, N=33) if compiled else Shape(B=2, H=4, G=2, M=33, N=33, dlse=True)
    (q, k, v, do), _ = make_inputs(shape, 0)
    for x in (q, k, v):
        x.requires_grad_()

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="triton")

    if not compiled:
        return errors_with_lse(shape, [q, k, v, do], None, backend="triton")
    o = torch.compile(call, backend="aot_eager", fullgraph=True)(q, k, v)
    got = [o, *torch.autograd.grad(o, (q, k, v), do)]
    wanted = without_lse(expected(shape, [q, k, v, do], None))
    return [error(a, b) for a, b in zip(got, wanted, strict=True)]


def errors_with_lse(shape: Shape, tensors: list[Tensor], ids: Any, backend: str) -> list[float]:
    """Errors of o, lse, dq, dk, dv of a public call."""
    *inputs, do = tensors
    o, lse = attention(
        *inputs, causal=shape.causal, window=shape.window, segment_ids=ids, backend=backend,
        return_lse=True,
    )  # fmt: skip
    assert lse.dtype == torch.float32 and lse.is_contiguous()
    outputs, grads = ((o, lse), (do, gradient_of(lse))) if shape.dlse else ((o,), (do,))
    got = [o, lse, *torch.autograd.grad(outputs, inputs, grads)]
    wanted = expected(shape, tensors, ids)
    return [error(a.detach(), b) for a, b in zip(got, wanted, strict=True)]


def without_lse(results: list[Tensor]) -> list[Tensor]:
    o, _, *grads = results
    return [o, *grads]


def set_interpreted() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    backends.INTERPRETED = True  # that module came with this one, before the variable


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with ProcessPoolExecutor(1, get_context("spawn"), set_interpreted) as pool:
        yield pool


@pytest.mark.parametrize("name", CASES)
def test_kernels_match_float64(interpreter: ProcessPoolExecutor, name: str) -> None:
    shape = CASES[name]
    errors = interpreter.submit(interpret, shape, seed=0).result()
    tf32 = shape.precision == "tf32"
    assert max(errors) <= (TF32_BOUND if tf32 else BOUNDS[shape.dtype]), errors  # NaN fails too
    assert errors[1] <= (TF32_BOUND if tf32 else BOUNDS[torch.float32]), errors  # lse is fp32


@pytest.mark.parametrize("compiled", [False, True])
def test_public_call_matches_float64(interpreter: ProcessPoolExecutor, compiled: bool) -> None:
    assert max(interpreter.submit(interpret_public, compiled).result()) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.dtype == torch.float32])
def test_reference_matches_float64(name: str) -> None:
    shape = CASES[name]
    (q, k, v, do), ids = make_inputs(shape, 1)
    scale = shape.scale if shape.scale is not None else 1 / math.sqrt(shape.D)
    mask = Mask(shape.causal, scale, shape.window, *(ids or (None, None)))
    o, lse = tiled_forward(q, k, v, mask, block=16)
    dlse = gradient_of(lse) if shape.dlse else None
    got = [o, lse, *tiled_backward(q, k, v, o, lse, do, dlse, mask, block=16)]
    wanted = expected(shape, [q, k, v, do], ids)
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) <= BOUNDS[torch.float32]


@pytest.mark.parametrize("backend", ["reference", "math"])
@pytest.mark.parametrize("name", ["ragged", "heads", "window-empty", "apart", "packed-window"])
def test_other_backends_match_float64(backend: str, name: str) -> None:
    shape = CASES[name]
    (q, k, v, do), ids = make_inputs(shape, 2)
    for x in (q, k, v):
        x.requires_grad_()
    o = attention(
        q, k, v, causal=shape.causal, window=shape.window, segment_ids=ids, backend=backend
    )
    got = [o, *torch.autograd.grad(o, (q, k, v), do)]
    wanted = without_lse(expected(shape, [q, k, v, do], ids))
    assert max(error(a, b) for a, b in zip(got, wanted, strict=True)) <= BOUNDS[torch.float32]
    if backend == "reference":
        for dlse in (False, True):
            errors = errors_with_lse(replace(shape, dlse=dlse), [q, k, v, do], ids, backend)
            assert max(errors) <= BOUNDS[torch.float32], errors


def test_three_dimensions_and_what_is_saved() -> None:
    q, k, v = (torch.randn(2, 30, 16, requires_grad=True) for _ in range(3))
    o = FlashAttention.apply(q, k, v, True)
    saved = o.grad_fn.saved_tensors
    assert [tuple(x.shape) for x in saved] == [(2, 30, 16)] * 4 + [(2, 30)]
    heads = [x.detach().double().unsqueeze(1) for x in (q, k, v)]
    scores = (heads[0] @ heads[1].mT / 4).masked_fill(torch.ones(30, 30).triu(1) > 0, -math.inf)
    natural = torch.logsumexp(scores, -1).squeeze(1)
    assert error(saved[4], natural) <= BOUNDS[torch.float32]
    o.sum().backward()
    wanted = plain_attention(*heads, causal=True)
    assert error(o, wanted.squeeze(1)) <= BOUNDS[torch.float32]
    assert torch.equal(attention(q, k, v, causal=True, backend="reference"), o)
    both = attention(q, k, v, causal=True, return_lse=True)  # torch's backends return no lse
    assert torch.equal(both[0], o) and torch.equal(both[1], saved[4])
    assert torch.equal(both[1].grad_fn.saved_tensors[4], saved[4])


def test_compiles_into_one_graph_and_checkpoints() -> None:
    q, k, v = (torch.randn(1, 2, 30, 16, requires_grad=True) for _ in range(3))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, backend="reference").sin().sum()

    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        o, lse = attention(q, k, v, causal=True, return_lse=True)
        return o.sin().sum() + lse.cos().sum()

    for call_it in (call, with_lse):
        wanted = torch.autograd.grad(call_it(q, k, v), (q, k, v))
        whole = torch.compile(call_it, backend="aot_eager", fullgraph=True)
        for variant in (whole, lambda *x: checkpoint(call_it, *x, use_reentrant=False)):  # noqa: B023
            got = torch.autograd.grad(variant(q, k, v), (q, k, v))
            assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_op_keeps_its_contract() -> None:
    q, k, v = (torch.randn(1, 2, 30, 16, requires_grad=True) for _ in range(3))
    torch.library.opcheck(attention_op, (q, k, v, None, None, True, 0.25, None, "fp32", False))


def test_autocast_lowers_the_dtype() -> None:
    q = torch.randn(1, 2, 8, 16)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(q, q, q, causal=True).dtype == torch.bfloat16


def test_nothing_to_see_gives_zeros() -> None:
    q, k = torch.randn(1, 2, 5, 16), torch.randn(1, 2, 0, 16)
    assert torch.equal(attention(q, k, k, causal=False), torch.zeros_like(q))
    assert attention(k, q, q, causal=True).shape == (1, 2, 0, 16)
    o, lse = attention(q, k, k, causal=False, return_lse=True)
    assert torch.equal(o, torch.zeros_like(q)) and torch.equal(
        lse, torch.full((1, 2, 5), -math.inf)
    )
    assert attention(k, q, q, causal=True, return_lse=True)[1].shape == (1, 2, 0)


GOOD = torch.zeros(2, 4, 8, 16)
BAD: dict[str, tuple[Any, Any, Any, dict[str, Any], str]] = {
    "dims": (GOOD, GOOD[0], GOOD[0], {}, "for all three"),
    "flat": (GOOD[0, 0], GOOD[0, 0], GOOD[0, 0], {}, "for all three"),
    "kv": (GOOD, GOOD, GOOD[:, :, 1:], {}, "same shape"),
    "batch": (GOOD, GOOD[:1], GOOD[:1], {}, "same batch"),
    "width": (GOOD, GOOD[..., :8], GOOD[..., :8], {}, "head width"),
    "heads": (GOOD, GOOD[:, :3], GOOD[:, :3], {}, "multiple of the key/value heads"),
    "dtype": (GOOD, GOOD.half(), GOOD.half(), {}, "one dtype"),
    "integers": (GOOD.int(), GOOD.int(), GOOD.int(), {}, "floating-point"),
    "device": (GOOD, GOOD.to("meta"), GOOD.to("meta"), {}, "one device"),
    "window": (GOOD, GOOD, GOOD, {"window": 0}, "at least 1"),
    "scale": (GOOD, GOOD, GOOD, {"scale": 0.0}, "scale must be positive"),
    "precision": (GOOD, GOOD, GOOD, {"precision": "fp8"}, "unknown precision"),
    "backend": (GOOD, GOOD, GOOD, {"backend": "fast"}, "unknown attention backend"),
    "ids-shape": (GOOD, GOOD, GOOD, {"segment_ids": torch.zeros(2, 9).int()}, "(batch, seq)"),
    "ids-dtype": (GOOD, GOOD, GOOD, {"segment_ids": torch.zeros(2, 8)}, "integers"),
    "cpu-cudnn": (GOOD, GOOD, GOOD, {"backend": "cudnn"}, "needs CUDA tensors"),
    "lse-sdpa": (GOOD, GOOD, GOOD, {"backend": "sdpa", "return_lse": True}, "log-sum-exp"),
    "lse-math": (GOOD, GOOD, GOOD, {"backend": "math", "return_lse": True}, "log-sum-exp"),
    "cpu-triton": (GOOD, GOOD, GOOD, {"backend": "triton"}, "cannot serve"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_clear_error(name: str) -> None:
    q, k, v, options, words = BAD[name]
    with pytest.raises(ValueError) as caught:
        attention(q, k, v, causal=True, **options)
    assert words in str(caught.value)


def request(**changes: Any) -> Request:
    facts: dict[str, Any] = {
        "device": torch.device("cuda"),
        "dtype": torch.bfloat16,
        "batch": 2,
        "heads": 8,
        "kv_heads": 8,
        "width": 128,
        "queries": 4096,
        "keys": 4096,
        "causal": True,
    }
    return Request(**facts | changes)


def test_dispatch_follows_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    row = backends.Preference(bits=16, min_width=64, min_keys=1024, order=("cudnn", "flash"))
    monkeypatch.setattr(backends, "TABLES", {(9, 0): (row,)})
    monkeypatch.setattr(backends, "_widest_of_cudnn", lambda device: 128)  # of an older cuDNN
    monkeypatch.setattr(backends, "capability", lambda device: (8, 0))
    assert choose(request()) == "flash"  # a GPU that nobody has measured
    monkeypatch.setattr(backends, "capability", lambda device: (9, 0))
    assert choose(request()) == "cudnn"
    assert choose(request(width=200)) == "flash"  # too wide for cudnn
    assert choose(request(keys=512, queries=512)) == "flash"  # no row
    assert choose(request(window=9)) == "triton"
    assert choose(request(lse=True)) == "triton"
    assert choose(request(lse=True, width=512)) == "reference"
    assert choose(request(lse=True, device=torch.device("cpu"))) == "reference"
    assert choose(request(keys=8192)) == "triton"  # unequal lengths under a causal mask
    assert choose(request(dtype=torch.float64, width=512, segments=True)) == "math"
    assert choose(request(device=torch.device("cpu"))) == "sdpa"
    assert choose(request(device=torch.device("cpu"), segments=True)) == "math"
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(request()) == "triton"
    finally:
        torch.use_deterministic_algorithms(False)
    monkeypatch.setattr(backends, "HAS_TRITON", False)
    assert choose(request(window=9)) == "math"
    with pytest.raises(ValueError, match="Triton is not installed"):
        choose(request(), "triton")


def test_forcing_a_backend_ends_with_the_block() -> None:
    with forced("math"):
        assert choose(request()) == "math"
        assert choose(request(), "flash") == "flash"  # the caller's own word counts more
    assert backends._forced is None
    with pytest.raises(ValueError, match="windows and segments"), forced("flash"):
        attention(GOOD, GOOD, GOOD, causal=True, window=3)


def test_works_without_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import importlib.util as u; u.find_spec = lambda name, *a: None\n"
        "import torch; from shardwise.kernels.attention import attention, FlashAttention\n"
        "q = torch.randn(1, 2, 8, 16, requires_grad=True)\n"
        "attention(q, q, q, causal=True, window=3).sum().backward()\n"
        "FlashAttention.apply(q, q, q, True).sum().backward()\n"
        "try: attention(q, q, q, causal=True, backend='triton')\n"
        "except ValueError as error: assert 'pip install triton' in str(error)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_bench_measures_once_and_resumes(tmp_path: Path) -> None:
    result = tmp_path / "attention.json"
    command = ["bench", "attention", "--quick", "--sweeps", "table7", "--json", str(result)]
    assert main(command) == 0
    first = json.loads(result.read_text())
    assert {row["case"]["backend"] for row in first["rows"]} >= {"plain", "triton", "flash"}
    for row in first["rows"]:
        assert row["failure"] is None, row
        assert set(row["ms"]) == set(row["tflops"]) == {"forward", "backward", "both"}
    assert main([*command, "--resume"]) == 0
    assert json.loads(result.read_text())["rows"] == first["rows"]
    picture = tmp_path / "attention.svg"
    assert main([*command, "--resume", "--plot", str(picture)]) == 0
    drawn = ElementTree.parse(picture).getroot()
    assert len(drawn.findall(".//{*}circle")) == len(first["rows"])


def test_bench_names_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "attention", "--sweeps", "table8"]) == 2
    assert "unknown sweep 'table8'" in capsys.readouterr().err
    assert main(["bench", "attention", "--plot", str(tmp_path / "absent" / "a.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
