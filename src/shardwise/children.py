"""Processes that this project starts, and what is said of one that a signal has ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable

from shardwise import processor

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "most often that is the system running out of host memory",
    signal.SIGILL: (
        "the processor refused an instruction, most often one of AMX that it announces and its "
        f"hypervisor forbids: set {processor.LIMIT}={processor.WITHOUT_AMX}"
    ),
    signal.SIGSEGV: (
        "torch, a driver or an extension touched memory that is not its own: "
        "PYTHONFAULTHANDLER=1 shows where"
    ),
    signal.SIGBUS: (
        "most often a file that is mapped into memory could not grow: is /dev/shm, or the disk, "
        "full?"
    ),
    signal.SIGABRT: "a library gave up; what it said stands above",
    signal.SIGFPE: "an integer was divided by zero in compiled code: PYTHONFAULTHANDLER=1 shows it",
    signal.SIGTERM: "somebody ended it: a scheduler, a time limit, another process",
}


STOPPED = 75  # exit code: ended when told to, and saved; EX_TEMPFAIL, run it again
UNREAD = 128 + signal.SIGPIPE  # exit code: whoever read the output left (`| head`)


class Stopped(Exception):
    """The run was told to end, and did; the message says after which step, and what it saved."""


class ChildFailed(Exception):
    """A process that a command started did not end well; the message says which, and how."""


def describe_end(code: int, more: str = "") -> str:
    """How a process ended, by its exit code, which is negative for a signal; what most often brings
    that signal, and `more` about it.
    """
    if code >= 0:
        return f"exited with code {code}"
    try:
        end = f"was killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        end = f"was killed by signal {-code}"
    return f"{end} ({_CAUSES[-code]}{more})" if -code in _CAUSES else end


def say(text: str) -> None:
    """Print; if whoever read it has left (`| head`), nothing is printed from then on."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """What is printed goes nowhere, also what is waiting to be."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def supervise(command: Callable[[], int]) -> int:
    """`command()` in a child of this process, which tells of a signal that ends it.

    Forked before anything is loaded, so it costs a millisecond. Not for ranks, whose launcher
    tells, nor where torch is loaded already, with its threads.
    """
    if "RANK" in os.environ or "torch" in sys.modules or not hasattr(signal, "sigwaitinfo"):
        return command()
    reader, writer = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    watched = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD}
    outside = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, outside)
        os.close(writer)
        threading.Thread(target=_end_with_parent, args=(reader,), daemon=True).start()
        return command()
    os.close(reader)
    ended, status = 0, 0
    while not ended:
        info = signal.sigwaitinfo(watched)
        if info.si_signo == signal.SIGCHLD:
            ended, status = os.waitpid(pid, os.WNOHANG)
        elif info.si_code <= 0:  # from a process, to this one; a terminal's reach the child too
            os.kill(pid, info.si_signo)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        print(f"shardwise: the command {describe_end(code)}", file=sys.stderr, flush=True)
    # What is to be done at exit was inherited by the child, and is done.
    os._exit(code if code >= 0 else 128 - code)


def _end_with_parent(reader: int) -> None:
    """The parent never writes: its end of the pipe closes when it is gone."""
    os.read(reader, 1)
    os._exit(1)
