"""`bench soak` and `bench arena` without a GPU: their paths, and the arenas of models of others to
the byte.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.children import ChildFailed
from shardwise.cli import main
from shardwise.lab.accuracy import arena
from shardwise.lab.steps import soak

pytestmark = pytest.mark.usefixtures("no_group")


@pytest.mark.parametrize("name", ["t5", "vit", "resnet", "experts", "unet", "lstm", "tied", "lora"])
def test_the_engine_takes_the_block_that_was_said(name: str) -> None:
    """By `explain`, by the predicted step, and by the engine of one rank of 8."""
    if name in ("t5", "vit"):
        pytest.importorskip("transformers")
    found = arena.measure(arena.Case(name, "quick", "cpu"))
    kinds = ("said_block_bytes", "predicted_block_bytes", "block_bytes")
    assert len({found[kind] for kind in kinds}) == 1, [found[kind] for kind in kinds]
    assert found["predicted_bytes"] > found["block_bytes"] > 0


def test_arenas_are_compared_row_by_row(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One that fails is said and tried again; peaks have a table where there are any."""
    fails = True

    def fresh(function: Any, case: arena.Case) -> dict[str, Any]:
        if fails and case.name == "lstm":
            raise ChildFailed("a measurement failed:\nRuntimeError: no room")
        block = {"said_block_bytes": 512, "predicted_block_bytes": 512, "block_bytes": 512}
        peaks = {"predicted_bytes": 1003, "measured_bytes": 1000, "reserved_bytes": 2000}
        return block | peaks | {"difference": 0.003}

    monkeypatch.setattr(arena, "run_fresh", fresh)
    path, plot = tmp_path / "arena.json", tmp_path / "arena.svg"
    command = ["bench", "arena", "--models", "lstm,unet", "--json", str(path), "--plot", str(plot)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "lstm: RuntimeError: no room" in said and "1 of 1 within 0.5%" in said
    assert "bytes of the block: 1 of 1 equal" in said
    fails = False
    assert main([*command, "--resume"]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["key"] for row in rows] == ["unet", "lstm"] and "failure" not in rows[1]
    assert plot.read_text().startswith("<svg")


@pytest.mark.filterwarnings("ignore:the step is not captured")
def test_a_soak_compares_with_eager_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak, "run_fresh", lambda function, case: function(case))
    path, threads = tmp_path / "soak.json", torch.get_num_threads()
    try:
        assert main(["bench", "soak", "--quick", "--json", str(path)]) == 0
    finally:
        torch.set_num_threads(threads)
    rows = json.loads(path.read_text())["rows"]
    assert [row["key"] for row in rows] == ["nccl1", "emulated8"]
    for row in rows:
        assert (row["head"]["differ"], row["tail"]["differ"], row["captured"]) == (0, 0, False)
        assert [sample["step"] for sample in row["samples"]] == [5, 10, 15, 20]
        assert "only CUDA has graphs" in row["reason"]
    assert "nccl1: the model is on cpu" in capsys.readouterr().out


def test_losses_are_compared_bit_for_bit() -> None:
    one = torch.tensor([1.0, float("nan"), 2.0])
    assert soak.compare(one, one.clone()) == {"steps": 3, "differ": 0, "largest": 0.0}
    other = torch.tensor([1.0, float("nan"), 2.5])
    assert soak.compare(one, other) == {"steps": 3, "differ": 1, "largest": 0.5}


def test_rates_rise_then_fall() -> None:
    rates = [soak.rate_at(step, 20_000) for step in range(20_000)]
    assert rates[0] < rates[99] == soak.RATE and rates[-1] == pytest.approx(soak.RATE / 10, rel=0.1)
    assert len(set(rates)) > 19_000
