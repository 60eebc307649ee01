import os
import subprocess
import sys

import pytest

from shardwise.children import UNREAD
from shardwise.cli import main

LIGHT = """
import sys
from shardwise.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stop:
    assert stop.code == 0, stop.code
assert "torch" not in sys.modules, "torch was imported"
"""


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["report", "--help"]])
def test_help_teaches_by_example_and_does_not_import_torch(arguments):
    shown = subprocess.run(
        [sys.executable, "-c", LIGHT, *arguments], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert "examples:\n  shardwise " in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--steps", "none"], "shardwise: run.steps must be a whole number"),
        (["train", "--set", "run.stpes=1"], "shardwise: unknown key run.stpes: did you mean"),
        (["train", "absent.toml"], "shardwise: cannot read configuration absent.toml"),
        (["report", "absent"], "shardwise: absent holds no run"),
    ],
)
def test_a_user_error_is_one_message_and_exit_code_two(arguments, message, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(message)
    assert "Traceback" not in shown.err


def test_a_directory_that_holds_a_run_is_refused(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("")
    assert main(["train", "--out", str(tmp_path)]) == 2
    assert "already holds a run (metrics.jsonl)" in capsys.readouterr().err


def test_an_unknown_command_exits_with_two(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["trian"])
    assert stop.value.code == 2
    assert "train" in capsys.readouterr().err


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "plan", "--exercise", "list"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (UNREAD, "")
