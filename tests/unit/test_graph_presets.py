"""Presets traced as graphs, the command `shardwise graph`, and the choice of settings."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed as dist

from shardwise.cli import main
from shardwise.description.cluster import Cluster
from shardwise.description.preset import load_preset
from shardwise.description.workload import Workload
from shardwise.errors import UserError
from shardwise.graph.cost import simulate_graphs
from shardwise.graph.nodes import group_of, is_compute, kind_of
from shardwise.graph.passes.schedule import frontier, schedule
from shardwise.graph.presets import TracedStep, plan_by_modules, trace_preset
from shardwise.planning.plan import Plan
from shardwise.predict.cost import Costs
from shardwise.timeline import Timeline

LAYERS = 4


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    """No process group of another file's tests."""
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def step(alone: None) -> TracedStep:
    plan = plan_by_modules("zero3", 4)
    return trace_preset(load_preset("tiny"), plan, Workload(64, 2), tensor=2, recompute=True)


def count(step: TracedStep, which: str) -> Counter[tuple[str, str]]:
    nodes = getattr(step, which).nodes
    return Counter((kind_of(n), step.axes[group_of(n)].name) for n in nodes if kind_of(n))


def test_collectives_are_where_the_mesh_says(step: TracedStep) -> None:
    assert not dist.is_initialized()  # the imagined world is left
    matrices, norms = 7 * LAYERS + 2, 2 * LAYERS + 1
    forward, backward = count(step, "forward"), count(step, "backward")
    assert forward["all_gather", "shard"] == matrices
    assert forward["all_gather", "combined"] == norms
    # Before attention, the feed-forward and the output; the loss has its own sums.
    assert forward["all_gather", "tensor"] == forward["reduce_scatter", "tensor"] == 2 * LAYERS + 1
    assert forward["all_reduce", "tensor"] == 3
    assert backward["reduce_scatter", "shard"] == matrices
    assert backward["reduce_scatter", "combined"] == norms
    assert sum(map(is_compute, step.forward.nodes)) == 8 * LAYERS + 1


def test_gradients_go_where_they_are_made(step: TracedStep) -> None:
    """The first of them soon: not behind all of backward's compute."""
    marks = [
        "scatter" if kind_of(n) == "reduce_scatter" and "shard" in step.axes[group_of(n)].name
        else "compute"
        for n in step.backward.nodes
        if kind_of(n) == "reduce_scatter" or is_compute(n)
    ]  # fmt: skip
    assert marks.index("scatter") < 5


def test_a_step_s_memory_is_balanced_and_the_settings_trade(step: TracedStep) -> None:
    costs = Costs.of(Cluster.load("h100x8"))
    timeline = simulate_graphs(step.forward, step.backward, costs, step.axes)
    assert timeline.stands_for == {0: 8}
    curve = timeline.curve()
    parameters = 4 * load_preset("tiny").parameter_count
    assert curve.roles["gradients"][-1] == pytest.approx(parameters / 8, rel=0.1)
    assert curve.roles["full"][-1] == 0
    assert curve.roles["state"][-1] == pytest.approx(2 * parameters / 8, rel=0.1)
    trials = schedule(
        step.forward, step.backward, costs=costs, axes=step.axes,
        bucket_sizes=(2**16, 2**20), windows=(0, 20), caps=(2, None),
    )  # fmt: skip
    assert len(trials) == 8 and trials[0].step_ms <= trials[-1].step_ms
    best = frontier(trials)
    assert best[0].step_ms == trials[0].step_ms
    assert trials[0].step_ms < timeline.step_ms


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("ffn8", {}, "no language model"),
        ("tiny", {"tensor": 3}, "does not divide a sequence of 64"),
        ("tiny", {"tensor": 8}, "does not divide the 4 heads"),
    ],
)
def test_what_cannot_be_traced_is_refused(name: str, more: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        trace_preset(load_preset(name), Plan.of("zero3", 4), Workload(64, 1), **more)  # type: ignore[arg-type]
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_command_prints_what_each_pass_did_and_writes_files(tmp_path: Path, capsys) -> None:
    files = {name: tmp_path / name for name in ("dump", "trace", "timeline", "json")}
    asked = "graph --model tiny --layers 2 --mesh 4 --length 64 --recompute --bucket-mib 1"
    given = [text for name, path in files.items() for text in (f"--{name}", str(path))]
    assert main([*asked.split(), *given]) == 0
    shown = capsys.readouterr().out
    assert max(len(line) for line in shown.splitlines() if "│" in line) <= 80
    for word in ("none", "bucket", "prefetch", "sort", "cap", "exposed", "peak GB"):
        assert word in shown
    rows = json.loads(files["json"].read_text())["rows"]
    assert [row["after"] for row in rows] == ["none", "bucket", "prefetch", "sort", "cap"]
    assert rows[1]["gathers"] < rows[0]["gathers"]
    assert rows[1]["gather_bytes"] == rows[0]["gather_bytes"]
    assert rows[-1]["longest_run"] <= 8
    assert Timeline.from_json(files["timeline"].read_text()).step_ms == rows[-1]["step_ms"]
    assert json.loads(files["trace"].read_text())["traceEvents"]
    assert "# backward" in files["dump"].read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny", "--mesh", "0"], "--mesh 0"),
        (["--model", "tiny", "--tp", "0"], "--tp 0: expected at least 1"),
        (["--model", "tinny"], "unknown model 'tinny'"),
        (["--model", "tiny", "--dump", "absent/x"], "there is no folder absent"),
        (["--model", "tiny", "--bucket-mib", "0"], "bucket_bytes"),
    ],
)
def test_wrong_input_is_told(arguments: list[str], message: str, capsys) -> None:
    assert main(["graph", *arguments]) == 2
    assert message in capsys.readouterr().err
