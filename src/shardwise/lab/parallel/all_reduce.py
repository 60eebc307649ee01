"""`shardwise bench all-reduce`: the assignment's table 8, with all-gather and reduce-scatter.

The ranks are started once for each number of them. They first measure what `shardwise calibrate`
measures of links, up to 16 MiB; the predictor makes its line of that. Then every message: its
result is checked, its first call is timed alone, the others count.

    algorithm bandwidth    bytes of the whole buffer / seconds
    bus bandwidth          bytes that each rank sends / seconds: what the link carries
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from shardwise.calibration.measure import CPU, Effort, Findings, measure_links
from shardwise.description.cluster import Cluster, CollectivePoint, Level, Protocol
from shardwise.description.collectives import bus_share, collective_time
from shardwise.description.tracing.real_run import free_bytes
from shardwise.lab.charts import draw_curves
from shardwise.lab.parallel import document
from shardwise.lab.processes import ask_ranks, time_on_ranks
from shardwise.lab.rows import RowFile, say
from shardwise.profiling.results import Row, print_table
from shardwise.profiling.timing import (
    SHARED_MEMORY,
    Step,
    issue_collective,
    no_garbage_collection,
    spread,
)

MB = 10**6
SAMPLES = (3, 15)  # at least and at most, of one message
SECONDS = 2.0  # that the samples of one message may take
COPIES = 2.5  # gloo's own buffers and ours, in buffers of the message's size
CALIBRATED = Effort(samples=7, sizes=CPU.sizes[::2])
QUICK = Effort(samples=3, sizes=(2**10, 2**16, 2**20))
BOTH = "cpu:gloo,cuda:nccl"  # what ranks say of their times travels by gloo


@dataclass(frozen=True)
class Case:
    """One message."""

    backend: str
    ranks: int
    operation: str
    megabytes: int

    @property
    def key(self) -> str:
        return f"{self.backend}/{self.ranks}/{self.operation}/{self.megabytes}"

    @property
    def numel(self) -> int:
        """Of the whole buffer, in equal parts for the ranks."""
        return self.megabytes * MB // 4 // self.ranks * self.ranks


def run(arguments: argparse.Namespace) -> None:
    """Measure ranks by ranks, write the JSON after each, draw the picture, print the tables."""
    sizes, counts = arguments.sizes, arguments.ranks
    if arguments.quick:
        sizes, counts = sizes[:2], counts[:1]
    several = torch.cuda.device_count() > 1
    judged = judge_document()
    file = RowFile.of(arguments, document={"nccl": judged})
    for ranks in counts:
        nccl = several and ranks <= torch.cuda.device_count()
        backends = ("gloo", "nccl") if nccl else ("gloo",)
        cases = [
            Case(backend, ranks, operation, size)
            for backend, size, operation in itertools.product(backends, sizes, arguments.operations)
        ]
        cases = list(file.missing(cases, lambda case: case.key))
        fits = [case for case in cases if case.backend == "nccl" or _fits(case)]
        for case in cases:
            if case not in fits:
                need = COPIES * ranks * case.megabytes / 1e3
                reason = f"needs about {need:.1f} GB, more than is free here"
                say(f"{case.key}: skipped, {reason}")
                file.add(_describe(case) | {"skipped": reason})
        if fits:
            say(f"{ranks} ranks: calibrating, then {len(fits)} messages")
            backend = BOTH if nccl else "gloo"
            effort = QUICK if arguments.quick else CALIBRATED
            answer = ask_ranks(measure, fits, effort, world=ranks, backend=backend)
            cluster = describe_links(ranks, answer["points"])
            for case, found in zip(fits, answer["messages"], strict=True):
                rates = _rate(case, found["seconds"])
                file.add(_describe(case) | found | rates | _predict(case, cluster))
    file.tell(arguments.plot, draw, show)


def _fits(case: Case) -> bool:
    return COPIES * case.ranks * case.megabytes * MB < free_bytes(torch.device("cpu"))


def measure(cases: list[Case], effort: Effort) -> dict[str, Any]:
    """What each of the ranks runs: the links as `calibrate` sees them, then every message."""
    os.environ[SHARED_MEMORY] = "0"  # of this rank alone: the table is of backends
    found = Findings()
    measure_links(found, effort, lambda what: None)
    points = [(p.kind, p.nbytes, p.seconds) for p in found.collectives]
    return {"points": points, "messages": [_measure(case) for case in cases]}


def _measure(case: Case) -> Row:
    """Seconds of one message: the first call, and the median of the others."""
    say(f"  {case.operation.replace('_', '-')} of {case.megabytes} MB over {case.backend}")
    device = "cpu"
    if case.backend == "nccl":
        torch.cuda.set_device(dist.get_rank())
        device = "cuda"
    rank = dist.get_rank()
    whole = torch.full((case.numel,), float(rank + 1), device=device)
    part = torch.full((case.numel // case.ranks,), float(rank + 1), device=device)
    step = _step(case, whole, part)
    first = time_on_ranks(step).step_ms / 1e3
    _check(case, whole, part)
    whole.zero_(), part.zero_()  # sums of sums would overflow
    least, most = SAMPLES
    # The slowest rank's time: all ranks repeat it equally often.
    count = int(min(most, max(least, SECONDS / max(first, 1e-6))))
    with no_garbage_collection():
        taken = [time_on_ranks(step).step_ms / 1e3 for _ in range(count)]
    return {
        "seconds": statistics.median(taken),
        "spread_s": spread(taken),
        "first_s": first,
        "samples": count,
    }


def _step(case: Case, whole: torch.Tensor, part: torch.Tensor) -> Step:
    def step() -> None:
        issue_collective(case.operation, whole, part).wait()
        if whole.is_cuda:
            torch.cuda.synchronize()

    return step


def _check(case: Case, whole: torch.Tensor, part: torch.Tensor) -> None:
    """Every rank gave its number, counted from 1: an error if that is not what arrived."""
    numbers = torch.arange(1.0, case.ranks + 1)
    if case.operation == "all_gather":
        arrived, expected = whole.view(case.ranks, -1)[:, [0, -1]].cpu(), numbers.view(-1, 1)
    else:
        result = part if case.operation == "reduce_scatter" else whole
        arrived, expected = result[[0, -1]].cpu(), numbers.sum()
    if not torch.equal(arrived, expected.expand_as(arrived)):
        raise RuntimeError(f"{case.key}: {arrived.tolist()} arrived, expected {expected.tolist()}")


def _describe(case: Case) -> Row:
    row: Row = {"key": case.key, "backend": case.backend, "ranks": case.ranks}
    row |= {"operation": case.operation, "megabytes": case.megabytes}
    said = case.operation == "all_reduce"
    row["document"] = document.all_reduce(case.backend, case.ranks, case.megabytes) if said else {}
    return row


def _rate(case: Case, seconds: float) -> Row:
    """Both bandwidths, in GB/s."""
    algorithm = case.numel * 4 / seconds / 1e9
    bus = algorithm * bus_share(case.operation, case.ranks)
    return {"algorithm_gbs": algorithm, "bus_gbs": bus}


Points = list[tuple[str, int, float]]  # collective, bytes, seconds


def describe_links(ranks: int, points: Points, share: float = 0.0) -> Cluster:
    """A CPU whose gloo links were measured so. `share`: of compute, that communication takes."""
    measured = tuple(CollectivePoint(kind, ranks, nbytes, s) for kind, nbytes, s in points)
    # Beyond the points a prediction goes on at the largest one's bandwidth: these two do not count.
    level = Level("gloo", None, 1e9, (Protocol("gloo", 0.0, 1e-4),), measured)
    known = Cluster.load("cpu-gloo")
    return Cluster(known.name, known.device, (level,), known.host, share)


def _predict(case: Case, cluster: Cluster) -> Row:
    if case.backend != "gloo":
        return {}
    nbytes = case.numel * 4
    return {"predicted_s": collective_time(cluster, case.operation, nbytes, case.ranks)}


def judge_document() -> list[Row]:
    """What the document's NCCL times hold: the same for 1 MB as for 1 GB but for a few hundredths
    of a second, so a start-up of communicators; only the difference is a transfer.
    """
    cluster, judged = Cluster.load("v100x8"), []
    for ranks, times in document.NCCL_ALL_REDUCE.items():
        above = times[1000] - times[1]
        algorithm = 999 * MB / above / 1e9
        judged.append(
            {
                "ranks": ranks,
                "seconds_of_1_mb": times[1],
                "seconds_of_1000_mb": times[1000],
                "above_s": above,
                "bus_gbs_of_1_mb": MB / times[1] / 1e9 * bus_share("all_reduce", ranks),
                "bus_gbs_of_the_difference": algorithm * bus_share("all_reduce", ranks),
                "predicted_s_of_1_mb": collective_time(cluster, "all_reduce", MB, ranks),
                "predicted_s_of_1000_mb": collective_time(cluster, "all_reduce", 1000 * MB, ranks),
            }
        )
    return judged


def draw(rows: list[Row]) -> str:
    """All-reduces by size, a curve for each number of ranks; dashed is predicted."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if row["operation"] != "all_reduce" or "skipped" in row:
            continue
        own = "" if row["backend"] == "gloo" else f" {row['backend']}"
        name = f"{row['ranks']} ranks{own}"
        curves.setdefault(name, []).append((row["megabytes"], row["seconds"]))
        if "predicted_s" in row:
            name = f"{row['ranks']} predicted"
            curves.setdefault(name, []).append((row["megabytes"], row["predicted_s"]))
    dashed = [name for name in curves if name.endswith("predicted")]
    return draw_curves("all-reduce of fp32", curves, "MB", "seconds", dashed=dashed)


def show(rows: list[Row], facts: dict[str, Any]) -> None:
    """A table for each operation, then the document's own times."""
    judged, environment = facts["document"]["nccl"], facts["environment"]
    heads = ("MB", "ranks", "ms", "+-", "first", "predicted", "alg", "bus", "document")
    operations = list(dict.fromkeys((row["backend"], row["operation"]) for row in rows))
    for backend, operation in operations:
        lines = []
        for row in rows:
            if (row["backend"], row["operation"]) != (backend, operation):
                continue
            cells = [str(row["megabytes"]), str(row["ranks"])]
            said = row["document"].get("seconds")
            last = "" if said is None else _ms(said)
            if "skipped" in row:
                lines.append([*cells, "skipped", *[""] * 5, last])
                continue
            cells += [_ms(row[name]) for name in ("seconds", "spread_s", "first_s")]
            cells.append(_ms(row["predicted_s"]) if "predicted_s" in row else "")
            cells += [f"{row[name]:.2f}" for name in ("algorithm_gbs", "bus_gbs")]
            lines.append([*cells, last])
        title = f"{operation.replace('_', '-')} over {backend}, ms and GB/s"
        print_table(title, heads, lines, {}, width=80)
    for row in rows:
        if "skipped" in row:
            print(f"{row['key']}: {row['skipped']}")
    lines = [
        [
            str(row["ranks"]), f"{row['seconds_of_1_mb']:.3f}", f"{row['seconds_of_1000_mb']:.3f}",
            f"{row['above_s'] * 1e3:.0f}", f"{row['bus_gbs_of_the_difference']:.1f}",
            f"{row['predicted_s_of_1_mb'] * 1e3:.2f}", f"{row['predicted_s_of_1000_mb'] * 1e3:.0f}",
        ]
        for row in judged
    ]  # fmt: skip
    named = ("ranks", "1 MB s", "1 GB s", "above ms", "its GB/s", "1 MB ms", "1 GB ms")
    title = "the document's NCCL on V100s, and (right) predicted"
    print_table(title, named, lines, environment, width=80)
    print(
        "0.36 s for 1 MB is no transfer: NCCL's communicators start in it, and more\n"
        "ranks take longer. What 1 GB takes above 1 MB is a transfer; `its GB/s` is the\n"
        "bus bandwidth of that."
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds < 0.1 else f"{seconds * 1e3:.0f}"
