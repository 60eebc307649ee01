"""The tables of steps: against torch, on the emulated cluster, under a profile; with the host in
them and on the device alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from page_tables import make_table, show_spread

Result = dict[str, Any]
Load = Callable[[str], Result]

STEP = ("step-cpu.json", "step-h200.json")
DROPIN = ("step-cpu-dropin.json", "step-h200-dropin.json")
EMULATED = ("emulate-4-h200.json", "emulate-1-h200.json")
BEFORE = ("emulate-4-h200-before.json", "emulate-1-h200-before.json")
CHECK = ("emulate-check-h200.json",)
PROFILE = ("profile-h200.json", "profile-cpu.json")
MISSING = "not measured"  # and filled in once a result has it


def make_step(load: Load, names: tuple[str, ...]) -> list[str]:
    """Ours and torch's; ratios with the host in them and on the device alone."""
    heads = ["case", "strategy", "against", "ours", "theirs", "step", "device only", "cpu",
             "memory", "reserved"]  # fmt: skip
    lines = []
    for row in (row for name in names for row in load(name)["rows"]):
        on_gpu = row["settings"]["device"] == "cuda"
        only = {
            name: f"{row[name]:.2f}" if row.get(name) else MISSING if on_gpu else ""
            for name in ("device_ratio", "reserved_ratio")
        }
        lines.append(
            [f"`{row['case']}`", row["strategy"], f"`{row['peer']}`",
             *(f"{show_spread(row[side])} ms" for side in ("ours", "theirs")),
             f"**{row['step_ratio']:.2f}**", only["device_ratio"], f"{row['cpu_ratio']:.2f}",
             f"{row['memory_ratio']:.2f}", only["reserved_ratio"]]
        )  # fmt: skip
    return make_table(heads, lines)


def _pairs(rows: list[Result]) -> list[tuple[Result, Result]]:
    """Rows of shardwise and torch on the same batch and network."""
    found = list(zip(rows[::2], rows[1::2], strict=True))
    for ours, theirs in found:
        assert (ours["engine"], theirs["engine"]) == ("shardwise", "torch")
        assert (ours["batch"], ours["network"]) == (theirs["batch"], theirs["network"])
    return found


def _place(row: Result) -> list[str]:
    rate = float(row["network"].removeprefix("emulated: ")) / 1e9
    return [f"{row['batch']} x {row['sequence']}", f"{rate:.0f}"]


def make_emulated_ratios(load: Load, names: tuple[str, ...]) -> list[str]:
    """What a slow host adds to the ratio, and what is the device's."""
    heads = ["batch", "GB/s", "ours", "theirs", "step", "ours, device", "theirs, device",
             "device only", "memory", "reserved"]  # fmt: skip
    lines = []
    for ours, theirs in _pairs([row for name in names for row in load(name)["rows"]]):
        reserved = MISSING
        if ours.get("reserved_bytes") and theirs.get("reserved_bytes"):
            reserved = f"{ours['reserved_bytes'] / theirs['reserved_bytes']:.2f}"
        lines.append(
            [*_place(ours), f"{show_spread(ours)} ms", f"{show_spread(theirs)} ms",
             f"{ours['step_ms'] / theirs['step_ms']:.2f}",
             f"{ours['device_ms']:.1f} ms", f"{theirs['device_ms']:.1f} ms",
             f"**{ours['device_ms'] / theirs['device_ms']:.3f}**",
             f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}", reserved]
        )  # fmt: skip
    return make_table(heads, lines)


def make_emulated(load: Load, names: tuple[str, ...]) -> list[str]:
    """Exposed communication, measured two ways, in two runs."""
    heads = ["batch", "GB/s", "engine", "step", "device only", "waits", "free network", "exposed",
             "counterfactual", "against exposed", "the run before", "both", "peak",
             "reserved"]  # fmt: skip
    now = [row for name in names for row in load(name)["rows"]]
    before = [row for name in BEFORE for row in load(name)["rows"]]
    lines, far = [], []
    for row, old in zip(now, before, strict=True):
        assert [row[k] for k in ("batch", "network", "engine")] == [
            old[k] for k in ("batch", "network", "engine")
        ]
        apart = [each["counterfactual_ms"] / each["exposed_ms"] - 1 for each in (row, old)]
        sums = [row[name] + old[name] for name in ("counterfactual_ms", "exposed_ms")]
        reserved = row.get("reserved_bytes")
        far += [value for value in apart[:1] if abs(value) > 0.1]
        lines.append(
            [*_place(row), "FSDP2" if row["engine"] == "torch" else row["engine"], show_spread(row),
             f"{row['device_ms']:.1f}", f"{row['waited_ms']:.2f}", f"{row['free_waited_ms']:.2f}",
             *(f"{row[f'{n}_ms']:.2f} ± {row[f'{n}_spread_ms']:.2f}"
               for n in ("exposed", "counterfactual")),
             *(f"{value:+.1%}".replace("%", " %") for value in (*apart, sums[0] / sums[1] - 1)),
             f"{row['peak_bytes'] / 1e9:.2f} GB",
             f"{reserved / 1e9:.2f} GB" if reserved else MISSING]
        )  # fmt: skip
    told = ", ".join(f"{value:+.1%}".replace("%", " %") for value in far) or "none"
    rows_told = f"Of {len(now)} rows, off by more than 10 %: {told}. {_tell_messages(now)}"
    return [*make_table(heads, lines), "", rows_told]


def _tell_messages(rows: list[Result]) -> str:
    """How the collectives of these steps met their model, by kind and size together."""
    errors = sorted(
        (m["taken_ms"] / m["modelled_ms"] - 1, m["most_ms"], m["modelled_ms"] / m["count"],
         m["count"], m["collective"].replace("_", "-"), row["engine"], " x ".join(_place(row)[:1]),
         _place(row)[1])
        for row in rows for m in row["messages"]
    )  # fmt: skip
    near = [error[0] for error in errors if abs(error[0]) <= 0.02]
    far = [
        f"{error:+.1%} for {count} {name}{'s' * (count > 1)} of {engine} at {batch} and {rate} "
        f"GB/s (the longest {most:.2f} ms, modelled {each:.2f})".replace("%", " %", 1)
        for error, most, each, count, name, engine, batch, rate in errors
        if abs(error) > 0.02
    ]
    said = "Collectives inside these steps, taken against modelled, all of one kind and size "
    said += f"together: {len(near)} of {len(errors)} within 2 %"
    return f"{said}; the others {'; '.join(far)}." if far else f"{said}."


def make_check(load: Load, names: tuple[str, ...]) -> list[str]:
    """Collectives alone against the model: the largest error of a median over the networks."""
    sizes = ("idle", "small", "large")
    heads = ["MiB", *(f"{what}: {size}" for what in ("all-reduce", "gather, scatter")
                      for size in sizes)]  # fmt: skip
    rows = [row for name in names for row in load(name)["rows"] if row.get("check")]
    lines = []
    for nbytes in sorted({row["bytes"] for row in rows if "bytes" in row}):
        cells = [f"{nbytes / 2**20:.0f}"]
        for kinds in (("all_reduce",), ("all_gather", "reduce_scatter")):
            for size in sizes:
                errors = [row["error"] for row in rows if row.get("bytes") == nbytes
                          and row["check"] in kinds and row["device"] == size]  # fmt: skip
                cells.append(f"{max(errors, key=abs):+.1%}".replace("%", " %") if errors else "")
        lines.append(cells)
    return make_table(heads, lines)


def make_profile(load: Load, names: tuple[str, ...]) -> list[str]:
    """What a profile costs the steps that it times, and those that it traces."""
    heads = ["case", "off", "on: timed", "ratio", "of rounds", "on: traced", "ratio",
             "marks, off: share of the step"]  # fmt: skip
    lines = [
        [f"`{row['case']}`", f"{show_spread(row['off'])} ms", f"{show_spread(row['on'])} ms",
         f"{row['step_ratio']:.2f}", f"{row['paired_ratio']:.3f} ± {row['paired_spread']:.3f}",
         f"{row['traced_step_ms']:.1f} ms", f"{row['traced_ratio']:.2f}",
         f"{row['marks_per_step']}: {row['share_of_step_off']:.2%}"]
        for name in names for row in load(name)["rows"]
    ]  # fmt: skip
    return make_table(heads, lines)


Make = Callable[[Load, tuple[str, ...]], list[str]]
TABLES: dict[str, tuple[Make, tuple[str, ...]]] = {
    "step": (make_step, STEP),
    "step-dropin": (make_step, DROPIN),
    "step-device": (make_emulated_ratios, EMULATED),
    "emulated": (make_emulated, EMULATED),
    "emulated-check": (make_check, CHECK),
    "profile": (make_profile, PROFILE),
}
