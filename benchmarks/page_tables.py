"""The tables of the pages, and the figures in their cells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def make_table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    rows = [heads, ["---"] * len(heads), *lines]
    return ["| " + " | ".join(row) + " |" for row in rows]


def show_spread(row: dict[str, Any], name: str = "step") -> str:
    """A median with the spread of what it is the median of."""
    return f"{row[f'{name}_ms']:.1f} ± {row[f'{name}_spread_ms']:.1f}"
