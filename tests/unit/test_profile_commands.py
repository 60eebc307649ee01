"""The commands that profile: `shardwise profile -- CMD`, `train --profile`, `bench profile`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.cli import main
from shardwise.cli.profile import insert_runner
from shardwise.timeline import COMPUTE, Timeline


def test_the_command_says_what_it_cannot_read_or_make(tmp_path: Path, capfd) -> None:
    (tmp_path / "taken").write_text("")
    assert main(["profile", "--out", str(tmp_path / "taken"), "--", "python", "x.py"]) == 2
    assert "cannot make the directory" in capfd.readouterr().err
    missing = [sys.executable, str(tmp_path / "missing.py")]
    assert main(["profile", "--out", str(tmp_path / "out"), "--", *missing]) == 2
    said = capfd.readouterr().err
    assert "missing.py: No such file" in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python train.py --lr 1", "python RUN train.py --lr 1"),
        ("python3.11 -u -m pkg.train x", "python3.11 -u RUN -m pkg.train x"),
        (
            "torchrun --standalone --nproc-per-node 2 train.py --a",
            "torchrun --standalone --nproc-per-node 2 RUN train.py --a",
        ),
        ("torchrun --nproc_per_node=2 -m pkg", "torchrun --nproc_per_node=2 RUN -m pkg"),
        (
            "python -m torch.distributed.run --nnodes=1 t.py",
            "python -m torch.distributed.run --nnodes=1 RUN t.py",
        ),
        ("shardwise train --nproc 2", "shardwise train --nproc 2"),
    ],
)
def test_the_runner_goes_before_the_script(command: str, expected: str) -> None:
    runner = "-m shardwise.profiling.run"
    assert " ".join(insert_runner(command.split())) == expected.replace("RUN", runner)


SCRIPT = """
import sys
import torch
from torch import nn

model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(2)])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[1])):
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
"""


def test_the_command_profiles_a_program_that_does_not_know_of_it(tmp_path: Path) -> None:
    script, out = tmp_path / "train.py", tmp_path / "out"
    script.write_text(SCRIPT)
    command = ["profile", "--out", str(out), "--steps", "2", "--skip", "1", "--", sys.executable]
    assert main([*command, str(script), "4"]) == 0
    timeline = Timeline.from_json((out / "timeline.json").read_text())
    assert timeline.labels["steps"] == "2" and timeline.ranks == (0,)
    # Its time is that of a step without a trace, as of a program that is on shardwise.
    assert timeline.labels["timing"] == "untraced" and "traced_ms" in timeline.labels
    assert timeline.step_ms == pytest.approx(float(timeline.labels["step_ms"]), rel=0.01)
    assert (out / "trace.json").exists() and (out / "memory.json").exists()


def test_a_program_that_ends_while_it_is_profiled_ends_well(tmp_path: Path, capfd) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["profile", "--out", str(tmp_path / "out"), "--steps", "50", "--skip", "1", "--"]
    assert main([*command, sys.executable, str(script), "5"]) == 2
    said = capfd.readouterr().err
    assert "took 5 optimizer steps" in said and "the program exited with code 0" in said


def test_the_command_says_why_nothing_was_profiled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = ["profile", "--out", str(tmp_path / "out"), "--", sys.executable, str(script), "2"]
    assert main(command) == 2
    assert "at least 6 steps" in capsys.readouterr().err
    assert main(["profile", "--"]) == 2
    assert "give the program" in capsys.readouterr().err
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", *command], capture_output=True, text=True
    )
    assert "took 2 optimizer steps" in ran.stderr and ran.returncode == 2


def test_training_with_profile_leaves_a_measured_and_a_predicted_timeline(tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["train", "--plan", "zero3", "--nproc", "2", "--steps", "4", "--profile", "2"]
    assert main([*command, "--out", str(out)]) == 0
    measured = Timeline.from_json((out / "timeline.json").read_text())
    predicted = Timeline.from_json((out / "predicted.json").read_text())
    assert (measured.labels["source"], predicted.labels["source"]) == ("measured", "simulated")
    assert measured.ranks == (0, 1)
    units = {s.unit for s in measured.spans if s.role == COMPUTE and s.phase == "forward"} - {""}
    assert units == {s.unit for s in predicted.spans if s.role == COMPUTE} - {""}
    for name in ("memory.json", "messages.json", "trace.json", "metrics.jsonl"):
        assert (out / name).stat().st_size > 0
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_run_too_short_to_profile_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--steps", "3", "--profile", "3"]) == 2
    assert "run.profile" in capsys.readouterr().err


def test_what_profiling_costs_is_measured_in_turn(tmp_path: Path) -> None:
    """As a command of its own: it starts two ranks."""
    file = tmp_path / "profile.json"
    command = [sys.executable, "-m", "shardwise.cli", "bench", "profile", "--cases", "gloo2"]
    ran = subprocess.run(
        [*command, "--rounds", "1", "--json", str(file)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert row["paired_ratio"] == pytest.approx(row["on"]["step_ms"] / row["off"]["step_ms"])
    assert row["traced_step_ms"] > 0 and row["around_ms"] > 0
    assert row["marks_per_step"] > 50 and 0 < row["share_of_step_off"] < 0.01
    assert "gloo2" in ran.stdout


WITHOUT_OPTIMIZER = """
import sys
import torch
from torch import nn

model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)])
criterion = nn.MSELoss()
for _ in range(int(sys.argv[2])):
    if sys.argv[1] == "infer":
        with torch.no_grad():
            model(torch.ones(4, 8))
        continue
    model.zero_grad()
    for _ in range(2):
        criterion(model(torch.ones(4, 8)), torch.ones(4, 8)).backward()
"""


@pytest.mark.parametrize(("kind", "forwards"), [("infer", 1), ("backward", 2)])
def test_a_program_without_an_optimizer_is_profiled_too(
    kind: str, forwards: int, tmp_path: Path, capfd
) -> None:
    script, out = tmp_path / "program.py", tmp_path / "out"
    script.write_text(WITHOUT_OPTIMIZER)
    command = ["profile", "--out", str(out), "--steps", "2", "--skip", "2", "--", sys.executable]
    assert main([*command, str(script), kind, "6"]) == 0
    said = capfd.readouterr()
    assert "Warning" not in said.err and "Traceback" not in said.err
    timeline = Timeline.from_json((out / "timeline.json").read_text())
    assert timeline.labels["steps"] == "2"
    computed = [span for span in timeline.spans if span.unit == "0" and span.stream == COMPUTE]
    phases = [span.phase for span in computed if span.role != "waiting"]
    assert phases.count("forward") >= forwards
    assert ("backward" in phases) == (kind == "backward")
    assert not any(span.phase == "optimizer" for span in timeline.spans)


def test_too_few_forwards_are_told(tmp_path: Path, capfd) -> None:
    script = tmp_path / "program.py"
    script.write_text(WITHOUT_OPTIMIZER)
    command = ["profile", "--out", str(tmp_path / "out"), "--", sys.executable, str(script)]
    assert main([*command, "infer", "5"]) == 2
    said = capfd.readouterr().err
    assert "took 5 forwards" in said and "one that ends the last" in said
