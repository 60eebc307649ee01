"""`sw.shard(model, "auto")`: the plan is chosen by trials, the same on all ranks, and nothing of
the program is touched. The report on what became of it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwise as sw
from shardwise.calibration import search, training
from shardwise.emulation.run import fake_group
from shardwise.engine import api
from shardwise.engine.engine import engine_of
from shardwise.errors import UserError
from shardwise.planning.plan import Plan
from shardwise.predict.foresight import Foresight
from shardwise.reporting.findings import find_in
from shardwise.reporting.run import Run, read_run
from shardwise.timeline import Span, Timeline
from shardwise.trainer.config import PlanConfig, TrainConfig
from tests.ranks import Ranks


class Net(nn.Module):
    """With a buffer that forward writes, and dropout."""

    def __init__(self, fails_on: int | None = None, after: int = 0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16))
            for _ in range(2)
        )
        self.norm = nn.BatchNorm1d(16)
        self.fails_on, self.left = fails_on, after

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_on is not None and not x.is_meta and dist.get_rank() == self.fails_on:
            self.left -= 1
            if self.left < 0:
                raise ValueError("a value that no other rank has")
        for block in self.blocks:
            x = x + block(x)
        return self.norm(x)


def _state(model: nn.Module) -> list[object]:
    return [
        *(t.clone() for t in (*model.parameters(), *model.buffers())),
        *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        torch.get_rng_state(),
        torch.from_numpy(np.random.get_state()[1].astype(np.int64)),
    ]


def _loss(output: Tensor) -> Tensor:
    return output.square().mean()


def shard_here(cache: str) -> dict[str, object]:
    """On every rank: choose, check what was left alone, train, compare; then fail in three ways."""
    os.environ["XDG_CACHE_HOME"] = cache
    search.TRIED = 2
    torch.manual_seed(0)
    model = Net()
    model(torch.randn(8, 16)).sum().backward()  # gradients and statistics of the program's own
    torch.manual_seed(100 + dist.get_rank())
    before, python = _state(model), random.getstate()
    seen: list[list[object]] = []
    real = api.shard

    def look(model: nn.Module, plan: Plan) -> nn.Module:
        seen.append(_state(model))
        return real(model, plan)

    api.shard = look
    batch = torch.randn(8, 16)
    torch.set_rng_state(before[-2])  # type: ignore[arg-type]
    try:
        sw.shard(model, "auto", example=batch, loss=_loss)
    finally:
        api.shard = real
    kept = len(seen[0]) == len(before) and all(
        torch.equal(a, b) for a, b in zip(seen[0], before, strict=True)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        _loss(model(batch)).backward()
        optimizer.step()
    plan = engine_of(model).plan
    assert plan is not None
    return {
        "kept": kept and random.getstate() == python,
        "plan": dataclasses.replace(plan, units=None).to_json(),
        "compared": str(sw.compare(model, 1.0)),
        "works": torch.ones(1),
    }


def fail_here(how: str, cache: str) -> tuple[str, str, float]:
    os.environ["XDG_CACHE_HOME"] = cache
    torch.manual_seed(0)
    after = {"first": 0, "later": 3}.get(how)
    model = Net(None if after is None else 1, after or 0)
    example = None if how == "no example" and dist.get_rank() == 1 else torch.randn(8, 16)
    try:
        sw.shard(model, "auto", example=example, loss=_loss)
        error: BaseException = AssertionError("it was sharded")
    except Exception as raised:
        error = raised
    ones = torch.ones(1)
    dist.all_reduce(ones)  # the program's own group is whole
    return type(error).__name__, str(error), ones.item()


def test_all_ranks_take_one_plan_and_lose_nothing(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(shard_here, str(tmp_path))
    assert first["kept"] and second["kept"]
    assert first["plan"] == second["plan"] and Plan.from_json(str(first["plan"])).world == 2
    assert "measured here" in str(first["compared"]) and "a miss" in str(first["compared"])
    for how, words in (
        ("no example", "rank 1: sw.shard(model, 'auto') tries plans, and needs example"),
        ("first", "rank 1: ValueError: a value that no other rank has"),
        ("later", "rank 1: ValueError: a value that no other rank has"),
    ):
        for kind, text, summed in two.run(fail_here, how, str(tmp_path / how), timeout=60):
            assert kind == "UserError" and words in text and summed == 2


def test_one_process_and_a_model_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(search, "TRIED", 1)
    with torch.device("meta"):
        model = Net()
    sw.shard(model, "auto", example=torch.randn(8, 16), loss=_loss, micro_batches=2)
    told = [line for line in capsys.readouterr().err.splitlines() if "trying" not in line]
    assert [line.split()[1] for line in told[1:4]] == ["chosen:", "rests", "next:"]
    assert "2 x 8 samples" in told[1] and "measured here (one process)" in told[2]
    assert engine_of(model).plan is not None
    sw.materialize(model)
    assert not any(p.is_meta for p in model.parameters())


def test_a_fake_world_is_planned_for_without_trials(capsys: pytest.CaptureFixture[str]) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    with fake_group(3, 8):
        model = sw.shard(Net(), "auto", example=torch.randn(8, 16))
        plan = engine_of(model).plan
        assert plan is not None and plan.world == 8
    told = capsys.readouterr().err
    assert "nothing was measured: in a fake group of a CPU nothing is sent" in told
    assert "trying" not in told


def test_wrong_calls_are_told() -> None:
    plan = Plan.of("zero3", 1)
    with pytest.raises(UserError, match=r"are for sw\.shard\(model, 'auto'\)"):
        sw.shard(Net(), plan, example=torch.ones(2, 16))
    with pytest.raises(TypeError, match="'zero3', a str, expected a Plan"):
        sw.shard(Net(), "zero3")
    with pytest.raises(UserError, match="micro_batches is 0"):
        sw.shard(Net(), "auto", example=torch.ones(2, 16), micro_batches=0)
    with pytest.raises(UserError, match="compute_dtype is 'bf16'"):
        sw.shard(Net(), "auto", example=torch.ones(2, 16), compute_dtype="bf16")
    with pytest.raises(UserError, match="whose plan"):
        sw.compare(Net(), 1.0)


SAID = Foresight(
    "zero3", 100.0, (95.0, 105.0), 1000, "measured here",
    {"compute": 80.0, "exposed_transfer": 20.0}, 1.0, ("chosen", "rests on", "next"),
)  # fmt: skip
ROW = {"step": 1, "loss": 1.0, "step_s": 0.1}


def _run(
    step_ms: float, peak: int | None = None, exposed: float | None = None, load: float = 1.0
) -> Run:
    taken = dataclasses.replace(SAID.compare(step_ms, peak, exposed), load=load).to_dict()
    choice = json.loads(SAID.to_json(Plan.of("zero3", 2))) | {"taken": taken | {"cores": 2}}
    return Run("run", metrics=(ROW,), choice=choice)


def test_a_miss_is_the_first_finding_with_its_cause() -> None:
    near = find_in(_run(109.0, 1050))
    assert near[0].kind != "good" and near[-1].kind == "good"
    assert "within 9.0 %, its memory within 5.0 %" in near[-1].text
    late = find_in(_run(130.0, None, 52.0))[0]
    assert late.urgent and "30 % longer: 32.0 ms of it more exposed communication" in late.text
    slow = find_in(_run(130.0, None, 20.0, load=9.0))[0]
    assert "30.0 ms of it more compute or host" in slow.text
    assert "other work ran beside it: 9.0 processes wanted 2 cores" in slow.text
    quick = find_in(_run(80.0))[0]
    assert quick.urgent and "20 % shorter" in quick.text
    large = find_in(_run(100.0, 1200))[0]
    assert large.urgent and "memory peaks at 1.2 KiB where 1000 B were said" in large.text
    assert not find_in(Run("run", metrics=(ROW,)))[0].urgent


def test_a_profile_tells_the_host_from_compute() -> None:
    spans = (
        Span("forward", "0", "forward", "compute", 0, "compute", 0, 80_000_000),
        Span("step", "", "optimizer", "compute", 0, "compute", 130_000_000, 150_000_000),
    )
    run = dataclasses.replace(_run(150.0), timeline=Timeline(spans))
    first = find_in(run)[0]
    assert first.kind == "deviation" and "50.0 ms of it more the host" in first.text


def test_what_is_said_survives_its_file(tmp_path: Path) -> None:
    text = SAID.to_json(Plan.of("zero3", 2), SAID.compare(90.0, 900))
    assert Foresight.from_json(text) == SAID
    (tmp_path / "choice.json").write_text(text)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    assert read_run(tmp_path).choice["taken"]["step_ms"] == 90.0
    (tmp_path / "choice.json").write_text('{"foreseen": {"step_ms": "fast"}}')
    with pytest.raises(UserError, match=r"foreseen\.step_ms is 'fast', expected a number"):
        read_run(tmp_path)


def test_the_trainer_chooses_compares_and_goes_on_under_its_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(search, "TRIED", 1)
    monkeypatch.setenv("SHARDWISE_WATCH", "0")
    for name, value in ("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1"):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    out = tmp_path / "run"
    out.mkdir()

    def train(steps: int, **run: object) -> str:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            monkeypatch.setenv("MASTER_PORT", str(probe.getsockname()[1]))
        if dist.is_initialized():
            dist.destroy_process_group()
        config = TrainConfig.from_dict(
            {
                "model": {"vocab": 256, "d_model": 32, "d_ff": 64, "layers": 2, "heads": 2},
                "data": {"batch": 2, "seq": 16},
                "plan": {"strategy": "auto"},
                "run": {"steps": steps, "out": str(out), "save_every": 12, "compare_after": 10,
                        **run},
            }
        )  # fmt: skip
        training.train(config.to_toml())
        return capsys.readouterr().out

    told = train(12)
    assert "trying " in told and "chosen: " in told and "after 10 steps: a step takes" in told
    plan = Plan.from_json((out / "plan.json").read_text())
    choice = json.loads((out / "choice.json").read_text())
    assert choice["foreseen"]["plan"] == plan.title and choice["taken"]["step_ms"] > 0
    again = train(14, resume="auto")
    assert f"the plan stays: {plan.title}" in again and "trying " not in again
    assert "too few steps to compare" in again
    assert Plan.from_json((out / "plan.json").read_text()) == plan
    run = read_run(out)
    assert run.facts["resumed_after"] == [12] and "taken" not in run.choice


def test_auto_leaves_no_setting_that_it_chooses() -> None:
    with pytest.raises(UserError, match=r"auto, which chooses plan\.mesh by itself"):
        PlanConfig("auto", {"mesh": 2, "compute_dtype": "bfloat16"})
    assert PlanConfig("auto", {"compute_dtype": "bfloat16"}).is_auto
