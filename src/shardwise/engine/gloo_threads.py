"""A program's end: gloo's threads let go of what they moved before the interpreter ends.

A thread of gloo drops its references to a collective's tensors only after it has told the rank that
waits for it. If they are the last ones, it needs the interpreter's lock for that. A thread that
waits for the lock when the interpreter ends is ended there, inside C++ that cannot be unwound, and
the process aborts: "terminate called without an active exception".
"""

from __future__ import annotations

import atexit
import functools
import time
from pathlib import Path

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
        idle = 0 if any(_is_busy(task) for task in _threads()) else idle + 1


def _threads() -> list[Path]:
    return list(_TASKS.iterdir()) if _TASKS.is_dir() else []


def _is_busy(task: Path) -> bool:
    """Whether a thread of gloo runs, or could run if it got a processor."""
    try:
        name, _, rest = (task / "stat").read_text().partition(") ")
    except OSError:  # it has ended
        return False
    return f"({_NAME}" in name and not rest.startswith("S")
