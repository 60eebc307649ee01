"""The tables and pictures of docs/exercises-measured.md, from the results of the exercises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from page_tables import make_table

from shardwise.lab.attention.seed import tables_4_and_5
from shardwise.lab.exercises import seed004
from shardwise.lab.pictures import draw_memory, draw_overlap

Result = dict[str, Any]


def _join(heads: list[str], lines: list[list[str]]) -> str:
    return "\n".join([*make_table(heads, lines), ""])


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['mean']:.1f} ± {figures['std']:.1f}"


def _seeds_pair(row: dict[str, Any], table: int) -> list[str]:
    for figures in row["seed"]:
        if figures["table"] == table:
            return [f"{figures['forward']:.0f}", f"{figures['backward']:.0f}"]
    return ["", ""]


def make_times(result: Result) -> str:
    """Tables 1 and 2: ms after five steps of warm-up."""
    heads = ["model", "precision", "forward", "backward", "optimizer", "H100 forward",
             "H100 backward", "A100 forward", "A100 backward"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        held = row["by_warmup"]["5"]
        own = [_spread(held[part]) for part in ("forward", "backward", "optimizer")]
        lines.append([row["size"], row["precision"], *own, *_seeds_pair(row, 1),
                      *_seeds_pair(row, 2)])  # fmt: skip
    return _join(heads, lines)


def make_warmup(result: Result) -> str:
    """What is measured with fewer steps of warm-up: ms of forward and backward together."""
    counts = [str(count) for count in result["warmups"]]
    heads = ["model", "precision", "first step", *(f"warm-up {count}" for count in counts)]
    lines = []
    for row in result["rows"]:
        both = [row["by_warmup"][count] for count in counts]
        first = row["ms"]["forward"][0] + row["ms"]["backward"][0]
        sums = [held["forward"]["mean"] + held["backward"]["mean"] for held in both]
        lines.append([row["size"], row["precision"], f"{first:.0f}", *(f"{s:.1f}" for s in sums)])
    return _join(heads, lines)


def make_memory(result: Result) -> str:
    """Table 3, for all sizes: GB at the peak."""
    heads = ["model", "precision", "context", "inference", "forward", "seed's forward",
             "first step", "second step", "seed's step"]  # fmt: skip
    rows = {(r["size"], r["precision"], r["context"], r["mode"]): r
            for r in result["rows"] if "mode" in r}  # fmt: skip
    lines = []
    for size, precision, context in dict.fromkeys(key[:3] for key in rows):
        cells = [size, precision, str(context)]
        for mode in ("inference", "forward", "step"):
            row = rows[size, precision, context, mode]
            if "failure" in row:
                cells += [row["failure"]] * (2 if mode == "step" else 1)
            else:
                cells += [f"{peak['bytes'] / 1e9:.2f}" for peak in row["peaks"]]
            if mode != "inference":
                cells.append(f"{row['seed']['gb']:.2f}" if row["seed"] else "")
        lines.append(cells)
    return _join(heads, lines)


def make_holders(result: Result) -> str:
    """What holds the memory of the largest model at its peaks, GB, and its largest tensors."""
    heads = ["precision", "context", "pass", "parameters", "gradients", "moments", "activations",
             "rest", "largest tensors"]  # fmt: skip
    rows = [row for row in result["rows"] if "mode" in row]
    lines = []
    for row in rows:
        if row["size"] != rows[-1]["size"] or "curve" not in row:
            continue
        for peak in row["peaks"]:
            roles = [peak["roles"][name] for name in heads[3:7]]
            roles.append(peak["bytes"] - sum(roles))
            most = peak["largest"][0]["each"]
            named = [f"{g['count']} x {g['what']}" for g in peak["largest"] if g["each"] == most]
            lines.append([row["precision"], str(row["context"]), peak["pass"],
                          *(f"{value / 1e9:.2f}" for value in roles),
                          f"{most / 2**20:.0f} MiB: {'; '.join(named[:3])}"])  # fmt: skip
    return _join(heads, lines)


def make_compiled(result: Result) -> str:
    """Table 6: ms, eager and compiled."""
    heads = ["model", "compiled", "first call", "forward", "eager", "backward", "eager",
             "whole step", "eager", "seed's forward", "eager", "seed's backward",
             "eager"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        if row["part"] != "model":
            continue
        if "failure" in row:
            lines.append([row["size"], row["scope"], row["failure"], *[""] * 10])
            continue
        cells = [row["size"], row["scope"], f"{row['first_call_s']:.1f} s"]
        for part in ("forward", "backward"):
            cells += [f"{row[side][part]['mean']:.1f}" for side in ("compiled", "eager")]
        cells += [f"{sum(p['mean'] for p in row[side].values()):.1f}"
                  for side in ("compiled", "eager")]  # fmt: skip
        cells += [f"{row['seed'][f'{side}_{part}']:.1f}" for part in ("forward", "backward")
                  for side in ("compiled", "eager")]  # fmt: skip
        lines.append(cells)
    return _join(heads, lines)


def make_compiled_attention(result: Result) -> str:
    """Tables 4 and 5: ms, eager and compiled."""
    heads = ["width", "tokens", "forward", "eager", "backward", "eager", "table 5: backward",
             "eager", "table 4: eager"]  # fmt: skip
    rows = {(r["case"]["dim"], r["case"]["seq"], r["case"]["backend"]): r
            for r in result["rows"] if r["part"] == "attention"}  # fmt: skip
    lines = []
    for dim, seq in dict.fromkeys(key[:2] for key in rows):
        pair = [rows[dim, seq, backend] for backend in ("compiled", "plain")]
        cells = [str(dim), f"{seq:,}"]
        for part in ("forward", "backward"):
            cells += [row["failure"] or f"{row['ms'][part]:.3f}" for row in pair]
        seeds = tables_4_and_5(dim, seq)
        sides = ("compiled", "plain", "alone")
        lines.append([*cells, *(f"{seeds[side]['backward']:.3f}" for side in sides)])
    return _join(heads, lines)


def make_overlap(result: Result) -> str:
    """With the host in the step, then by the device with the host ahead."""
    names = ("step_ms", "free_step_ms", "host_ms", "device_ms", "free_device_ms", "above_ms",
             "exposed_ms", "communication_ms")  # fmt: skip
    heads = ["reduce", "messages", "step", "free network", "host", "device", "its free network",
             "difference", "exposed", "communication", "document's step",
             "its `naive` of the same exercise", "its communication"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        seed = seed004.DDP_STEPS[row["reduce"]]
        seeds = (seed.get(name) for name in ("step", "beside", "communication"))
        lines.append([f"`{row['reduce']}`", str(len(row["messages"])),
                      *(f"{row[name]:.1f}" for name in names),
                      *("" if s is None else f"{s * 1e3:.0f}" for s in seeds)])  # fmt: skip
    return _join(heads, lines)


TABLES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "exercise-times": ("forward-backward-h200.json", make_times),
    "exercise-warmup": ("forward-backward-h200.json", make_warmup),
    "exercise-memory": ("memory-h200.json", make_memory),
    "exercise-holders": ("memory-h200.json", make_holders),
    "exercise-compiled": ("compile-h200.json", make_compiled),
    "exercise-compiled-attention": ("compile-h200.json", make_compiled_attention),
    "exercise-overlap": ("overlap-h200.json", make_overlap),
}
PICTURES: dict[str, tuple[str, Callable[[Result], str]]] = {
    "docs/images/memory-2.7b.svg": (
        "memory-h200.json",
        lambda result: draw_memory(result["rows"]),
    ),
    "docs/images/overlap-xl.svg": (
        "overlap-h200.json",
        lambda result: draw_overlap(result["rows"]),
    ),
}
