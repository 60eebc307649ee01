"""Write the measured tables of README.md and docs from benchmarks/results.

python benchmarks/tables.py            rewrites the tables
python benchmarks/tables.py --check    fails if a table is not what the results give
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import exercise_tables
import results_page
import static_tables
import step_tables
import user_table
from page_tables import make_table

from shardwise.chaos import report as chaos
from shardwise.lab import levers
from shardwise.lab.accuracy import user_page
from shardwise.lab.attention import untuned

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
END = "<!-- end -->\n"


def load(name: str) -> Any:
    return json.loads((RESULTS / name).read_text())


def note(*names: str) -> str:
    """Where and with what results were measured, those of one place and commit together."""
    places: dict[str, list[str]] = {}
    for name in names:
        places.setdefault(_place(name), []).append(f"`{name}`")
    return "; ".join(f"{', '.join(named)}: {place}" for place, named in places.items())


def _place(name: str) -> str:
    """Files from before `virtual` was recorded are all of shared virtual machines."""
    found = load(name)
    facts = found["environment"]
    host = f"{facts['cpu']}, {facts['cores']} cores"
    host += " of a shared virtual machine" if facts.get("virtual", True) else ""
    hardware = f"{facts['gpu']}, host {host}" if facts.get("gpu") else host
    others = {row["commit"] for row in found["rows"] if "commit" in row} - {facts["commit"]}
    commits = " and ".join([facts["commit"], *sorted(others)])
    return f"{hardware}, torch {facts['torch']}, commit {commits}"


def finish(heads: Sequence[str], lines: Sequence[Sequence[str]], name: str) -> str:
    return "\n".join([*make_table(heads, lines), "", note(name) + ".", ""])


def make_attention_table() -> str:
    """TFLOP/s with 16 heads, and what they are of torch's flash and of cuDNN."""
    result = load("attention-h200.json")
    rows = {
        (r["case"]["dim"], r["case"]["seq"], r["case"]["backend"]): r["tflops"]
        for r in result["rows"]
        if r["case"]["sweep"] == "heads" and not r["failure"]
    }
    heads = ["width", "tokens", "forward", "/ flash", "/ cuDNN", "forward + backward", "/ flash",
             "/ cuDNN", "of the product"]  # fmt: skip
    lines = []
    for dim, seq, backend in rows:
        if backend != "triton":
            continue
        ours = rows[dim, seq, "triton"]
        cells = [f"{dim}", f"{seq:,}"]
        for name in ("forward", "both"):
            cells.append(f"{ours[name]:.0f}")
            cells += [f"{ours[name] / rows[dim, seq, b][name]:.2f}" for b in ("flash", "cudnn")]
        cells.append(f"{ours['both'] / result['ceilings_tflops']['bf16']:.0%}")
        lines.append(cells)
    return finish(heads, lines, "attention-h200.json")


def make_attention_step_table() -> str:
    """Thousands of tokens per second of a training step."""
    result = load("attention-step-h200.json")
    shapes = list(dict.fromkeys((r["batch"], r["seq"]) for r in result["rows"]))
    rates = {
        (r["backend"], r["batch"], r["seq"]): r.get("tokens_per_second") for r in result["rows"]
    }
    heads = ["backend", *(f"{b} x {t:,}" for b, t in shapes)]
    lines = []
    for backend in dict.fromkeys(r["backend"] for r in result["rows"]):
        cells = (rates[backend, *shape] for shape in shapes)
        words = ("out of memory" if rate is None else f"{rate / 1e3:.0f} k" for rate in cells)
        lines.append([backend, *words])
    return finish(heads, lines, "attention-step-h200.json")


def make_one_head_table() -> str:
    """One head of width 128, both passes: ms, the seed's on an H100 in brackets, and MiB."""
    rows = {
        (r["case"]["seq"], r["case"]["kind"], r["case"]["backend"]): r
        for r in load("attention-h200.json")["rows"]
        if r["case"]["sweep"] == "table7" and r["case"]["dim"] == 128 and not r["failure"]
    }

    def cell(seq: int, kind: str, backend: str) -> str:
        row = rows.get((seq, kind, backend))
        if row is None:
            return ""
        seed = row["seed"].get("both") if (kind, backend) in sides[:3:2] else None
        return f"{row['ms']['both']:.3g}" + (f" ({seed:.3g})" if seed else "")

    def bytes_of(seq: int, kind: str, backend: str) -> str:
        row = rows.get((seq, kind, backend))
        return f"{row['peak_bytes'] / 2**20:,.0f}" if row else "-"

    sides = [
        (kind, backend) for kind in ("bf16", "fp32", "tf32") for backend in ("triton", "plain")
    ]
    heads = ["tokens", "bf16", "plain", "fp32", "plain", "tf32", "plain", "MiB: bf16", "fp32",
             "plain fp32"]  # fmt: skip
    lines = []
    for seq in sorted({key[0] for key in rows}):
        cells = [f"{seq:,}", *(cell(seq, *side) for side in sides)]
        cells += [bytes_of(seq, *side) for side in (sides[0], sides[2], sides[3])]
        lines.append(cells)
    return finish(heads, lines, "attention-h200.json")


def make_plain_attention_table() -> str:
    """Tables 4 and 5 at their longest: ms of both passes and the peak beyond the inputs."""
    found = [r for r in load("attention-h200.json")["rows"] if r["case"]["sweep"] == "tables45"]
    longest = max(r["case"]["seq"] for r in found)
    heads = ["width", "ours", "", "compiled", "", "eager", ""]
    lines = []
    for dim in sorted({r["case"]["dim"] for r in found}):
        cells = [str(dim)]
        for backend in ("triton", "compiled", "plain"):
            (row,) = (r for r in found if (r["case"]["dim"], r["case"]["seq"]) == (dim, longest)
                      and r["case"]["backend"] == backend)  # fmt: skip
            cells += [f"{row['ms']['both']:.1f} ms", f"{row['peak_bytes'] / 2**20:,.0f} MiB"]
        lines.append(cells)
    return finish(heads, lines, "attention-h200.json")


UNTUNED = "attention-untuned-h200.json"


def untuned_rows() -> list[dict[str, Any]]:
    """Those that were measured; none before there is a file."""
    if not (RESULTS / UNTUNED).exists():
        return []
    return [row for row in load(UNTUNED)["rows"] if row["failure"] is None]


def not_measured() -> str:
    command = f"shardwise bench attention --shapes untuned --json benchmarks/results/{UNTUNED}"
    return f"Not measured yet: `{command}` on an H200 makes this.\n"


def make_default_table() -> str:
    """How far the default is from the fastest backend, by kind of shapes; and the worst shapes."""
    rows = untuned_rows()
    if not rows:
        return not_measured()
    lines = []
    for group, words in (
        ("drawn", "drawn"),
        ("named", "named before"),
        ("grid", "grid"),
        ("", "all"),
    ):
        found = untuned.sum_up([r for r in rows if group in ("", r["shape"]["group"])])
        if found:
            of = [found[name] for name in untuned.PASSES]
            pairs = ((f"{e['within']} of {e['shapes']}", f"{e['worst']:.2f}") for e in of)
            lines.append([words, *chain.from_iterable(pairs)])
    heads = ["shapes", "forward: within 3 %", "at worst", "both: within 3 %", "at worst"]
    far = [
        f"{untuned.Shape(**row['shape']).sizes} {name}, {row[name]['chosen']} for "
        f"{row[name]['fastest']}: {row[name]['ratio']:.2f}"
        for row in rows for name in untuned.PASSES if row[name]["ratio"] > untuned.WITHIN
    ]  # fmt: skip
    far += [
        f"{untuned.Shape(**row['shape']).sizes} not measured: {row['failure']}"
        for row in load(UNTUNED)["rows"] if row["failure"] is not None
    ]  # fmt: skip
    table = finish(heads, lines, UNTUNED)
    return table + ("\nPast 3 %: " + "; ".join(far) + ".\n" if far else "")


def make_against_cudnn_table() -> str:
    """The kernels' own rate against cuDNN's, by width, from 2,048 tokens on, without windows."""
    lines, ratios = [], dict[tuple[int, str], list[float]]()
    for row in sorted(untuned_rows(), key=lambda row: (row["shape"]["dim"], row["shape"]["seq"])):
        shape = untuned.Shape(**row["shape"])
        rates = {name: row[name]["tflops"] for name in untuned.PASSES}
        both_ran = all({"triton", "cudnn"} <= set(rate) for rate in rates.values())
        if shape.dim not in untuned.GRID_WIDTHS or shape.seq < 2048 or not both_ran:
            continue
        heads = f"{shape.batch} x {shape.heads}"
        heads += f" ({shape.kv_heads} kv)" if shape.kv_heads != shape.heads else ""
        cells = [f"{shape.dim}", f"{shape.seq:,}", heads, shape.mask]
        for name, rate in rates.items():
            ratio = rate["triton"] / rate["cudnn"]
            ratios.setdefault((shape.dim, name), []).append(ratio)
            cells += [f"{rate['triton']:.0f}", f"{rate['cudnn']:.0f}", f"{ratio:.2f}"]
        lines.append(cells)
    if not lines:
        return not_measured()
    words = [
        f"width {width} {name}: {min(found):.2f} to {max(found):.2f}"
        for (width, name), found in ratios.items()
    ]
    columns = ["width", "tokens", "batch x heads", "mask", "forward", "cuDNN", "ours / cuDNN",
               "both", "cuDNN", "ours / cuDNN"]  # fmt: skip
    said = "The kernels' rate over cuDNN's, " + "; ".join(words) + ".\n\n"
    return said + finish(columns, lines, UNTUNED)


def make_levers_table() -> str:
    """Steps over a slow network, plain and with each way to send fewer bytes."""
    name = "bytes-h200.json"
    (row,) = (row for row in load(name)["rows"] if row["part"] == "step")
    heads = ["candidate", "step, ms", "of `fully_shard`", "+-", "device alone, ms", "GiB"]
    lines = [
        [
            candidate,
            f"{side['step_ms']:.1f}",
            f"{side['ratio']:.2f}",
            f"{side['ratio_spread']:.2f}",
            f"{side['device_ms']:.1f}",
            f"{side['peak_bytes'] / 2**30:.2f}",
        ]
        for candidate, side in row["candidates"].items()
    ]
    return finish(heads, lines, name)


def make_peers_table() -> str:
    """Steps over FSDP2's on an emulated network, by model, blocks and rate."""
    name = "peers-h200.json"
    told: dict[str, dict[str, str]] = {}
    for row in load(name)["rows"]:
        _, world, model, rate, blocks = row["case"].split("-")
        if row["peer"] == "FSDP2":
            who = f"{PEER_MODELS[model]}, {blocks}, one of {world}"
            figures = f"{row['step_ratio']:.2f}, {row['device_ratio']:.2f}"
            told.setdefault(who, {})[rate] = f"{figures}; {row['reserved_ratio']:.2f}"
    heads = ["", *(f"{rate.removesuffix('GBs')} GB/s" for rate in PEER_RATES)]
    lines = [[who, *(found.get(rate, "") for rate in PEER_RATES)] for who, found in told.items()]
    return finish(heads, lines, name)


PEER_MODELS = {"lm": "language model", "gpt2": "GPT-2 medium", "moe": "experts"}
PEER_RATES = ("300GBs", "100GBs", "50GBs", "25GBs")


def make_as_user_table() -> str:
    names = ("as-user-h200.json", "as-user-gloo.json")
    heads, lines = user_table.make(*(load(name)["rows"] for name in names))
    return "\n".join([*make_table(heads, lines), "", note(*names) + ".", ""])


def make_curves_table() -> str:
    """Where each lever's loss ends, and how far its curve is from the plain one."""
    name = "bytes-gloo.json"
    rows = {row["lever"]: row for row in load(name)["rows"] if row["part"] == "curve"}
    heads = ["lever", "loss", "plain, by seed", "distance / seeds' spread", "points outside"]
    lines = []
    for lever, row in rows.items():
        found = levers.compare_curve(row, rows["plain"])
        span = "{:.3f} to {:.3f}".format(*found["span"])
        apart = f"{found['distance'] / found['spread']:.2f}"
        lines.append([lever, f"{found['end']:.3f}", span, apart, f"{found['beyond']:.0%}"])
    return finish(heads, lines, name)


def make_of_steps(make: step_tables.Make, names: tuple[str, ...]) -> str:
    return "\n".join([*make(load, names), "", note(*names) + ".", ""])


def make_exercise_table(name: str, make: Callable[[Any], str]) -> str:
    return "\n".join([make(load(name)), note(name) + ".", ""])


def make_of_static(
    name: str, make: Callable[[static_tables.Result], list[str]], command: str
) -> str:
    if not (RESULTS / name).exists():
        told = f"shardwise bench {command} --json benchmarks/results/{name} --resume"
        return f"Not measured yet: `{told}` on an H200 makes this.\n"
    return "\n".join([*make(load(name)), "", note(name) + ".", ""])


def make_chaos_table() -> str:
    """Every class of faults, and what became of them."""
    result = load("chaos-cpu.json")
    heads, lines = chaos.lines_of(result)
    return "\n".join([f"{chaos.sum_up(result)}.", "", finish(heads, lines, "chaos-cpu.json")])


TABLES = {
    "chaos": make_chaos_table,
    "attention": make_attention_table,
    "attention-head": make_one_head_table,
    "attention-default": make_default_table,
    "attention-against-cudnn": make_against_cudnn_table,
    "attention-plain": make_plain_attention_table,
    "attention-step": make_attention_step_table,
    "levers": make_levers_table,
    "lever-curves": make_curves_table,
    "peers-emulated": make_peers_table,
    "as-user": make_as_user_table,
    **{name: partial(make_of_steps, *how) for name, how in step_tables.TABLES.items()},
    **{name: partial(make_of_static, *how) for name, how in static_tables.TABLES.items()},
    **{name: partial(make_exercise_table, *how) for name, how in exercise_tables.TABLES.items()},
}
PAGES = {
    "README.md": ["as-user", "step-dropin", "step", "step-device"],
    "docs/benchmarks.md": ["step", "step-dropin", "step-device", "attention", "attention-plain",
                           "attention-step", "peers-emulated"],
    "docs/attention.md": ["attention", "attention-default", "attention-against-cudnn",
                          "attention-head"],
    "docs/bytes.md": ["levers", "lever-curves"],
    "docs/emulation.md": ["emulated", "emulated-check"],
    "docs/faults.md": ["chaos"],
    "docs/profiling.md": ["profile"],
    "docs/static_steps.md": list(static_tables.TABLES),
    "docs/exercises-measured.md": list(exercise_tables.TABLES),
}  # fmt: skip


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
    as_user = [load(name) for name in ("as-user-gloo.json", "as-user-h200.json")]
    for name, fresh in {
        "docs/accuracy-as-user.md": user_page.make_page(*as_user),
        "docs/results.md": results_page.make_page(RESULTS, _place),
    }.items():
        if (ROOT / name).read_text() != fresh:
            stale.append(name)
            if "--check" not in sys.argv:
                (ROOT / name).write_text(fresh)
    if "--check" in sys.argv and stale:
        print(f"tables differ from benchmarks/results: {stale}; run python benchmarks/tables.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
