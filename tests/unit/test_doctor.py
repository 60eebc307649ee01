"""`shardwise doctor`: what is wrong is found, named and ends with code 1."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shardwise import processor
from shardwise.cli import main
from shardwise.trainer import doctor
from shardwise.trainer.config import load_config


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("may not mount a small disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_machine_with_nothing_wrong_and_a_taken_port(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two ranks are started, and all is told though one thing fails."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        file = tmp_path / "checks.json"
        arguments = ["doctor", "--out", str(tmp_path), "--json", str(file), "--port", str(port)]
        assert main(arguments) == 1
    checks = {check["name"]: check for check in json.loads(file.read_text())}
    assert [name for name, check in checks.items() if check["verdict"] == "fail"] == ["port"]
    assert "Address already in use: choose another MASTER_PORT" in checks["port"]["do"]
    assert checks["ranks"]["found"] == "2 on 1 host(s) reach each other"
    assert "worst pair: ranks 0 and 1" in checks["bandwidth"]["found"]
    said = capfd.readouterr()
    assert "what to do" in said.out and "shardwise: not ready for a run: port" in said.err


@pytest.mark.parametrize(
    ("size", "verdict", "says"), [("4m", "fail", "less than"), ("100m", "warn", "fill it")]
)
def test_a_small_disk(tmp_path: Path, size: str, verdict: str, says: str) -> None:
    with small_disk(tmp_path, size):
        check = doctor._disk(tmp_path / "not" / "yet", None)
    assert check.verdict == verdict and says in check.do and str(tmp_path) in check.found


def test_a_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path, "64k"):
        with pytest.raises(OSError), (tmp_path / "all").open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        check = doctor._disk(tmp_path, None)
    assert check.verdict == "fail" and "No space left on device" in check.do


def test_a_disk_too_small_for_the_model(tmp_path: Path) -> None:
    config = load_config(None, [("model.size", "medium")])
    with small_disk(tmp_path, "200m"):
        check = doctor._disk(tmp_path, config)
    assert check.verdict == "fail" and "two checkpoints take" in check.do


def test_small_shared_memory(tmp_path: Path) -> None:
    with small_disk(tmp_path, "8m"):
        check = doctor._shared_memory(tmp_path)
    assert check.verdict == "fail" and "--shm-size" in check.do


@pytest.mark.parametrize(("limit", "verdict"), [(80, "fail"), (512, "warn")])
def test_few_open_files(limit: int, verdict: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        check = doctor._open_files(4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.verdict == verdict and "ulimit -n 4096" in check.do


def test_too_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "free_memory", lambda: 1 << 30)
    assert doctor._memory(1, None).verdict == "ok"
    check = doctor._memory(2, load_config(None, [("model.size", "small")]))
    assert check.verdict == "fail" and "--plan zero3" in check.do


def test_a_processor_that_refuses_what_it_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.ANSWER, "refused")
    check = doctor._processor()
    assert check.verdict == "warn" and processor.LIMIT in check.do


def test_a_slow_pair_and_a_wrong_clock_are_named() -> None:
    found = {
        "all_gather": 100.0,
        "all_reduce": 100.0,
        "pairs": [[[0, 1], 900.0], [[0, 2], 100.0], [[1, 2], 1000.0]],
        "clocks": [0.0, 0.01, -7.5],
        "hosts": ["a", "b", "c"],
    }
    slow, clock = doctor._bandwidth(found), doctor._clocks(found)
    assert slow.verdict == "warn" and "between a and c" in slow.do
    assert clock.verdict == "warn" and "rank 2 (c) is off by -7.5 s" in clock.do


def test_ranks_that_cannot_meet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("first\nthe port is taken")

    monkeypatch.setattr(doctor.launch, "start_ranks", fail)
    monkeypatch.setattr(doctor.launch, "joined", lambda: False)
    (check,) = doctor._ranks(2, [])
    assert check.verdict == "fail" and "the port is taken" in check.do


@pytest.mark.parametrize("wrong", [["--nproc", "0"], ["--port", "70000"], ["--json", "/no/x"]])
def test_wrong_arguments(wrong: list[str]) -> None:
    assert main(["doctor", *wrong]) == 2


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    file = tmp_path / "checks.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "shardwise.cli", "doctor", "--json", str(file), "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run(command, check=True, env=environment, timeout=120, capture_output=True)
    assert "ranks" in {check["name"] for check in json.loads(file.read_text())}
