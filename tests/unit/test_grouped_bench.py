"""`shardwise bench grouped-step`: its rows, tables and picture, and the document's figures."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.emulation.collectives import Network, emulate
from shardwise.lab.grouped import torch_steps
from shardwise.lab.grouped.cases import CANDIDATES, DOCUMENT, DOCUMENT_RUN, SIZES, GroupedCase
from shardwise.lab.grouped.run import draw, show
from shardwise.lab.processes import ask_ranks

ENVIRONMENT = {"gpu": None, "cpu": "a CPU", "cores": 2, "commit": "abc", "torch": "2.13"}


def test_the_documents_sizes_are_the_cases():
    for size in SIZES:
        case = GroupedCase("torch", size, 16, "fp32", 8, "cuda", 6)
        assert case.parameters / 1e9 == pytest.approx(float(size[:-1]), rel=0.03)
        small = GroupedCase("torch", size, 16, "fp32", 2, "cpu", 6)
        assert small.parameters * 600 == pytest.approx(case.parameters, rel=0.05)
        for mib in (16, 32):
            assert set(DOCUMENT[size, mib]) == {"fp32", "bf16"}
    # The memory that its run saved is that of the moments which other ranks keep, in fp32.
    saved = DOCUMENT_RUN["ddp_gb"] - DOCUMENT_RUN["sharded_gb"]
    assert saved == pytest.approx(8 * DOCUMENT_RUN["parameters"] / 1e9 * 7 / 8, rel=0.08)


@pytest.mark.slow
def test_quick_measures_both_frameworks_with_their_document(tmp_path: Path, capsys):
    path, picture = tmp_path / "rows.json", tmp_path / "rows.svg"
    main(["bench", "grouped-step", "--quick", "--json", str(path), "--plot", str(picture)])
    written = json.loads(path.read_text())
    rows = written["rows"]
    assert [row["framework"] for row in rows] == ["torch", "mlx"]
    for row in rows:
        assert row["parity"] < 1e-4
        assert set(row["candidates"]) == set(CANDIDATES)
        assert all(side["step_ms"] > 0 for side in row["candidates"].values())
        assert all(
            side["peak_bytes"] > 3 * 4 * row["parameters"] for side in row["candidates"].values()
        )
        assert row["note"].startswith("The document's milliseconds are of 8 B200")
        saved = row["candidates"]["ddp"]["peak_bytes"] - row["candidates"]["rows"]["peak_bytes"]
        assert saved > 0  # half the moments, less messages under way
    assert rows[0]["sent_over_all_reduce"]["flat"] == pytest.approx(1.0, abs=0.01)
    assert written["document_run"] == DOCUMENT_RUN
    ElementTree.fromstring(picture.read_text())
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    main(["bench", "grouped-step", "--quick", "--json", str(path), "--resume"])
    assert json.loads(path.read_text())["rows"] == rows  # nothing was left to measure


def step_as_one_of_eight() -> dict[str, list[float]]:
    """Calls and bytes over an all-reduce's, of a rank of an emulated group."""
    case = GroupedCase("torch", "2.7b", 16, "fp32", 8, "cpu", 1)
    found = {}
    for name in CANDIDATES[1:]:
        with emulate(Network(1e12, 0.0)) as emulation:
            _, step = torch_steps.build(case, name)
            step()
            calls = [emulation.calls["reduce_scatter"], emulation.calls["all_gather"]]
            found[name] = [*calls, torch_steps._count_sent(case, step)]
    return found


def test_a_rank_of_an_emulated_group_sends_what_an_all_reduce_sends():
    answer = ask_ranks(step_as_one_of_eight, world=8, processes=1, backend="fake")
    for scatters, gathers, sent in answer.values():
        assert scatters == gathers > 16  # 18 MB in messages of 1 MiB
        assert sent == pytest.approx(1.0, abs=0.001)


def make_row(size: str, mib: int, precision: str) -> dict:
    case = GroupedCase("torch", size, mib, precision, 8, "cuda", 6)
    side = {
        "step_ms": 1234.5,
        "spread_ms": 234.5,
        "device_ms": 1234.5,
        "peak_bytes": 123456_000_000,
    }
    return case.describe() | {
        "candidates": dict.fromkeys(CANDIDATES, side), "parity": None,
        "network": "emulated: 450 GB/s per rank, 20 us per collective",
        "sent_over_all_reduce": {"rows": 1.0, "flat": 1.0},
    }  # fmt: skip


def test_tables_of_all_sizes_fit_80_columns(capsys):
    rows = [make_row(*key, precision) for key in DOCUMENT for precision in ("fp32", "bf16")]
    failed = {"key": "torch/5.4b/32/fp32/8/cuda", "failure": "out of memory"}
    show([*rows, failed], {"environment": ENVIRONMENT})
    shown = capsys.readouterr().out
    assert "…" not in shown and max(map(len, shown.splitlines())) <= 80
    assert "63.07" in shown and "27.89" in shown and "1.13" in shown  # the document's
    assert "out of memory" in shown
    ElementTree.fromstring(draw([*rows, failed]))


def test_wrong_options_are_named(capsys):
    assert main(["bench", "grouped-step", "--sizes", "3b"]) != 0
    assert "did you mean '0.3b'" in capsys.readouterr().err
    assert main(["bench", "grouped-step", "--ranks", "1"]) != 0
    assert "expected at least 2" in capsys.readouterr().err
