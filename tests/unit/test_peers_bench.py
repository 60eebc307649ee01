"""`shardwise bench peers`: every peer trains as ours does, and one that does not is not timed."""

import dataclasses
import json

import pytest
import torch

from shardwise.cli import main
from shardwise.emulation.run import joined
from shardwise.hosts import refusal
from shardwise.lab.peers import engines, run
from shardwise.lab.steps import cases, models
from shardwise.lab.steps import engines as step_engines
from shardwise.lab.steps.engines import Wrapped
from shardwise.lab.steps.measure import measure

TINY = models.MoESize(16, 8, 2, 2, 2, 32, rotary=False, fused_qkv=True, experts=4)


def test_every_expert_trains_in_every_step():
    model = models.build_model(TINY, "cpu")
    tokens = torch.arange(6).view(1, 6)
    model(tokens).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    assert len(list(model.parameters())) > 2 * 4 * 4  # many small ones
    again = models.build_model(TINY, "cpu")
    assert torch.equal(model(tokens), again(tokens))


def test_real_ranks_are_compared_class_by_class_and_gone_on_with(tmp_path, capsys, monkeypatch):
    path = tmp_path / "peers.json"
    monkeypatch.setitem(run.SMALL, "moe", TINY)
    classes = "replicate,parameters,hybrid"
    command = ["bench", "peers", "--quick", "--ranks", "2", "--models", "moe", "--steps", "2"]
    command += ["--classes", classes, "--json", str(path)]
    assert main([*command, "--peers", "ddp,fsdp1"]) == 0
    shown = capsys.readouterr().out
    assert all(len(line) <= 80 for line in shown.splitlines())
    rows = json.loads(path.read_text())["rows"]
    named = [(row["strategy"], row["peer"]) for row in rows]
    assert named == [
        ("ddp", "DDP"), ("ddp", "DDP, views"), ("ddp", "FSDP1 NO_SHARD"),
        ("zero3", "FSDP1 FULL_SHARD"),
    ]  # fmt: skip  # two ranks are no replicas of shards
    for row in rows:
        assert "failure" not in row and row["parity"] <= 1e-5
        assert row["step_ratio"] > 0 and row["ratio_spread"] >= 0 and row["memory_ratio"] > 0
    # All of a class stepped in turn with the same of ours.
    assert rows[0]["ours"] == rows[1]["ours"]
    assert main([*command, "--peers", "ddp", "--resume"]) == 0
    assert json.loads(path.read_text())["rows"] == rows


@pytest.mark.usefixtures("no_group")
def test_emulated_ranks_of_both_generations(monkeypatch):
    """The GPU's cases, on a CPU that plays one rank of eight."""
    monkeypatch.setattr(step_engines, "_meshes", {})
    family = next(run.emulated_families(("moe",), "cpu"))
    assert (family.world, family.cases[0].name) == (8, "h200-8-moe-300GBs-eager")
    case = dataclasses.replace(family.cases[0], size=TINY, batch=1, length=8, steps=2, warmup=1)
    family = dataclasses.replace(family, cases=(case,))
    (group,) = run.groups(family, None, engines.KINDS)
    assert (group.kind, group.peers) == ("parameters", ("FSDP1 FULL_SHARD", "FSDP2"))
    with joined(0, 8):
        rows = run.compare_group(group, quick=True)
    for row in rows:
        assert "failure" not in row, row["failure"]
        assert row["parity"] is None and row["settings"]["network"].startswith("emulated: 300")


def test_the_gpu_has_every_world_network_model_and_both_kinds_of_blocks():
    names = [family.cases[0].name for family in run.emulated_families(("lm", "gpt2", "moe"))]
    assert len(names) == len(set(names)) == 2 * 3 * 4 * 2
    assert "h200-128-gpt2-25GBs-compiled" in names


def _plain(lr: float = 1e-3) -> Wrapped:
    model = models.build_model(TINY, "cpu")
    return Wrapped(model, torch.optim.SGD(model.parameters(), lr=lr), 1, {})


def test_a_peer_that_parts_or_fails_is_not_timed_and_the_others_are(monkeypatch):
    case = cases.StepCase("c", TINY, 1, 8, (), steps=2, warmup=1)
    family = cases.Family((case,), "gloo", 1, 1, "cpu")
    monkeypatch.setattr("shardwise.lab.steps.measure.time_on_ranks", _time)

    def fail() -> Wrapped:
        raise NotImplementedError("no such engine")

    builds = {"ours": _plain, "other": lambda: _plain(1e-2), "broken": fail, "same": _plain}
    measured = measure(family, case, builds, None, isolates=True)
    assert set(measured.sides) == {"ours", "same"} and measured.parity["same"] == 0
    assert "nothing was timed" in measured.failures["other"]
    assert measured.failures["broken"] == "NotImplementedError: no such engine"
    with pytest.raises(NotImplementedError):
        measure(family, case, builds, None)


def _time(step):
    from shardwise.profiling.timing import timer_on

    return timer_on("cpu")(step)


def test_a_peer_that_is_not_installed_is_said(capsys, monkeypatch):
    monkeypatch.setattr(run, "is_installed", lambda kind: kind != "deepspeed")
    monkeypatch.setattr(run, "families", lambda arguments: [])
    assert main(["bench", "peers", "--peers", "deepspeed"]) == 0
    told = capsys.readouterr()
    assert "deepspeed: not installed here, left out" in told.err
    assert "nothing was measured" in told.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peers", "fsdp3"], "unknown peer 'fsdp3'"),
        (["--classes", "zero3"], "unknown class 'zero3'"),
        (["--ranks", "1"], "--ranks is 1, expected at least 2"),
        (["--models", "bert"], "unknown model 'bert'"),
    ],
)
def test_wrong_choices_are_told_before_anything_runs(arguments, message, capsys):
    assert main(["bench", "peers", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_two_hosts_with_a_cable_between_them(tmp_path, monkeypatch):
    path = tmp_path / "peers.json"
    monkeypatch.setitem(run.SMALL, "moe", TINY)
    command = ["bench", "peers", "--quick", "--cases", "hosts", "--rate", "500mbit", "--steps", "2"]
    command += ["--models", "moe", "--classes", "hybrid", "--peers", "fsdp2", "--json", str(path)]
    assert main(command) == 0
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["case"], row["peer"]) == ("hosts-500mbit-moe", "FSDP2")
    assert "failure" not in row and row["parity"] <= 1e-5 and row["step_ratio"] > 0
    assert row["settings"]["ranks"] == 4 and "500mbit" in row["settings"]["network"]
