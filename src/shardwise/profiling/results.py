"""What a benchmark leaves: a JSON file, and a table; and such a file read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.errors import UserError


def check_file(option: str, path: Path | None) -> None:
    """Error if nothing can be written there, before anything is measured."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: give the name of a file")


def read_json(path: Path, option: str = "--json", needs: str = "") -> dict[str, Any]:
    """What `write_json` or a `RowFile` wrote, whose rows all have the key `needs`; an error in
    words if the file is none of theirs.
    """
    try:
        text = path.read_bytes().decode("utf-8")
        wrong = _find_fault(json.loads(text), needs) if text.strip() else "empty"
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        wrong = f"not JSON ({error})"
    if wrong:
        raise UserError(
            f"{option} {path} is no result of a benchmark, it is {wrong}: name another file, or "
            "remove this one"
        )
    return dict(json.loads(text))


def _find_fault(found: Any, needs: str) -> str:
    """What keeps a JSON value from being a benchmark's result; nothing if it is one."""
    if not isinstance(found, dict):
        return f"a JSON {type(found).__name__}"
    if not isinstance(found.get("environment"), dict):
        return "without an `environment`"
    rows = found.get("rows")
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        return "without a list of `rows`"
    if needs and not all(needs in row for row in rows):
        return f"another benchmark's (a row has no `{needs}`)"
    return ""


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
    console = print_on_console(table, environment, width=130)
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
