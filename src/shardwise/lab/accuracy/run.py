"""`shardwise bench accuracy`: predictions against what others reported and what was measured.

Results are written after every row, and rows that the file already holds are not measured again, so
a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.description.cluster import Cluster
from shardwise.emulation.run import join_fake_group
from shardwise.errors import UserError
from shardwise.lab.accuracy import as_user, published, seeds
from shardwise.lab.accuracy.calibrate import Calibration, calibrate_device
from shardwise.lab.accuracy.cases import CASES, WORLD, AccuracyCase
from shardwise.lab.accuracy.device import predict_shipped, run_case
from shardwise.lab.accuracy.gloo import run_gloo
from shardwise.lab.accuracy.page import SEEDS, draw_plot, show, tell_prediction, write_page
from shardwise.lab.rows import RowFile, describe_run, say
from shardwise.profiling.results import Row, read_json

SIMULATED = ("reported", "published", "shipped")
SHIPPED = "h200x8-measured"  # the packaged file of the GPU that was measured


class Results(RowFile):
    """The rows so far and what else their file keeps. Until a row is added, the environment is that
    of the run which left them there.
    """

    def __init__(self, path: Path | None, environment: dict[str, Any], command: str) -> None:
        """Take over what an earlier run left in the file, but for cases that failed."""
        self.now = {"environment": environment, "command": command}
        super().__init__(path, self.now | {"sweep": [], "calibration": {}})
        self.delayed: list[str] = []  # seed 000's delayed step, by engine
        if path is not None and path.exists():
            held = read_json(path, needs="mode")
            self.rows = [row for row in held.pop("rows") if "error" not in row]
            self.facts |= held

    @property
    def calibration(self) -> dict[str, Any]:
        return self.facts["calibration"]

    def has(self, **labels: str) -> bool:
        return any(all(row.get(k) == v for k, v in labels.items()) for row in self.rows)

    def add(self, row: Row) -> None:
        self.facts |= self.now
        super().add(row)


def run(arguments: argparse.Namespace) -> None:
    """Run the parts, print the table and the claims, write the page."""
    if arguments.as_user:
        as_user.run(arguments)
        return
    if arguments.only is not None or arguments.budget is not None:
        raise UserError("--only and --budget belong to --as-user: give it too, or leave them out")
    beside = [read_json(path, "--beside", needs="mode|plans") for path in arguments.beside]
    results = Results(arguments.json, **describe_run(arguments))
    run_parts(
        SIMULATED if arguments.simulated else arguments.cases,
        results,
        arguments.quick,
        arguments.device,
        arguments.busy,
        [row for each in beside for row in each["rows"]],
        arguments.cluster,
    )
    show(results.rows, results.facts)
    for line in results.delayed:
        print(line)
    if arguments.plot is not None:
        arguments.plot.write_text(draw_plot(results.rows), encoding="utf-8")
    if arguments.docs is not None:
        held = results.facts | {"rows": results.rows, "delayed": results.delayed}
        write_page(arguments.docs, held, *(b for b in beside if "mode" in b["rows"][0]))


def run_parts(
    parts: Iterable[str],
    results: Results,
    quick: bool = False,
    device: str = "",
    busy: bool = False,
    measured: Iterable[Row] = (),
    cluster: str = SHIPPED,
) -> None:
    """Run the parts asked for; one that this machine cannot run is named and left out."""
    for part in parts:
        if part == "reported":
            run_seeds(results, quick)
        elif part == "published":
            run_published(results, quick)
        elif part == "shipped":
            run_shipped(results, [*results.rows, *measured], cluster)
        elif part == "gloo":
            run_gloo(results, quick, busy)
        else:
            run_device(results, device, quick)


def run_seeds(results: Results, quick: bool = False) -> None:
    makers: dict[str, Callable[[], Iterable[Row]]] = {
        "000": seeds.rows_000, "001": seeds.rows_001, "002": partial(seeds.rows_002, quick),
    }  # fmt: skip
    for seed, make in makers.items():
        if not results.has(seed=seed):
            say(f"{SEEDS[seed]}: simulating")
            for row in make():
                results.add(row)
    if not quick:
        results.delayed = seeds.delayed_000()
    if not quick and not results.facts["sweep"]:
        say(f"{SEEDS['000']}: accumulate 1 to 8, ratio 1 to 4")
        results.facts["sweep"] = seeds.sweep_000()
        results.write()


def run_published(results: Results, quick: bool = False) -> None:
    """Predict what was published, in the order that builds each model once."""
    cluster = Cluster.load(published.CLUSTER)
    for run in published.quick_runs() if quick else published.RUNS:
        if not results.has(case=run.name):
            say(f"{run.name}: {run.mode}")
            results.add(published.row_of(run, cluster))


def run_shipped(results: Results, measured: Iterable[Row], cluster: str) -> None:
    """Predict, from a packaged cluster file alone, every case that has been measured, and the
    models of others whose Plans were.
    """
    by_name, measured = {case.name: case for case in CASES}, list(measured)
    found = [row for row in measured if row.get("case") in by_name and "measured_ms" in row]
    others = [row for row in measured if row.get("plans") and row.get("cluster") == cluster]
    if not found and not others:
        say("shipped: skipped, no measured rows: give --beside accuracy-h200.json")
        return
    base = Cluster.load(cluster)
    results.rows = [row for row in results.rows if row.get("cluster") != cluster]
    for row in found:
        predicted = predict_shipped(by_name[row["case"]], base)
        results.rows.append(
            {
                "case": f"{cluster} {row['case']}",
                "mode": row["mode"],
                "set": "shipped",
                "cluster": cluster,
                **tell_prediction(predicted),
                "measured_ms": row["measured_ms"],
                "predicted_bytes": predicted.peak().total,
                "measured_bytes": row["measured_bytes"],
            }
        )
    for row in others:
        say(f"{row['key']}: planning")
        results.rows += as_user.predict_again(row)
    results.write()


def run_device(
    results: Results, device: str, quick: bool, cases: Iterable[AccuracyCase] = CASES
) -> None:
    """Calibrate, then predict and measure every case that has no row yet."""
    if not device:
        if not torch.cuda.is_available():
            say("h200: skipped, no CUDA device here")
            return
        device = "cuda"
    cases = [case.quick() if quick else case for case in cases]
    todo = [case for case in cases if not results.has(case=case.name)]
    if not todo:
        return
    if not dist.is_initialized():
        torch.set_flush_denormal(True)
        join_fake_group(0, WORLD)
    base = Cluster.load("h200x8")
    calibration = _calibrate(results, device, quick)
    for case in todo:
        try:
            row = run_case(case, calibration, base, device)
        except Exception as error:  # one case must not cost the others
            traceback.print_exc()
            row = {"case": case.name, "mode": case.describe(), "error": f"{error}"}
        results.add(row)
        gc.collect()


def _calibrate(results: Results, device: str, quick: bool) -> Calibration:
    """What an earlier run measured, or this one."""
    if "device" not in results.calibration:
        say("timing copies, the smallest kernel and the host")
        found = calibrate_device(device, 3) if quick else calibrate_device(device)
        results.calibration["device"] = dataclasses.asdict(found)
        results.write()
    return Calibration(**results.calibration["device"])
