"""Tests of a module without pytest: `python -m tests.gpu.test_NAME`, on a GPU machine without test
tools.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def run_all(module: Mapping[str, Any]) -> None:
    """Call what a module's `globals()` name test_...; the exit code counts the failures."""
    tests: list[Callable[[], None]] = [
        value for name, value in module.items() if name.startswith("test_")
    ]
    failures = 0
    for test in tests:
        began = time.monotonic()
        try:
            test()
            said = "ok"
        except Exception as error:
            failures += 1
            said = f"FAILED {type(error).__name__}: {error}"
        print(f"{test.__name__}: {said} ({time.monotonic() - began:.1f} s)", flush=True)
    sys.exit(failures)
