"""`shardwise bench accuracy --as-user`: others' models, planned and trained, and the claims."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.calibration import search as measured_search
from shardwise.calibration.trial import Program
from shardwise.cli import main
from shardwise.description.cluster import Cluster
from shardwise.description.foreign import count_values, find_function
from shardwise.description.workload import Workload
from shardwise.engine.torch_private import compiled_modules
from shardwise.lab.accuracy import as_user, user_page
from shardwise.lab.accuracy.user_models import BY_NAME, MODELS, SCALES
from shardwise.lab.catalog.engine import USER_MODELS
from shardwise.predict.ranking import Trial

OF_TRANSFORMERS = ("gpt2", "bert", "t5", "vit")


def test_models_are_found_by_name_and_learn() -> None:
    """In the size that tries the benchmark; the others build on the meta device."""
    assert tuple(BY_NAME) == USER_MODELS and len(MODELS) >= 12
    known = importlib.util.find_spec("transformers") is not None
    for model in MODELS:
        if model.name == "compiled" or (model.name in OF_TRANSFORMERS and not known):
            continue
        built = find_function(model.build_text("quick"), "--model")()
        inputs = find_function(model.inputs_text("quick"), "--inputs", model.build_text("quick"))
        assert (model.work("quick") is not None) == (model.name in ("gpt2", "bert", "t5"))
        loss = as_user._loss(model, built, inputs(3))
        loss.backward()
        assert loss.isfinite()
        trained = [p for p in built.parameters() if p.requires_grad]
        assert trained and all(p.grad is not None for p in trained if p.dim() > 1)
        frozen = [p for p in built.parameters() if not p.requires_grad]
        assert bool(frozen) == (model.name == "lora")
        for scale in SCALES[:2]:
            with torch.device("meta"):
                find_function(model.build_text(scale), "--model")()


@pytest.fixture
def fake_trials(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Trials that give what was predicted, and half as much time again; how often each was."""
    asked: dict[str, int] = {}
    first: list[sw.Plan] = []

    def fake(program: Program, plan: sw.Plan, workload: Workload, cluster: Cluster) -> Trial:
        assert program.model.startswith("shardwise.lab.accuracy.user_models:build_")
        asked[plan.name] = asked.get(plan.name, 0) + 1
        first.append(plan)
        return Trial(10.0 + len(first), 0.1, 5.0, 1_000_000, 1_100_000, "fake")

    monkeypatch.setattr(measured_search, "try_plan", fake)
    return asked


def test_a_gpu_s_part_plans_then_trains_and_goes_on_after_a_failure(
    fake_trials: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """One emulated rank of 8, here on the host."""
    monkeypatch.setattr(measured_search, "can_try", lambda cluster, world: "")
    path, page = tmp_path / "rows.json", tmp_path / "page.md"
    typed = ["bench", "accuracy", "--as-user", "--cases", "h200", "--device", "cpu", "--quick"]
    typed += ["--only", "lstm,unet", "--json", str(path)]
    build = as_user.predict
    broken = ["lstm"]

    def fail_once(place: as_user.Place, model: as_user.UserModel) -> object:
        if model.name in broken:
            broken.remove(model.name)
            raise RuntimeError("it broke")
        return build(place, model)

    monkeypatch.setattr(as_user, "predict", fail_once)
    assert main(typed) == 0
    said = capsys.readouterr()
    assert "h200 lstm: failed: RuntimeError: it broke" in said.err
    assert "lstm failed: RuntimeError: it broke" in said.out
    assert max(map(len, said.out.splitlines())) <= 80
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["lstm"]["plans"] == [] and "error" not in rows["unet"]
    plans = rows["unet"]["plans"]
    assert [p["basis"] == "measured here" for p in plans] == [True, True, True, False]
    assert {p["strategy"] for p in plans[:3]} == {"ddp", "zero2", "zero3"}
    for plan in plans:
        assert plan["measured_ms"] > 0 and plan["steps"] == as_user.STEPS
        assert plan["alone_ms"] > 0 and plan["alone_range_ms"][0] < plan["alone_ms"]
        assert plan["range_ms"][0] < plan["predicted_ms"] < plan["range_ms"][1]
    assert all(p["predicted_bytes"] == 1_000_000 for p in plans[:3])
    before = dict(fake_trials)
    assert main([*typed, "--resume", "--docs", str(page)]) == 0
    assert "h200 unet" not in capsys.readouterr().err  # only the one that had failed
    rows = {row["case"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows["lstm"]["plans"]) == 4 and rows["unet"]["plans"] == plans
    assert sum(fake_trials.values()) > sum(before.values())
    text = page.read_text()
    assert "| lstm | " in text and "| unet | " in text and "## One rank of 8" in text
    assert "h200, without --measure: step within" in text


def test_two_real_ranks_train_what_was_planned() -> None:
    place = as_user.Place.of("gloo", "", "", quick=True)
    assert place is not None and place.world == 2
    model = BY_NAME["tied"]
    ranking = sw.search(
        model.build_text("quick"), place.cluster, inputs=model.inputs_text("quick"),
        loss=model.loss, world=2, strategies=("zero3",), checkpoints=("none",),
    )  # fmt: skip
    (took,) = as_user.train(place, model, ranking[:1], [{}])
    plan = as_user.tell_plan(ranking[0], ranking, took)
    assert plan["measured_ms"] > 0 and plan["steps"] == as_user.STEPS
    assert plan["measured_bytes"] > ranking[0].plan.require_units()[0].parameter_bytes


def test_training_that_fails_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    place = as_user.Place("h200", Cluster.load("h200x8-measured"), 8, "quick", "cpu")

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(as_user, "start", full)
    plan = sw.Plan.of("zero3", 8).to_json()
    row = as_user._train_emulated(place, BY_NAME["unet"], plan, Workload(1, 2), {})
    assert row == {"error": "out of memory"}
    assert user_page.fits(row | {"needed_bytes": 1e9}, "needed_bytes") is False


def plan_row(strategy: str, said: float, took: float, **more: object) -> dict[str, object]:
    return {
        "strategy": strategy, "basis": "measured here", "predicted_ms": said,
        "range_ms": [said * 0.95, said * 1.05], "predicted_bytes": 100, "needed_bytes": 103,
        "alone_ms": said, "alone_range_ms": [said, said], "alone_bytes": 90,
        "alone_needed_bytes": 93, "measured_ms": took, "measured_spread_ms": 0.5,
        "measured_bytes": 100, "measured_reserved_bytes": 102, **more,
    }  # fmt: skip


def test_what_rows_come_to() -> None:
    plans = [plan_row("ddp", 100.0, 104.0), plan_row("zero2", 98.0, 110.0)]
    plans.append(plan_row("zero3", 99.0, 104.4))  # within ddp's spread: in no order
    row = {"key": "h200 a", "part": "h200", "case": "a", "plans": plans}
    assert user_page.wrong_orders(row, "predicted_ms") == (["a: ddp, zero2", "a: zero2, zero3"], 2)
    assert [user_page.inside(p, "range_ms") for p in plans] == [True, False, False]
    assert user_page.error(plans[0], "alone_bytes") == pytest.approx(-0.1)
    assert user_page.fits(plans[0], "needed_bytes") is True
    tried = plans[0] | {"fits_needed_bytes": False}
    assert user_page.fits(tried, "needed_bytes") is False
    assert user_page.fits(plans[0], "alone_needed_bytes") is False
    first, alone, *_ = user_page.summarize("h200", [row])
    assert "step within 6.6% on average and -10.9% at worst (3 Plans)" in first
    assert "1 of 3 in the stated range, 'fits' wrong in 0 of 3" in first
    assert "order wrong in 2 of 2 pairs" in first
    assert "memory within 10.0%" in alone and "'fits' wrong in 3 of 3" in alone


def test_captured_steps_are_told_beside_and_where_they_were_advised() -> None:
    said = {"captured_predicted_ms": 50.0, "captured_range_ms": [47.0, 53.0]}
    took = {"captured_measured_ms": 40.0, "captured_measured_spread_ms": 0.2}
    pays = plan_row("ddp", 100.0, 200.0, **said, **took, captured_advised=True)
    does_not = plan_row("zero2", 51.0, 51.0, **said, **took)
    failed = plan_row("zero3", 100.0, 125.0, captured_error="it draws on the host")
    row = {"key": "h200 a", "part": "h200", "case": "a", "plans": [pays, does_not, failed]}
    lines = "\n".join(user_page.summarize("h200", [row]))
    both = "under sw.capture: step within 25.0% on average and +25.0% at worst (2 Plans), 0 of 2 in"
    assert both in lines
    # ddp's captured step, zero2's and zero3's plain ones.
    advised = "where that was advised: step within 15.0% on average and +25.0% at worst (3 Plans)"
    assert advised in lines
    assert user_page._PAGE["captured"](pays) == "50.0, 40.0 ± 0.1 ms, +25.0%"
    assert user_page._PAGE["captured"](failed) == "not captured: it draws on the host"


def test_options_of_the_benchmark_are_checked(capsys) -> None:
    assert main(["bench", "accuracy", "--as-user", "--cases", "reported"]) == 2
    assert "--cases gloo and h200" in capsys.readouterr().err
    assert main(["bench", "accuracy", "--as-user", "--only", "gtp2"]) == 2
    assert "gpt2" in capsys.readouterr().err
    assert main(["bench", "accuracy", "--only", "gpt2"]) == 2
    assert "--as-user" in capsys.readouterr().err


def test_trials_run_compiled_what_is_compiled() -> None:
    """torch drops it where a module is copied or sent to a rank."""
    built = Program(BY_NAME["compiled"].build_text("quick"))._build()
    assert compiled_modules(built) == ("blocks.0", "blocks.1")
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].compile()
    assert compiled_modules(Program.of(net)._build()) == ("1",)
    assert compiled_modules(Program.of(nn.Linear(2, 2))._build()) == ()


def test_trials_draw_tokens_from_the_whole_vocabulary() -> None:
    class TinyForCausalLM(nn.Module):
        config = type("Config", (), {"vocab_size": 500})

    class TinyForTokenClassification(TinyForCausalLM):
        pass

    writer, tagger = TinyForCausalLM(), TinyForTokenClassification()
    assert count_values(writer, "input_ids") == count_values(writer, "labels") == 500
    assert (count_values(tagger, "input_ids"), count_values(tagger, "labels")) == (500, 2)
    assert count_values(writer, "attention_mask") == count_values(nn.Linear(1, 1), "x") == 2


def test_a_trial_that_takes_more_than_the_limit_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    traced: list[object] = []
    as_source = measured_search.as_source

    def fake(program: Program, plan: sw.Plan, workload: Workload, cluster: Cluster) -> Trial:
        reserved = 999_000_000 if plan.name == "ddp" else 2_000_000
        return Trial(1.0, 0.0, 1.0, 1_000_000, reserved, "fake")

    def count(*arguments: object, **settings: object) -> object:
        traced.append(arguments)
        return as_source(*arguments, **settings)

    monkeypatch.setattr(measured_search, "try_plan", fake)
    monkeypatch.setattr(measured_search, "as_source", count)
    net = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    settings = {"inputs": torch.randn(4, 64), "world": 2, "strategies": ("ddp", "zero3")}
    found = sw.search(net, Cluster.load("cpu-gloo"), None, 0.5, measure=True, **settings)
    assert not any(c.plan.name == "ddp" and c.trial is not None for c in found)
    assert any(c.plan.name == "zero3" and c.trial is not None for c in found)
    dropped = [r for r in found.rejected if r.strategy == "ddp"]
    assert dropped and max(r.needed_bytes for r in dropped) > 999_000_000
    assert len(traced) == 1  # the model is described once, not for each Plan
