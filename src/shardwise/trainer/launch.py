"""Local ranks as processes: all of them succeed, or all end and the first failure is shown."""

import importlib
import json
import math
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from shardwise import processor
from shardwise.children import STOPPED, ChildFailed, Stopped, describe_end
from shardwise.errors import UserError
from shardwise.trainer.stopping import PassedOn, passing_on
from shardwise.watch import rank as watched
from shardwise.watch.hub import LOST_PEER

_LOOPBACK = "127.0.0.1"
Target = str | Callable[..., None]  # "module:function", or the function itself
# What every rank would import by itself, which takes seconds of each: they are forked from a server
# that has done it once and touches no device.
PRELOADED = ["torch.distributed.tensor", "torch._dynamo", "shardwise.trainer.loop"]
# A rank that has done nothing yet takes this much of its own: so many more than fit are a slip.
_LEAST_BYTES = 20e6
_STREAMS = (1, 2)  # standard output and error

# A rank that fails breaks its peers' connections within milliseconds, so after the first exit a
# moment is given to all that are failing, and then the one that began it is chosen.
_SETTLE_S = 0.3
_STOP_S = 10.0  # for the others, once a rank has saved and ended as it was told
_LESS_MEMORY = (
    ": lower data.batch or data.seq, set model.checkpoint=nonreentrant, shard more "
    "(--plan zero3), or use a machine with more memory"
)
# Faults that a launcher does not see; of others it knows more than the watch.
_ONLY_SEEN = ("stopped", "diverged", "lost", "early")


@dataclass(frozen=True)
class Meeting:
    """Where the ranks of one start meet: at a port that other machines do not reach."""

    rank: int
    world: int
    port: int
    listener: socket.socket | None  # of rank 0, bound by the launcher, so that nobody takes it


meeting: Meeting | None = None  # in a rank that `start_ranks` started


class _Surroundings:
    """The launcher's environment, output and error as they are when a rank starts; the server that
    it is forked from has those of an earlier time.
    """

    env: dict[str, str]
    streams: dict[int, Any]  # descriptors on their way; one that is closed is not among them

    def __getstate__(self) -> dict[str, Any]:
        streams = {}
        for fd in _STREAMS:
            with suppress(OSError):
                os.fstat(fd)
                streams[fd] = reduction.DupFd(fd)
        return {"env": dict(os.environ), "streams": streams}

    def enter(self) -> None:
        for name in os.environ.keys() - self.env.keys():
            del os.environ[name]
        os.environ.update(self.env)
        for fd, sent in self.streams.items():
            ours = sent.detach()
            os.dup2(ours, fd)
            os.close(ours)


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

    def order(self) -> tuple[bool, bool, bool, float]:
        """Sort the likely cause first; a rank that its watcher ended is none.

        A signal comes from outside the training, so it began what the peers then saw; but abort is
        how a communication library ends itself when a peer has gone. Time alone would not do: the
        first rank may close its connections, as it unwinds, before it can say that it failed.
        """
        killed = self.code < 0 and -self.code != signal.SIGABRT
        return self.code == watched.ENDED, not killed, self.lost_peer, self.time


def joined() -> bool:
    """Tell whether a launcher such as torchrun (or `run_ranks`) has made this process a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def run_ranks(target: str, args: tuple[Any, ...], nproc: int) -> None:
    """Call `target` ("module:function") with `args` on `nproc` local ranks, and wait for them.

    Under torchrun it is called in this process, which is a rank already.
    """
    if joined():
        world = int(os.environ["WORLD_SIZE"])
        if nproc not in (1, world):
            raise UserError(
                f"run.nproc is {nproc}, but torchrun has started {world} ranks already: leave out "
                f"--nproc, or run without torchrun"
            )
        _call(target, args)
    else:
        start_ranks(target, args, nproc, _LESS_MEMORY, saves=True)


def start_ranks(
    target: Target,
    args: tuple[Any, ...],
    nproc: int,
    less_memory: str = "",
    saves: bool = False,
) -> None:
    """Call `target` on so many new local ranks, each with the environment torch.distributed reads,
    and wait for them. On the first failure end the others and raise RankFailed, or UserError where
    that is what the rank raised; `less_memory` is what to do where memory ran out. If `saves`,
    SIGTERM goes on to the ranks, and Stopped is raised once they have ended by it. None is left
    running.
    """
    most = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _LEAST_BYTES)
    if nproc > most:
        raise UserError(
            f"{nproc} ranks are asked for on this machine, whose memory holds the processes of "
            f"{most} at most: start fewer (--nproc, --ranks), or use more machines"
        )
    processor.settle()
    context = _forking()
    with (
        socket.create_server((_LOOPBACK, 0)) as listener,
        tempfile.TemporaryDirectory(prefix="shardwise-") as folder,
    ):
        records = [Path(folder) / f"rank{rank}.json" for rank in range(nproc)]
        processes: list[BaseProcess] = []
        try:
            for rank, record in enumerate(records):
                port: int = listener.getsockname()[1]
                at = Meeting(rank, nproc, port, listener if rank == 0 else None)
                task = at, target, args, record, _Surroundings()
                processes.append(context.Process(target=_run_rank, args=task))  # type: ignore[attr-defined]
                processes[-1].start()
            listener.close()
            with passing_on(processes if saves else ()) as told:
                _wait(processes, records, less_memory, told)
        finally:
            _end(processes)


def _forking() -> BaseContext:
    """How ranks begin."""
    if sys.platform != "linux":  # elsewhere libraries do not bear a fork
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    # A scheduler's SIGTERM goes to every process of a job. The server outlives it, for it is the
    # one that hears how ranks have ended. The tracker is started first: its start ends with SIGTERM
    # let through.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def _call(target: Target, args: tuple[Any, ...]) -> None:
    if not isinstance(target, str):
        target(*args)
        return
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*args)


# In a rank


def _run_rank(
    at: Meeting, target: Target, args: tuple[Any, ...], record: Path, around: _Surroundings
) -> None:
    """Run the task; a rank that fails leaves a record of when and why."""
    global meeting
    meeting, nproc = at, at.world
    # Ctrl-C reaches the whole process group; the launcher alone answers it, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    threading.Thread(target=_end_with_launcher, daemon=True).start()
    around.enter()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // nproc)))
    os.environ.update(
        RANK=str(at.rank),
        LOCAL_RANK=str(at.rank),
        WORLD_SIZE=str(nproc),
        LOCAL_WORLD_SIZE=str(nproc),
        MASTER_ADDR=_LOOPBACK,
        MASTER_PORT=str(at.port),
    )
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ[watched.VERDICT] = str(_verdict_beside(record))
    _settle_libraries()
    try:
        _call(target, args)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        _fail(record, stop, code)
    except Stopped as stop:
        _fail(record, stop, STOPPED)
    except BaseException as error:
        _fail(record, error, 1)


def _settle_libraries() -> None:
    """What the server has imported knows neither the number of threads nor that it is one of many
    copies.
    """
    if "torch" in sys.modules:
        import torch

        asked = os.environ["OMP_NUM_THREADS"].split(",")[0]
        if asked.isdecimal() and int(asked):  # else OpenMP takes no notice of it either
            torch.set_num_threads(int(asked))
    if "numpy" in sys.modules:
        import numpy

        numpy.random.seed()


def _fail(record: Path, error: BaseException, code: int) -> None:
    """Write the record, then end at once: clean-up would wait for peers that are not coming."""
    text = ""
    if isinstance(error, Stopped):
        text = str(error)
    elif not isinstance(error, SystemExit):
        outer = error.__traceback__  # two frames of this module, then the task's own
        frames = outer.tb_next.tb_next if outer and outer.tb_next else None
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    said = {
        "time": time.monotonic(),
        "text": text,
        "lost_peer": isinstance(error, ConnectionError) or bool(LOST_PEER.search(str(error))),
        "user_error": str(error) if isinstance(error, UserError) else None,
    }
    record.write_text(json.dumps(said), encoding="utf-8")
    if watched.on is not None and isinstance(error, Stopped):
        watched.on.stop()  # all ranks end so
    elif watched.on is not None and not isinstance(error, SystemExit):
        watched.on.raised(error, error.__traceback__)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _end_with_launcher() -> None:
    """A launcher that is killed leaves no orphans."""
    launcher = multiprocessing.parent_process()
    assert launcher is not None  # this process is its child
    launcher.join()
    os._exit(1)


# In the launcher


def _wait(
    processes: list[BaseProcess], records: list[Path], less_memory: str, told: PassedOn
) -> None:
    """Return when all ranks have ended well; raise for the rank that failed first."""
    deadline = math.inf
    while True:
        codes = [process.exitcode for process in processes]  # one look: they change meanwhile
        if any(code not in (None, 0, STOPPED) for code in codes) or time.monotonic() > deadline:
            break
        if None not in codes:
            if STOPPED in codes:
                break
            return
        if STOPPED in codes:  # all ranks end so, in their own time
            deadline = min(deadline, time.monotonic() + _STOP_S)
        running = [p.sentinel for p, code in zip(processes, codes, strict=True) if code is None]
        wait(running, None if deadline == math.inf else _STOP_S)
    time.sleep(_SETTLE_S)
    failures = [
        _read_failure(rank, process.exitcode, record)
        for rank, (process, record) in enumerate(zip(processes, records, strict=True))
    ]
    first = min((failure for failure in failures if failure), key=_Failure.order)
    if first.code == STOPPED:
        raise Stopped(first.text)
    if first.code == -signal.SIGTERM and told.asked:
        raise Stopped("ended by SIGTERM before its first step; there was nothing to save")
    seen = _read_verdict(records[0])
    if seen["kind"] in _ONLY_SEEN:
        raise RankFailed(seen["rank"], seen["text"])
    if first.user_error is not None:
        raise UserError(first.user_error)
    where = f" {seen['place']}" if seen["place"] and seen["rank"] == first.rank else ""
    raise RankFailed(first.rank, _explain(first, len(processes), less_memory, where))


def _verdict_beside(record: Path) -> Path:
    """Where the watch of all ranks leaves what it has seen."""
    return record.with_name("verdict.json")


def _read_verdict(record: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(_verdict_beside(record).read_text(encoding="utf-8"))
    except OSError:
        return {"kind": "", "place": ""}
    return found


def _read_failure(rank: int, code: int | None, record: Path) -> _Failure | None:
    if record.exists() and code is not None:
        said = json.loads(record.read_text(encoding="utf-8"))
        return _Failure(rank, code, **said)
    return _Failure(rank, code) if code else None


def _explain(failure: _Failure, nproc: int, less_memory: str, where: str) -> str:
    who = f"rank {failure.rank} of {nproc}"
    others = f"{where}; the other ranks were ended" if nproc > 1 else ""
    if failure.text:
        return f"{who} failed{others}:\n{failure.text}"
    more = less_memory if failure.code == -signal.SIGKILL else ""
    return f"{who} {describe_end(failure.code, more)}{others}"


def _end(processes: list[BaseProcess]) -> None:
    """End what still runs, and reap all. Not by SIGTERM: it asks ranks to save, with all others."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join()
