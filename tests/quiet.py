"""Tests that assert times, or fill the machine, run while no other does: `@pytest.mark.quiet`.

Workers of one run share two locks. Every test passes the gate and holds the room with the others; a
quiet one keeps the gate shut until it has the room to itself.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path


@contextmanager
def _locked(path: Path, kind: int) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, kind)
        yield


@contextmanager
def sharing_the_machine(alone: bool) -> Iterator[None]:
    """While a test runs: with those of the other workers, or with none of them."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:
        yield
        return
    gate, room = (Path(tempfile.gettempdir()) / f"shardwise-{run}-{x}" for x in ("gate", "room"))
    with ExitStack() as held:
        with _locked(gate, fcntl.LOCK_EX):
            held.enter_context(_locked(room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
