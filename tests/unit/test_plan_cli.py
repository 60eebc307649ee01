"""`shardwise plan`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.plan import Question
from shardwise.planning.plan import Plan

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
    from shardwise.description.language_model import LM
    from shardwise.description.preset import size_named

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
        ([*ASK, "--world", "0"], "world is 0, expected a whole number of at least 1"),
        ([*ASK[:5], "--sequence", "0"], "sequence is 0"),
        ([*ASK, "--tokens", "-8"], "tokens is -8"),
        ([*ASK, "--budget-gb", "nan"], "budget_gb is nan, expected a number above 0"),
        ([*ASK, "--top", "0"], "--top 0: expected at least 1"),
        ([*ASK, "--micro-batches", "0"], "--micro-batches 0 do not divide the 8 sequences"),
        ([*ASK, "--out", "/"], "is a folder"),
        ([*ASK, "--what-if", "contention=7"], "contention is 7.0"),
        ([*ASK, "--what-if", "memory_gb=-3"], "--what-if memory_gb=-3: memory_gb is -3.0"),
        ([*ASK, "--what-if", "world=16,tokens=8"], "several changes are given as"),
        ([*ASK, "--what-if", "compute_dtype=int3"], "float32, bfloat16"),
        ([*ASK, "--what-if", "=4"], "expected KEY=VALUE"),
        ([*ASK, "--what-if", "seq=1000"], "multiple of 8000, such as 16000"),
        ([*ASK, "--what-if", "model=tyny"], "did you mean 'tiny'"),
        (
            [
                "plan",
                "--model",
                "tiny",
                "--tokens",
                "14336",
                "--world",
                "7",
                "--strategies",
                "hsdp",
            ],
            "hsdp has no mesh on 7 ranks",
        ),
        ([*ASK, "--budget-gb", "0.001", "--strategies", "zero3"], "which needs a device of"),
    ],
)
def test_wrong_input_says_what_to_do(arguments: list[str], words: str, capsys) -> None:
    assert main(arguments) == 2
    said = capsys.readouterr()
    assert words in said.err
    assert not said.out  # told before anything is searched, and once


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


@pytest.mark.parametrize(
    ("model", "world", "words"),
    [
        ("tiny", 3, "shardwise train --plan"),
        ("tiny", 24, "torchrun --nnodes 3 --nproc-per-node 8 "),
        ("ffn8", 8, "has language models only"),
    ],
)
def test_the_command_that_runs_the_plan_is_one_that_can(
    model: str, world: int, words: str, tmp_path: Path, capsys
) -> None:
    asked = ["plan", "--model", model, "--world", str(world), "--tokens", str(world * 64)]
    out = tmp_path / "plan.json"
    asked += ["--sequence", "64", "--strategies", "zero3", "--out", str(out)]
    assert main(asked) == 0
    said = capsys.readouterr().out
    assert words in said and ("train --plan" in said) == (model == "tiny")


def test_seq_is_sequence() -> None:
    asked = Question("tiny", "h100x8", 8, 65536, 256, None, None, None)
    assert asked.changed(["seq=512", "world=16"]) == asked.changed(["world=16", "sequence=512"])
