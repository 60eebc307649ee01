import dataclasses
import json
import subprocess
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from shardwise.children import ChildFailed
from shardwise.cli import main
from shardwise.description.language_model import LM, draw_tokens, make_model
from shardwise.description.preset import BENCH, bench_size
from shardwise.emulation import collectives
from shardwise.emulation.collectives import Network
from shardwise.emulation.run import joined
from shardwise.lab.steps import cases, compare, engines, measure
from shardwise.lab.steps.engines import OPTIMIZER, Wrapped, largest_difference
from shardwise.lab.steps.measure import Measured
from shardwise.lab.steps.models import build_model
from shardwise.profiling import footprint, timing
from shardwise.profiling.timing import Sample, Side

TINY = bench_size(layers=2, d_model=8, d_ff=16, heads=2, vocab=11)


def test_spread_is_the_interquartile_range_or_of_few_values_the_whole():
    assert timing.spread([5.0]) == 0
    assert timing.spread([1.0, 9.0, 5.0]) == 8
    assert timing.spread([1.0, 2.0, 3.0, 4.0, 1000.0]) == 2


def test_ratios_are_ours_over_theirs():
    ours = Side.of([Sample(2, 1), Sample(4, 1), Sample(900, 1)], peak_bytes=30)
    theirs = Side.of([Sample(8, 4)], peak_bytes=20)
    row = compare.compare_sides(ours, theirs)
    assert (row["step_ratio"], row["cpu_ratio"], row["memory_ratio"]) == (0.5, 0.25, 1.5)
    assert row["device_ratio"] is None and row["reserved_ratio"] is None  # no device told of them


def test_a_device_has_a_time_of_its_own_and_a_reserve():
    ours = Side.of([Sample(9, 9)], 30, device=[3, 1, 2], reserved_bytes=80)
    theirs = Side.of([Sample(9, 9)], 30, device=[8], reserved_bytes=40)
    row = compare.compare_sides(ours, theirs)
    assert (row["step_ratio"], row["device_ratio"], row["reserved_ratio"]) == (1, 0.25, 2)
    assert (ours.device_ms, ours.device_spread_ms) == (2, 2)


def test_a_device_is_timed_with_its_host_ahead(monkeypatch):
    """It is held for longer than issuing the step ever took; that does not count."""
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("record")

        def synchronize(self):
            happened.append("synchronize")

        def elapsed_time(self, end):
            return 5.0

    @contextmanager
    def watch():
        happened.append("watch")
        yield "seen"
        happened.append("read")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("idle"))
    took = timing.time_ahead(
        lambda: happened.append("step"), happened.append, [Sample(9, 10), Sample(9, 100)], watch()
    )
    assert took == (5.0, "seen")
    held = happened.pop(1)
    assert held > 0.1
    assert " ".join(happened) == "idle record watch step record read synchronize"


@pytest.mark.usefixtures("no_group")
def test_blocks_on_a_gpu_give_the_device_s_time_and_the_reserve(monkeypatch):
    """The same path, with a device that a CPU plays."""
    family = dataclasses.replace(cases.FAMILIES["h200"], device="cpu")
    case = cases.StepCase("c", TINY, 1, 8, ("zero3",), steps=7, warmup=1, network=Network())
    slow = dataclasses.replace(case, network=Network(latency=1e-3))
    ahead = iter(range(1, 100))
    met = []

    def play(run, answer):
        met.append(emulation.network)
        run()
        return answer

    monkeypatch.setattr(engines, "_meshes", {})
    monkeypatch.setattr(footprint, "free_device", lambda workspaces=False: 100)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 1000)
    monkeypatch.setattr(footprint, "peaks_on_cuda", lambda run: play(run, (700, 3000)))
    monkeypatch.setattr(timing, "time_on_cuda", timing.time_on_host(lambda: None))
    monkeypatch.setattr(timing, "time_ahead", lambda run, *_: play(run, (float(next(ahead)), None)))
    with joined(0, 8), case.open_network() as emulation:
        monkeypatch.setattr(emulation, "links_of", lambda device: SimpleNamespace(delay=None))
        builds = {
            name: partial(compare._build, wrap, "zero3", family, case)
            for name, wrap in (("ours", engines.wrap_ours), ("theirs", engines.wrap_theirs))
        }
        monkeypatch.setattr(measure, "_measure_on_cpu", measure._measure_on_gpu)
        both = measure.measure_on_networks(family, (case, slow), builds, emulation)
    # Five blocks of two steps on each network, the candidates in turn: of ours, 1 2, 9 10, 17 18,
    # ... are on the first one and 3 4, 11 12, ... on the other.
    assert [(each.sides["ours"].device_ms, each.sides["theirs"].device_ms) for each in both] == [
        (17.5, 21.5),
        (19.5, 23.5),
    ]
    for each in both:
        for side in each.sides.values():
            assert (side.peak_bytes, side.reserved_bytes) == (600, 2000)
            assert side.collectives > 0 and side.device_spread_ms > 0
        assert each.settings["blocks"] == cases.BLOCKS == 5
    # Each of ten builds: two steps ahead and the one for its peaks, then two on the other network.
    assert met == ([case.network] * 3 + [slow.network] * 2) * 10


@pytest.mark.usefixtures("no_group")
def test_every_candidate_of_captured_steps_trains(monkeypatch):
    """On a CPU, where nothing is captured, they all train alike."""
    case = cases.StepCase("c", TINY, 1, 8, ("zero3",), steps=1, warmup=1, through="capture")
    compiled = dataclasses.replace(case, compiled=True)
    monkeypatch.setattr(engines, "_meshes", {})
    monkeypatch.setattr(engines, "TorchCaptured", lambda step: step)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: None)
    tokens = draw_tokens(TINY, 1, 8, "cpu")
    with joined(0, 8):
        wraps = [*compare._wraps(case).values(), *compare._wraps(compiled).values()]
        for wrap in wraps:
            step = wrap(make_model(TINY, "cpu"), "zero3", case.precision).step_on(*tokens)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(4):
                    step()
    assert len(wraps) == 10


@pytest.fixture
def device_of_the_host(monkeypatch):
    """A CPU plays the device of captured steps, which stay eager there."""
    monkeypatch.setattr(engines, "_meshes", {})
    monkeypatch.setattr(engines, "TorchCaptured", lambda step: step)
    monkeypatch.setattr(engines.sw, "capture", lambda step: step, raising=False)
    monkeypatch.setattr(footprint, "free_device", lambda workspaces=False: 2**30)
    monkeypatch.setattr(footprint, "largest_blocks", lambda: "1 x 1024.0 MiB")
    monkeypatch.setattr(footprint, "peaks_on_cuda", lambda step: (step(), (2**31, 2**32))[1])
    monkeypatch.setattr(timing, "time_on_cuda", timing.time_on_host(lambda: None))
    monkeypatch.setattr(timing, "time_ahead", lambda step, *_: (step(), (1.0, None))[1])
    for name in ("synchronize", "memory_reserved", "max_memory_allocated", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 2**30)
    links = SimpleNamespace(delay=None)
    monkeypatch.setattr(collectives.Emulation, "links_of", lambda emulation, device: links)
    monkeypatch.setattr(compare, "build_model", lambda size, device: build_model(size, "cpu"))
    monkeypatch.setattr(measure, "draw_tokens", lambda *given: draw_tokens(*given[:3], "cpu"))
    monkeypatch.setattr(compare, "draw_tokens", lambda *given: draw_tokens(*given[:3], "cpu"))


@pytest.mark.usefixtures("no_group", "device_of_the_host")
def test_static_steps_go_on_after_a_failure(monkeypatch, tmp_path, capsys):
    """One candidate raises, one case's process ends: rows say so, and are tried again."""
    case = cases.StepCase(
        "static-a", TINY, 1, 8, ("zero3",), steps=2, warmup=1, network=Network(),
        through="capture", blocks=1,
    )  # fmt: skip
    small = dataclasses.replace(
        cases.FAMILIES["static"], cases=(case, dataclasses.replace(case, name="static-b"))
    )
    dies = True

    def ask(family, function, *given):
        if dies and given[0].cases[0].name == "static-b":
            raise ChildFailed("rank 0:\nout of luck")
        with joined(0, 8):
            return json.loads(json.dumps(function(*given)))

    def broken(*_):
        raise RuntimeError("no graph")

    monkeypatch.setattr(cases.Family, "ask", ask)
    monkeypatch.setattr(compare, "select", lambda names, choice: {"static": small})
    monkeypatch.setattr(compare, "run_fresh", lambda function, *given: function(*given))
    monkeypatch.setitem(engines.BESIDE["capture"], "fully_shard, captured", broken)
    path = tmp_path / "static.json"
    command = ["bench", "step", "--cases", "static", "--json", str(path)]
    assert main(command) == 0
    row, lost = json.loads(path.read_text())["rows"]
    assert row["failures"] == {"fully_shard, captured": "RuntimeError: no graph"}
    assert set(row["beside"]) == {"ours, eager", "ours, eager, arena", "ours, captured, arena"}
    assert set(row["alone"]) == {"ours", "theirs", compare.GROWING, *row["beside"]}
    assert "out of luck" in lost["failure"]
    said = capsys.readouterr()
    assert "static-b zero3: its process ended" in said.out
    assert "1024 MiB stayed on the device after the last candidate: 1 x" in said.err
    dies = False
    assert main([*command, "--resume"]) == 0
    assert "failure" not in json.loads(path.read_text())["rows"][1]


def test_candidates_take_turns_after_their_warm_up():
    ran = []
    steps = {"a": lambda: ran.append("a"), "b": lambda: ran.append("b")}
    samples = timing.alternate(steps, rounds=3, warmup=2, timer=timing.time_on_host(lambda: None))
    assert "".join(ran) == "aabb" + "ab" + "ba" + "ab"
    assert [len(samples[name]) for name in "ab"] == [3, 3]
    assert all(s.step_ms >= s.cpu_ms >= 0 for s in samples["a"])


def test_the_environment_is_recorded():
    found = timing.describe_environment()
    assert found["torch"] == torch.__version__
    assert found["commit"] and found["cpu"] and found["cores"] >= 1
    assert found["virtual"] in (True, False)
    assert timing.describe_environment("abc")["commit"] == "abc"


def test_the_peak_on_a_cpu_counts_what_lives_at_one_time():
    def build():
        kept = torch.empty(1000)

        def run():
            first = torch.empty(50_000)
            del first
            second = torch.empty(30_000)
            assert second.numel() and kept.numel()

        return run

    assert footprint.peak_on_cpu(build) == 4 * 51_000


def test_the_peak_of_a_trace_is_inside_the_marked_step_and_above_its_start():
    def event(ts, total, size):
        return {"name": "[memory]", "ts": ts, "args": {"Total Allocated": total, "Bytes": size}}

    mark = {"name": "shardwise.peak", "ts": 5, "dur": 10}
    events = [mark, event(1, 107, 7), event(2, 900, 793), event(3, 150, -750), event(20, 999, 1)]
    assert footprint.read_peak(events) == 50
    assert footprint.read_peak([*events, event(6, 190, 40)]) == 90


def test_the_large_model_is_the_design_s():
    with torch.device("meta"):
        count = sum(p.numel() for p in LM(BENCH, 8).parameters())
    assert round(count / 1e9, 2) == 0.95


def _plain(model):
    return Wrapped(model, torch.optim.AdamW(model.parameters(), **OPTIMIZER), 1, {})


def test_models_that_part_are_not_timed():
    tokens = torch.arange(10).view(1, 10)
    candidates = {
        "ours": _plain(make_model(TINY, "cpu")),
        "theirs": _plain(make_model(TINY, "cpu")),
    }
    for candidate in candidates.values():
        candidate.step_on(tokens, tokens)()
    measured = Measured()
    measure.check_parity(candidates, measured)
    assert measured.parity == {"theirs": 0} and not measured.failures
    with torch.no_grad():
        candidates["ours"].model.head.weight[0, 0] += 1
    worst, where = largest_difference(candidates["ours"].model, candidates["theirs"].model)
    assert worst > 0.5 and where == "head.weight"
    measure.check_parity(candidates, measured)
    assert measured.parity["theirs"] > 0.5 and "nothing was timed" in measured.failures["theirs"]


def test_nan_is_no_parity():
    ours, theirs = make_model(TINY, "cpu"), make_model(TINY, "cpu")
    with torch.no_grad():
        ours.norm.weight[0] = float("nan")
    worst, _ = largest_difference(ours, theirs)
    assert worst == float("inf")


def test_options_cut_the_cases():
    family = cases.StepChoice(strategies=("ddp",), steps=7).apply(cases.FAMILIES["gloo2"])
    assert [(case.strategies, case.steps) for case in family.cases] == [(("ddp",), 7)]
    assert cases.StepChoice(strategies=("ddp",)).apply(cases.FAMILIES["fake8"]).cases == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "fake9"], "unknown case 'fake9': did you mean 'fake8'?"),
        (["--strategies", "zero4"], "unknown strategy 'zero4': did you mean"),
        (["--steps", "0"], "--steps is 0, expected at least 1"),
        (["--json", "absent/x.json"], "--json absent/x.json: there is no folder absent"),
    ],
)
def test_wrong_choices_are_told_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "step", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_help_teaches_the_cases_without_torch():
    code = (
        "import sys\nfrom shardwise.cli import main\n"
        "try: main(['bench', 'step', '--help'])\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules\n"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert all(name in shown.stdout for name in cases.FAMILIES)
    assert "examples:\n  shardwise bench step" in shown.stdout


def test_a_quick_run_writes_every_figure(tmp_path):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "shardwise.cli", "bench", "step", "--against", "torch"]
    options = ["--quick", "--cases", "fake8", "--strategies", "zero3", "--json", str(path)]
    shown = subprocess.run(
        [*command, *options], capture_output=True, text=True, check=True, timeout=120
    )
    assert "fully_shard" in shown.stdout
    written = json.loads(path.read_text())
    assert set(written) == {"environment", "command", "quick", "rows"}
    assert written["command"].startswith("shardwise bench step --against torch --quick")
    (row,) = written["rows"]
    assert (row["case"], row["strategy"], row["peer"]) == ("fake8", "zero3", "fully_shard")
    assert row["parity"] is None and row["settings"]["quick"] is True
    assert row["settings"]["ours"]["plan"]["name"] == "zero3"
    for side in ("ours", "theirs"):
        for figure in ("step_ms", "step_spread_ms", "cpu_ms", "cpu_spread_ms", "peak_bytes"):
            assert row[side][figure] >= 0
    assert row["memory_ratio"] == row["ours"]["peak_bytes"] / row["theirs"]["peak_bytes"]


EMULATED = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from shardwise.engine import torch_private as versions
from shardwise.emulation.collectives import Network, emulate
from shardwise.lab.steps import engines
from shardwise.description.language_model import make_model
from shardwise.description.preset import bench_size

dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
tokens = torch.arange(6).view(1, 6)
shape = bench_size(layers=3, d_model=8, d_ff=16, heads=2, vocab=11)
before = dist.all_reduce
with emulate(Network(bandwidth=1e9, latency=1e-6)) as network:
    for wrap in (engines.wrap_ours, engines.wrap_theirs):
        candidate = wrap(make_model(shape, "cpu"), "zero3", engines.Precision())
        step = candidate.step_on(tokens, tokens)
        step()
        network.calls.clear()
        step()
        print(dict(sorted(network.calls.items())))
        assert all(torch.isfinite(p.to_local()).all() for p in candidate.model.parameters())
    out, part = torch.empty(8), torch.empty(2)
    work = versions.all_gather(out, torch.tensor([1.0, 2.0]), None)
    assert isinstance(work, dist.distributed_c10d.Work) and work.wait()
    assert out.tolist() == [1.0, 2.0] * 4
    versions.reduce_scatter(part, torch.arange(8.0), None).wait()
    assert part.tolist() == [2.0, 3.0]  # rank 1's part
    assert dist.all_reduce(part) is None
assert dist.all_reduce is before
"""


def test_both_engines_go_over_the_emulated_network():
    """Four units of one model: a step gathers three twice and the root once, and reduces all."""
    shown = subprocess.run(
        [sys.executable, "-c", EMULATED], capture_output=True, text=True, check=False, timeout=120
    )
    assert shown.returncode == 0, shown.stderr
    ours, theirs = shown.stdout.splitlines()
    assert ours == theirs
    assert "'reduce_scatter': 4" in ours


def test_a_network_s_time_is_a_ring_s():
    network = Network(bandwidth=1e9, latency=1e-3)
    assert network.seconds(4_000_000, ranks=4) == pytest.approx(0.004)
    assert network.seconds(4_000_000, ranks=4, collective="all_reduce") == pytest.approx(0.007)
    assert Network().seconds(4_000_000, ranks=4) == 0
    with pytest.raises(ValueError, match="expected bytes/s above 0"):
        Network(bandwidth=0)
