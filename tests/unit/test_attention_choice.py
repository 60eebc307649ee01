"""The measured choice of an attention backend, with times that the tests make up."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from shardwise.cli import main
from shardwise.errors import UserError
from shardwise.kernels.attention import backends, measured
from shardwise.kernels.attention.backends import Request, choose
from shardwise.kernels.attention.interface import attention
from shardwise.kernels.attention.mask import Mask, visible_pairs
from shardwise.kernels.attention.measured import Trials
from shardwise.lab.attention import untuned

CUDA, CPU = torch.device("cuda"), torch.device("cpu")
NAMES = ("triton", "cudnn", "flash")


def request(**changes: Any) -> Request:
    facts: dict[str, Any] = {
        "device": CUDA, "dtype": torch.bfloat16, "batch": 2, "heads": 8, "kv_heads": 4,
        "width": 96, "queries": 4096, "keys": 4096, "causal": True,
    }  # fmt: skip
    return Request(**facts | changes)


class Gpu:
    """A GPU that is not there: `ms` is how long its backends take."""

    def __init__(self, **ms: float) -> None:
        self.ms, self.able, self.timed, self.facts = ms, True, 0, "one"

    def time(self, request: Request, names: tuple[str, ...]) -> Trials:
        self.timed += 1
        ms = {name: [self.ms[name]] for name in names if name in self.ms}
        return Trials(ms, {name: "refused" for name in names if name not in self.ms})

    def restart(self) -> None:
        """As a new process begins."""
        measured._decided.clear()
        measured._timed.clear()
        backends._chosen.clear()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Gpu:
    gpu = Gpu(triton=3.0, cudnn=2.0, flash=4.0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(measured.VARIABLE, raising=False)
    for name in ("_decided", "_timed"):
        monkeypatch.setattr(measured, name, {})
    monkeypatch.setattr(backends, "_chosen", {})
    monkeypatch.setattr(backends, "HAS_TRITON", True)
    monkeypatch.setattr(backends, "capability", lambda device: (9, 0))
    monkeypatch.setattr(measured, "_time", gpu.time)
    monkeypatch.setattr(measured, "_facts", lambda device: gpu.facts)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: not gpu.able)
    monkeypatch.setattr(measured, "_bytes_free", lambda device: 100 << 30)
    return gpu


def files(folder: Path) -> list[Path]:
    return list((folder / "shardwise" / "attention").iterdir())


def test_a_shape_is_timed_once_and_later_processes_read_it(gpu: Gpu, tmp_path: Path) -> None:
    assert measured.decide(request(), NAMES) == "cudnn"
    assert measured.decide(request(), NAMES) == "cudnn" and gpu.timed == 1
    assert measured.decide(request(grad=True), NAMES) == "cudnn" and gpu.timed == 2
    gpu.ms["cudnn"] = 9.0  # would be another choice, if it were timed again
    gpu.restart()
    assert measured.decide(request(), NAMES) == "cudnn" and gpu.timed == 2
    # What a file holds counts for one GPU, one set of versions, and only if it makes sense.
    gpu.facts = "another"
    gpu.restart()
    assert measured.decide(request(), NAMES) == "triton" and gpu.timed == 3
    assert len(files(tmp_path)) == 3 and all(f.suffix == ".json" for f in files(tmp_path))
    for broken in ("", "{", "[]", '{"backend": 3}', '{"backend": "fast"}', "[" * 10**5):
        for file in files(tmp_path):
            file.write_text(broken)
        gpu.restart()
        before = gpu.timed
        assert measured.decide(request(), NAMES) == "triton" and gpu.timed == before + 1, broken


def test_without_a_folder_to_write_it_is_timed_by_every_process(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    for timed in (1, 2):
        assert measured.decide(request(), NAMES) == "cudnn" and gpu.timed == timed
        gpu.restart()


def test_the_table_alone_if_the_program_says_so(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured.decide(request(), NAMES)
    gpu.restart()
    monkeypatch.setenv(measured.VARIABLE, "table")
    assert measured.decide(request(), NAMES) == "triton"
    assert measured.recall(request(), NAMES) is None
    monkeypatch.setenv(measured.VARIABLE, "tabel")
    with pytest.raises(UserError, match=r"SHARDWISE_ATTENTION is 'tabel'.*'table'"):
        measured.decide(request(batch=3), NAMES)


def test_a_choice_stays_also_where_nothing_could_be_timed(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.able = False  # a graph is being captured
    assert measured.decide(request(), NAMES) == "triton" and gpu.timed == 0
    gpu.able = True  # what backward recomputes must be what forward ran
    assert measured.decide(request(), NAMES) == "triton" and gpu.timed == 0
    gpu.restart()
    assert measured.decide(request(), NAMES) == "cudnn"  # and no file was left
    monkeypatch.setattr(measured, "_bytes_free", lambda device: 1 << 20)
    assert measured.decide(request(batch=3), NAMES) == "triton"
    monkeypatch.setattr(measured, "_bytes_free", lambda device: 100 << 30)
    chosen = []

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            chosen.append(measured.decide(request(batch=4), NAMES))
            return grad

    Recomputed.apply(torch.ones(1, requires_grad=True)).backward()
    assert chosen == ["triton"] and gpu.timed == 1
    monkeypatch.setattr(measured, "MOST_TIMED", 1)
    assert measured.decide(request(batch=5), NAMES) == "triton"  # enough was timed


def test_who_wins(gpu: Gpu) -> None:
    gpu.ms = {"cudnn": 2.0, "triton": 2.01, "flash": 5.0}
    assert measured.decide(request(), NAMES) == "triton"  # as good as equal: the table's first
    gpu.ms = {"flash": 5.0}
    assert measured.decide(request(batch=3), NAMES) == "flash"  # the others could not run
    gpu.ms = {}
    assert measured.decide(request(batch=4), NAMES) == "triton"
    assert measured.decide(request(batch=5), ("math",)) == "math"


def test_lengths_that_change_with_every_batch_share_a_choice(gpu: Gpu) -> None:
    def timed(length: int) -> int:
        measured.decide(request(queries=length, keys=length), NAMES)
        return gpu.timed

    assert [timed(n) for n in (1000, 1001, 1021, 1024, 1100, 1152, 5, 6)] == [
        1,
        1,
        1,
        2,
        3,
        4,
        5,
        5,
    ]
    before = gpu.timed
    for length in range(20_000, 30_000, 37):
        timed(length)
    assert gpu.timed - before < 40
    # One of them has unequal lengths, which cuDNN does not take under a causal mask.
    assert choose(request(queries=1000, keys=1001), plain=True) == "triton"
    assert choose(request(queries=1001, keys=1001), plain=True) == "cudnn"


def test_every_way_of_asking_meets_the_measured_choice(gpu: Gpu) -> None:
    assert choose(request(width=128), plain=True) == "cudnn" and gpu.timed == 1
    assert choose(request(width=128), plain=False) == "triton"  # a subclass: by the table
    assert choose(request(width=128), "flash", plain=True) == "flash"
    assert choose(request(window=64), plain=True) == "triton" and gpu.timed == 1  # no other can
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(request(), plain=True) == "triton"
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_trace_takes_what_is_known_and_stays_dynamic(gpu: Gpu) -> None:
    seen: list[str] = []

    def call(x: Tensor) -> Tensor:
        n = x.shape[0]
        facts = (CUDA, torch.bfloat16, 2, 8, 4, 128, n, n, True)
        return x.sin() if choose(Request(*facts)) == "cudnn" else x.cos()

    def counting(graph: Any, inputs: Any) -> Callable[..., Any]:
        seen.append(str(graph.code))
        return graph.forward

    def run(length: int, **options: Any) -> str:
        x = torch.randn(length)
        y = torch.compile(call, backend=counting, fullgraph=True, **options)(x)
        return "cudnn" if torch.equal(y, x.sin()) else "triton"

    assert run(4096) == "triton" and gpu.timed == 0  # nothing is timed in a trace
    choose(request(width=128), plain=True)
    torch._dynamo.reset()
    assert run(4096) == "cudnn"
    torch._dynamo.reset()
    seen.clear()
    lengths = (4096, 4224, 4352, 4480, 5000)
    assert {run(n, dynamic=True) for n in lengths} == {"triton"}  # by the table
    assert len(seen) == 1


def test_a_window_of_all_keys_is_none() -> None:
    q, k = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 5, 8)
    for causal in (False, True):
        plain = attention(q, k, k, causal=causal)
        assert torch.equal(attention(q, k, k, causal=causal, window=9), plain)
        assert not torch.allclose(attention(q, k, k, causal=causal, window=1), plain)


def test_calls_take_turns_and_failures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    ms = {"a": 2.0, "b": 2.5, "slow": 3.5}

    class Clock:
        ahead_ms = 0.0

        def __init__(self, device: torch.device) -> None:
            assert device == CPU

        def get_ahead(self, call: Callable[[], object]) -> None: ...

        def start(self, call: Callable[[], object]) -> Callable[[], float]:
            call()
            taken = ms[order[-1]]
            return lambda: taken

    def call(name: str) -> Callable[[], None]:
        def run() -> None:
            order.append(name)
            if name == "broken":
                raise ValueError("no such kernel\nand a trace")

        return run

    calls = {name: call(name) for name in ("a", "broken", "slow", "b")}
    trials = Trials()
    with monkeypatch.context() as patched:
        patched.setattr(measured, "_Clock", Clock)
        trials.run(calls, CPU, budget_ms=14.0)
    assert trials.failed == {"broken": "ValueError: no such kernel"}
    assert order == ["a", "a", "broken", "slow", "slow", "b", "b", *3 * ("a", "b")]
    assert trials.ms == {"a": [2.0] * 3, "slow": [3.5], "b": [2.5] * 3}
    assert trials.medians() == ms
    once = Trials()
    once.run({"a": calls["a"]}, CPU, budget_ms=0)  # by the real clock
    assert len(once.ms["a"]) == 2 and min(once.ms["a"]) > 0
    nothing = Trials()
    nothing.run({"broken": calls["broken"]}, CPU, budget_ms=1)
    assert nothing.medians() == {} and measured.pick(("broken",), {}) is None


@pytest.mark.parametrize("transposed", [False, True])
def test_a_trial_leaves_the_program_alone(
    monkeypatch: pytest.MonkeyPatch, transposed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, lambda x: nullcontext())
    torch.manual_seed(1)
    before, packed = torch.get_rng_state(), []

    def pack(x: Tensor) -> Tensor:
        packed.append(x)
        return x

    small = request(
        device=CPU, dtype=torch.float32, width=8, queries=20, keys=20, grad=True,
        transposed=transposed,
    )  # fmt: skip
    names = ("math", "reference", "cudnn")
    with (
        FlopCounterMode(display=False) as counter,
        torch.autograd.graph.saved_tensors_hooks(pack, pack),
        torch.autocast("cpu", torch.bfloat16),
        torch.no_grad(),
    ):
        trials = measured._time(small, names)
    assert set(trials.medians()) == {"math", "reference"}
    assert "needs CUDA tensors" in trials.failed["cudnn"]
    assert counter.get_total_flops() == 0 and packed == []
    assert torch.equal(torch.get_rng_state(), before)


def test_a_request_says_what_a_call_is() -> None:
    q = torch.zeros(3, 20, 8, 16).transpose(1, 2)
    k = torch.zeros(3, 4, 30, 16, requires_grad=True)
    asked = Request.of(q, k, k, causal=False, window=5, precision="tf32")
    assert asked == request(
        device=CPU, dtype=torch.float32, batch=3, width=16, queries=20, keys=30, causal=False,
        window=5, precision="tf32", grad=True, transposed=True,
    )  # fmt: skip
    with torch.no_grad():
        assert not Request.of(q, k, k, causal=True).grad
    flat = Request.of(q[:, 0], k[:, 0], k[:, 0], causal=True, segments=True)
    assert (flat.heads, flat.kv_heads, flat.transposed, flat.masked) == (1, 1, False, True)


def test_the_untuned_shapes_are_many_and_of_every_kind() -> None:
    shapes = untuned.make_shapes(quick=False)
    drawn = [shape for shape in shapes if shape.group == "drawn"]
    assert len(drawn) >= 40 and drawn == untuned.draw(len(drawn))
    assert len({shape.key for shape in shapes}) == len(shapes)
    for name, least, most in (("batch", 1, 32), ("heads", 8, 64), ("dim", 32, 256),
                              ("seq", 512, 65536)):  # fmt: skip
        found = [getattr(shape, name) for shape in drawn]
        assert least <= min(found) <= 2 * least and most / 2 <= max(found) <= most, name
    kinds = {(s.causal, s.window is not None, s.documents > 0) for s in drawn}
    assert {(True, False, False), (False, False, False), (True, True, False), (False, True, False),
            (True, False, True), (False, False, True)} <= kinds  # fmt: skip
    assert {1, 2, 4, 8} <= {shape.heads // shape.kv_heads for shape in drawn}
    sizes = [(s.batch, s.heads, s.kv_heads, s.seq, s.dim) for s in shapes if s.group == "named"]
    assert sizes == list(untuned.NAMED) and len(sizes) == 4


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize("documents", [0, 3])
def test_a_shape_counts_what_its_mask_shows(
    causal: bool, window: int | None, documents: int
) -> None:
    shape = untuned.Shape("drawn", 1, 2, 1, 23, 4, causal, window, documents)
    options = untuned.Problem(shape, CPU).options
    place = torch.arange(shape.seq)
    mask = Mask(causal, 1.0, window, *options.get("segment_ids", (None, None)))
    assert shape.pairs() == visible_pairs(place, place, mask).sum()
    assert shape.flops("both") == 7 * 2 * 2 * 4 * shape.pairs()


def test_the_bench_of_untuned_shapes_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "untuned.json"
    command = ["bench", "attention", "--shapes", "untuned", "--quick", "--json", str(result)]
    rivals = untuned.Bench.rivals

    def with_more(self: untuned.Bench, problem: untuned.Problem) -> list[str]:
        if problem.shape.window:
            raise RuntimeError("this shape fails as a whole")
        return [*rivals(self, problem), "cudnn"]  # which cannot run here

    monkeypatch.setattr(untuned.Bench, "rivals", with_more)
    assert main([*command, "--budget", "0"]) == 0
    assert not result.exists()
    assert main(command) == 0
    assert "shapes within 3 % of the fastest" in capsys.readouterr().out
    rows = json.loads(result.read_text())["rows"]
    failures = [row["failure"] for row in rows]
    assert failures.count(None) == 3 and "fails as a whole" in str(failures)
    for row in rows:
        if row["failure"] is None:
            assert "cannot serve" in row["failed"]["cudnn"]
            assert row["apart"] <= untuned.AGREEMENT
            for name in untuned.PASSES:
                side = row[name]
                assert set(side["ms"]) == {"default", "math", "reference"}
                assert side["ratio"] == side["ms"]["default"] / side["ms"][side["fastest"]]
                assert side["chosen"] in ("sdpa", "math")
    assert main([*command, "--resume"]) == 0
    assert json.loads(result.read_text())["rows"] == rows
    assert main(["bench", "attention", "--quick", "--resume", "--json", str(result)]) == 2
    assert "not of --shapes sweeps" in capsys.readouterr().err
    assert main([*command[:5], "--plot", str(tmp_path / "a.svg")]) == 2
    assert "leave --plot out" in capsys.readouterr().err


def test_a_backend_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = untuned.attention

    def wrong(q: Tensor, *tensors: Tensor, backend: str | None, **options: Any) -> Tensor:
        o = right(q, *tensors, backend=backend, **options)
        return o * 1.1 if backend == "reference" else o

    monkeypatch.setattr(untuned, "attention", wrong)
    row = untuned.Bench(quick=True).measure(untuned.make_shapes(quick=True)[0])
    assert row["failure"] is None and "differs from float64" in row["failed"]["reference"]
    assert set(row["both"]["ms"]) == {"default", "math"}
