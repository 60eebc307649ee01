"""SIGTERM, by which schedulers end a job: the launcher passes it on, ranks save and end."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.process import BaseProcess

# One request comes more than once: a scheduler signals every process of a job, and the launcher
# passes its own on.
_ECHO_S = 2.0
_AT_ONCE = 128 + signal.SIGTERM  # the exit code, as a shell has it


class StopNotice:
    """While it is open, SIGTERM sets `asked`; a second one, later than the first's echoes, ends the
    process at once.

    A thread hears it, because a rank that waits in a collective runs no signal handler of Python's.
    """

    def __init__(self, rank: int) -> None:
        self.rank, self._asked_at = rank, 0.0

    @property
    def asked(self) -> bool:
        return self._asked_at > 0

    def __enter__(self) -> StopNotice:
        self._hears = threading.current_thread() is threading.main_thread()
        if self._hears:
            reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._before = signal.signal(signal.SIGTERM, lambda *_: None)
            self._fd_before = signal.set_wakeup_fd(self._writer)
            threading.Thread(target=self._listen, args=(reader,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._hears:
            signal.set_wakeup_fd(self._fd_before)
            signal.signal(signal.SIGTERM, self._before)
            os.close(self._writer)

    def _listen(self, reader: int) -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM:
                self._hear()
        os.close(reader)

    def _hear(self) -> None:
        now = time.monotonic()
        if not self.asked:
            self._asked_at = now
            self._say("saves at the end of this step, and ends")
        elif now > self._asked_at + _ECHO_S:
            self._say("ends at once")
            os._exit(_AT_ONCE)

    def _say(self, text: str) -> None:
        told = f"shardwise: rank {self.rank} was told by SIGTERM: {text}"
        print(told, file=sys.stderr, flush=True)


class PassedOn:
    """Whether the launcher was told to end."""

    asked = False


@contextmanager
def passing_on(processes: Sequence[BaseProcess]) -> Iterator[PassedOn]:
    """SIGTERM to this process goes to these, which it has started; without any, it ends this."""
    passed = PassedOn()
    if not processes or threading.current_thread() is not threading.main_thread():
        yield passed
        return

    def pass_on(*_: object) -> None:
        passed.asked = True
        for process in processes:
            if process.pid is not None and process.exitcode is None:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, pass_on)
    try:
        yield passed
    finally:
        signal.signal(signal.SIGTERM, before)
