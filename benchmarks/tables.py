"""Write the measured tables of README.md and docs from benchmarks/results.

python benchmarks/tables.py            rewrites the tables
python benchmarks/tables.py --check    fails if a table is not what the results give
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import exercise_tables

ROOT = Path(__file__).parent.parent
STEP = ("step-cpu.json", "step-h200.json")
DROPIN = ("step-cpu-dropin.json", "step-h200-dropin.json")
END = "<!-- end -->\n"


def load(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())


def note(name: str) -> str:
    """Where and with what a result was measured."""
    found = load(name)
    facts = found["environment"]
    hardware = facts.get("gpu") or f"{facts['cpu']}, {facts['cores']} cores"
    others = {row["commit"] for row in found["rows"] if "commit" in row} - {facts["commit"]}
    commits = " and ".join([facts["commit"], *sorted(others)])
    return f"`{name}`: {hardware}, torch {facts['torch']}, commit {commits}"


def make_step_table(results: tuple[str, ...]) -> str:
    lines = [
        "| case | strategy | against | ours | theirs | step | cpu | memory |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in results:
        for row in load(name)["rows"]:
            ours, theirs = row["ours"], row["theirs"]
            lines.append(
                f"| `{row['case']}` | {row['strategy']} | `{row['peer']}` "
                f"| {ours['step_ms']:.1f} ± {ours['step_spread_ms']:.1f} ms "
                f"| {theirs['step_ms']:.1f} ± {theirs['step_spread_ms']:.1f} ms "
                f"| **{row['step_ratio']:.2f}** | {row['cpu_ratio']:.2f} "
                f"| {row['memory_ratio']:.2f} |"
            )
    return "\n".join([*lines, "", "; ".join(map(note, results)) + ".", ""])


def make_attention_table() -> str:
    """TFLOP/s with 16 heads, and what they are of torch's flash and of cuDNN."""
    result = load("attention-h200.json")
    rows = {
        (r["case"]["dim"], r["case"]["seq"], r["case"]["backend"]): r["tflops"]
        for r in result["rows"]
        if r["case"]["sweep"] == "heads" and not r["failure"]
    }
    lines = [
        "| width | tokens | forward | / flash | / cuDNN | forward + backward | / flash | / cuDNN "
        "| of the product |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for dim, seq, backend in rows:
        if backend != "triton":
            continue
        ours = rows[dim, seq, "triton"]
        cells = [f"{dim}", f"{seq:,}"]
        for name in ("forward", "both"):
            cells.append(f"{ours[name]:.0f}")
            cells += [f"{ours[name] / rows[dim, seq, b][name]:.2f}" for b in ("flash", "cudnn")]
        cells.append(f"{ours['both'] / result['ceilings_tflops']['bf16']:.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", note("attention-h200.json") + ".", ""])


def make_attention_step_table() -> str:
    """Thousands of tokens per second of a training step."""
    result = load("attention-step-h200.json")
    shapes = list(dict.fromkeys((r["batch"], r["seq"]) for r in result["rows"]))
    rates = {
        (r["backend"], r["batch"], r["seq"]): r.get("tokens_per_second") for r in result["rows"]
    }
    lines = [
        "| backend | " + " | ".join(f"{b} x {t:,}" for b, t in shapes) + " |",
        "|---" * (len(shapes) + 1) + "|",
    ]
    for backend in dict.fromkeys(r["backend"] for r in result["rows"]):
        cells = (rates[backend, *shape] for shape in shapes)
        words = ("out of memory" if rate is None else f"{rate / 1e3:.0f} k" for rate in cells)
        lines.append(f"| {backend} | " + " | ".join(words) + " |")
    return "\n".join([*lines, "", note("attention-step-h200.json") + ".", ""])


def make_exercise_table(name: str, make: Callable[[Any], str]) -> str:
    return "\n".join([make(load(name)), note(name) + ".", ""])


TABLES = {
    "step": lambda: make_step_table(STEP),
    "step-dropin": lambda: make_step_table(DROPIN),
    "attention": make_attention_table,
    "attention-step": make_attention_step_table,
    **{name: partial(make_exercise_table, *how) for name, how in exercise_tables.TABLES.items()},
}
PAGES = {
    "README.md": ["step-dropin", "step"],
    "docs/benchmarks.md": ["step", "step-dropin", "attention", "attention-step"],
    "docs/attention.md": ["attention"],
    "docs/exercises-measured.md": list(exercise_tables.TABLES),
}


def main() -> int:
    stale = []
    for name, tables in PAGES.items():
        page = ROOT / name
        text = fresh = page.read_text()
        for table in tables:
            begin = f"<!-- table: {table} -->\n"
            head, found, rest = fresh.partition(begin)
            if not found:
                sys.exit(f"{name} has no place for the table {table!r}: {begin.strip()}")
            _, _, tail = rest.partition(END)
            fresh = head + begin + TABLES[table]() + END + tail
        if fresh != text:
            stale.append(name)
            if "--check" not in sys.argv:
                page.write_text(fresh)
    for name, (result, draw) in exercise_tables.PICTURES.items():
        picture, fresh = ROOT / name, draw(load(result))
        if not picture.exists() or picture.read_text() != fresh:
            stale.append(name)
            if "--check" not in sys.argv:
                picture.write_text(fresh)
    if "--check" in sys.argv and stale:
        print(f"tables differ from benchmarks/results: {stale}; run python benchmarks/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
