"""The assignment's benchmarks of several ranks: what they count, check, leave and print."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.emulation.collectives import Network
from shardwise.errors import UserError
from shardwise.lab.parallel import all_reduce, ddp, document, optimizer_sharding
from shardwise.lab.processes import run_fresh

NETWORK = Network(117e9, 30e-6)
TINY = ddp.Case("scaled", ddp.QUICK_SIZE, ranks=2, steps=2, quick=True)


def bench(
    folder: Path, capsys: pytest.CaptureFixture[str], *command: str
) -> tuple[list[dict], str]:
    """Rows and printed text of a trial run, whose picture and width are right."""
    rows, plot = folder / "rows.json", folder / "plot.svg"
    assert main(["bench", *command, "--quick", "--json", str(rows), "--plot", str(plot)]) == 0
    ElementTree.parse(plot)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    return json.loads(rows.read_text())["rows"], out


# all-reduce


def test_the_documents_nccl_times_are_start_up_and_a_transfer():
    two, four, six = all_reduce.judge_document()
    assert two["above_s"] == pytest.approx(0.060, abs=1e-3)
    assert two["bus_gbs_of_the_difference"] == pytest.approx(16.6, abs=0.1)
    for row in (two, four, six):
        assert row["bus_gbs_of_1_mb"] < 0.003  # no link is that slow
        assert row["predicted_s_of_1_mb"] < row["seconds_of_1_mb"] / 1000
    assert document.all_reduce("gloo", 2, 1000)["seconds"] == 1.468517
    assert document.all_reduce("gloo", 2, 1) == {}


def test_bandwidths_are_those_of_the_whole_buffer_and_of_the_link():
    case = all_reduce.Case("gloo", 4, "all_reduce", 1000)
    assert all_reduce._rate(case, 2.0) == pytest.approx({"algorithm_gbs": 0.5, "bus_gbs": 0.75})
    gather = all_reduce.Case("gloo", 4, "all_gather", 1000)
    assert all_reduce._rate(gather, 2.0)["bus_gbs"] == pytest.approx(0.375)


def test_collectives_are_checked_timed_and_predicted(tmp_path, capsys):
    rows, out = bench(tmp_path, capsys, "all-reduce", "--sizes", "1,2")
    assert [(row["operation"], row["megabytes"]) for row in rows] == [
        (operation, size)
        for size in (1, 2)
        for operation in ("all_reduce", "all_gather", "reduce_scatter")
    ]
    for row in rows:
        assert row["seconds"] > 0 and row["first_s"] > 0 and row["predicted_s"] > 0
        assert row["samples"] >= all_reduce.SAMPLES[0]
        assert row["algorithm_gbs"] == pytest.approx(row["megabytes"] / 1e3 / row["seconds"])
    assert "0.36 s for 1 MB is no transfer" in out


def test_what_does_not_fit_is_left_out_with_a_reason(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(all_reduce, "free_bytes", lambda device: 10**6)
    rows, out = bench(tmp_path, capsys, "all-reduce", "--sizes", "1", "--ranks", "2")
    assert all("more than is free here" in row["skipped"] for row in rows) and len(rows) == 3
    assert "gloo/2/all_reduce/1: needs about 0.0 GB" in out


# ddp


def test_all_ways_of_data_parallel_agree_and_are_predicted(tmp_path, capsys):
    rows, out = bench(tmp_path, capsys, "ddp")
    *ways, best = rows
    assert [row["way"] for row in ways] == [
        "naive", "flat", "overlap", "bucketed 1 MB", "bucketed 10 MB", "torch's DDP",
    ]  # fmt: skip
    messages = {row["way"]: row["messages"] for row in ways}
    assert messages["naive"] == messages["overlap"] > messages["flat"] == 1
    for row in ways:
        assert row["parity"] <= ddp.TOLERANCE and row["step_ms"] > 0 and row["alone_ms"] > 0
        assert row["above_ms"] == pytest.approx(row["step_ms"] - row["alone_ms"])
        assert ("predicted_ms" in row) == (row["way"] != "torch's DDP")
    assert ways[1]["document"] == {"step_s": 0.898, "communication_s": 0.0967, "beside_s": 0.846}
    assert best["best_measured"].startswith("bucketed") and best["best_by_formula_mb"] > 0
    assert "best bucket: measured bucketed" in out


@pytest.mark.parametrize("way", [ddp.Way("naive"), ddp.Way("bucketed", 10), ddp.Way("")])
def test_an_emulated_step_is_timed_with_and_without_its_network(way):
    found = run_fresh(ddp.measure_emulated, TINY, way, Network(1e9, 1e-4))
    assert "failure" not in found
    assert found["messages"] > 0 and found["step_ms"] > 0 and found["free_device_ms"] > 0
    assert found["communication_ms"] >= 0.1 * found["messages"]


def test_tables_of_long_steps_are_not_cut(capsys):
    """Steps of ten seconds, and a way that ran out of memory."""
    row = {"messages": 435, "share": 0.123} | dict.fromkeys(
        ("step_ms", "step_spread_ms", "above_ms", "predicted_ms", "free_step_ms", "host_ms",
         "device_ms", "free_device_ms", "exposed_ms", "communication_ms"), 9876.5,
    )  # fmt: skip
    rows = [{"way": name, "document": said, **row} for name, said in document.DDP.items()]
    rows[-1] = {"way": rows[-1]["way"], "document": {}, "failure": "out of memory"}
    environment = {"gpu": "a GPU", "commit": "c", "torch": "t"}
    ddp.show(rows, {"network": "emulated: 117 GB/s per rank", "environment": environment})
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80 and "…" not in out
    for name in document.DDP:
        assert out.count(f"│ {name} ") == 2 - (name == rows[-1]["way"])
    assert "bucketed 1000 MB: out of memory" in out


def test_the_planner_knows_the_ways_on_a_gpu():
    flat, overlap = (
        ddp._predict_emulated(ddp.Way(reduce), TINY, NETWORK)["predicted_ms"]
        for reduce in ("flat", "overlap")
    )
    assert 0 < flat < overlap  # tiny tensors: a call for each is what costs
    assert ddp._predict_emulated(ddp.Way(""), TINY, NETWORK) == {}


# optimizer-sharding


def test_a_sharded_state_is_a_share_and_what_a_rank_holds_is_the_formulas(tmp_path, capsys):
    rows, out = bench(tmp_path, capsys, "optimizer-sharding")
    held = {row["way"]: row["held_bytes"] for row in rows}
    whole = held["AdamW, whole"]
    assert whole["state"] == pytest.approx(2 * whole["parameters"], rel=0.01)
    for way in ("ShardedOptimizer", "ZeroRedundancy"):
        assert held[way]["parameters"] == whole["parameters"]
        assert held[way]["state"] == pytest.approx(whole["state"] / 2, rel=0.15)
    assert held["ShardedOptimizer"]["state"] == pytest.approx(whole["state"] / 2, rel=0.01)
    for row in rows:
        memory = row["memory_bytes"]
        assert 0 < memory["init"] <= memory["before"] <= memory["peak"] <= memory["step_peak"]
        assert row["parity"] <= ddp.TOLERANCE and row["step_ms"] > 0 and row["update_ms"] > 0
        if row["way"] in ("AdamW, whole", "ShardedOptimizer"):
            assert sum(row["held_bytes"].values()) == pytest.approx(
                row["formula_bytes"]["fp32"], rel=0.02
            )
    assert rows[1]["document"] == {"step_s": 0.249, "peak_gb": 42.0}
    assert "8 P + 8 P / n" in out


@pytest.mark.parametrize("way", optimizer_sharding.WAYS)
def test_every_optimizer_steps_on_an_emulated_rank(way):
    found = run_fresh(optimizer_sharding.measure_emulated, TINY, way, Network(1e9, 1e-4))
    assert "failure" not in found and found["update_ms"] > 0
    assert found["held_bytes"]["state"] > 0


# The command line


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (["all-reduce", "--ranks", "1"], "expected at least 2"),
        (["all-reduce", "--operations", "broadcast"], "unknown operation 'broadcast'"),
        (["ddp", "--ways", "eager"], "unknown way 'eager'"),
        (["ddp", "--buckets", "0"], "expected at least 1"),
        (["optimizer-sharding", "--size", "tiny"], "unknown size 'tiny'"),
    ],
)
def test_bad_options_are_named(command, told, capsys):
    try:
        assert main(["bench", *command]) != 0
        said = capsys.readouterr().err
    except (UserError, SystemExit) as error:
        said = str(error)
    assert told in said
