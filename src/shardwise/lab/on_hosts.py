"""Measuring on two hosts of this machine: torchrun on each, as a user starts it.

`ask_hosts` is `ask_ranks` (processes.py) with a cable between the ranks.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from shardwise.children import ChildFailed, describe_end
from shardwise.hosts import NAMES, Hosts
from shardwise.trainer.group import open_group

PORT = 29500  # on the first host; no other program is there
_POLL_S, _END_S = 0.05, 10.0


def ask_hosts(hosts: Hosts, per_host: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """What `function(*arguments)` answers on rank 0 of so many new ranks on each host, as JSON
    gives it back. The group is there when it is called, and the function may leave it.
    """
    with tempfile.TemporaryDirectory() as folder:
        task, answer = Path(folder) / "task", Path(folder) / "answer.json"
        task.write_bytes(pickle.dumps((function, arguments, answer)))
        words = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(NAMES)),
            "--nproc-per-node", str(per_host), "--rdzv-backend", "c10d",
            "--rdzv-endpoint", f"{NAMES[0]}:{PORT}", "-m", "shardwise.lab.on_hosts", str(task),
        ]  # fmt: skip
        # torch warns of addresses that have no name.
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        quiet = subprocess.DEVNULL  # ranks tell how far they are on stderr
        programs = [hosts.start(i, words, env=env, stdout=quiet) for i in range(len(NAMES))]
        try:
            _wait(programs)
        finally:
            _end(programs)
        return json.loads(answer.read_text())


def _wait(programs: list[subprocess.Popen[str]]) -> None:
    """Until all have ended well; one that has not ends the others."""
    while any(program.poll() is None for program in programs):
        if any(program.returncode for program in programs):
            break
        time.sleep(_POLL_S)
    for name, program in zip(NAMES, programs, strict=True):
        if program.returncode:
            told = describe_end(program.returncode)
            raise ChildFailed(f"torchrun on {name} {told}; what its ranks said is above")


def _end(programs: list[subprocess.Popen[str]]) -> None:
    """torchrun ends its ranks when it is asked to end."""
    for program in programs:
        program.terminate()
    for program in programs:
        try:
            program.wait(_END_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def _answer_as_rank(task: Path) -> None:
    function, arguments, answer = pickle.loads(task.read_bytes())
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    open_group("gloo")
    found = function(*arguments)
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(found))


if __name__ == "__main__":
    _answer_as_rank(Path(sys.argv[1]))
