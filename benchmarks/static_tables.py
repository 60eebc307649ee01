"""The tables of static steps: captured ones and arenas, a soak, and predicted blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from page_tables import make_table, show_spread

Result = dict[str, Any]
GIB = 2**30
# Of the rows of `bench step --cases static`: what each candidate is called in the table.
CANDIDATES = {
    "theirs": "`fully_shard`",
    "theirs, segments that grow": "`fully_shard`, `expandable_segments`",
    "fully_shard, captured": "`fully_shard`, `torch.cuda.graph`",
    "ours, eager": "ours",
    "ours, eager, arena": "ours, arena",
    "ours": "ours, captured",
    "ours, captured, arena": "ours, captured, arena",
}


def make_static(result: Result) -> list[str]:
    """Each candidate's step and memory; ratios are over fully_shard's, eager and captured."""
    heads = ["case", "candidate", "ms", "device", "host", "/ eager", "/ captured", "allocated GiB",
             "reserved", "/ `fully_shard`'s", "/ allocated", "reserved at the end"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        if "failure" in row:
            lines.append([f"`{row['case']}`", row["failure"], *[""] * (len(heads) - 2)])
            continue
        sides = {name: row[name] for name in ("ours", "theirs")} | row["beside"]
        alone = row.get("alone", {})
        for name, words in CANDIDATES.items():
            if name in sides:
                cells = _times(sides, name) + _memory(alone, name)
                lines.append([f"`{row['case']}`", words, *cells])
            elif name in alone:
                lines.append([f"`{row['case']}`", words, *[""] * 5, *_memory(alone, name)])
            elif name in row.get("failures", {}):
                failed = [row["failures"][name], *[""] * (len(heads) - 3)]
                lines.append([f"`{row['case']}`", words, *failed])
    return make_table(heads, lines)


def _times(sides: Result, name: str) -> list[str]:
    side = sides[name]
    device = f"{side['device_ms']:.1f}" if side.get("device_ms") else ""
    over = [
        f"{side['step_ms'] / sides[peer]['step_ms']:.2f}" if peer in sides else ""
        for peer in ("theirs", "fully_shard, captured")
    ]
    return [show_spread(side), device, f"{side['cpu_ms']:.1f}", *over]


def _memory(alone: Result, name: str) -> list[str]:
    found, theirs = alone.get(name, {}), alone.get("theirs", {})
    if "reserved" not in found:
        return [found.get("failure", ""), "", "", "", ""]
    over = f"{found['reserved'] / theirs['reserved']:.2f}" if "reserved" in theirs else ""
    kinds = ("allocated", "reserved", "reserved_at_the_end")
    allocated, reserved, end = (f"{found[kind] / GIB:.2f}" for kind in kinds)
    return [allocated, reserved, over, f"{found['reserved'] / found['allocated']:.2f}", end]


def make_soak(result: Result) -> list[str]:
    """What was reserved at the first look and at the most, and losses against eager ones."""
    heads = ["run", "steps", "captured", "ms", "eager ms", "reserved MiB", "at most", "losses that "
             "differ", "after the last step", "by at most"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        if "failure" in row:
            lines.append([f"`{row['key']}`", row["failure"], *[""] * (len(heads) - 2)])
            continue
        reserved = [sample["reserved"] / 2**20 for sample in row["samples"] if "reserved" in sample]
        looks = [f"{reserved[0]:.1f}", f"{max(reserved):.1f}"] if reserved else ["", ""]
        parts = [row[part] for part in ("head", "tail")]
        lines.append(
            [f"`{row['key']}`", f"{row['steps']:,}", "yes" if row["captured"] else row["reason"],
             f"{row['step_ms']:.2f}", f"{row['eager_ms']:.2f}", *looks,
             *(f"{part['differ']} of {part['steps']:,}" for part in parts),
             f"{max(part['largest'] for part in parts):.1g}"]
        )  # fmt: skip
    return make_table(heads, lines)


def make_arena(result: Result) -> list[str]:
    """Peaks and blocks, predicted and taken."""
    heads = ["model", "about", "peak predicted, GB", "measured", "apart", "block: `explain`",
             "predicted", "taken", "reserved / measured"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        name = [f"`{row['key']}`", row["about"]]
        if "failure" in row:
            lines.append([*name, row["failure"], *[""] * (len(heads) - 3)])
            continue
        peaks, more = [f"{row['predicted_bytes'] / 1e9:.3f}", "", ""], ""
        if "measured_bytes" in row:
            apart = f"{row['difference']:+.2%}".replace("%", " %")
            peaks[1:] = f"{row['measured_bytes'] / 1e9:.3f}", apart
            more = f"{row['reserved_bytes'] / row['measured_bytes']:.2f}"
        kinds = ("said_block_bytes", "predicted_block_bytes", "block_bytes")
        blocks = ["left" if row[kind] is None else f"{row[kind]:,}" for kind in kinds]
        lines.append([*name, *peaks, *blocks, more])
    return make_table(heads, lines)


# The file of each table, what makes it, and the command that makes the file.
TABLES: dict[str, tuple[str, Callable[[Result], list[str]], str]] = {
    "static-steps": ("step-static-h200.json", make_static, "step --cases static"),
    "static-soak": ("soak-h200.json", make_soak, "soak"),
    "static-arena": ("arena-h200.json", make_arena, "arena"),
}
