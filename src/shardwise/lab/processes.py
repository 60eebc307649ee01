"""Measuring in processes of their own: ranks of a group, or one that starts afresh, so that what an
earlier measurement left (a CUDA context, loaded kernels, cached memory) does not flatter it.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.children import ChildFailed, describe_end
from shardwise.emulation.run import join_fake_group
from shardwise.profiling.timing import Sample, Step, time_on_host
from shardwise.trainer.group import open_group
from shardwise.trainer.launch import start_ranks

# Imported once, in the server that the processes are forked from; it touches no device.
_PRELOAD = [
    "shardwise.lab.exercises.compiling",
    "shardwise.lab.exercises.overlap",
    "shardwise.lab.steps.compare",
]


def ask_ranks(
    function: Callable[..., Any],
    *arguments: Any,
    world: int,
    processes: int | None = None,
    backend: str = "gloo",
) -> Any:
    """What `function(*arguments)` answers on rank 0 of `world` new ranks, as JSON gives it back.
    The backend "fake" sends nothing and needs fewer `processes`.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "answer.json"
        shared = (function, arguments, world, backend, file)
        start_ranks(_answer_as_rank, shared, processes or world)
        return json.loads(file.read_text())


def _answer_as_rank(
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    world: int,
    backend: str,
    file: Path,
) -> None:
    torch.set_num_threads(1)
    # The fake backend leaves garbage in what it gathers; denormal numbers there would cost time.
    torch.set_flush_denormal(True)
    if backend == "fake":
        join_fake_group(0, world)
    else:
        open_group(backend)
    answer = function(*arguments)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(answer))
    dist.destroy_process_group()


def time_on_ranks(step: Step) -> Sample:
    """Time a step that all ranks begin together: it is over when its slowest rank is."""
    sample = time_on_host(dist.barrier)(step)
    times = torch.tensor([sample.step_ms, sample.cpu_ms], dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return Sample(*times.tolist())


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


def explain_failure(error: BaseException) -> str:
    """An out-of-memory is a result; the rest is named."""
    message = str(error)
    if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in message:
        return "out of memory"
    return f"{type(error).__name__}: {message[:200]}"
