"""`shardwise chaos`: the table of classes, the judge, the supervisor, and one fault of each class
that takes no seconds.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardwise import cli
from shardwise.chaos import report
from shardwise.chaos.faults import BY_NAME, KINDS, OUTCOMES, Fault, draw
from shardwise.chaos.inject import AT_FILES, BEFORE_SAVES, DAMAGES, SUDDEN, WAYS
from shardwise.chaos.job import Ended
from shardwise.chaos.judge import judge
from shardwise.chaos.run import usable_kinds

# Left to longer runs: 3 s or more each, two hosts, twice the ranks.
LONG = ("none", "stop", "pause", "slow", "lock held", "link cut", "link slow", "two jobs",
        "first order", "lost pointer", "early end")  # fmt: skip


# The table


def test_classes_are_what_their_rows_say() -> None:
    assert len(BY_NAME) == len(KINDS) >= 25
    changes_the_program = {"none", "plan", "order", "first order", "left out", "nonfinite"}
    assert set(WAYS) | changes_the_program == set(BY_NAME)
    assert {*AT_FILES, *BEFORE_SAVES, *DAMAGES, *SUDDEN} <= set(WAYS)
    for kind in KINDS:
        assert kind.expected in OUTCOMES and kind.places and kind.weight > 0
        assert bool(kind.says) == (kind.expected in ("ends", "refused"))
        for pattern in kind.says:
            re.compile(pattern.format(**vars(fault()), unit=1, other=0))


def test_faults_are_drawn_by_the_seed_each_class_first() -> None:
    faults = draw(3, 1100, KINDS)
    assert faults == draw(3, 1100, KINDS) != draw(4, 1100, KINDS)
    assert {each.kind for each in faults[: len(KINDS)]} == set(BY_NAME)
    assert [each.number for each in faults] == list(range(1100))
    for kind in KINDS:
        mine = [each for each in faults if each.kind == kind.name]
        assert {each.place for each in mine} == set(kind.places)
        assert {each.step for each in mine if each.place == "forward"} <= set(kind.steps)
        assert all(each.rank < each.world and each.strategy in kind.strategies for each in mine)


# The judge


def fault(kind: str = "kill", **changes: Any) -> Fault:
    plain = Fault(7, kind, BY_NAME[kind].places[0], 1, 3, 2, "zero3", 0, 0.5)
    return replace(plain, **changes)


def job(said: str = "", codes: tuple[int, ...] = (114, -9), lines: int | None = None) -> Ended:
    """Both ranks saved step 2; rank 1 was struck after that."""
    ended = Ended(0.0, list(codes), [2.5, 1.5], said=said)
    ended.records = [
        [
            {"what": "saving", "time": 0.5, "step": 2, "hash": "a"},
            {"what": "saved", "time": 0.6, "step": 2},
            *([{"what": "fault", "time": 1.0}] if rank else []),
        ][:lines]
        for rank in range(2)
    ]
    return ended


SAID = "shardwise: rank 1 of 2 was killed by SIGKILL (...); the other ranks were ended\n"
DISK = {"step": 2, "hash": "a", "refused": [], "problems": {}, "finite": True, "next": True,
        "left": []}  # fmt: skip


def test_what_is_as_expected() -> None:
    row = judge(fault(), job(SAID), DISK)
    assert row["wrong"] == [] and row["named"] and not row["hang"] and not row["wrong_load"]
    assert row["seconds"] == 1.5


@pytest.mark.parametrize(
    ("said", "wrong"),
    [
        ("", "nothing said matches"),
        (SAID.replace("rank 1", "rank 0"), "nothing said matches"),
        (SAID.replace("SIGKILL", "SIGTERM"), "nothing said matches"),
        (SAID + SAID, "2 messages instead of 1"),
    ],
)
def test_a_message_that_is_not_the_right_one(said: str, wrong: str) -> None:
    row = judge(fault(), job(said), DISK)
    assert not row["named"] and wrong in " ".join(row["wrong"])


@pytest.mark.parametrize(
    "disk",
    [
        {**DISK, "hash": "b"},
        {**DISK, "step": None, "hash": None},
        {**DISK, "step": 4, "hash": "a"},
        {**DISK, "problems": {"step-00000002": ["damaged"]}},
        {**DISK, "refused": ["cannot load"]},
        {**DISK, "finite": False},
        {**DISK, "next": False},
        {**DISK, "left": [".saving-step-00000004-ab"]},
        {"failed": "Traceback"},
    ],
)
def test_what_is_on_the_disk_and_should_not_be(disk: dict[str, Any]) -> None:
    row = judge(fault(), job(SAID), disk)
    assert row["wrong_load"] and row["wrong"]


def test_hangs_orphans_other_ends_and_faults_that_miss() -> None:
    hang = job(SAID, codes=(-9, -9))
    hang.hang = True
    assert judge(fault(), hang, DISK)["wrong"][0] == "hangs, expected ends"
    orphan = job(SAID)
    orphan.orphans = ["python (state R)"]
    assert "outlived" in judge(fault(), orphan, DISK)["wrong"][0]
    assert "expected ends" in judge(fault(), job(codes=(0, 0)), DISK)["wrong"][0]
    assert judge(fault(), job(SAID, lines=2), DISK)["wrong"] == ["the fault did not strike"]
    assert judge(fault("slow"), job(SAID, codes=(0, 0)), DISK)["wrong"] == ["a false alarm"]


def test_a_refusal_is_the_same_on_all_ranks_and_changes_nothing() -> None:
    text = "saving x: rank 1: No space left on device (.../rank-00001.safetensors)"
    refused = {"what": "refused", "call": "save", "time": 1.2, "text": text, "unchanged": True}

    def judged(*lines: dict[str, Any]) -> dict[str, Any]:
        ended = job(codes=(0, 0))
        for record, line in zip(ended.records, lines, strict=True):
            record.append(line)
        return judge(fault("disk full"), ended, DISK)

    assert judged(refused, refused)["wrong"] == []
    assert "other words" in judged(refused, {**refused, "text": "another"})["wrong"][0]
    assert judged(refused, {**refused, "unchanged": False})["wrong_load"]
    nameless = {**refused, "text": "No space left on device"}
    assert not judged(nameless, nameless)["named"]


def test_jobs_that_train_to_another_state_are_found() -> None:
    alike = {"kind": "none", "strategy": "ddp", "world": 2, "seed": 0, "state": "a",
             "outcome": "continues"}  # fmt: skip
    ended = {**alike, "kind": "kill", "outcome": "ends", "state": "c", "wrong": []}
    rows = [ended, {**alike, "wrong": []}, {**alike, "kind": "slow", "state": "b", "wrong": []}]
    report.compare_states(rows)
    assert [bool(row["wrong"]) for row in rows] == [False, False, True]


def test_percentiles() -> None:
    assert report.spread([]) is None
    assert report.spread([3.0, 1.0, 2.0]) == {"median": 2.0, "p99": 3.0, "max": 3.0}
    assert report.spread([1.0] * 99 + [9.0]) == {"median": 1.0, "p99": 1.0, "max": 9.0}


# Jobs


SUPERVISED = """
import os, sys, time
from pathlib import Path
from shardwise.chaos import job

def hang(rank):
    time.sleep(60 * rank)

def leave_a_child(rank):
    if rank == 1 and os.fork() == 0:
        time.sleep(60)

job.become_supervisor()
job.HANG_S, job._ORPHAN_S = 0.5, 0.3
for main in (hang, leave_a_child):
    folder = Path(sys.argv[1]) / main.__name__
    folder.mkdir()
    ended = job.run_ranks(main, 2, folder)
    print(ended.hang, ended.codes, len(ended.orphans), job._children())
    print("in hang" in ended.said, file=sys.stderr)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_a_job_that_hangs_or_leaves_something_is_ended_and_told_of(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == ["True [0, -9] 0 []", "False [0, 0] 1 []"], done.stderr
    assert done.stderr.splitlines() == ["True", "False"]


@pytest.mark.skipif(sys.platform != "linux", reason="forks, and looks into /proc")
def test_one_fault_of_each_class_that_takes_no_seconds(tmp_path: Path) -> None:
    usable, left_out = usable_kinds()
    classes = [kind.name for kind in usable if kind.name not in LONG]
    assert len(classes) + len(left_out) >= 24
    out = tmp_path / "chaos.json"
    words = ["chaos", "--classes", ",".join(classes), "--faults", str(len(classes)), "--slots", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", *words, "--json", str(out)],
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert out.exists(), done.stderr
    result = json.loads(out.read_text())
    assert result["failures"] == [] and done.returncode == 0, done.stderr
    assert (result["faults"], result["hangs"], result["wrong_loads"]) == (len(classes), 0, 0)
    assert result["named"] == 1.0
    assert "shardwise chaos" in result["command"] and not (tmp_path / "chaos.json.rows").exists()


def test_a_run_goes_on_where_it_was_ended(tmp_path: Path) -> None:
    part = tmp_path / "x.json.rows"
    part.write_text('{"number": 0, "kind": "kill"}\n{"number": 1, "ki')
    assert report._read_part(part) == [{"number": 0, "kind": "kill"}]
    assert report._read_part(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--classes", "kil"], "did you mean 'kill'"),
        (["--faults", "-1"], "--faults is -1"),
        (["--faults", "0", "--classes", "kill"], "--faults is 0"),
        (["--resume"], "give --json FILE"),
        (["--json", "/no/such/x.json"], "no folder"),
    ],
)
def test_wrong_words(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err
