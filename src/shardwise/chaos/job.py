"""One job seen from outside: ranks forked from this process, which has imported all they need;
watched, ended at the deadline, and nothing of them left.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import os
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from shardwise.hosts import ADDRESSES, Hosts
from shardwise.trainer import launch

HANG_S = 30.0
# Helpers of ended ranks are given this long to end too; over a cut link they try for 3 s to tell
# each other.
_ORPHAN_S = 6.0
_POLL_S = 0.004
_DEATH_SIGNAL, _SUBREAPER = 1, 36  # of prctl
CUT = "cut"  # a file of this name in the job's folder: the supervisor cuts the power


@dataclass
class Ended:
    """How a job ended."""

    began: float
    codes: list[int | None]  # by process; negative for a signal
    times: list[float | None]  # when each ended
    hang: bool = False
    orphans: list[str] = field(default_factory=list)  # helpers that outlived their ranks
    said: str = ""  # by all ranks and what they started, rank after rank
    records: list[list[dict[str, Any]]] = field(default_factory=list)


def become_supervisor() -> None:
    """What a rank leaves behind becomes this process's child, so that nothing is overlooked."""
    libc = ctypes.CDLL(None)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL)
    libc.prctl(_SUBREAPER, 1)


def run_ranks(
    main: Callable[[int], None], world: int, folder: Path, hosts: Hosts | None = None, jobs: int = 1
) -> Ended:
    """`main(process)` in so many processes, each as the program of a rank: those of the first job,
    then those of the second. They meet as ranks of `start_ranks` do, those on hosts as torchrun's.
    """
    total = world * jobs
    ended = Ended(time.monotonic(), [None] * total, [None] * total)
    address = ADDRESSES[0] if hosts else "127.0.0.1"
    local = world // 2 if hosts else world
    doors = [socket.create_server(("" if hosts else address, 0)) for _ in range(jobs)]
    ports = [door.getsockname()[1] for door in doors]
    processes: dict[int, int] = {}
    try:
        for process in range(total):
            job, rank = divmod(process, world)
            pid = os.fork()
            if pid == 0:
                os.environ.update(
                    RANK=str(rank), LOCAL_RANK=str(rank % local), WORLD_SIZE=str(world),
                    LOCAL_WORLD_SIZE=str(local), MASTER_ADDR=address, MASTER_PORT=str(ports[job]),
                )  # fmt: skip
                host = None if hosts is None else (hosts, rank // local)
                if hosts is None:
                    door = doors[job] if rank == 0 else None
                    launch.meeting = launch.Meeting(rank, world, ports[job], door)
                for each in doors:
                    if hosts is not None or rank or each is not doors[job]:
                        each.close()
                _be_program(main, process, folder, f"rank-{process}", host)
            processes[pid] = process
        for door in doors:
            door.close()
        _watch(processes, ended, folder)
    finally:
        _kill_children(processes, ended)
    for process in range(total):
        log = folder / f"rank-{process}.log"
        ended.said += log.read_text(errors="replace") if log.exists() else ""
    return ended


def run_alone(main: Callable[[], None], folder: Path, name: str) -> tuple[int | None, str]:
    """One more process, such as one that reads what a job left: its code, None for a hang, and
    what it printed.
    """
    deadline = time.monotonic() + HANG_S
    pid = os.fork()
    if pid == 0:
        _be_program(lambda _: main(), 0, folder, name)
    code = None
    while time.monotonic() < deadline and code is None:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(_POLL_S)
    _kill_children()
    return code, (folder / f"{name}.log").read_text(errors="replace")


def _watch(ranks: dict[int, int], ended: Ended, folder: Path) -> None:
    """Until all ranks and their helpers have ended, or the time is up."""
    deadline = ended.began + HANG_S
    others_until = None
    cut = folder / CUT
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        now = time.monotonic()
        if pid in ranks:
            rank = ranks[pid]
            ended.codes[rank], ended.times[rank] = os.waitstatus_to_exitcode(status), now
        if pid:
            continue
        if None not in ended.codes:
            others_until = others_until or now + _ORPHAN_S
            if now > others_until:
                ended.orphans = [_describe(child) for child in _children()]
                return
        elif now > deadline:
            ended.hang = True
            _show_stacks([pid for pid, rank in ranks.items() if ended.codes[rank] is None])
            return
        elif cut.exists():
            _kill_children(ranks, ended)
            return
        time.sleep(_POLL_S)


def _children() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def _kill_children(ranks: dict[int, int] | None = None, ended: Ended | None = None) -> None:
    """Until there are none: those of the killed become this process's."""
    while children := _children():
        for child in children:
            os.kill(child, signal.SIGKILL)
        for child in children:
            _, status = os.waitpid(child, 0)
            if ranks and ended and child in ranks:
                ended.codes[ranks[child]] = os.waitstatus_to_exitcode(status)
                ended.times[ranks[child]] = time.monotonic()


def _show_stacks(pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    time.sleep(0.3)


def _describe(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone meanwhile"
    return f"{words.strip()[:120]} (state {state})"


# In a rank


def _be_program(
    main: Callable[[int], None],
    process: int,
    folder: Path,
    name: str,
    host: tuple[Hosts, int] | None = None,
) -> NoReturn:
    """From here on this process is a program of its own."""
    code = 70
    try:
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        os.chdir(folder)
        log = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
        sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, file=sys.stderr)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if host is not None:
            host[0].enter(host[1])
        code = _run_as_program(lambda: main(process))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _run_as_program(main: Callable[[], None]) -> int:
    """What Python does with a program: its exit code, after the hooks for an uncaught exception
    and for the end.
    """
    code = 0
    try:
        main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
