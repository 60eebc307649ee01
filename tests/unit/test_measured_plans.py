"""Plans that are tried before they are chosen: `shardwise plan --measure`, `measure=True`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.calibration import search as measured_search
from shardwise.calibration.trial import Program, _parameters_on_meta, can_try, try_plan
from shardwise.description.cluster import Cluster
from shardwise.description.workload import Workload
from shardwise.emulation.engines import Subject
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict.ranking import Captured, Trial, basis_of

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.head = nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x) * self.scale
        return self.head(x)


def build():
    return Net()


def inputs(samples=8):
    return torch.randn(samples, 16)
"""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "net.py").write_text(MODEL)
    return f"{tmp_path / 'net.py'}:build"


def test_real_ranks_try_the_best_and_are_remembered(model: str) -> None:
    told: list[str] = []
    settings = {
        "inputs": "inputs", "world": 2, "strategies": ("ddp", "zero3"), "measure": True,
        "checkpoints": ("none",), "tell": told.append,
    }  # fmt: skip
    cluster = Cluster.load("cpu-gloo")
    ranking = sw.search(model, cluster, **settings)
    tried = [c for c in ranking if c.trial is not None]
    assert {c.plan.name for c in tried} == {"ddp", "zero3"}
    assert len(told) == len(tried) <= 4
    assert ranking[0].trial is not None and ranking[0].basis == "measured here"
    for candidate in tried:
        trial = candidate.trial
        assert candidate.step_ms == trial.step_ms > 0 and trial.how == "2 ranks, gloo"
        assert candidate.range_ms[0] < candidate.step_ms < candidate.range_ms[1]
        assert candidate.predicted_ms != candidate.step_ms
        assert trial.peak_bytes == candidate.peak_bytes > 0
    assert [c.step_ms for c in ranking] == sorted(c.step_ms for c in ranking)
    told.clear()
    again = sw.search(model, cluster, **settings)
    assert [c.step_ms for c in again] == [c.step_ms for c in ranking] and not told


def test_presets_and_modules_are_tried_recomputing_too() -> None:
    """As built by others, and without their values: a trial takes no second copy of them."""
    cluster = Cluster.load("cpu-gloo")
    again = Workload(16, 2, checkpoint="nonreentrant")
    plan = Plan.of("zero3", 2).resolve(Subject("tiny", 2, 16).build())
    assert try_plan(Program("tiny"), plan, again, cluster).step_ms > 0
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    built = Program(net)._build()
    assert all(p.is_meta for p in built.parameters()) and not built[1].running_var.is_meta
    assert not any(p.is_meta for p in net.parameters())
    trial = try_plan(Program(net, torch.randn(6, 4)), Plan.of("ddp", 2), Workload(1, 6), cluster)
    assert trial.how == "2 ranks, gloo" and trial.peak_bytes > 0


def test_a_cluster_of_gpus_is_not_tried_without_one(model: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    ranking = sw.search(
        model, Cluster.load("h100x8"), inputs="inputs", world=8, strategies=("zero3",), measure=True
    )
    assert "nothing was measured: there is no GPU here" in ranking.explain()
    assert ranking[0].trial is None and ranking[0].basis.startswith("predicted from data sheets")


def test_too_many_ranks_for_the_cores_are_not_started() -> None:
    assert "512 ranks on" in can_try(Cluster.load("cpu-gloo"), 512)


def test_what_trials_teach_corrects_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy's own ratio counts for its other Plans, and a Plan that comes first by it is
    tried too.
    """
    ratios = {"ddp": 3.0, "zero3": 1.0}
    asked: list[str] = []

    def fake(program: Program, plan: Plan, workload: Workload, cluster: Cluster) -> Trial:
        asked.append(plan.title)
        of = next(c for c in first if c.plan == plan and c.workload == workload)
        return Trial(of.step_ms * ratios[plan.name], 0.0, 1.0, of.peak_bytes, None, "fake")

    monkeypatch.setattr(measured_search, "try_plan", fake)
    monkeypatch.setattr(measured_search._Remembered, "find", lambda self, candidate: None)
    monkeypatch.setattr(measured_search._Remembered, "keep", lambda self, candidate, trial: None)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    settings = {"inputs": torch.randn(4, 64), "world": 2, "strategies": ("ddp", "zero3")}
    first = sw.search(net, Cluster.load("cpu-gloo"), **settings)
    found = sw.search(net, Cluster.load("cpu-gloo"), **settings, measure=True)
    assert set(asked[:2]) == {"ddp", "zero3"}
    for candidate in found:
        assert candidate.predicted_ms is not None
        ratio = candidate.step_ms / candidate.predicted_ms
        assert ratio == pytest.approx(ratios[candidate.plan.name])
    assert found[0].trial is not None


def test_a_description_cannot_be_run() -> None:
    described = sw.describe(nn.Linear(4, 4), (torch.randn(2, 4),))
    with pytest.raises(UserError, match="give it, not its description"):
        sw.search(described, Cluster.load("cpu-gloo"), Workload(1, 2), world=2, measure=True)


def test_parameters_have_no_memory_and_ties_stay_where_a_model_is_built() -> None:
    with _parameters_on_meta():
        net = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
        net[1].weight = net[0].weight
    assert all(p.is_meta for p in net.parameters()) and net[1].weight is net[0].weight
    assert not net[2].running_mean.is_meta
    assert not nn.Linear(2, 2).weight.is_meta


def test_ranges_say_what_a_prediction_rests_on() -> None:
    sheet, derated = Cluster.load("h200x8"), Cluster.load("h100x8")
    measured = Cluster.load("h200x8-measured")
    assert basis_of(sheet)[0] == "predicted from data sheets"
    assert basis_of(derated)[0] == "predicted from data sheets, derated by published runs"
    widths = [high / low for _, low, high in map(basis_of, (derated, sheet, measured))]
    assert widths == sorted(widths)  # the more is known of whole steps, the narrower
    assert "measured on NVIDIA H200" in basis_of(measured)[0]


def test_a_captured_step_is_advised_where_it_pays_and_fits() -> None:
    """And a remembered trial is the one that was kept."""
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    found = sw.search(net, Cluster.load("cpu-gloo"), inputs=torch.randn(4, 64), world=2)[0]
    assert found.captured is None
    room = dataclasses.replace(found.room, limit_bytes=2e9, beside_bytes=0.0)
    for step_ms, host_ms, reserved, advised in (
        (50.0, 60.0, 10**9, True),
        (98.0, 60.0, 10**9, False),
        (102.0, 99.0, 10**9, True),  # the host swings, and a replay does not ask it
        (50.0, 60.0, 3 * 10**9, False),
    ):
        captured = Captured(step_ms, 0.5, reserved)
        trial = Trial(100.0, 1.0, host_ms, 10**8, 10**8, "a GPU", captured)
        assert Trial.from_dict(json.loads(json.dumps(dataclasses.asdict(trial)))) == trial
        tried = dataclasses.replace(found, step_ms=100.0, trial=trial, room=room, predicted_ms=90.0)
        assert (tried.captured is not None) is advised
        said = f"as sw.capture(step) {step_ms:.1f} ms, {step_ms / 1.05:.1f} to {step_ms * 1.05:.1f}"
        assert (said in tried.show_basis()) is advised


def test_a_trial_that_waited_for_the_host_has_a_wider_range() -> None:
    """And a range never begins below nothing."""
    for trial, factor in (
        (Trial(100.0, 1.0, 50.0, 1, 1, "a GPU"), 1.05),
        (Trial(100.0, 1.0, 95.0, 1, 1, "a GPU"), 1.25),
        (Trial(100.0, 1.0, 100.0, 1, None, "a CPU"), 1.25),
        (Trial(100.0, 300.0, 100.0, 1, None, "a busy CPU"), 4.0),
    ):
        assert trial.range_ms == pytest.approx((100 / factor, 100 * factor))
