"""docs/results.md: every file of benchmarks/results as its own benchmark shows it.

The tables are those that the command prints on 80 columns, with the document's figures beside and
the sentences that say where the two cannot be compared.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shardwise.lab.benchmark import DOCUMENTS, Benchmark
from shardwise.lab.benchmarks import BENCHMARKS

HEAD = """\
# Results

Made by `python benchmarks/tables.py` from `benchmarks/results/*.json`; a test compares the two.
Every table is what the command below its title prints, from the figures that it wrote: with what
was measured (hosts, the GPU's too, are shared virtual machines: what they limit moves from hour
to hour), versions and commit. Where a document has the same table, its figures stand beside ours.
`shardwise bench` lists all benchmarks; [documents.md](documents.md) says what each repeats and what
differs.

"""


def find_benchmark(command: str) -> Benchmark | None:
    """The benchmark that a command ran; None if it ran none."""
    words = command.split()
    if words[:2] != ["shardwise", "bench"]:
        return None
    return next((each for each in BENCHMARKS if each.name == words[2]), None)


def show(benchmark: Benchmark, result: dict[str, Any]) -> str:
    """What the benchmark prints of a file."""
    module = importlib.import_module(f"shardwise.lab.{benchmark.module}")
    facts = {key: value for key, value in result.items() if key != "rows"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        module.show(result["rows"], facts)
    return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())


def make_page(folder: Path, place_of: Callable[[str], str]) -> str:
    """The whole page; `place_of` says where a file was measured, and at which commit."""
    shown: dict[str, list[str]] = {key: [] for key in DOCUMENTS}
    elsewhere = []
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        benchmark = find_benchmark(result.get("command", ""))
        if benchmark is None:
            elsewhere.append(f"- `{path.name}`: `{result.get('command') or 'no command'}`")
            continue
        shown[benchmark.document] += [
            f"### {benchmark.name}: {benchmark.summary}",
            "",
            f"`{result['command']}`, {place_of(path.name)} (`{path.name}`).",
            "",
            "```text",
            show(benchmark, result),
            "```",
            "",
        ]
    lines = [HEAD.rstrip("\n"), ""]
    for key, sections in shown.items():
        if sections:
            lines += [f"## {DOCUMENTS[key][0].upper()}{DOCUMENTS[key][1:]}", "", *sections]
    lines += ["## Files of other commands", "", *elsewhere, ""]
    return "\n".join(lines)
