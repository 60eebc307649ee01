"""The program of one local rank, started by `launch.py`: reads its task from standard input.

Standard input stays open for as long as the launcher lives. When it closes the rank ends, so a
launcher that is killed leaves no orphans.
"""

import importlib
import json
import os
import pickle
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from shardwise.children import end_when_closed
from shardwise.errors import UserError

# How gloo, the store and NCCL say that another rank has gone.
_LOST_PEER = re.compile(
    r"connection (closed|reset|refused|aborted)|closed by peer|broken pipe"
    r"|remote process exited|failed to recv|socket timeout",
    re.IGNORECASE,
)


def call(target: str, args: tuple[Any, ...]) -> None:
    """Import and call `target`, written "module:function"."""
    module, _, name = target.partition(":")
    getattr(importlib.import_module(module), name)(*args)


def main() -> None:
    """Run the task; a rank that fails leaves a record of when and why."""
    # Ctrl-C reaches the whole process group; the launcher alone answers it, and ends the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    task = pickle.load(os.fdopen(os.dup(0), "rb", buffering=0))
    end_when_closed(0)
    sys.path[:] = task["path"]
    try:
        call(task["target"], task["args"])
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        _fail(Path(task["record"]), stop, code)
    except BaseException as error:
        _fail(Path(task["record"]), error, 1)


def _fail(record: Path, error: BaseException, code: int) -> None:
    """Write the record, then end at once: clean-up would wait for peers that are not coming."""
    text = ""
    if not isinstance(error, SystemExit):
        outer = error.__traceback__  # two frames of this module, then the task's own
        frames = outer.tb_next.tb_next if outer and outer.tb_next else None
        text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    said = {
        "time": time.monotonic(),
        "text": text,
        "lost_peer": isinstance(error, ConnectionError) or bool(_LOST_PEER.search(str(error))),
        "user_error": str(error) if isinstance(error, UserError) else None,
    }
    record.write_text(json.dumps(said), encoding="utf-8")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
