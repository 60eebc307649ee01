"""What a run leaves: a table, a summary of each class, every failure in full."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwise.chaos.faults import BY_NAME, CONTINUES, KINDS, REFUSED, draw
from shardwise.chaos.judge import Row
from shardwise.chaos.run import run_faults, usable_kinds
from shardwise.children import ChildFailed
from shardwise.profiling.results import print_table, write_json
from shardwise.profiling.timing import describe_environment


def run(arguments: argparse.Namespace, count: int, chosen: Sequence[str]) -> None:
    """Draw the faults, run those that are missing, show and write what became of them."""
    usable, left_out = usable_kinds()
    kinds = [kind for kind in usable if kind.name in chosen]
    for name, why in left_out.items():
        if name in chosen:
            print(f"shardwise: {name} is left out: {why}", file=sys.stderr)
    faults = draw(arguments.seed, count, kinds)
    path: Path | None = arguments.json
    part = None if path is None else path.with_name(path.name + ".rows")
    rows = _read_part(part) if arguments.resume and part is not None else []
    done = {row["number"]: row for row in rows}
    rows = [done[f.number] for f in faults if f.number in done and done[f.number]["kind"] == f.kind]
    began = time.monotonic()
    environment = describe_environment()
    known = {row["number"] for row in rows}
    left = [fault for fault in faults if fault.number not in known]
    if part is not None:
        part.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in run_faults(left, arguments.slots) if left else ():
        rows.append(row)
        if part is not None:
            with part.open("a") as file:
                file.write(json.dumps(row) + "\n")
        _tell(row, len(rows), len(faults), began)
    compare_states(rows)
    result = summarize(rows)
    result |= {"left_out": left_out, "took_s": round(time.monotonic() - began, 1)}
    show(result, environment)
    if path is not None and part is not None:
        write_json(path, environment, _describe(arguments), seed=arguments.seed, **result)
        part.unlink()
    if result["failures"]:
        raise ChildFailed(
            f"{len(result['failures'])} of {len(rows)} faults became something else than expected"
        )


def _describe(arguments: argparse.Namespace) -> str:
    size = f" --faults {arguments.faults}" if arguments.faults else ""
    size = " --full" if arguments.full else size
    return f"shardwise chaos{size} --seed {arguments.seed} --json {arguments.json.name}"


def _read_part(path: Path) -> list[Row]:
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]  # the last one may be cut


def _tell(row: Row, done: int, total: int, began: float) -> None:
    """Progress: every failure at once; else a line that is written over, or one in fifty."""
    seconds = time.monotonic() - began
    progress = f"{done} of {total} faults, {seconds:.0f} s"
    if row["wrong"]:
        where = f"{row['place']}, rank {row['rank']} of {row['world']}, step {row['step']}"
        print(f"{row['kind']} ({where}, fault {row['number']}): {row['wrong'][0]}", file=sys.stderr)
    if sys.stderr.isatty():
        print(f"\r{progress} ", end="" if done < total else "\n", file=sys.stderr, flush=True)
    elif done % 50 == 0 or done == total:
        print(progress, file=sys.stderr, flush=True)


def compare_states(rows: Sequence[Row]) -> None:
    """Jobs of one strategy, world and seed that come to their last step come to one state."""
    ends: dict[tuple[Any, ...], str] = {}
    alike = [
        row for row in rows if row["outcome"] in (CONTINUES, REFUSED) and row["kind"] != "nonfinite"
    ]
    for row in sorted(alike, key=lambda row: (bool(row["wrong"]), row["kind"] != "none")):
        key = row["strategy"], row["world"], row["seed"]
        if ends.setdefault(key, row["state"]) != row["state"]:
            row["wrong"].append("it trained to another state than other jobs of its kind")
            row["wrong_load"] = True


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    seconds = [row["seconds"] for row in rows if row["seconds"] is not None]
    named = [row["named"] for row in rows if "named" in row]
    return {
        "faults": len(rows),
        "classes": len({row["kind"] for row in rows} - {"none"}),
        "hangs": sum(row["hang"] for row in rows),
        "wrong_loads": sum(row["wrong_load"] for row in rows),
        "named": round(sum(named) / max(1, len(named)), 4),
        "detection": spread(seconds),
        "rows": [
            summarize_kind(kind.name, [row for row in rows if row["kind"] == kind.name])
            for kind in KINDS
            if any(row["kind"] == kind.name for row in rows)
        ],
        "failures": [row for row in rows if row["wrong"]],
    }


def summarize_kind(name: str, rows: Sequence[Row]) -> Row:
    kind = BY_NAME[name]
    named = [row["named"] for row in rows if "named" in row]
    places = Counter(row["place"] for row in rows)
    return {
        "class": name,
        "what": kind.what,
        "expected": kind.expected,
        "places": {place: places[place] for place in kind.places if places[place]},
        "faults": len(rows),
        "as_expected": sum(not row["wrong"] for row in rows),
        "named": sum(named) if named else None,
        "detection": spread([row["seconds"] for row in rows if row["seconds"] is not None]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Median, 99th percentile (of the values, the first that 99 % do not exceed) and maximum."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    high = ordered[math.ceil(0.99 * len(ordered)) - 1]
    return {"median": statistics.median(ordered), "p99": high, "max": ordered[-1]}


def lines_of(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The table: its heads, and a line for each class."""
    heads = ["class", "what is done", "where", "expected", "faults", "as expected", "named",
             "median", "p99", "max"]  # fmt: skip
    lines = []
    for row in result["rows"]:
        named = "" if row["named"] is None else f"{row['named']}"
        times = row["detection"] or {}
        cells = [f"{times[name]:.2f} s" if times else "" for name in ("median", "p99", "max")]
        lines.append([row["class"], row["what"], ", ".join(row["places"]), row["expected"],
                      str(row["faults"]), str(row["as_expected"]), named, *cells])  # fmt: skip
    return heads, lines


def sum_up(result: dict[str, Any]) -> str:
    times = result["detection"] or {"median": 0.0, "p99": 0.0, "max": 0.0}
    return (
        f"{result['faults']} faults of {result['classes']} classes: {len(result['failures'])} not "
        f"as expected, {result['hangs']} hangs, {result['wrong_loads']} wrong loads; "
        f"{result['named']:.1%} of the messages name rank and cause; detected after "
        f"{times['median']:.2f} s in the median, {times['p99']:.2f} s at the 99th percentile, "
        f"{times['max']:.2f} s at most"
    )


def show(result: dict[str, Any], environment: dict[str, Any]) -> None:
    heads, lines = lines_of(result)
    keep = [i for i, head in enumerate(heads) if head not in ("what is done", "where")]
    shown = [[line[i] for i in keep] for line in lines]
    print_table("Faults", [heads[i] for i in keep], shown, environment, ("class", "expected"))
    print(sum_up(result))
