"""Running a measurement in a process of its own, so that what an earlier one left (a CUDA context,
loaded kernels, cached memory) does not flatter it.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

# Imported once, in the server that the processes are forked from; it touches no device.
_PRELOAD = ["shardwise.measurement.exercises.compiling", "shardwise.measurement.exercises.overlap"]


def context() -> multiprocessing.context.ForkServerContext:
    """Processes that start with torch imported and nothing else done."""
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(_PRELOAD)
    return made


def run_fresh(function: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `function` answers in a new process; if that dies, `{"failure": ...}`."""
    try:
        with ProcessPoolExecutor(1, context()) as pool:
            return pool.submit(function, *arguments).result()
    except BrokenProcessPool:
        return {"failure": "its process was killed (out of host memory?)"}
