"""README's code runs, and its measured tables are what the committed results say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


# What must hold after each example, in the README's order.
AFTER = (
    "from torch.distributed.tensor import DTensor\n"
    "assert all(isinstance(p.grad, DTensor) for p in model.parameters())",
    "assert whole['0.weight'].shape == (256, 64)",
)


def test_the_readme_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    for block, after in zip(blocks, AFTER, strict=True):
        done = subprocess.run(
            [sys.executable, "-c", f"{block}\n{after}\n"],
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr
        assert "explain" not in block or "kept per rank" in done.stdout


def test_the_tables_are_the_results() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
