"""What a benchmark leaves: a JSON file, and a table; and such a file read again."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from shardwise.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

Row = dict[str, Any]


def check_file(option: str, path: Path | None) -> None:
    """Error if nothing can be written there, before anything is measured."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if path.is_dir():
        raise UserError(f"{option} {path} is a folder: give the name of a file")


def read_json(path: Path, option: str = "--json", needs: str = "") -> dict[str, Any]:
    """What `write_json` wrote, if its rows all have the key `needs` (`a|b`: one of these); an error
    in words if the file is none of these.
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
    if needs and not all(any(key in row for key in needs.split("|")) for row in rows):
        return f"another benchmark's (a row has no `{needs}`)"
    return ""


def write_json(
    path: Path, environment: dict[str, Any], command: str, rows: Iterable[Row], **facts: Any
) -> None:
    """A line for each row, after the facts of all; a file that is there stays whole until then."""
    known = {"environment": environment, "command": command, **facts}
    head = json.dumps(known, indent=1).removesuffix("\n}")
    lines = ",\n".join(json.dumps(row) for row in rows)
    whole = path.with_name(path.name + ".part")
    whole.write_text(f'{head},\n "rows": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    whole.replace(path)


def open_console(width: int) -> Console:
    """A pipe has no width of its own, and a table cut to 80 columns loses its names."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=width)


def print_table(
    title: str,
    heads: Sequence[str],
    lines: Iterable[Sequence[str]],
    environment: dict[str, Any],
    left: Sequence[str] = (),
    width: int = 110,
) -> None:
    """Print lines of cells under their heads (those of `left` to the left, the others to the
    right), and where the figures are from. A long word goes on in the next line: no cell is cut.
    """
    from rich.table import Table

    table = Table(title=title)
    for head in heads:
        justify: Literal["left", "right"] = "left" if head in left else "right"
        table.add_column(head, justify=justify, overflow="fold")
    for line in lines:
        table.add_row(*line)
    console = open_console(width)
    console.print(table)
    if environment:
        console.print(say_where(environment), highlight=False)


def say_where(environment: dict[str, Any]) -> str:
    """Where figures are from."""
    hardware = environment["gpu"] or f"{environment['cpu']}, {environment['cores']} cores"
    return f"commit {environment['commit']}, torch {environment['torch']}, {hardware}"
