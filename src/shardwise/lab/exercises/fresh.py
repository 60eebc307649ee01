"""Running a measurement in a process of its own, so that what an earlier one left (a CUDA context,
loaded kernels, cached memory) does not flatter it.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from shardwise.children import ChildFailed, describe_end

# Imported once, in the server that the processes are forked from; it touches no device.
_PRELOAD = ["shardwise.lab.exercises.compiling", "shardwise.lab.exercises.overlap"]


class Fresh:
    """A new process that runs `function(pipe, *arguments)`, seen from outside."""

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOAD)
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=function, args=(theirs, *arguments))
        self.process.start()
        theirs.close()

    def receive(self, seconds: float | None = None) -> Any:
        """Its next word, or the failure that ended it; None if `seconds` pass without one."""
        try:
            return self.pipe.recv() if self.pipe.poll(seconds) else None
        except EOFError:
            self.process.join()
            assert self.process.exitcode is not None  # it has ended
            return {"failure": f"its process {describe_end(self.process.exitcode)}"}

    def stop(self) -> None:
        """End it before its answer."""
        self.process.kill()
        self.process.join()


def run_fresh(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` answers in a new process; if that dies, `{"failure": ...}`."""
    process = Fresh(_answer, function, arguments)
    try:
        answer = process.receive()
        process.process.join()
    finally:
        process.stop()
    if isinstance(answer, str):
        raise ChildFailed(f"a measurement failed:\n{answer}")
    return answer


def _answer(
    pipe: Connection, function: Callable[..., dict[str, Any]], arguments: tuple[Any, ...]
) -> None:
    try:
        pipe.send(function(*arguments))
    except Exception:
        pipe.send(traceback.format_exc())
