"""README's code runs, and measured figures of the pages are what the committed results say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardwise.lab.attention.seed import tables_4_and_5
from shardwise.lab.exercises import seed004
from shardwise.lab.steps.cases import BLOCKS

ROOT = Path(__file__).parents[2]


# What must hold after each example, in the README's order.
AFTER = (
    "from torch.distributed.tensor import DTensor\n"
    "assert all(isinstance(p.grad, DTensor) for p in model.parameters())",
    "assert whole['0.weight'].shape == (256, 64)",
    "assert loaded.step == 20 and loaded.extra == {'epoch': 3}",
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stdout


def load(name: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "benchmarks" / "results" / name).read_text())["rows"]


def words_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


def test_figures_in_sentences_are_the_results() -> None:
    """What a page says in prose, beside its tables."""
    emulated = words_of("docs/emulation.md")
    (row,) = load("emulate-llama8b-h200.json")
    assert (
        f"in {row['peak_bytes'] / 1e9:.1f} GB: {row['step_ms']:.1f} ms a step, of which" in emulated
    )
    assert (
        f"{row['exposed_ms']:.1f} ms exposed; without a network {row['free_step_ms']:.1f}"
        in emulated
    )

    attention = words_of("docs/attention.md")
    rows = {
        tuple(row["case"][key] for key in ("seq", "dim", "kind", "backend")): row
        for row in load("attention-h200.json")
        if row["case"]["sweep"] == "table7" and not row["failure"]
    }
    seeds, plains = [], []
    for (seq, dim, kind, backend), row in rows.items():
        if backend == "triton" and kind != "tf32":
            seeds += [row["ms"][name] / row["seed"][name] for name in row["seed"]]
            plain = rows.get((seq, dim, kind, "plain"))
            if plain and seq >= 1024:
                plains += [row["ms"][name] / plain["ms"][name] for name in row["ms"]]
    assert f"at most {max(seeds):.2f} of the seed's time at every row" in attention
    assert f"at most {max(plains):.2f} of plain torch's" in attention
    long = [rows[131072, dim, kind, "triton"] for kind in ("bf16", "fp32") for dim in (64, 16)]
    times = "{:.1f} and {:.1f} ms in bf16, {:.0f} and {:.1f} ms in fp32"
    assert times.format(*(row["ms"]["both"] for row in long)) in attention
    short = [rows[1024, 128, "tf32", backend]["ms"] for backend in ("triton", "plain")]
    assert "forward {:.3f} against {:.3f} ms".format(*(ms["forward"] for ms in short)) in attention


def test_the_documents_figures_stand_beside_their_own_kind() -> None:
    """Eager times beside compiled ones are of the same table; runs are paired as the document
    pairs them.
    """
    found = {at: tables_4_and_5(*at) for at in ((16, 4096), (128, 16384))}
    eager = [round(row["plain"]["backward"], 1) for row in found.values()]
    compiled = [round(row["compiled"]["backward"], 1) for row in found.values()]
    assert (eager, compiled) == ([4.5, 186.8], [3.4, 189.6])
    assert seed004.DDP_STEPS["overlap"] == {"step": 0.796, "beside": 0.776}
    page = (ROOT / "docs" / "exercises-measured.md").read_text()
    assert re.search(r"\| 128 \| 16,384 \|.*\| 189.612 \| 186.847 \| 240.708 \|", page)
    assert re.search(r"\| `overlap` \|.*\| 796 \| 776 \|", page)


def test_the_pages_say_how_steps_take_turns() -> None:
    """And show both times of a step: with the host, and the device's alone."""
    settings = load("step-h200.json")[0]["settings"]
    each = {2: "two", 3: "three", 4: "four", 5: "five"}
    in_block, blocks = each[-(-settings["steps"] // BLOCKS)], each[BLOCKS]
    assert f"on a GPU in blocks of {in_block} steps" in words_of("README.md")
    assert f"timed for {in_block} steps and freed, {blocks} times" in words_of("docs/benchmarks.md")
    for page in ("README.md", "docs/benchmarks.md"):
        heads = [line for line in (ROOT / page).read_text().splitlines() if "| step |" in line]
        assert len(heads) == 3
        assert all("| device only |" in line and "| reserved |" in line for line in heads)
    for number in (4, 1):
        ours, theirs = load(f"emulate-{number}-h200.json")[:2]
        ratio = f"**{ours['device_ms'] / theirs['device_ms']:.3f}**"
        assert ratio in words_of("README.md") and ratio in words_of("docs/benchmarks.md")
