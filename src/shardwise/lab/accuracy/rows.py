"""`shardwise bench accuracy`: predictions against what others reported and what was measured.

Results are written after every row, and rows that the file already holds are not measured again, so
a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.description.cluster import Cluster
from shardwise.lab.accuracy import seeds as accuracy_seeds
from shardwise.lab.accuracy.calibrate import Calibration, calibrate_device
from shardwise.lab.accuracy.cases import CASES, WORLD, AccuracyCase
from shardwise.lab.accuracy.gpu import predict_shipped, run_case
from shardwise.profiling.results import read_json

Row = dict[str, Any]
SHIPPED = "h200x8-measured"  # the packaged file of the GPU that was measured


@dataclass
class Results:
    """The rows so far, and the file they are kept in."""

    path: Path | None
    environment: dict[str, Any]
    command: str
    rows: list[Row] = field(default_factory=list)
    sweep: list[Row] = field(default_factory=list)
    delayed: list[str] = field(default_factory=list)  # seed 000's delayed step, by engine
    calibration: dict[str, Any] = field(default_factory=dict)
    # Of the run that is under way; the two above are those of the newest row.
    now: tuple[dict[str, Any], str] = field(default_factory=lambda: ({}, ""))

    @classmethod
    def open(cls, path: Path | None, environment: dict[str, Any], command: str) -> Results:
        """Take over what an earlier run left in the file."""
        results = cls(path, environment, command)
        results.now = environment, command
        if path is not None and path.exists():
            held = read_json(path, needs="mode")
            results.environment, results.command = held["environment"], held.get("command", "")
            results.rows = [row for row in held["rows"] if "error" not in row]
            results.sweep = held.get("sweep", [])
            results.calibration = held.get("calibration", {})
        return results

    def has(self, **labels: str) -> bool:
        return any(all(row.get(k) == v for k, v in labels.items()) for row in self.rows)

    def add(self, rows: Iterable[Row]) -> None:
        self.environment, self.command = self.now
        self.rows += rows
        self.write()

    def write(self) -> None:
        if self.path is None:
            return
        content = {
            "environment": self.environment,
            "command": self.command,
            "rows": self.rows,
            "sweep": self.sweep,
            "calibration": self.calibration,
        }
        self.path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def run(
    parts: Iterable[str],
    results: Results,
    quick: bool = False,
    device: str = "",
    busy: bool = False,
    measured: Iterable[Row] = (),
    cluster: str = SHIPPED,
) -> Results:
    """Run the parts asked for; one that this machine cannot run is named and left out."""
    for part in parts:
        if part == "seeds":
            run_seeds(results, sweep=not quick)
        elif part == "shipped":
            run_shipped(results, [*results.rows, *measured], cluster)
        elif part == "gloo":
            from shardwise.lab.accuracy.gloo import run_gloo

            run_gloo(results, quick, busy)
        else:
            run_device(results, device, quick)
    return results


def run_seeds(results: Results, sweep: bool = True) -> None:
    makers: tuple[tuple[str, Callable[[], Iterable[Row]]], ...] = (
        ("000", accuracy_seeds.rows_000),
        ("001", accuracy_seeds.rows_001),
        ("002", accuracy_seeds.rows_002),
    )
    for seed, make in makers:
        if not results.has(seed=seed):
            say(f"seed {seed}: simulating")
            results.add(list(make()))
    if sweep:
        results.delayed = accuracy_seeds.delayed_000()
    if sweep and not results.sweep:
        say("seed 000: accumulate 1 to 8, ratio 1 to 4")
        results.sweep = accuracy_seeds.sweep_000()
        results.write()


def run_shipped(results: Results, measured: Iterable[Row], cluster: str) -> None:
    """Predict, from a packaged cluster file alone, every case that has been measured."""
    by_name = {case.name: case for case in CASES}
    found = [row for row in measured if row.get("case") in by_name and "measured_ms" in row]
    if not found:
        say("shipped: skipped, no measured rows: give --beside accuracy-h200.json")
        return
    base = Cluster.load(cluster)
    results.rows = [row for row in results.rows if row.get("cluster") != cluster]
    for row in found:
        predicted = predict_shipped(by_name[row["case"]], base)
        parts = predicted.timeline.breakdown().parts()
        results.rows.append(
            {
                "case": f"{cluster} {row['case']}",
                "mode": row["mode"],
                "set": "shipped",
                "cluster": cluster,
                "predicted_ms": predicted.step_ms,
                "measured_ms": row["measured_ms"],
                "predicted_bytes": predicted.peak_bytes,
                "measured_bytes": row["measured_bytes"],
                "breakdown_ms": {k: v / 1e6 for k, v in parts.items()},
            }
        )
    results.write()


def run_device(
    results: Results, device: str, quick: bool, cases: Iterable[AccuracyCase] = CASES
) -> None:
    """Calibrate, then predict and measure every case that has no row yet."""
    import torch

    if not device:
        if not torch.cuda.is_available():
            say("h200: skipped, no CUDA device here")
            return
        device = "cuda"
    cases = [case.quick() if quick else case for case in cases]
    todo = [case for case in cases if not results.has(case=case.name)]
    if not todo:
        return
    _join_fake_group()
    base = Cluster.load("h200x8")
    calibration = _calibration(results, device, quick)
    for case in todo:
        try:
            row = run_case(case, calibration, base, device, say)
        except Exception as error:  # one case must not cost the others
            traceback.print_exc()
            row = {"case": case.name, "mode": case.describe(), "error": f"{error}"}
        results.add([row])
        gc.collect()


def _join_fake_group() -> None:
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_flush_denormal(True)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)


def _calibration(results: Results, device: str, quick: bool) -> Calibration:
    held = results.calibration.get("device")
    if held is not None:
        return Calibration(**held)
    say("timing copies, the smallest kernel and the host")
    calibration = calibrate_device(device, 3) if quick else calibrate_device(device)
    results.calibration["device"] = dataclasses.asdict(calibration)
    results.write()
    return calibration


def error_of(row: Row, what: str) -> float | None:
    """Predicted over actual, less 1; None where there is nothing to compare."""
    predicted = row.get(f"predicted_{what}")
    actual = row.get(f"measured_{what}") or row.get(f"reported_{what}")
    if not predicted or not actual:
        return None
    return predicted / actual - 1


def summarize(rows: Iterable[Row]) -> list[str]:
    """The claims, as sentences with their figures."""
    rows = list(rows)
    lines = []
    groups = {
        f"`shardwise plan --cluster {name}` on the GPU's configurations": [
            r for r in rows if r.get("cluster") == name
        ]
        for name in dict.fromkeys(r["cluster"] for r in rows if r.get("set") == "shipped")
    }
    groups |= {
        "held-out configurations, kernels replayed on the same GPU": [
            r for r in rows if r.get("set") == "held-out"
        ],
        "build configurations, kernels replayed on the same GPU": [
            r for r in rows if r.get("set") == "build"
        ],
        "two gloo ranks, kernels timed on the same machine": [
            r for r in rows if r.get("set") == "gloo"
        ],
        "seed 000 (three modes; its inputs repeat to 1 %: the claim is 1 to 2 %)": [
            r for r in rows if r.get("seed") == "000"
        ],
    }
    for name, members in groups.items():
        for what, unit in (("ms", "step time"), ("bytes", "peak memory")):
            errors = [e for r in members if (e := error_of(r, what)) is not None]
            if errors:
                mean = sum(map(abs, errors)) / len(errors)
                worst = max(errors, key=abs)
                lines.append(
                    f"{name}: {unit} within {mean:.1%} on average, {worst:+.1%} at worst "
                    f"({len(errors)} rows)"
                )
    failed = [r["case"] for r in rows if "error" in r]
    if failed:
        lines.append(f"cases that failed: {', '.join(failed)}")
    return lines


def say(message: str) -> None:
    """Progress, beside the output proper."""
    print(message, file=sys.stderr, flush=True)
