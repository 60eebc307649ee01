"""Write the measured tables of README.md and docs/benchmarks.md from benchmarks/results.

python benchmarks/tables.py            rewrites the tables
python benchmarks/tables.py --check    fails if a table is not what the results give
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ("step-cpu.json", "step-h200.json")
PAGES = ("README.md", "docs/benchmarks.md")
BEGIN, END = "<!-- table: step -->\n", "<!-- end -->\n"


def make_table() -> str:
    lines = [
        "| case | strategy | against | ours | theirs | step | cpu | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    notes = []
    for name in RESULTS:
        result = json.loads((ROOT / "benchmarks" / "results" / name).read_text())
        for row in result["rows"]:
            ours, theirs = row["ours"], row["theirs"]
            lines.append(
                f"| `{row['case']}` | {row['strategy']} | `{row['peer']}` "
                f"| {ours['step_ms']:.1f} ± {ours['step_spread_ms']:.1f} ms "
                f"| {theirs['step_ms']:.1f} ± {theirs['step_spread_ms']:.1f} ms "
                f"| **{row['step_ratio']:.2f}** | {row['cpu_ratio']:.2f} "
                f"| {row['memory_ratio']:.2f} |"
            )
        facts = result["environment"]
        hardware = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
        notes.append(f"`{name}`: {hardware}, torch {facts['torch']}, commit {facts['commit']}")
    return "\n".join([*lines, "", "; ".join(notes) + ".", ""])


def main() -> int:
    table, stale = make_table(), []
    for name in PAGES:
        page = ROOT / name
        text = page.read_text()
        head, _, rest = text.partition(BEGIN)
        _, _, tail = rest.partition(END)
        fresh = head + BEGIN + table + END + tail
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(fresh)
    if "--check" in sys.argv and stale:
        print(f"tables differ from benchmarks/results: {stale}; run python benchmarks/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
