"""What a benchmark leaves: a JSON file, and a table."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def write_json(
    path: Path, environment: dict[str, Any], command: str, rows: list[dict[str, Any]]
) -> None:
    content = {"environment": environment, "command": command, "rows": rows}
    path.write_text(json.dumps(content, indent=1) + "\n")


def print_table(environment: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """One line per comparison; ratios are ours over the peer's."""
    from rich.table import Table

    table = Table(title="one training step, shardwise against torch")
    for name in ("case", "strategy", "peer"):
        table.add_column(name)
    for name in ("ours ms", "theirs ms", "step", "device", "cpu", "memory", "reserved", "parity"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row["case"],
            row["strategy"],
            row["peer"],
            *(f"{row[s]['step_ms']:.1f} +-{row[s]['step_spread_ms']:.1f}" for s in SIDES),
            *("-" if row[name] is None else f"{row[name]:.2f}" for name in RATIOS),
            "-" if row["parity"] is None else f"{row['parity']:.0e}",
        )
    console = print_on_console(table, environment)
    if any(row["settings"]["network"].startswith("emulated") for row in rows):
        console.print("h200 rows: emulated network; values are fabricated, times are not")


def print_on_console(table: Any, environment: dict[str, Any], width: int = 110) -> Any:
    """Print a table and where its figures are from; gives the console for more lines."""
    from rich.console import Console

    # A pipe has no width of its own; a table cut to 80 columns loses its names.
    console = Console()
    console = console if console.is_terminal else Console(width=width)
    console.print(table)
    place = environment["gpu"] or f"{environment['cpu']}, {environment['cores']} cores"
    console.print(
        f"commit {environment['commit']}, torch {environment['torch']}, {place}", highlight=False
    )
    return console


SIDES = ("ours", "theirs")
RATIOS = ("step_ratio", "device_ratio", "cpu_ratio", "memory_ratio", "reserved_ratio")
