"""`shardwise train` from end to end, on real local ranks."""

import json
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch

import shardwise as sw
from shardwise.children import UNREAD
from shardwise.cli import main
from shardwise.description.language_model import LM
from shardwise.reporting.run import read_run
from shardwise.trainer.config import OptimConfig, TrainConfig
from shardwise.trainer.group import Member
from shardwise.trainer.loop import build_model, draw_weights, lr_at
from tests.ranks import Ranks

SMALL = ["model.layers=2", "model.d_model=64", "model.heads=2", "data.batch=4", "data.seq=64"]


def words(out, *arguments, settings=()):
    command = ["train", "--out", str(out), *arguments]
    for text in (*SMALL, *settings):
        command += ["--set", text]
    return command


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """By a command of its own; the others run in this process, which has loaded torch."""
    out = tmp_path_factory.mktemp("train") / "run"
    asked = words(
        out,
        *("--plan", "zero3", "--nproc", "2", "--steps", "12"),
        settings=["run.micro_batches=2", "optim.warmup=3"],
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    shown = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", *asked],
        capture_output=True, text=True, env=environment,
    )  # fmt: skip
    assert shown.returncode == 0, shown.stderr
    return out, shown.stdout


@pytest.fixture
def no_rank(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_run_goes_on_when_nobody_reads_it(tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", *words(tmp_path, "--steps", "3")],
        stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (UNREAD, "")
    assert read_run(tmp_path).column("step") == [1, 2, 3]


def test_the_loss_falls(finished):
    loss = read_run(finished[0]).column("loss")
    assert loss[0] > 5
    assert loss[-1] < loss[0] - 1.5


def test_every_step_has_its_metrics(finished):
    rows = read_run(finished[0]).metrics
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert [row["tokens"] for row in rows] == [step * 2 * 2 * 4 * 64 for step in range(1, 13)]
    for row in rows:
        assert row["grad_norm"] > 0
        assert row["step_s"] > 0
        assert row["memory_bytes"] > 2**20
        assert row["tokens_per_s"] == pytest.approx(2 * 2 * 4 * 64 / row["step_s"])
        assert 0 <= row["exposed_share"] <= 1
    assert rows[2]["lr"] == pytest.approx(3e-3)
    assert rows[-1]["lr"] == pytest.approx(3e-4)


def test_the_files_describe_the_run(finished):
    out, shown = finished
    config = TrainConfig.from_toml((out / "config.toml").read_text())
    assert (config.run.steps, config.model.layers, config.plan.strategy) == (12, 2, "zero3")
    assert json.loads((out / "plan.json").read_text())["name"] == "zero3"
    facts = json.loads((out / "run.json").read_text())
    assert (facts["world"], facts["device"], facts["backend"]) == (2, "cpu", "gloo")
    assert facts["plan_explanation"]
    assert "step 12/12  loss " in shown
    assert shown.endswith(f"Next:\n  shardwise report {out}\n")
    assert "\x1b" not in shown


def test_the_report_reads_the_run(finished, capsys):
    assert main(["report", str(finished[0])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("report.html")
    assert len(lines) == 4
    assert (finished[0] / "report.html").stat().st_size > 10_000


@pytest.mark.usefixtures("no_rank")
def test_the_written_plan_and_configuration_run_again_to_the_same_losses(finished, tmp_path):
    again = tmp_path / "again"
    settings = ["run.micro_batches=2", "optim.warmup=3"]
    plan = str(finished[0] / "plan.json")
    asked = ("--plan", plan, "--nproc", "2", "--steps", "12")
    assert main(words(again, *asked, settings=settings)) == 0
    assert read_run(again).column("loss") == pytest.approx(read_run(finished[0]).column("loss"))


@pytest.mark.usefixtures("no_rank")
def test_bfloat16_with_recomputation_follows_the_same_losses(finished, tmp_path):
    asked = words(
        tmp_path / "run",
        *("--plan", "zero3", "--nproc", "2", "--steps", "12"),
        settings=[
            *("run.micro_batches=2", "optim.warmup=3"),
            *("plan.compute_dtype=bfloat16", "model.checkpoint=nonreentrant"),
        ],
    )
    assert main(asked) == 0
    expected = pytest.approx(read_run(finished[0]).column("loss"), rel=0.02)
    assert read_run(tmp_path / "run").column("loss") == expected


@pytest.mark.usefixtures("no_rank")
@pytest.mark.parametrize(
    ("arguments", "settings", "message"),
    [
        (["--plan", "zero4"], [], "shardwise: plan zero4: "),
        (["--plan", "zero3"], ["plan.bucket_byte=1"], "shardwise: plan zero3: "),
        (["--plan", "ddp"], ["plan.average=true"], "average=True would divide twice"),
        (["--plan", "hsdp"], ["plan.mesh=2x2"], "is for 4 ranks, but 1 are running"),
        (["--data", "absent.txt"], [], "shardwise: data file absent.txt does not exist"),
    ],
)
def test_what_a_rank_finds_wrong_is_one_message(tmp_path, capfd, arguments, settings, message):
    assert main(words(tmp_path / "run", *arguments, settings=settings)) == 2
    told = capfd.readouterr().err
    assert message in told and "Traceback" not in told


def test_warm_up_is_linear_and_the_cosine_ends_at_its_share():
    optim = OptimConfig(lr=1.0, warmup=4, min_lr_ratio=0.1)
    rates = [lr_at(step, 24, optim) for step in range(1, 25)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[13] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert lr_at(1, 1, OptimConfig(lr=1.0, warmup=0)) == pytest.approx(0.1)


@pytest.mark.usefixtures("no_rank")
def test_a_wrong_plan_file_leaves_the_older_run_alone(tmp_path, capsys):
    out = tmp_path / "run"
    out.mkdir()
    (out / "metrics.jsonl").write_text("kept")
    mine = out / "plan.json"
    mine.write_text('{"name": "zero3", "mesh": [1, 1]}')
    for text, plan, told in (
        ('{"name": "zero3"}', tmp_path / "plan.json", "a Plan needs ['mesh']"),
        ('{"name": "zero3", "mesh": [1, 8]}', tmp_path / "plan.json", "is for 8 ranks, but 1"),
        ("", tmp_path / "absent" / "plan.json", "`shardwise plan` writes one"),
        ("", mine, "is a file of the run that --overwrite replaces"),
    ):
        if text:
            plan.write_text(text)
        assert main(["train", "--plan", str(plan), "--out", str(out), "--overwrite"]) == 2
        assert told in capsys.readouterr().err
        assert (out / "metrics.jsonl").read_text() == "kept" and mine.exists()


def _weights(strategy, world, tied):
    """A model's first values, whole, as ranks draw them under a plan; few elements in a block."""
    with mock.patch("shardwise.trainer.loop._BLOCK", 100):
        return _draw(strategy, world, tied)


def _draw(strategy, world, tied):
    size = {"layers": 2, "d_model": 24, "heads": 2, "d_ff": 40, "vocab": 50, "tied": tied}
    config = TrainConfig.from_dict({"model": size, "data": {"seq": 8}, "run": {"seed": 3}})
    model = build_model(config, Member(0, world, torch.device("cpu"), "gloo"))
    assert all(p.is_meta for p in model.parameters())
    spreads = model.spreads()
    sharded = sw.shard(model, sw.Plan.of(strategy, world))
    draw_weights(sharded, spreads, config.run.seed)
    tokens = torch.arange(8)[None]
    loss = sharded(tokens, tokens)
    loss.backward()
    return sw.full_state_dict(sharded), loss.item()


@pytest.mark.parametrize("tied", [False, True])
def test_the_first_weights_are_the_same_under_every_plan(two: Ranks, no_group, tied) -> None:
    alone, loss = _weights("zero3", 1, tied)
    for strategy in ("ddp", "zero1", "zero2", "zero3"):
        for whole, again in two.run(_weights, strategy, 2, tied):
            assert again == pytest.approx(loss, rel=1e-6)
            assert whole.keys() == alone.keys()
            assert all(torch.equal(whole[name], value) for name, value in alone.items())
    assert not torch.equal(alone["layers.0.attention.q.weight"][:8],
                           alone["layers.1.attention.q.weight"][:8])  # fmt: skip


def test_the_trainer_draws_as_the_model_does() -> None:
    size = TrainConfig.from_dict({"model": {"layers": 3, "tied": False}}).model.resolve()
    model = LM(size, 8)
    spreads = model.spreads()
    assert spreads.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        spread = spreads[name]
        if spread is None:
            assert (parameter == 1).all()
        else:
            assert parameter.std().item() == pytest.approx(spread, rel=0.05), name
