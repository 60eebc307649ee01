"""The benchmarks of seed 004's exercises: what they count, what they leave, how they resume."""

from __future__ import annotations

import json
import os
import re
import signal
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

from shardwise.cli import main
from shardwise.description.language_model import make_model
from shardwise.description.preset import Size
from shardwise.errors import UserError
from shardwise.lab.attention.seed import tables_4_and_5
from shardwise.lab.exercises import seed004
from shardwise.lab.exercises.forward_backward import summarize
from shardwise.lab.exercises.memory.peaks import MeasuredModel
from shardwise.lab.exercises.memory.tensors import attention_bytes
from shardwise.lab.exercises.memory.trace import (
    MODULE,
    PHASE,
    HeldMemory,
    group_by_name,
    read_trace,
    thin_out,
)
from shardwise.lab.exercises.models import ModelCase
from shardwise.lab.processes import explain_failure, run_fresh
from shardwise.lab.rows import RowFile

CPU = {"environment": {"gpu": None}}


def read(path: Path) -> list[dict]:
    return json.loads(path.read_text())["rows"]


# The model


def test_the_seeds_shapes_are_those_its_figures_imply():
    case = ModelCase("2.7b", "fp32")
    assert case.batch * 128 * case.model_size.d_model * 4 == 5 * 2**20  # its residual stream
    assert (
        case.model_size.d_model * case.model_size.d_ff * 4 == 100 * 2**20
    )  # its largest allocation
    with torch.device("meta"):
        parameters = sum(p.numel() for p in make_model(case.model_size, "meta").parameters())
    assert 16 * parameters / 1e9 == pytest.approx(seed004.TABLE_3[128][1], rel=0.02)


def test_plain_attention_is_the_fused_one():
    tokens = torch.arange(12).view(2, 6)
    logits = [
        make_model(Size(16, 32, 2, 2, 2, 32, attention=attention), "cpu")(tokens)
        for attention in ("plain", "torch")
    ]
    torch.testing.assert_close(*logits)


def test_rotary_positions_tell_orders_apart():
    orders = torch.tensor([[1, 2, 3], [2, 1, 3]])
    for rotary in (False, True):
        model = make_model(Size(16, 32, 1, 2, 2, 32, rotary=rotary), "cpu")
        one, other = model(orders)[:, -1]
        # Without positions the last token sees a set, with them a sequence.
        assert (one - other).abs().max() > 1e-4 if rotary else torch.allclose(one, other, atol=1e-6)


# Rows


def test_rows_are_written_one_by_one_and_taken_up_again(tmp_path):
    path = tmp_path / "rows.json"
    file = RowFile(path, CPU)
    file.add({"key": "a", "value": 1})
    assert read(path) == [{"key": "a", "value": 1}]
    again = RowFile(path, CPU, resume=True)
    assert "a" in again and "b" not in again
    again.add({"key": "a", "value": 2})
    again.add({"key": "b", "value": 3})
    assert [row["value"] for row in read(path)] == [2, 3]
    assert not list(tmp_path.glob("*.part"))


def test_rows_of_another_device_or_of_a_trial_are_not_mixed_in(tmp_path):
    path = tmp_path / "rows.json"
    RowFile(path, {"environment": {"gpu": "a GPU"}}).add({"key": "a"})
    with pytest.raises(UserError, match="device a GPU, this run has CPU"):
        RowFile(path, CPU, resume=True)
    RowFile(path, CPU | {"quick": True}).add({"key": "a"})
    with pytest.raises(UserError, match="quick True"):
        RowFile(path, CPU, resume=True)


def test_rows_of_another_commit_keep_its_name(tmp_path):
    path = tmp_path / "rows.json"
    RowFile(path, {"environment": {"commit": "old"}}).add({"key": "a"})
    for commit in ("new", "newer"):
        RowFile(path, {"environment": {"commit": commit}}, resume=True).add({"key": commit})
    assert read(path) == [
        {"commit": "old", "key": "a"}, {"commit": "new", "key": "new"}, {"key": "newer"},
    ]  # fmt: skip


def test_a_spent_budget_says_so(capsys):
    assert RowFile(None, CPU, budget=0.0).time_is_up()
    assert "--resume" in capsys.readouterr().err
    assert not RowFile(None, CPU, budget=1e6).time_is_up()
    assert not RowFile(None, CPU).time_is_up()


def die(number: int) -> dict:
    os.kill(os.getpid(), number)
    return {}


def run_out_of_memory() -> dict:
    try:
        torch.empty(2**60)
    except RuntimeError as error:
        return {"failure": explain_failure(error)}
    return {}


def test_a_process_that_dies_is_a_row_and_so_is_a_lack_of_memory():
    assert "its process was killed by SIGILL (the" in run_fresh(die, signal.SIGILL)["failure"]
    assert run_out_of_memory() == {"failure": "out of memory"}


# forward-backward


def test_warm_up_leaves_out_the_first_steps():
    times = {"forward": [100.0, 10.0, 2.0, 4.0, 9.0]}
    found = summarize(times, (0, 1, 2), steps=2)
    assert [found[w]["forward"]["mean"] for w in "012"] == [55, 6, 3]
    assert found["2"]["forward"]["std"] == pytest.approx(2**0.5, abs=1e-3)


def test_forward_backward_writes_times_beside_the_seeds_and_resumes(tmp_path, capsys):
    path = tmp_path / "times.json"
    command = ["bench", "forward-backward", "--quick", "--sizes", "small", "--json", str(path)]
    command += ["--precision", "bf16", "--warmup", "0,1", "--resume"]
    assert main(command) == 0
    (row,) = read(path)
    assert [len(values) for values in row["ms"].values()] == [3, 3, 3]
    assert all(value > 0 for values in row["ms"].values() for value in values)
    assert set(row["by_warmup"]) == {"0", "1"}
    assert row["seed"] == [{"table": 2, "hardware": "A100", "forward": 31, "backward": 62}]
    assert "this CPU's" in capsys.readouterr().err
    assert main(command) == 0
    assert read(path) == [row]


# memory


def op(name, start, end, tid=1, cat="cpu_op", **args):
    return {"ph": "X", "name": name, "cat": cat, "ts": start, "dur": end - start, "tid": tid,
            "args": {k.replace("_", " "): v for k, v in args.items()}}  # fmt: skip


def memory_event(time, nbytes, address, tid=1, device=0):
    args = {"Bytes": nbytes, "Addr": address, "Device Type": device}
    return {"name": "[memory]", "ts": time, "tid": tid, "args": args}


def test_a_trace_names_what_is_held_by_module_operator_and_parameter():
    events = [
        op(f"{PHASE}forward", 0, 40, cat="user_annotation"),
        op(f"{MODULE}layers.3.gate", 5, 20, cat="user_annotation"),
        op("aten::linear", 6, 19, Sequence_number=4, Fwd_thread_id=0),
        op("aten::mm", 7, 18, Sequence_number=5, Fwd_thread_id=0),
        memory_event(8, 100, 0xA),
        op(f"{PHASE}backward", 50, 80, cat="user_annotation"),
        op("autograd::engine::evaluate_function: MmBackward0", 55, 70, tid=2,
           Sequence_number=5, Fwd_thread_id=1),
        op("aten::mm", 56, 60, tid=2),
        memory_event(57, 30, 0xB, tid=2),
        op("aten::mm", 61, 66, tid=2),
        memory_event(62, 70, 0xC, tid=2),
        memory_event(66, -100, 0xA, tid=2),
        memory_event(67, 999, 0xD, device=1),
        op(f"{PHASE}optimizer", 81, 90, cat="user_annotation"),
    ]  # fmt: skip
    trace = read_trace(events, on_gpu=False, before=1000, owners=[{0xC: "gradient of x"}])
    assert [a.what for a in trace.allocations] == [
        "layers.3.gate: linear", "layers.3.gate: backward of Mm", "gradient of x",
    ]  # fmt: skip
    assert trace.totals == [1000, 1100, 1130, 1200, 1100]
    assert trace.peak(0, 90) == (62, 1200)
    assert trace.peak(0, 45) == (8, 1100)
    assert [a.bytes for a in trace.held_at(66.5)] == [30, 70]
    assert read_trace(events, on_gpu=True, before=0).totals == [0, 999]


def test_layers_are_one_group_and_thinning_keeps_the_extremes():
    groups = group_by_name([HeldMemory(8, 0, what=f"layers.{i}.up: linear") for i in range(3)])
    assert groups == [{"what": "layers.*.up: linear", "count": 3, "each": 8, "total": 24}]
    totals = [0] * 500
    totals[333] = 7
    kept = thin_out(list(range(500)), totals, 40)
    assert len(kept) <= 42 and (333, 7) in kept and kept == sorted(kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts a CPU's allocations")
def test_the_peak_of_a_step_is_made_of_parameters_moments_and_gradients():
    case = ModelCase("small", "fp32", context=4, quick=True)
    row = MeasuredModel(case).measure(case, "step", with_curve=True)
    parameters = row["parameter_bytes"]
    first, second = row["peaks"]
    for peak in (first, second):
        assert sum(peak["roles"].values()) == pytest.approx(peak["bytes"], rel=0.01)
        assert peak["roles"]["parameters"] == parameters
    # The first step ends with gradients and both moments; the second begins with the moments.
    assert first["roles"]["gradients"] == pytest.approx(parameters, rel=0.01)
    assert second["roles"]["moments"] == pytest.approx(2 * parameters, rel=0.01)
    phases = [name for name, _, _ in row["curve"]["phases"]]
    assert phases == ["forward", "backward", "optimizer"] * 2
    assert max(row["curve"]["mib"]) == pytest.approx(second["bytes"] / 2**20, abs=0.2)
    named = {group["what"] for peak in (first, second) for group in peak["held"]}
    assert "gradient of layers.*.feed_forward.gate.weight" in named


def test_memory_of_a_forward_pass_exceeds_inference_and_is_drawn(tmp_path):
    path, plot = tmp_path / "memory.json", tmp_path / "memory.svg"
    command = ["bench", "memory", "--quick", "--sizes", "small", "--precision", "fp32"]
    command += ["--contexts", "512", "--json", str(path), "--plot", str(plot)]
    assert main([*command, "--parts", "peaks"]) == 0
    by_mode = {row["mode"]: row["peaks"][-1]["bytes"] for row in read(path)}
    assert by_mode["inference"] < by_mode["forward"] < by_mode["step"]
    ElementTree.parse(plot)
    assert plot.read_text().count("<path") == 3


def test_attention_keeps_what_the_document_accounts_for(tmp_path, capsys):
    path = tmp_path / "memory.json"
    command = ["bench", "memory", "--quick", "--parts", "residual,attention", "--json", str(path)]
    assert main(command) == 0
    rows = {row["key"]: row for row in read(path)}
    stream = rows["residual/2.7b"]
    assert (
        stream["bytes"] == stream["derived_bytes"] == 5 * 2**20 == stream["document"]["mib"] * 2**20
    )
    row = rows["attention/128/1024"]
    # Softmax of its parts keeps two tensors of the scores' size, and one number for each row.
    assert row["by_hand_bytes"] == pytest.approx(row["derived_bytes"], rel=2e-3)
    scores = 4 * 8 * 1024**2
    assert row["by_hand_bytes"] - row["torch_softmax_bytes"] == pytest.approx(scores, rel=5e-3)
    assert capsys.readouterr().out.count("5.0 ") == 3
    for width, tokens in ((16, 16384), (128, 16384), (64, 4096)):
        document = tables_4_and_5(width, tokens)["alone"]["memory_gb"] * 1e9
        assert document - attention_bytes(width, tokens) == pytest.approx(64 * 2**20, rel=0.03)


# compile


def test_compiled_and_eager_are_timed_from_the_same_loss(tmp_path):
    path = tmp_path / "compile.json"
    command = ["bench", "compile", "--quick", "--sizes", "small", "--parts", "model"]
    assert main([*command, "--scopes", "blocks", "--json", str(path)]) == 0
    (row,) = read(path)
    assert row["loss_gap"] < 1e-5 and row["first_call_s"] > 0
    for side in ("compiled", "eager"):
        assert all(part["mean"] > 0 for part in row[side].values())
    assert row["seed"]["compiled_forward"] == pytest.approx(3.762)


# overlap


def measure_overlap(folder: Path, reduce: str) -> tuple[dict, list]:
    """The row of one plan, and its messages that start before backward's compute is over."""
    path = folder / "overlap.json"
    command = ["bench", "overlap", "--quick", "--reduce", reduce, "--bandwidth", "1"]
    assert main([*command, "--json", str(path), "--plot", str(folder / "overlap.svg")]) == 0
    (row,) = read(path)
    ended = next(start for _, phase, start, _ in row["compute"] if phase == "waiting")
    return row, [message for message in row["messages"] if message[1] < ended]


def test_naive_communication_starts_after_backward_and_is_drawn(tmp_path):
    row, inside = measure_overlap(tmp_path, "naive")
    phases = [phase for _, phase, _, _ in row["compute"]]
    assert phases == ["forward"] * 3 + ["backward"] * 3 + ["waiting", "optimizer"]
    assert not inside
    model = ModelCase("small", "fp32", quick=True).make_model()
    assert len(row["messages"]) == len(list(model.parameters()))
    sent = sum(nbytes for nbytes, *_ in row["messages"])
    # Each with eight numbers behind it that say who produced a gradient.
    assert sent == 4 * sum(p.numel() + 8 for p in model.parameters())
    titles = [e for e in ElementTree.parse(tmp_path / "overlap.svg").iter() if "title" in e.tag]
    assert len(titles) == len(row["messages"]) + len(row["compute"]) + 1


def test_overlapped_communication_starts_inside_backward(tmp_path):
    _, inside = measure_overlap(tmp_path, "overlap")
    assert inside


# ffn


def test_a_micro_batch_of_the_feed_forward_stack_is_timed(tmp_path, capsys):
    path = tmp_path / "ffn.json"
    command = ["bench", "ffn", "--quick", "--steps", "3", "--json", str(path), "--resume"]
    assert main(command) == 0
    rows = read(path)
    assert [row["micro_batch"] for row in rows] == [1, 2]
    assert all(row["step_ms"] > 0 and row["precision"] == "fp32" for row in rows)
    assert "1 x 16 tokens " in capsys.readouterr().out
    assert main(command) == 0 and read(path) == rows  # nothing was measured again


# The command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["forward-backward", "--sizes", "smal"], "did you mean 'small'"),
        (["forward-backward", "--warmup", "one"], "whole numbers"),
        (["forward-backward", "--steps", "0"], "at least 1"),
        (["memory", "--contexts", "0"], "at least 1"),
        (["memory", "--json", "/nowhere/at/all.json"], "no folder"),
        (["compile", "--scopes", "half"], "unknown scope"),
        (["overlap", "--ranks", "1"], "at least 2"),
        (["overlap", "--bandwidth", "0"], "above 0"),
        (["ffn", "--steps", "0"], "at least 1"),
    ],
)
def test_wrong_words_are_answered_before_anything_runs(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_help_teaches(capsys):
    names = ("forward-backward", "memory", "compile", "overlap", "ffn", "kernels")
    for name in (*names, "mixed-precision"):
        with pytest.raises(SystemExit):
            main(["bench", name, "--help"])
        text = capsys.readouterr().out
        assert re.search(r"examples:\n  shardwise bench " + name, text) and "--resume" in text


NOT_OURS = {
    "empty": "",
    "not JSON": "[1, ",
    "a JSON list": "[]",
    "without an `environment`": "{}",
    "without a list of `rows`": '{"environment": {}, "rows": {}}',
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_a_file_that_is_not_ours_is_told_in_words(what, tmp_path, capsys):
    """Every benchmark that goes on with a file, and the page of accuracy with those beside it."""
    path = tmp_path / "given.json"
    path.write_text(NOT_OURS[what])
    resumed = ["forward-backward", "memory", "compile", "overlap", "ffn", "attention"]
    commands = [[name, "--quick", "--resume", "--json", str(path)] for name in resumed]
    commands[1:2] = [["memory", "--resume", "--json", str(path), "--plot", str(tmp_path / "p.svg")]]
    commands.append(["accuracy", "--simulated", "--json", str(path)])
    for words in commands:
        assert main(["bench", *words]) == 2, words
        said = capsys.readouterr().err
        assert f"{path} is no result of a benchmark, it is {what}" in said, said
    assert main(["bench", "accuracy", "--beside", str(path)]) == 2
    assert f"--beside {path} is no result" in capsys.readouterr().err
    assert path.read_text() == NOT_OURS[what]


def test_rows_of_another_benchmark_are_not_mixed_in(tmp_path, capsys):
    path = tmp_path / "rows.json"
    RowFile(path, CPU | {"command": "shardwise bench step --quick"}).add({"key": "a"})
    with pytest.raises(UserError, match="benchmark step, this run has overlap"):
        RowFile(path, CPU | {"command": "shardwise bench overlap"}, resume=True)
    assert main(["bench", "accuracy", "--simulated", "--json", str(path)]) == 2
    assert "another benchmark's (a row has no `mode`)" in capsys.readouterr().err


# The page


def test_the_page_and_its_pictures_are_the_results(monkeypatch):
    root = Path(__file__).parents[2]
    monkeypatch.syspath_prepend(root / "benchmarks")
    import exercise_tables

    page = (root / "docs" / "exercises-measured.md").read_text()

    def load(name: str) -> dict:
        return json.loads((root / "benchmarks" / "results" / name).read_text())

    for name, (result, make) in exercise_tables.TABLES.items():
        assert f"<!-- table: {name} -->\n{make(load(result))}" in page, name
    for name, (result, draw) in exercise_tables.PICTURES.items():
        assert (root / name).read_text() == draw(load(result)), name
        assert name.removeprefix("docs/") in page
    sizes = {row["size"] for row in load("forward-backward-h200.json")["rows"]}
    whole = {row["size"] for row in load("memory-h200.json")["rows"] if "size" in row}
    assert sizes == whole == set(seed004.MODELS)
