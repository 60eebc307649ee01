import argparse
import os
import signal
import subprocess
import sys

import pytest

from shardwise import cli
from shardwise.children import UNREAD
from shardwise.cli import build_parser, main
from shardwise.cli.help import HelpFormatter

LIGHT = """
import sys
from shardwise.cli import build_parser, main
from shardwise.cli.help import HelpFormatter
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


def test_every_help_fits_a_terminal_of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    seen = 0
    parsers = [build_parser()]
    while parsers:
        parser = parsers.pop()
        seen += 1
        long = [line for line in parser.format_help().splitlines() if len(line) > 80]
        assert not long, (parser.prog, long)
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
    assert seen > 12


HELP = """\
A paragraph that was written for a hundred columns, and goes on in a second line, which belongs to
it.
  name      what is said of it, at some length, so that it does not fit
            and goes on here
  shardwise plan --model tiny --tokens 2048 --sequence 128 --out plan.json
  shardwise train --steps 500 --save-every 50      later
"""
NARROW = """\
A paragraph that was written for a hundred
columns, and goes on in a second line, which
belongs to it.
  name      what is said of it, at some length,
            so that it does not fit and goes on
            here
  shardwise plan --model tiny --tokens 2048 \\
      --sequence 128 --out plan.json
  shardwise train --steps 500 --save-every 50
      later
"""


def test_a_help_is_broken_where_it_may_be():
    formatter = HelpFormatter("shardwise", width=50)
    assert formatter._fill_text(HELP, 48, "") == NARROW
    assert formatter._fill_text(HELP, 100, "") == HELP


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--steps", "none"], "shardwise: run.steps must be a whole number"),
        (
            ["train", "--steps", "2", "--set", "run.steps=abc"],
            "shardwise: run.steps must be a whole number, got a string 'abc'",
        ),
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


def test_the_package_runs_as_a_program():
    command = [sys.executable, "-m", "shardwise", "--version"]
    assert subprocess.run(command, capture_output=True, check=True).stdout.startswith(b"shardwise ")


def test_a_second_interruption_tells_nothing_of_the_exit(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(cli, "main", lambda: cli.INTERRUPTED)
    try:
        assert cli._read_or_not() == 130
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_reader_that_leaves_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "plan", "--exercise", "list"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False,
    )  # fmt: skip
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (UNREAD, "")
