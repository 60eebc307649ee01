"""Local ranks as subprocesses: all of them succeed, or all end and the first failure is shown."""

import contextlib
import json
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise import processor
from shardwise.children import ChildFailed, name_end, usual_cause
from shardwise.errors import UserError
from shardwise.trainer.rank import call

_POLL_S = 0.02
# A rank that fails breaks its peers' connections within milliseconds, so after the first exit a
# moment is given to all that are failing, and then the one that began it is chosen.
_SETTLE_S = 0.3
_TERMINATE_S = 2.0


class RankFailed(ChildFailed):
    """A rank failed; the message holds its traceback, or the signal that killed it."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class _Failure:
    rank: int
    code: int  # of the process: negative for a signal
    time: float = math.inf  # when it raised or exited, where it could still say so
    text: str = ""
    lost_peer: bool = False  # it complains that another rank has gone
    user_error: str | None = None

    def order(self) -> tuple[bool, bool, float]:
        """Sort the likely cause first.

        A signal comes from outside the training, so it began what the peers then saw; but abort is
        how a communication library ends itself when a peer has gone. Time alone would not do: the
        first rank may close its connections, as it unwinds, before it can say that it failed.
        """
        killed = self.code < 0 and -self.code != signal.SIGABRT
        return not killed, self.lost_peer, self.time


def joined() -> bool:
    """Tell whether a launcher such as torchrun (or `run_ranks`) has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(target: str, args: tuple[Any, ...], nproc: int) -> None:
    """Call `target` ("module:function") with `args` on `nproc` local ranks, and wait for them.

    Under torchrun it is called in this process, which is a rank already. Otherwise: start the
    ranks, each with the environment torch.distributed reads; on the first failure end the others
    and raise RankFailed, or UserError where that is what the rank raised. None is left running.
    """
    if joined():
        world = int(os.environ["WORLD_SIZE"])
        if nproc not in (1, world):
            raise UserError(
                f"run.nproc is {nproc}, but torchrun has started {world} ranks already: leave out "
                f"--nproc, or run without torchrun"
            )
        call(target, args)
        return
    processor.settle()
    with tempfile.TemporaryDirectory(prefix="shardwise-") as folder:
        records = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
        processes: list[subprocess.Popen[bytes]] = []
        try:
            port = _free_port()
            for rank, record in enumerate(records):
                processes.append(_start(rank, nproc, port, target, args, record))
            _wait(processes, records)
        finally:
            _end(processes)


def _start(
    rank: int, nproc: int, port: int, target: str, args: tuple[Any, ...], record: Path
) -> subprocess.Popen[bytes]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environment = {
        "OMP_NUM_THREADS": str(max(1, (cores or 1) // nproc)),
        **os.environ,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "shardwise.trainer.rank"], stdin=subprocess.PIPE, env=environment
    )
    task = {"target": target, "args": args, "path": sys.path, "record": str(record)}
    assert process.stdin is not None  # asked for above
    with contextlib.suppress(BrokenPipeError):  # it has died already: its exit code will tell
        process.stdin.write(pickle.dumps(task))
        process.stdin.flush()
    return process


def _wait(processes: list[subprocess.Popen[bytes]], records: list[Path]) -> None:
    """Return when all ranks have ended well; raise for the rank that failed first."""
    while True:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        if any(codes):
            break
        time.sleep(_POLL_S)
    time.sleep(_SETTLE_S)
    failures = [
        _read_failure(rank, process.poll(), record)
        for rank, (process, record) in enumerate(zip(processes, records, strict=True))
    ]
    first = min((failure for failure in failures if failure), key=_Failure.order)
    if first.user_error is not None:
        raise UserError(first.user_error)
    raise RankFailed(first.rank, _explain(first, len(processes)))


def _read_failure(rank: int, code: int | None, record: Path) -> _Failure | None:
    if record.exists() and code is not None:
        said = json.loads(record.read_text(encoding="utf-8"))
        return _Failure(rank, code, **said)
    return _Failure(rank, code) if code else None


def _explain(failure: _Failure, nproc: int) -> str:
    who = f"rank {failure.rank} of {nproc}"
    others = "; the other ranks were ended" if nproc > 1 else ""
    if failure.text:
        return f"{who} failed{others}:\n{failure.text}"
    cause = usual_cause(failure.code)
    if failure.code == -signal.SIGKILL:
        cause += (
            ": lower data.batch or data.seq, set model.checkpoint=nonreentrant, shard more "
            "(--plan zero3), or use a machine with more memory"
        )
    return f"{who} {name_end(failure.code)}{others}" + (f" ({cause})" if cause else "")


def _end(processes: list[subprocess.Popen[bytes]]) -> None:
    """End what still runs: politely, then by force; reap all."""
    for process in processes:
        if process.poll() is None:
            process.terminate()
    deadline = time.monotonic() + _TERMINATE_S
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()  # type: ignore[union-attr]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
