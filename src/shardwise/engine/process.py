"""What a process needs that holds a sharded model, done once: a heap that keeps what the engine
gives back, and an end that waits for gloo's threads.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import time
from pathlib import Path

# glibc's mallopt: from how many bytes on a block has pages of its own, which go back to the system
# with it (32 MiB is the most that glibc takes); and how much may lie free at the heap's end.
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
_LARGEST_BLOCK, _MOST_FREE = 32 * 2**20, 2**31 - 1
# Settings of the user's, which stay as they are.
SETTINGS = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_MAX_")


@functools.cache  # once
def keep_heap() -> bool:
    """Let the C library keep freed memory for the next step. A unit's memory comes and goes in
    every step; what went back to the system would come page by page, each with a fault and zeroed.
    False where the user has set this up, or the C library is not glibc.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or any(name in os.environ for name in SETTINGS):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = ((_MMAP_THRESHOLD, _LARGEST_BLOCK), (_TRIM_THRESHOLD, _MOST_FREE))
    return all([mallopt(name, value) == 1 for name, value in wanted])


_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo"  # how torch names those threads
_NAP_S = 1e-3
_PATIENCE_S = 2.0


@functools.cache  # once
def rest_at_exit() -> None:
    """Let the end of this program wait until gloo's threads have nothing left to do."""
    atexit.register(_wait_until_idle)


def _wait_until_idle() -> None:
    """Sleep, which leaves the lock to whoever waits for it, until all of them sleep too.

    One that waits for another rank sleeps as well, so this never waits for a rank that has gone.
    """
    until, idle = time.monotonic() + _PATIENCE_S, 0
    while idle < 3 and time.monotonic() < until:
        time.sleep(_NAP_S)
        tasks = list(_TASKS.iterdir()) if _TASKS.is_dir() else []
        idle = 0 if any(map(_is_busy, tasks)) else idle + 1


def _is_busy(task: Path) -> bool:
    """Whether a thread of gloo runs, or could run if it got a processor."""
    try:
        name, _, rest = (task / "stat").read_text().partition(") ")
    except OSError:  # it has ended
        return False
    return f"({_NAME}" in name and not rest.startswith("S")
