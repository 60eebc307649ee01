"""`shardwise plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.planning.plan import Plan
from shardwise.planning.plan_cli import Question

ASK = ["plan", "--model", "tiny", "--tokens", "16384", "--sequence", "256"]


def test_it_prints_a_table_and_writes_a_plan_that_runs(tmp_path: Path, capsys) -> None:
    out, trace = tmp_path / "plan.json", tmp_path / "trace.json"
    asked = [*ASK, "--out", str(out), "--trace", str(trace), "--strategies", "zero3,zero2"]
    assert main([*asked, "--what-if", "nvlink=x0.1", "--what-if", "memory_gb=40"]) == 0
    said = capsys.readouterr().out
    assert "is the fastest of" in said and "what if nvlink=x0.1" in said
    assert "The best step goes from" in said and "shardwise train --plan" in said
    written = Plan.from_json(out.read_text())
    assert written.world == 8 and written.units is None
    assert json.loads(trace.read_text())["traceEvents"]


def test_the_written_plan_fits_the_trainer_s_model(tmp_path: Path) -> None:
    from shardwise.trainer.model import LM
    from shardwise.trainer.sizes import size_named

    out = tmp_path / "plan.json"
    assert main([*ASK, "--strategies", "zero2", "--out", str(out)]) == 0
    model = LM(size_named("tiny"), 256)
    assert Plan.from_json(out.read_text()).resolve(model).units


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["plan", "--tokens", "16384"], "--model is needed"),
        (["plan", "--model", "tiny"], "--tokens is needed"),
        ([*ASK[:4], "1000"], "multiple of"),
        ([*ASK, "--what-if", "sequence"], "expected KEY=VALUE"),
        ([*ASK, "--what-if", "warp=9"], "unknown key 'warp'"),
        ([*ASK, "--what-if", "nvlink=fast"], "expected bytes/s"),
        ([*ASK, "--cluster", "h100x9"], "unknown cluster"),
        (["plan", "--model", "tyny", "--tokens", "16384"], "did you mean 'tiny'"),
        ([*ASK, "--strategies", "zero4"], "unknown strategy"),
        ([*ASK, "--compute-dtype", "float17"], "--compute-dtype"),
        ([*ASK, "--out", "/no/such/folder/plan.json"], "no folder"),
        (["plan", "--exercise", "nothing"], "unknown exercise"),
    ],
)
def test_wrong_input_says_what_to_do(arguments: list[str], words: str, capsys) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_exercises_are_listed_and_shown(capsys) -> None:
    assert main(["plan", "--exercise", "list"]) == 0
    names = capsys.readouterr().out.split()
    assert names
    assert main(["plan", "--exercise", names[0]]) == 0
    assert capsys.readouterr().out.strip()


def test_what_if_changes_the_question() -> None:
    question = Question("tiny", "h100x8", None, 16384, 256, "bfloat16", "float32", None)
    changed = question.changed(["world=16", "infiniband=x2", "contention=0", "memory_gb=141"])
    assert changed.world == 16 and question.world is None
    cluster, plain = changed.load_cluster(), question.load_cluster()
    assert cluster.communication_share_of_compute == 0
    assert cluster.device.memory_bytes == 141e9
    faster, before = cluster.levels[1], plain.levels[1]
    assert faster.bandwidth_bytes_per_s == 2 * before.bandwidth_bytes_per_s
