"""`shardwise bench checkpoint` on two real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.lab.checkpoints import TIMES, WAYS


def test_both_ways_are_timed_after_they_agree(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    assert main(["bench", "checkpoint", "--quick", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == list(WAYS.values())
    for row in rows:
        assert row["parity"] == "bit for bit"
        assert all(row[f"{time}_ms"] > 0 for time in TIMES)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80
