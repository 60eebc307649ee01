"""`shardwise bench hsdp`: every source, the document's switches, and its figures beside ours."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.hosts import refusal
from shardwise.lab.hybrid.case import DOCUMENT, HybridCase
from shardwise.lab.hybrid.compare import REAL, draw
from shardwise.lab.hybrid.predicted import predict


def run(tmp_path: Path, *words: str) -> list[dict]:
    path = tmp_path / "hsdp.json"
    assert main(["bench", "hsdp", "--quick", "--json", str(path), *words]) == 0
    return json.loads(path.read_text())["rows"]


def check_rows(rows: list[dict], count: int) -> None:
    assert len(rows) == count
    for row in rows:
        assert "failure" not in row, row
        assert row["mean_ms"] > 0 and row["tokens_per_s"] > 0 and math.isfinite(row["step_ms"])
        assert row["document"]["mean_ms"] == DOCUMENT[row["mode"]]["mean_ms"]
        assert row["compared"] and row["accumulate"] == 2 and row["ratio"] == 2


def test_emulated_and_predicted_steps_stand_in_one_table(tmp_path, capsys) -> None:
    plot = tmp_path / "hsdp.svg"
    words = ("--sources", "emulated,predicted", "--plot", str(plot))
    rows = run(tmp_path, *words)
    check_rows(rows, 12)
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line.startswith(("│", "┃"))]
    assert len(table) == 1 + 12 + 3 and max(map(len, table)) <= 80 and "…" not in said
    assert "2145.8 ±2.5" in said and "1.26" in said
    assert "document, torch" in plot.read_text() and draw(rows)


def test_four_real_ranks_agree_before_they_are_timed(tmp_path) -> None:
    rows = run(tmp_path, "--sources", "gloo", "--modes", "hsdp,delayed", "--batch-size-ratio", "2")
    check_rows(rows, 4)
    assert all(row["parity"] <= 1e-5 for row in rows)
    assert [row["mode"] for row in rows] == ["hsdp", "delayed"] * 2
    assert rows[0]["speedup"] == 1.0 and rows[1]["speedup"] > 0


@pytest.mark.skipif(refusal() != "", reason=refusal())
def test_two_hosts_are_measured_beside_their_prediction(tmp_path, capsys) -> None:
    """Under torchrun, two ranks on each; the figures of so quick a run mean nothing."""
    words = ("--hosts", "2", "--rate", "50mbit", "--modes", "hsdp,delayed")
    rows = run(tmp_path, *words, "--engines", "shardwise")
    check_rows(rows, 2)
    for row in rows:
        assert (row["source"], row["hosts"], row["rate"]) == ("hosts", 2, "50mbit")
        assert row["parity"] <= 1e-5 and row["predicted_ms"] > 0
        between = row["links"]["between hosts"]
        # 6.25 MB/s for the two ranks of a host together; a rank alone may find it free at times.
        assert 0 < between["mb_per_s"] < 6.25
        assert between["mb_per_s"] < row["links"]["in a host"]["mb_per_s"]
    said = capsys.readouterr().out
    table = [line for line in said.splitlines() if line.startswith(("│", "┃"))]
    assert len(table) == 3 and max(map(len, table)) <= 80 and "50mbit" in said
    again = run(tmp_path, *words, "--engines", "shardwise", "--resume")  # nothing is left to do
    assert again == rows


@pytest.mark.parametrize(
    ("words", "modes"),
    [((), {"hsdp", "delayed", "fsdp"}), (("--delay-all-reduce",), {"delayed"}),
     (("--fsdp-only",), {"fsdp"}), (("--modes", "hsdp"), {"hsdp"})],
)  # fmt: skip
def test_the_document_s_switches_choose_the_mode(tmp_path, words, modes) -> None:
    rows = run(tmp_path, "--sources", "predicted", "--engines", "shardwise", *words)
    assert {row["mode"] for row in rows} == modes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--delay-all-reduce", "--fsdp-only"), "no all-reduce to delay"),
        (("--accum-steps", "0"), "at least 1"),
        (("--sources", "ncl"), "unknown source"),
        (("--modes", "hsdpp"), "unknown mode"),
        (("--hosts", "3"), "--hosts is 3, expected 1 or 2"),
        (("--hosts", "2", "--rate", "fast"), "expected a number with kbit, mbit or gbit"),
        (("--hosts", "2", "--sources", "gloo"), "leave out --sources"),
        (("--rate", "1gbit"), "give --hosts 2 with it"),
    ],
)
def test_wrong_words_are_answered_before_anything_runs(words, message, capsys) -> None:
    assert main(["bench", "hsdp", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["shardwise", "fsdp2"])
def test_the_delayed_all_reduce_is_predicted_to_pay_as_in_the_document(engine: str) -> None:
    steps = {mode: predict(mode, engine=engine).step_ms for mode in DOCUMENT}
    for mode, figures in DOCUMENT.items():
        assert steps[mode] == pytest.approx(figures["mean_ms"], rel=0.025)
    assert steps["hsdp"] / steps["delayed"] >= 1.2
    together = {mode: predict(mode, engine=engine, synced=True).step_ms for mode in DOCUMENT}
    assert together["hsdp"] / together["delayed"] < 1.05  # nobody waits for anybody


def test_sizes_are_the_document_s() -> None:
    from shardwise.description.preset import load_preset

    stack = load_preset("ffn8")
    case = HybridCase(stack, REAL.sequence, 3, 2)
    assert (stack.d_model, stack.d_ff, stack.layers) == REAL[:3]
    assert case.sizes(0) == [1, 2, 1] and case.sizes(1) == [2, 1, 2]
    assert HybridCase(stack, 16, 3, 2, synced=True).sizes(1) == [1, 2, 1]
    assert case.tokens == (4 + 5) * 2 * 4096
